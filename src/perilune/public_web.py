"""Which URLs of strangers may be fetched, and from which addresses: for agents' tools and for pictures in prompts.

A URL that a model or a caller wrote makes this machine open a connection (server-side request forgery). It passes these
checks, again at every redirect:

    its text        http or https, no user or password, no backslash, blank or control character
    its port        one of the policy's (80 and 443)
    its host        a full domain name or a plain address; names of local networks, and addresses in odd spellings
                    (decimal, octal, hexadecimal, short, percent-encoded), are refused before any look-up
    the lists       `deny` first, then `allow` when there is one; a refused host is not even resolved, because a
                    look-up already tells its owner something
    its addresses   all of them public. The connection is made to exactly the addresses that were checked, so that a
                    name which answers differently the next time gains nothing (DNS rebinding), and the peer of the
                    open connection is compared with them once more

`Resolver` is the seam for tests: an object given by whoever fetches. Nothing that a stranger writes reaches it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urljoin

import idna

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(ValueError):
    """A URL that may not be fetched, and why."""

    redirected = False
    """Whether a server sent us there: then the text may quote that server."""


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    """What a run may reach. With `allow`, only these hosts; `deny` always wins.

    A pattern is a host (`en.wikipedia.org`) or `*.` and a domain (`*.wikipedia.org`: all below it, not itself).
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    ports: frozenset[int] = frozenset({80, 443})
    redirects: int = 5
    seconds: float = 30.0
    connect_seconds: float = 10.0
    max_bytes: int = 5_000_000
    """Of a body, before and after decompression each."""
    permits: Callable[[str], bool] | None = None
    """Rights of the agent that asks, where they are narrower than the run's."""

    def __post_init__(self) -> None:
        for field, patterns in (("allow", self.allow or ()), ("deny", self.deny)):
            for pattern in patterns:
                if not _PATTERN.match(pattern):
                    raise ValueError(
                        f"{field} holds {pattern!r}, expected a host such as 'example.org' or '*.example.org'"
                    )

    def refusal(self, host: str) -> str | None:
        if any(_matches(host, pattern) for pattern in self.deny):
            return f"host {host!r} is on the run's deny-list"
        if self.allow is not None and not any(_matches(host, pattern) for pattern in self.allow):
            return f"host {host!r} is not on the run's allow-list ({', '.join(self.allow[:20]) or 'which is empty'})"
        if self.permits is not None and not self.permits(host):
            return f"host {host!r} is not among those that you were given rights to"
        return None


class Resolver(Protocol):
    async def addresses(self, host: str) -> list[Address]:
        """Addresses that a connection may use, all checked; raises `Refused`."""
        ...


async def system_lookup(host: str) -> list[str]:
    """Addresses of a host as the system's resolver knows them. The dot keeps the machine's search domains out of it."""
    loop = asyncio.get_running_loop()
    rows = await loop.getaddrinfo(host + ".", None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(row[4][0]) for row in rows]


@dataclass(frozen=True, kw_only=True)
class PublicResolver:
    """Public addresses and no others."""

    seconds: float = 10.0
    lookup: Callable[[str], Awaitable[list[str]]] = system_lookup

    async def addresses(self, host: str) -> list[Address]:
        literal = _literal(host)
        found = [literal] if literal is not None else await self._looked_up(host)
        for address in found:
            # One bad address among good ones is how rebinding begins: none of them is used.
            if reason := not_public(address):
                raise Refused(f"host {host!r} has the address {address}, {reason}; only public addresses are fetched")
        return found

    async def _looked_up(self, host: str) -> list[Address]:
        try:
            async with asyncio.timeout(self.seconds):
                rows = await self.lookup(host)
        except TimeoutError:
            raise Refused(f"host {host!r} could not be resolved within {self.seconds:g} seconds") from None
        except (OSError, UnicodeError):
            raise Refused(f"host {host!r} could not be resolved; is it spelled right?") from None
        if not rows:
            raise Refused(f"host {host!r} has no address")
        return list(dict.fromkeys(ipaddress.ip_address(row) for row in rows))


