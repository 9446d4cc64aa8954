"""web_fetch and web_search against servers on this machine."""

import asyncio
import gzip
import json
import socket
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perilune.public_web import NetworkPolicy, PublicResolver, Refused
from perilune.swarm.rights import Rights
from perilune.swarm.tools.fetch import FetchFailed, _pinned_socket, fetch
from perilune.swarm.tools.tool import Tool, ToolError, ToolResult
from perilune.swarm.tools.web import SearchEndpoint, fetch_tool, search_tool
from tests.swarm.tools import calling
from tests.swarm.tools.serving import Site, serving


async def call(tool: Tool, workspace: Path, **arguments: Any) -> ToolResult:
    return await calling.call(tool, calling.context_in(workspace), **arguments)


def answering(body: bytes | str, content_type: str = "text/html", status: int = 200, **headers: str) -> Any:
    async def page(request: web.Request) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(body=data, content_type=content_type, status=status, headers=headers)

    return page


def sending_to(location: str) -> Any:
    async def page(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": location.replace("PORT", str(request.url.port))})

    return page


def test_a_page_comes_as_text_with_its_links_and_is_untrusted(tmp_path: Path) -> None:
    async def scene() -> None:
        html = "<title>Moon</title><p>It has <a href='/phases'>phases</a>.<script>x</script>"
        async with serving({"/": answering(html)}) as site:
            tool = fetch_tool(site.policy, resolver=site.resolver)
            result = await call(tool, tmp_path, url=site.url())
            assert f"It has [phases]({site.url('/phases')})." in result.text
            assert "[title: Moon]" in result.text and not result.is_error
            assert tool.untrusted and result.untrusted is None

    asyncio.run(scene())


def test_a_request_carries_no_cookie_no_credential_and_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("CANARY", "canary-secret-value")

    async def scene() -> None:
        set_cookie = answering("hello", "text/plain", **{"Set-Cookie": "id=1; Path=/"})
        async with serving({"/": set_cookie}) as site:
            for _ in range(2):
                await fetch(site.url(), site.policy, resolver=site.resolver)
            for request in site.seen:
                assert set(request.headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
                assert "canary" not in str(request.headers)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:PORT/secret",
        "http://localhost:PORT/secret",
        "http://[::1]:PORT/secret",
        "http://[::ffff:127.0.0.1]:PORT/secret",
        "http://2130706433:PORT/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://user:password@site.example.com:PORT/secret",
        "http://other.example.org/",
        "//0.0.0.0:PORT/secret",
        "file:///etc/passwd",
        "gopher://site.example.com/",
        "http://site.example.com:22/",
        "http://site.example.com:PORT\\@127.0.0.1/",
    ],
)
def test_every_redirect_is_checked_again(tmp_path: Path, location: str) -> None:
    async def scene() -> None:
        pages = {"/": sending_to(location), "/secret": answering("SECRET")}
        async with serving(pages) as site:
            result = await call(fetch_tool(site.policy, resolver=site.resolver), tmp_path, url=site.url())
            assert result.is_error and "SECRET" not in result.text
            # The location is a stranger's text, and the refusal quotes it.
            assert result.untrusted is True
            assert [request.path for request in site.seen] == ["/"]

    asyncio.run(scene())


