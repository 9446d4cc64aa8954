"""Servers that lie below HTTP: certificates that prove nothing, and answers that are none."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perilune.public_web import NetworkPolicy, Refused
from perilune.swarm.tools import fetch as fetching
from perilune.swarm.tools.fetch import Fetched, FetchFailed, fetch
from tests.swarm.tools.serving import LoopbackResolver

PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


@asynccontextmanager
async def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads a request and sends these bytes, whatever they are."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.read(65_536))
            writer.write(answer.replace(b"PORT", str(port).encode()))
            await writer.drain()
            writer.close()
        except OSError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield port, asked
    finally:
        server.close()


def fetched(answer: bytes, *, tls: ssl.SSLContext | None = None, host: str = "site.example.com") -> Fetched:
    async def scene() -> Fetched:
        async with answering(answer, tls) as (port, _):
            policy = NetworkPolicy(ports=frozenset({port}), seconds=20)
            url = f"{'https' if tls else 'http'}://{host}:{port}/"
            return await fetch(url, policy, resolver=LoopbackResolver())

    return asyncio.run(scene())


# Certificates --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory, tool_path: Callable[[str], str]) -> Path:
    """One that its owner signed, for site.example.com; the file also holds the key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=site.example.com", "-addext", "subjectAltName=DNS:site.example.com"]
    subprocess.run(
        [tool_path("openssl"), *words, "-keyout", str(path), "-out", str(path)], check=True, capture_output=True
    )
    return path


def server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    with pytest.raises(FetchFailed, match="certificate is not valid"):
        fetched(PAGE, tls=server_side(certificate))


def test_a_certificate_holds_for_its_own_name_alone(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetching, "_tls", lambda: trusting)
    assert fetched(PAGE, tls=server_side(certificate)).body == b"ok"
    with pytest.raises(FetchFailed, match="certificate is not valid"):
        fetched(PAGE, tls=server_side(certificate), host="other.example.com")


def test_a_server_that_speaks_no_tls_is_one_sentence() -> None:
    async def scene() -> None:
        async with answering(PAGE) as (port, _):
            policy = NetworkPolicy(ports=frozenset({port}), seconds=20)
            with pytest.raises(FetchFailed, match="TLS failed|could not be made|closed the connection"):
                await fetch(f"https://site.example.com:{port}/", policy, resolver=LoopbackResolver())

    asyncio.run(scene())


# Answers -------------------------------------------------------------------------------------------------------------

REDIRECT = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
HOSTILE = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "endless status": b"HTTP/1.1 200 " + b"x" * 100_000,
    "endless header": HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\nSECRET",
    "many headers": HEAD + b"X: y\r\n" * 100_000 + b"\r\nSECRET",
    "bytes that are no text in a redirect": REDIRECT + b"http://site.example.com:PORT/\xff\xfe\r\n\r\n",
    "bytes that are no text in its host": REDIRECT + b"http://\xff\xfe.example.com:PORT/\r\n\r\n",
    "a redirect that is half a URL": REDIRECT + b"http://[::1\r\n\r\n",
    "a redirect to a file": REDIRECT + b"file:///etc/passwd\r\n\r\n",
    "a redirect to an address in brackets": REDIRECT + b"http://[::ffff:127.0.0.1]:PORT/\r\n\r\n",
    "a redirect to an unspecified address": REDIRECT + b"http://[::]:PORT/\r\n\r\n",
    "a redirect to an address with a zone": REDIRECT + b"http://[fe80::1%25lo]:PORT/\r\n\r\n",
    "a header within a redirect": REDIRECT + b"/%0d%0aX-Evil:%20yes\x0b\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\nSECRET",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 100\r\n\r\nSECRET",
    "a chunk without end": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nSECRET",
    "bytes that are not what they say": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 6\r\n\r\nSECRET",
    "a compression within a compression": HEAD + b"Content-Encoding: gzip, gzip\r\nContent-Length: 6\r\n\r\nSECRET",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_is_none_is_one_sentence(name: str) -> None:
    with pytest.raises((FetchFailed, Refused)) as raised:
        fetched(HOSTILE[name])
    assert len(str(raised.value)) < 400
    assert "SECRET" not in str(raised.value)


def test_what_a_redirect_carries_stays_in_its_path() -> None:
    async def scene() -> list[bytes]:
        async with answering(REDIRECT + b"/%0d%0aX-Evil:%20yes\r\n\r\n") as (port, asked):
            policy = NetworkPolicy(ports=frozenset({port}), seconds=20, redirects=1)
            with pytest.raises(Refused, match="more than 1 redirects"):
                await fetch(f"http://site.example.com:{port}/", policy, resolver=LoopbackResolver())
            return asked

    second = asyncio.run(scene())[1]
    assert second.startswith(b"GET /%0d%0aX-Evil:%20yes HTTP/1.1\r\n")
    assert b"\r\nX-Evil" not in second


@pytest.mark.parametrize("charset", ["utf-7", "zlib", "punycode", "idna", "rot13", "\\x00", "x" * 300])
def test_a_charset_that_is_no_encoding_of_the_web_is_read_as_utf8(charset: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset={charset}\r\nContent-Length: 9\r\n\r\n"
    assert fetched(head.encode() + "größ +AD".encode()[:9]).text().startswith("gr")
