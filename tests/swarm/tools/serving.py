"""A web server on this machine under public names, and the resolver that lets one test reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from perilune.public_web import Address, NetworkPolicy, PublicResolver


@dataclass(kw_only=True)
class LoopbackResolver:
    """Hosts below example.com are this machine; everything else gets the real rules."""

    asked: list[str] = field(default_factory=list)

    async def addresses(self, host: str) -> list[Address]:
        self.asked.append(host)
        if host.endswith(".example.com"):
            return [ipaddress.IPv4Address("127.0.0.1")]
        return await PublicResolver(lookup=_nowhere).addresses(host)


async def _nowhere(host: str) -> list[str]:
    raise OSError("tests look nothing up")


@dataclass(frozen=True, kw_only=True)
class Site:
    port: int
    policy: NetworkPolicy
    resolver: LoopbackResolver
    seen: list[web.Request]

    def url(self, path: str = "/", host: str = "site.example.com") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serving(
    pages: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], **policy: object
) -> AsyncIterator[Site]:
    seen: list[web.Request] = []

    @web.middleware
    async def remember(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):
        seen.append(request)
        return await handler(request)

    application = web.Application(middlewares=[remember])
    for path, page in pages.items():
        application.router.add_route("*", path, page)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    port = runner.addresses[0][1]
    try:
        yield Site(
            port=port,
            policy=NetworkPolicy(ports=frozenset({80, 443, port}), **policy),
            resolver=LoopbackResolver(),
            seen=seen,
        )
    finally:
        await runner.cleanup()