def test_redirects_end(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving({"/": sending_to("/")}, redirects=3) as site:
            with pytest.raises(Refused, match="more than 3 redirects"):
                await fetch(site.url(), site.policy, resolver=site.resolver)
            assert len(site.seen) == 4

    asyncio.run(scene())


def test_a_redirect_out_of_the_allow_list_is_refused_before_it_is_looked_up(tmp_path: Path) -> None:
    async def scene() -> None:
        pages = {"/": sending_to("http://other.example.com:PORT/x")}
        async with serving(pages, allow=("site.example.com",)) as site:
            with pytest.raises(Refused, match="allow-list"):
                await fetch(site.url(), site.policy, resolver=site.resolver)
            assert site.resolver.asked == ["site.example.com"]

    asyncio.run(scene())


def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """The look-up of the check is the only one: the connection goes to the address that was checked."""
    answers = [["203.0.113.7"], ["127.0.0.1"]]
    asked = []

    async def lookup(host: str) -> list[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    async def scene(site: Site) -> None:
        with pytest.raises(Refused, match=r"203\.0\.113\.7"):
            await fetch(site.url(), site.policy, resolver=PublicResolver(lookup=lookup))
        with pytest.raises(Refused, match=r"127\.0\.0\.1"):
            await fetch(site.url(), site.policy, resolver=PublicResolver(lookup=lookup))
        assert len(asked) == 2 and site.seen == []

    async def run() -> None:
        async with serving({"/": answering("x")}) as site:
            await scene(site)

    asyncio.run(run())


def test_the_last_check_is_on_the_address_that_is_connected_to() -> None:
    info = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80))
    with pytest.raises(OSError, match="not one of the addresses"):
        _pinned_socket(info, [])


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_costs_what_a_page_costs(encoding: str) -> None:
    data = b"a" * 50_000_000
    packed = gzip.compress(data, 9) if encoding == "gzip" else zlib.compress(data, 9)

    async def scene() -> None:
        page = answering(packed, "text/plain", **{"Content-Encoding": encoding})
        async with serving({"/": page}, max_bytes=100_000) as site:
            await fetch(site.url(), site.policy, resolver=site.resolver)  # so that all modules are loaded
            tracemalloc.start()
            fetched = await fetch(site.url(), site.policy, resolver=site.resolver)
            assert len(fetched.body) == 100_000 and fetched.truncated
            assert tracemalloc.get_traced_memory()[1] < 10_000_000

    try:
        asyncio.run(scene())
    finally:
        tracemalloc.stop()


def test_an_endless_body_is_cut_and_a_stalled_one_given_up() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)

    async def stalled(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async def scene() -> None:
        async with serving({"/endless": endless, "/stalled": stalled}, max_bytes=50_000, seconds=1.0) as site:
            fetched = await fetch(site.url("/endless"), site.policy, resolver=site.resolver)
            assert len(fetched.body) == 50_000 and fetched.truncated
            with pytest.raises(FetchFailed, match="no answer within 1 seconds"):
                await fetch(site.url("/stalled"), site.policy, resolver=site.resolver)

    asyncio.run(scene())


@pytest.mark.parametrize("content_type", ["image/png", "application/octet-stream", "application/zip", "video/mp4"])
def test_what_is_no_text_is_not_read(content_type: str) -> None:
    async def scene() -> None:
        async with serving({"/": answering(b"\x89PNG", content_type)}) as site:
            with pytest.raises(FetchFailed, match="not text"):
                await fetch(site.url(), site.policy, resolver=site.resolver)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "charset, text, data",
    [
        ("utf-8", "naïve", "naïve".encode()),
        ("iso-8859-1", "naïve", "naïve".encode("latin-1")),
        ("shift_jis", "月", "月".encode("shift_jis")),
        ("zlib", "plain", b"plain"),  # a codec of Python that is no text encoding
        ("punycode", "plain", b"plain"),
        ("no-such-charset", "plain", b"plain"),
    ],
)
def test_charsets_are_those_of_the_web(charset: str, text: str, data: bytes) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(body=data, headers={"Content-Type": f"text/plain; charset={charset}"})

    async def scene() -> None:
        async with serving({"/": page}) as site:
            assert (await fetch(site.url(), site.policy, resolver=site.resolver)).text() == text

    asyncio.run(scene())