@dataclass(frozen=True, kw_only=True)
class Target:
    """A URL that passed the checks of text, port and lists, in one canonical spelling."""

    scheme: str
    host: str
    port: int
    path: str
    """With the query, percent-encoded."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://([^/?#]*)([^#]*)(?:#.*)?$", re.S)
_PORT = re.compile(r"^[0-9]{1,5}$")
_LABEL = re.compile(r"^(?!-)[a-z0-9_-]{1,63}(?<!-)$")
_PATTERN = re.compile(r"^(\*\.)?[a-z0-9]([a-z0-9._:-]*[a-z0-9])?$")
URL_LIMIT = 8_000
LOCAL_NAMES = (
    "localhost",
    "local",
    "localdomain",
    "internal",
    "intranet",
    "lan",
    "home",
    "corp",
    "private",
    "arpa",
    "onion",
)
"""Last labels that no public site has (RFC 6761, 6762, 7686, 8375 and what networks use inside)."""


def checked(url: str, policy: NetworkPolicy, *, base: Target | None = None) -> Target:
    """The URL as a target, or `Refused`. `base` is where a redirect came from."""
    if base is not None:
        try:
            url = urljoin(base.url, url)
        except ValueError:
            raise Refused(f"{url[:200]!r} is no URL") from None
    if len(url) > URL_LIMIT:
        raise Refused(f"the URL has {len(url)} characters, more than {URL_LIMIT}")
    # Parsers disagree about these, and a disagreement is where a guard is passed.
    if bad := re.search(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029\ufeff\ud800-\udfff]", url):
        raise Refused(f"the URL holds the character {bad[0]!r}; write it percent-encoded")
    match = _URL.match(url)
    if match is None:
        raise Refused(f"{url[:200]!r} is no full URL; expected something like 'https://example.org/page'")
    scheme = match[1].lower()
    if scheme not in ("http", "https"):
        raise Refused(f"scheme {scheme!r} is not fetched; only http and https are")
    if base is not None and base.scheme == "https" and scheme == "http":
        raise Refused("a redirect from https to http is not followed")
    if "@" in match[2]:
        raise Refused("the URL holds a user or password; such URLs are not fetched")
    host, port = _host_and_port(match[2], 443 if scheme == "https" else 80)
    if port not in policy.ports:
        raise Refused(f"port {port} is not fetched; the run allows {', '.join(map(str, sorted(policy.ports)))}")
    if reason := policy.refusal(host):
        raise Refused(reason)
    path = match[3] if match[3].startswith("/") else "/" + match[3]
    return Target(scheme=scheme, host=host, port=port, path=quote(path, safe="/?:@!$&'()*+,;=-._~%[]|"))


def _host_and_port(authority: str, default: int) -> tuple[str, int]:
    if authority.startswith("["):
        inside, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise Refused(f"{authority[:200]!r} is no host")
        name, digits = _ipv6(inside), rest[1:]
    else:
        name, _, digits = authority.partition(":")
        name = _name(name)
    if digits and not (_PORT.match(digits) and 0 < int(digits) < 65536):
        raise Refused(f"port {digits[:20]!r} is no number from 1 to 65535")
    return name, int(digits) if digits else default


def _ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise Refused(f"'[{text[:80]}]' is no IPv6 address") from None
    if address.scope_id is not None:
        raise Refused(f"'[{text[:80]}]' names an interface; only public addresses are fetched")
    return str(address)


def _name(text: str) -> str:
    """A host in lower case ASCII: an address in its plain spelling, or a domain name with a dot in it."""
    name = text
    if not name.isascii():
        try:
            # Full-width digits, circled letters and other dots become what a resolver would take them for.
            name = idna.encode(name, uts46=True).decode()
        except (idna.IDNAError, UnicodeError):
            raise Refused(f"{text[:80]!r} is no domain name") from None
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    last = labels[-1]
    if last.isdigit() or re.match(r"^0x[0-9a-f]*$", last):
        # Every parser takes such a name for an address, each in its own way: only one spelling is let through.
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise Refused(f"{text[:80]!r} is an address in an odd spelling; write it as four decimal numbers") from None
    if len(name) > 253 or not all(_LABEL.match(label) for label in labels):
        raise Refused(f"{text[:80]!r} is no domain name")
    if last in LOCAL_NAMES or len(labels) < 2:
        raise Refused(f"{text[:80]!r} is a name of a local network; only public sites are fetched")
    return name


def _matches(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _networks(*rows: tuple[str, str]) -> Sequence[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str]]:
    return [(ipaddress.ip_network(text), reason) for text, reason in rows]


# The special-purpose registries of IANA, written out: what Python calls global has changed between its versions.
_SPECIAL = _networks(
    ("0.0.0.0/8", "which means this machine"),
    ("10.0.0.0/8", "in a private network"),
    ("100.64.0.0/10", "inside a provider's network (CGNAT)"),
    ("127.0.0.0/8", "on this machine (loopback)"),
    ("168.63.129.16/32", "the metadata service of a cloud"),
    ("169.254.0.0/16", "link-local, where clouds keep their metadata"),
    ("172.16.0.0/12", "in a private network"),
    ("192.0.0.0/24", "reserved for protocols"),
    ("192.0.2.0/24", "for documentation only"),
    ("192.31.196.0/24", "reserved for AS112"),
    ("192.52.193.0/24", "reserved for AMT"),
    ("192.88.99.0/24", "a relay to IPv6 (6to4)"),
    ("192.168.0.0/16", "in a private network"),
    ("192.175.48.0/24", "reserved for AS112"),
    ("198.18.0.0/15", "for benchmarks of networks"),
    ("198.51.100.0/24", "for documentation only"),
    ("203.0.113.0/24", "for documentation only"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved or broadcast"),
    ("::/96", "unspecified, loopback or an IPv4 address in disguise"),
    ("::ffff:0:0/96", "an IPv4 address in disguise (mapped)"),
    ("::ffff:0:0:0/96", "an IPv4 address in disguise (translated)"),
    ("64:ff9b::/96", "an IPv4 address in disguise (NAT64)"),
    ("64:ff9b:1::/48", "an IPv4 address in disguise (local NAT64)"),
    ("100::/64", "a black hole"),
    ("2001::/32", "an IPv4 address in disguise (Teredo)"),
    ("2001::/23", "reserved for protocols"),
    ("2001:db8::/32", "for documentation only"),
    ("2002::/16", "an IPv4 address in disguise (6to4)"),
    ("2620:4f:8000::/48", "reserved for AS112"),
    ("3fff::/20", "for documentation only"),
    ("fc00::/7", "in a private network"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "in a private network"),
    ("ff00::/8", "multicast"),
)
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def not_public(address: Address) -> str | None:
    """Why an address is not one of a public host, or None."""
    for network, reason in _SPECIAL:
        if address.version == network.version and address in network:
            return reason
    if isinstance(address, ipaddress.IPv6Address):
        if address not in _GLOBAL_IPV6 or address.scope_id is not None:
            return "outside of the global range"
        if (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE:
            return "an IPv4 address in disguise (ISATAP)"
    return None if address.is_global else "not public"
