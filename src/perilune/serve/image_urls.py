"""Pictures from the web, for a server that was told to fetch them: every hop guarded, every size and time bounded.

    fetch = image_fetcher(NetworkPolicy(allow=("example.org",)))
    content = await fetch("https://example.org/moon.png", 1 << 24)

A caller's URL makes this machine open a connection, so the guard of public_web.py decides first, again at every
redirect, by the text of the URL and by the addresses of its host, all of them public. The connection goes to exactly
these addresses, so that a name which answers differently the next time gains nothing. There are no cookies, no
credentials, no proxies and no compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import cache

import h11

from perilune.public_web import Address, NetworkPolicy, PublicResolver, Resolver, Target, checked
from perilune.serve.attachments import Fetch

MOST_ADDRESSES = 4
PIECE = 65_536


class FetchFailed(ValueError):
    """The URL may be fetched, but it did not work out."""


def image_fetcher(
    policy: NetworkPolicy,
    *,
    resolver: Resolver | None = None,
    seconds: float = 20.0,
    connect_seconds: float = 5.0,
    redirects: int = 3,
    at_once: int = 16,
) -> Fetch:
    """What `ServerConfig.fetch` takes. At most `at_once` pictures are fetched at a time, over all callers."""
    known = PublicResolver() if resolver is None else resolver
    places = asyncio.Semaphore(at_once)

    async def fetch(url: str, max_bytes: int) -> bytes:
        try:
            async with asyncio.timeout(seconds), places:
                target = checked(url, policy)
                for _ in range(redirects + 1):
                    found = await _one_hop(target, await known.addresses(target.host), max_bytes, connect_seconds)
                    if isinstance(found, bytes):
                        return found
                    target = checked(found, policy, base=target)
        except TimeoutError:
            raise FetchFailed(f"no whole answer within {seconds:g} s") from None
        except (OSError, ssl.SSLError, h11.ProtocolError) as error:
            raise FetchFailed(f"the connection failed ({type(error).__name__})") from None
        raise FetchFailed(f"more than {redirects} redirects")

    return fetch


async def _one_hop(target: Target, addresses: Sequence[Address], max_bytes: int, connect_seconds: float) -> bytes | str:
    """The content, or where the server sends us instead (a text)."""
    reader, writer = await _connected(target, addresses, connect_seconds)
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=PIECE)
        headers = [
            ("Host", target.authority),
            ("Accept", "image/png, image/jpeg, image/webp, image/gif"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", "perilune"),
            ("Connection", "close"),
        ]
        request = connection.send(h11.Request(method="GET", target=target.path, headers=headers))
        writer.write((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        return await _answer(connection, reader, max_bytes)
    finally:
        writer.transport.abort()


async def _connected(
    target: Target, addresses: Sequence[Address], seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = _tls() if target.scheme == "https" else None
    failure: Exception = OSError("the host has no address")
    for address in addresses[:MOST_ADDRESSES]:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.open_connection(
                    str(address), target.port, ssl=tls, server_hostname=target.host if tls else None, limit=PIECE
                )
        except (OSError, TimeoutError) as error:
            failure = error
    raise failure


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader, max_bytes: int) -> bytes | str:
    pieces: list[bytes] = []
    size = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(PIECE))
        elif isinstance(event, h11.Response):
            headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
            if event.status_code in (301, 302, 303, 307, 308) and "location" in headers:
                return headers["location"]
            if event.status_code != 200:
                raise FetchFailed(f"the server answered with {event.status_code}")
            if headers.get("content-encoding", "identity") != "identity":
                raise FetchFailed("the server compressed its answer")
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size > max_bytes:
                raise FetchFailed(f"it has more than {max_bytes:,} bytes")
            pieces.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return b"".join(pieces)
        elif not isinstance(event, h11.InformationalResponse):
            raise FetchFailed("the server ended the connection early")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


__all__ = ["FetchFailed", "image_fetcher"]
