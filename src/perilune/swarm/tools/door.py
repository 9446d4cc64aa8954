"""A proxy that applies the guard of `network` to a whole browser: the only way out of the room it runs in.

It listens on a Unix socket. A request names a host (`CONNECT host:443`, or `GET http://host/...`); the host passes the
same checks as for `web_fetch`, is resolved here, and the connection goes to the address that was checked. What the
browser does afterwards on that connection can reach nobody else. Bytes are counted over the life of the door.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from perilune.public_web import Address, NetworkPolicy, PublicResolver, Refused, Resolver, Target, checked

HEAD_LIMIT = 65_536
# What Chromium asks for by itself, whatever it is told. No page is served there.
OWN_CHATTER = ("update.googleapis.com", "clients2.google.com", "clientservices.googleapis.com", "accounts.google.com")
_REQUEST = re.compile(rb"^([A-Z]{1,16}) ([^ \r\n]{1,8192}) HTTP/1\.[01]\r\n")


class OwnChatter(Refused):
    """The browser speaks for itself, not for a page."""


@dataclass(kw_only=True)
class Door:
    policy: NetworkPolicy
    resolver: Resolver = field(default_factory=PublicResolver)
    total_bytes: int = 200_000_000
    connections: int = 64
    passed: int = 0
    refused: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """The last refusals, so that an agent learns why a page is incomplete."""
    on_caller: Callable[[int], None] | None = None
    """Told the number of the process that connects, before anything else."""
    longest_seconds: float = 120.0
    """Of one connection: a page that keeps all of them would keep every other page out."""
    _server: asyncio.Server | None = None
    _slots: asyncio.Semaphore | None = None

    async def open(self, path: Path) -> None:
        self._slots = asyncio.Semaphore(self.connections)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=HEAD_LIMIT)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._slots is not None
        if self.on_caller is not None:
            self.on_caller(_caller(writer))
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with self._slots:
                try:
                    async with asyncio.timeout(self.policy.seconds):
                        head = await reader.readuntil(b"\r\n\r\n")
                        target, first = self._asked(head)
                        if target.host in OWN_CHATTER:
                            raise OwnChatter
                        addresses = await self.resolver.addresses(target.host)
                        upstream = await self._connected(target, addresses)
                except (Refused, TimeoutError, OSError) as error:
                    if not isinstance(error, OwnChatter):
                        self.refused.append(str(error) or "no answer in time")
                    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    await writer.drain()
                else:
                    await self._both_ways((reader, writer), upstream, first)
        writer.close()

    def _asked(self, head: bytes) -> tuple[Target, bytes]:
        """Whom the request is for, and what to send there first (nothing for a tunnel)."""
        match = _REQUEST.match(head)
        if match is None:
            raise Refused("the request is not HTTP")
        method, address = match[1], match[2].decode("ascii", "replace")
        if method == b"CONNECT":
            host, _, port = address.rpartition(":")
            scheme = "http" if port == "80" else "https"
            return checked(f"{scheme}://{host}:{port}/", self.policy), b""
        target = checked(address, self.policy)
        if target.scheme != "http":
            raise Refused("https goes through a tunnel")
        kept = [
            line
            for line in head[match.end() : -4].split(b"\r\n")
            if line and not line.lower().startswith((b"proxy-", b"connection:", b"host:"))
        ]
        lines = [
            b"%s %s HTTP/1.1" % (method, target.path.encode()),
            b"Host: " + target.authority.encode(),
            *kept,
            b"Connection: close",
        ]
        return target, b"\r\n".join(lines) + b"\r\n\r\n"

    async def _connected(
        self, target: Target, addresses: list[Address]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        last: OSError = OSError(f"host {target.host!r} has no address")
        for address in addresses[:4]:
            try:
                async with asyncio.timeout(self.policy.connect_seconds):
                    return await asyncio.open_connection(str(address), target.port)
            except OSError as error:
                last = OSError(f"no connection to {target.host!r} ({type(error).__name__})")
        raise last

    async def _both_ways(
        self,
        browser: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        first: bytes,
    ) -> None:
        if first:
            upstream[1].write(first)
        else:
            browser[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        pumps = [
            asyncio.create_task(self._pump(browser[0], upstream[1])),
            asyncio.create_task(self._pump(upstream[0], browser[1])),
        ]
        try:
            await asyncio.wait(pumps, timeout=self.longest_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            upstream[1].close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65_536):
                self.passed += len(chunk)
                if self.passed > self.total_bytes:
                    self.refused.append(f"more than {self.total_bytes} bytes in all")
                    break
                sink.write(chunk)
                await sink.drain()


def _caller(writer: asyncio.StreamWriter) -> int:
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[0]
