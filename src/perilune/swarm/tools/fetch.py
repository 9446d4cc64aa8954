"""Fetch a page through the guard of `network`: every hop checked and pinned, every size and time bounded.

    page = await fetch("https://example.org/", NetworkPolicy())

There are no cookies, no proxies of the environment, no credentials and no connection that outlives its request.
Compressed bodies are unpacked here and only up to the limit, so a bomb costs what a page costs.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from perilune.public_web import Address, NetworkPolicy, PublicResolver, Refused, Resolver, Target, checked

ACCEPTED = (
    "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9,application/pdf;q=0.8,application/xml;q=0.8"
)
READABLE = re.compile(
    r"^(text/[\w.+-]+|application/([\w.-]+\+)?(json|xml)|application/(pdf|x-ndjson|yaml|x-yaml|toml|sql))$"
)
# Codecs by name: Python also has some that are no text encoding (zlib) or take quadratic time (punycode).
CHARSETS = re.compile(
    r"^(utf-?8|utf-?16(-?[lb]e)?|us-?ascii|ascii|latin-?1|iso-?8859-?\d{1,2}|windows-?125\d|cp125\d|koi8-?[ru]|gbk|gb2312|"
    r"gb18030|big5|shift[-_]jis|euc-?(jp|kr)|macintosh)$",
    re.I,
)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w-]{1,40})", re.I)


class FetchFailed(RuntimeError):
    """The URL may be fetched, but it did not work out."""

    redirected = False
    """Whether a server sent us where it failed: then the text may quote that server."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    url: str
    """The last one, after redirects."""
    hops: int
    status: int
    content_type: str
    charset: str | None
    body: bytes
    truncated: bool

    def text(self) -> str:
        charset = self.charset
        if charset is None and (match := _META_CHARSET.search(self.body[:4096])):
            charset = match[1].decode("ascii")
        return self.body.decode(charset if charset and CHARSETS.match(charset) else "utf-8", "replace")


async def fetch(url: str, policy: NetworkPolicy, *, resolver: Resolver | None = None) -> Fetched:
    """The page behind a URL; raises `Refused` when a hop may not be fetched, `FetchFailed` when one does not answer."""
    resolver = resolver or PublicResolver()
    target, redirected = checked(url, policy), False
    try:
        async with asyncio.timeout(policy.seconds):
            for hops in range(policy.redirects + 1):
                answer = await _one_hop(target, hops, policy, await resolver.addresses(target.host))
                if isinstance(answer, Fetched):
                    return answer
                redirected = True
                target = checked(answer, policy, base=target)
        raise Refused(f"more than {policy.redirects} redirects")
    except (Refused, FetchFailed) as failure:
        failure.redirected = redirected
        raise
    except TimeoutError:
        raise FetchFailed(f"no answer within {policy.seconds:g} seconds") from None
    except (aiohttp.ClientError, OSError) as error:
        raise FetchFailed(_plain(error)) from None


async def _one_hop(target: Target, hops: int, policy: NetworkPolicy, addresses: list[Address]) -> Fetched | str:
    """The page, or where the server sends us instead."""
    connector = aiohttp.TCPConnector(
        resolver=_Pinned(addresses),
        use_dns_cache=False,
        force_close=True,
        ssl=_tls(),
        socket_factory=lambda info: _pinned_socket(info, addresses),
    )
    headers = {"User-Agent": user_agent(), "Accept": ACCEPTED, "Accept-Encoding": "gzip, deflate"}
    timeout = aiohttp.ClientTimeout(total=policy.seconds, sock_connect=policy.connect_seconds)
    async with (
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=timeout,
        ) as session,
        session.get(URL(target.url, encoded=True), headers=headers, allow_redirects=False) as response,
    ):
        if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
            return response.headers["Location"]
        content_type = response.content_type.lower()
        if not READABLE.match(content_type):
            raise FetchFailed(f"the server sent something that is not text (HTTP {response.status})")
        body, truncated = await _body(response, policy.max_bytes)
        return Fetched(
            url=target.url,
            hops=hops,
            status=response.status,
            content_type=content_type,
            charset=response.charset,
            body=body,
            truncated=truncated,
        )


async def _body(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes, unpacked; whether there was more."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise FetchFailed("the server used a compression that was not offered to it")
    packer = None if encoding in ("identity", "") else zlib.decompressobj(wbits=47)
    pieces: list[bytes] = []
    received = unpacked = 0
    async for chunk in response.content.iter_chunked(65_536):
        received += len(chunk)
        if packer is not None:
            try:
                chunk = packer.decompress(chunk, limit - unpacked + 1)
            except zlib.error:
                raise FetchFailed("the compressed body is damaged") from None
        pieces.append(chunk)
        unpacked += len(chunk)
        if unpacked > limit or received > limit:
            return b"".join(pieces)[:limit], True
        if packer is not None and packer.eof:
            break
    return b"".join(pieces), False


@dataclass(frozen=True)
class _Pinned(AbstractResolver):
    """Answers with the addresses that were checked, whatever the name has become since."""

    pinned: list[Address]

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self.pinned
        ]

    async def close(self) -> None:
        """Nothing is open."""


def _pinned_socket(info: Any, addresses: list[Address]) -> socket.socket:
    """The last check, on the very address that is connected to."""
    family, kind, protocol, _, address = info
    if address[0] not in {str(each) for each in addresses}:
        raise OSError(f"{address[0]} is not one of the addresses that were checked")
    return socket.socket(family, kind, protocol)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@cache
def user_agent() -> str:
    return f"perilune/{metadata.version('perilune')}"


def _plain(error: Exception) -> str:
    """What went wrong in words of our own: the text of a network error may quote what the server sent."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "TLS failed"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "the connection could not be made"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the server closed the connection"
    return f"the answer could not be read ({type(error).__name__})"
