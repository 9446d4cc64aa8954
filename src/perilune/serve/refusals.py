"""What the server answers when it does not answer: one exception, in the shape that OpenAI's clients read.

    {"error": {"message": "temperature is 'hot', expected a number from 0 to 2", "type": "invalid_request_error",
               "param": "temperature", "code": null}}

`param` is the exact path into the body (`messages[2].content[0].image_url.url`). A refusal that waiting cures carries
`retry_after`, which becomes the header Retry-After.
"""

from __future__ import annotations

import math
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LONGEST_SHOWN = 80


class Refusal(Exception):
    """An answer that is not 200."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def shown(value: Any) -> str:
    """A value as an error shows it: short, on one line, and safe to print whatever a stranger put in it."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str) and len(value) > LONGEST_SHOWN:
        return f"{value[:LONGEST_SHOWN]!a}... ({len(value):,} characters)"
    text = ascii(value)  # a lone surrogate would break the answer itself
    return text if len(text) <= 2 * LONGEST_SHOWN else text[: 2 * LONGEST_SHOWN] + "..."


__all__ = ["Refusal", "shown"]
