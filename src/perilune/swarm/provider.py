"""Endpoints and the limits of a call: what a person sets before an `HTTPClient` runs.

Keys come from the environment or as a `Secret`, which shows itself to nobody but the transport.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yarl

from perilune.swarm.rate import Pace


class Secret:
    """A key that shows itself to nobody but the transport."""

    __slots__ = ("_reveal",)

    def __init__(self, value: str) -> None:
        if not value or value != value.strip() or not value.isprintable():
            raise ValueError("a key must be a text without blanks around it or line breaks in it")
        self._reveal = lambda: value

    def reveal(self) -> str:
        return self._reveal()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be stored or sent")


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An endpoint and how it may be used."""

    base_url: str
    """Up to and without /chat/completions; ends in /v1 as a rule."""
    name: str = ""
    """For messages to people; the host when empty."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None: no key."""
    api_key: Secret | None = None
    """The key itself, in place of the variable."""
    models: tuple[str, ...] = ("*",)
    """Names of models it serves, with * and ?; the first provider that fits is asked."""
    max_concurrent: int | None = None
    """Calls at a time over all its models. None: what it can take is found out."""
    pace: Pace = field(default_factory=Pace)
    """How the limit of each model is found."""
    model_paces: Mapping[str, Pace] = field(default_factory=dict)
    """In place of `pace`, by model."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every call. Not for keys: they would be visible here."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every request."""
    max_tokens_field: str = "max_tokens"
    session_field: str | None = None
    """Field of the request that carries `ModelRequest.session`; None: it is not sent."""
    proxy: str | None = None

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.base_url):
            raise ValueError(f"base_url {self.base_url!r}: expected an address like https://api.example.com/v1")
        if yarl.URL(self.base_url).user is not None:
            raise ValueError("base_url holds a user or password; use api_key_env instead")

        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError(f"max_concurrent {self.max_concurrent!r}: expected at least 1, or None for no limit")

    def key(self) -> Secret | None:
        if self.api_key is not None:
            return self.api_key
        if self.api_key_env is None:
            return None
        value = os.environ.get(self.api_key_env, "").strip()
        if not value:
            raise ValueError(
                f"the environment variable {self.api_key_env} is not set; "
                f"it must hold the key of {self.base_url} (api_key_env=None for an endpoint without keys)"
            )
        return Secret(value)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one call. Times are in seconds."""

    attempts: int = 6
    """How often a call is tried when it fails; refusals are not counted."""
    connect_seconds: float = 20.0
    idle_seconds: float = 120.0
    """Without a byte from a stream, or after the beginning of a body."""
    attempt_seconds: float = 600.0
    call_seconds: float = 1800.0
    """All of it: waiting, attempts, pauses."""
    first_pause: float = 0.5
    """Pauses between attempts are drawn between 0 and this, doubled each time."""
    longest_pause: float = 30.0
    reply_bytes: int = 64 << 20
    patience_seconds: float = 120.0
    """How long calls wait for a provider that has stopped answering."""
    first_patience_seconds: float = 10.0
    """The same for one that never answered: a wrong address should show soon."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts {self.attempts!r}: expected at least 1")
        for name in ("connect_seconds", "idle_seconds", "attempt_seconds", "call_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected more than 0")


__all__ = ["Limits", "Provider", "Secret"]