def test_an_error_page_is_an_error_that_can_be_read(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving({"/": answering("<p>gone", status=404)}) as site:
            result = await call(fetch_tool(site.policy, resolver=site.resolver), tmp_path, url=site.url())
            assert result.is_error and "[HTTP 404]" in result.text and "gone" in result.text

    asyncio.run(scene())


def test_fetching_reaches_outside_unless_the_hosts_were_chosen() -> None:
    assert fetch_tool(NetworkPolicy()).effects == "outside"
    assert fetch_tool(NetworkPolicy(allow=("*.example.org",))).effects == "none"


def test_no_argument_of_the_model_reaches_the_guard() -> None:
    tool = fetch_tool(NetworkPolicy())
    assert list(tool.parameters["properties"]) == ["url"]
    assert tool.validate is not None
    for extra in ({"resolver": "x"}, {"policy": {}}, {"allow_private": True}):
        with pytest.raises(ToolError):
            tool.validate({"url": "https://example.org/", **extra})


def test_rights_of_an_agent_narrow_the_policy_of_the_run(tmp_path: Path) -> None:
    async def scene() -> None:
        pages = {"/": sending_to("http://other.example.com:PORT/x"), "/x": answering("reached", "text/plain")}
        async with serving(pages) as site:
            tool = fetch_tool(site.policy, resolver=site.resolver)
            narrow = calling.context_in(tmp_path, rights=Rights(network=frozenset({"site.example.com"})))
            refused = await calling.call(tool, narrow, url=site.url())
            assert refused.is_error and "you were given rights to" in refused.text
            wide = calling.context_in(tmp_path, rights=Rights(network=frozenset({"*"})))
            assert "reached" in (await calling.call(tool, wide, url=site.url())).text

    asyncio.run(scene())


# Search --------------------------------------------------------------------------------------------------------------

SEARXNG = {
    "query": "moon",
    "results": [
        {
            "title": "The Moon",
            "url": "https://example.org/moon",
            "content": "A <b>satellite</b> <script>x</script>of Earth",
        },
        {"title": "line\nbreak\u202e", "url": "https://example.org/2", "content": None},
        "not a result",
    ],
}


def test_search_gives_titles_addresses_and_snippets(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving({"/search": answering(json.dumps(SEARXNG), "application/json")}) as site:
            tool = search_tool(SearchEndpoint(url=f"http://127.0.0.1:{site.port}/search"))
            result = await call(tool, tmp_path, query="moon & stars")
            assert "1. The Moon\n   https://example.org/moon\n   A satellite of Earth" in result.text
            assert "2. line\\nbreak\\u202e" in result.text
            assert dict(site.seen[0].query) == {"format": "json", "q": "moon & stars"}
            assert tool.effects == "none" and tool.untrusted

    asyncio.run(scene())


def test_any_json_service_is_described_by_its_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"data": {"items": [{"name": "A", "href": {"full": "https://a.example.org"}, "text": "snip"}]}}
    monkeypatch.setenv("SEARCH_KEY", "canary-key")
    bodies = []

    async def page(request: web.Request) -> web.Response:
        bodies.append((await request.json(), request.headers["X-Key"]))
        return web.json_response(answer)

    async def scene() -> None:
        async with serving({"/v1": page}) as site:
            endpoint = SearchEndpoint(
                url=f"http://127.0.0.1:{site.port}/v1",
                method="POST",
                query="text",
                parameters={},
                results="data.items",
                title="name",
                link="href.full",
                snippet="text",
                header_from_environment={"X-Key": "SEARCH_KEY"},
            )
            result = await call(search_tool(endpoint), tmp_path, query="q")
            assert result.text == "1. A\n   https://a.example.org\n   snip"
            assert bodies == [({"text": "q"}, "canary-key")]
            assert "canary-key" not in repr(endpoint) + result.text

    asyncio.run(scene())


@pytest.mark.parametrize(
    "page, complaint",
    [
        (answering("{}", "application/json"), "without a list under 'results'"),
        (answering("<html>", "text/html"), "not answer in JSON"),
        (answering("no", status=403), "HTTP 403"),
        (sending_to("http://127.0.0.1:PORT/other"), "HTTP 302"),
        (answering(b"[" + b"1," * 2_000_000 + b"1]", "application/json"), "more than 2000000 bytes"),
    ],
)
def test_a_search_that_fails_says_what_to_do(tmp_path: Path, page: Any, complaint: str) -> None:
    async def scene() -> None:
        async with serving({"/search": page}) as site:
            with pytest.raises(ToolError, match=complaint):
                await call(search_tool(SearchEndpoint(url=f"http://127.0.0.1:{site.port}/search")), tmp_path, query="q")

    asyncio.run(scene())


def test_a_missing_key_is_named_and_nothing_is_sent(tmp_path: Path) -> None:
    endpoint = SearchEndpoint(url="http://127.0.0.1:9/", header_from_environment={"X-Key": "NO_SUCH_VARIABLE"})
    with pytest.raises(ToolError, match="set NO_SUCH_VARIABLE"):
        asyncio.run(call(search_tool(endpoint), tmp_path, query="q"))
