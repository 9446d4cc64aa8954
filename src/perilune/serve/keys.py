"""Who may use the server: API keys, the admin key, and which addresses may be served without one.

A key is compared in constant time: what was presented is hashed, and the hash is compared with that of every key, all
of them, whichever matched. No repr, error or log shows a key. A caller is known by the first digits of the hash of its
key: that names it in rate limits, sessions and the salt of the prefix cache, and says nothing about the key.

Without keys the server answers anybody who reaches it, so it may then only listen on this machine (`check_address`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field

from perilune.serve.refusals import Refusal

SHORTEST_KEY = 16
ANYBODY = "anybody"
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks: `name` is stable for a key and tells nothing about it."""

    name: str
    is_admin: bool = False


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of a server. `api` open /v1; `admin` opens everything, and /metrics and weight loading only it opens."""

    api: tuple[str, ...] = field(default=(), repr=False)
    admin: str | None = field(default=None, repr=False)
    _digests: tuple[tuple[bytes, Caller], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name, key in [*(("api key", key) for key in self.api), ("admin key", self.admin)]:
            if key is not None and (
                len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key
            ):
                raise ValueError(
                    f"an {name} of {len(key)} characters: expected at least {SHORTEST_KEY} printable ASCII characters"
                    " without blanks; make one with `python -c 'import secrets; print(secrets.token_urlsafe())'`"
                )
        if self.admin is not None and self.admin in self.api:
            raise ValueError("the admin key is also an API key: give the admin a key of its own")
        digests = [(_digest(key), False) for key in self.api]
        if self.admin is not None:
            digests.append((_digest(self.admin), True))
        callers = tuple((digest, Caller(name=digest.hex()[:12], is_admin=admin)) for digest, admin in digests)
        object.__setattr__(self, "_digests", callers)

    @property
    def is_open(self) -> bool:
        """Whether /v1 needs no key."""
        return not self.api

    def caller(self, authorization: list[str]) -> Caller:
        """Who sent these Authorization headers; raises a 401 where a key is needed and none of ours came."""
        presented = _bearer(authorization)
        found = self._match(presented) if presented is not None else None
        if found is not None:
            return found
        if self.is_open:
            return Caller(name=ANYBODY)
        raise Refusal(
            "the API key is wrong"
            if presented is not None
            else "no API key: send the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )

    def admin_caller(self, authorization: list[str]) -> Caller:
        """The admin; raises a 401 or 403 for anybody else."""
        if self.admin is None:
            raise Refusal("this server was started without an admin key, so nobody may do this", status=403)
        presented = _bearer(authorization)
        found = self._match(presented) if presented is not None else None
        if found is None:
            raise Refusal(
                "the admin key is needed: send the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )
        if not found.is_admin:
            raise Refusal("this key is not the admin key", status=403, code="insufficient_permissions")
        return found

    def _match(self, presented: str) -> Caller | None:
        digest = _digest(presented)
        found: Caller | None = None
        for known, caller in self._digests:  # never ends early: the time says nothing about which key matched
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def check_address(host: str, keys: Keys) -> None:
    """Refuse to listen where strangers are without a key."""
    if keys.is_open and not is_loopback(host):
        raise ValueError(
            f"host={host!r} can be reached from other machines and there is no API key: give an API key, or listen on"
            " 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether a host, as a server listens on it or as a Host header names it, is this machine alone."""
    name = host.strip("[]").lower()
    if name in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _bearer(authorization: list[str]) -> str | None:
    """The key of the one Authorization header; several of them, or another scheme, are none."""
    if len(authorization) != 1:
        return None
    scheme, _, key = authorization[0].strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


__all__ = ["ANYBODY", "Caller", "Keys", "check_address", "is_loopback"]
