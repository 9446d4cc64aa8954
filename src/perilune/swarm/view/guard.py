"""Who may talk to the view: this machine's browser on the view's own page, with the token of the run.

Every request must name the view itself as its Host (a foreign name that resolves to loopback does not) and, where the
browser says where a request comes from, come from the view's own page. Everything under /api needs the token in the
header `X-Perilune-Token`; commands are POST with JSON. The token travels to the page in the fragment of the address,
which browsers never send. Answers carry a policy that allows no script but the view's own files.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "X-Perilune-Token"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
ANSWER_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return _refuse(421, "this is not the address of the view: open the one that was printed")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return _refuse(403, "requests from other pages are refused")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refuse(403, "requests from other pages are refused")
        if not scope["path"].startswith("/api/"):
            return None
        token = headers.get(TOKEN_HEADER)
        if token is None:
            return _refuse(
                401, f"the header {TOKEN_HEADER} is missing: open the address that was printed, with its #token"
            )
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return _refuse(403, "wrong token: it belongs to another run")
        is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        if scope["method"] == "POST" and not is_json:
            return _refuse(415, "commands are JSON (content-type application/json)")
        return None


def _refuse(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)
