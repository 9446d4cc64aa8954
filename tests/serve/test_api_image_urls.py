"""Image URLs that are not `data:`: fetched only when allowed, only through the guard, and only within bounds."""

from __future__ import annotations

import asyncio
import io
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from PIL import Image

from perilune.public_web import Address, NetworkPolicy, PublicResolver
from perilune.serve.attachments import Fetch
from perilune.serve.image_urls import FetchFailed, image_fetcher
from tests.serve.api_engine import ScriptedEngine, app_of, call

PATH = "/v1/chat/completions"
HOST = "pictures.example"


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (30, 30), "blue").save(content, "PNG")
    return content.getvalue()


def fetcher_of(port: int, seen: list[str] | None = None, **options: float) -> Fetch:
    """As the package has it, except that one public name leads to a server of the test."""

    class Resolver:
        async def addresses(self, host: str) -> list[Address]:
            if seen is not None:
                seen.append(host)
            if host == HOST:
                return [ipaddress.ip_address("127.0.0.1")]
            return await PublicResolver().addresses(host)

    return image_fetcher(NetworkPolicy(ports=frozenset({80, 443, port})), resolver=Resolver(), **options)


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    rows = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: image/png", *headers]
    return "\r\n".join(rows).encode() + b"\r\n\r\n" + body


def with_server(answers: Callable[[bytes], bytes], play: Callable[[int], Awaitable[None]]) -> None:
    """Runs `play(port)` beside a server that answers each request head with `answers(head)`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers(await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await play(server.sockets[0].getsockname()[1])

    asyncio.run(main())


def asked(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def test_an_allowed_url_becomes_a_picture():
    heads: list[bytes] = []

    def answers(head: bytes) -> bytes:
        heads.append(head)
        return answer(png())

    async def play(port: int) -> None:
        engine = ScriptedEngine()
        app = app_of(engine, takes_pictures=True, fetch=fetcher_of(port))
        reply = await call(app, PATH, asked(f"http://{HOST}:{port}/a.png?x=1"))
        assert reply.status == 200 and engine.seen[0].media[0].grid == (1, 4, 4)
        assert heads[0].startswith(b"GET /a.png?x=1 HTTP/1.1\r\n") and f"Host: {HOST}:{port}".encode() in heads[0]

    with_server(answers, play)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://[::1]/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://0x7f000001/",
        "http://localhost/",
        "http://10.0.0.1/",
        "http://user:password@pictures.example/",
        "http://pictures.example:22/",
        "ftp://pictures.example/",
        "//pictures.example/",
        "gopher://pictures.example/",
        "http://pictures.example\\@127.0.0.1/",
    ],
)
def test_what_the_guard_refuses_is_refused_by_its_path(url):
    engine = ScriptedEngine()
    app = app_of(engine, takes_pictures=True, fetch=fetcher_of(1))
    reply = asyncio.run(call(app, PATH, asked(url)))
    assert reply.status == 400 and reply.error["code"] == "invalid_image_url" and not engine.seen
    assert reply.error["param"] == "messages[0].content[0].image_url.url"


def test_a_redirect_is_guarded_like_the_first_url():
    def answers(head: bytes) -> bytes:
        return answer(b"", "302 Found", "Location: http://127.0.0.1:9/secret")

    async def play(port: int) -> None:
        seen: list[str] = []
        with pytest.raises(ValueError, match=r"port 9|127\.0\.0\.1"):
            await fetcher_of(port, seen)(f"http://{HOST}:{port}/", 1000)
        assert seen == [HOST], "the second host was refused before it was asked for"

    with_server(answers, play)


@pytest.mark.parametrize(
    "reply, why",
    [
        (answer(b"x" * 2000), "more than 1,000 bytes"),
        (answer(b"x", "404 Not Found"), "404"),
        (answer(b"x", "200 OK", "Content-Encoding: gzip"), "compressed"),
        (answer(b"x" * 10)[:-5], "failed|early"),
        (b"not http at all\r\n\r\n", "failed|early"),
        (answer(b"", "302 Found", "Location: /again"), "redirects"),
    ],
)
def test_an_answer_out_of_bounds_is_refused_with_the_reason(reply, why):
    async def play(port: int) -> None:
        with pytest.raises(FetchFailed, match=why):
            await fetcher_of(port)(f"http://{HOST}:{port}/", 1000)

    with_server(lambda head: reply, play)


def test_a_server_that_never_answers_is_given_up():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(FetchFailed, match=r"within 0\.2 s"):
                await fetcher_of(port, seconds=0.2)(f"http://{HOST}:{port}/", 1000)

    asyncio.run(main())
