"""The browser: pages with scripts, and no way out but the door."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from perilune.public_web import NetworkPolicy
from perilune.swarm.rights import Rights
from perilune.swarm.sandbox.contract import Limits
from perilune.swarm.tools import browser, browser_room
from perilune.swarm.tools.browser import Browser, browser_tools, open_browser
from perilune.swarm.tools.door import Door
from perilune.swarm.tools.tool import Tool, ToolError
from tests.swarm.tools.calling import call, context_in
from tests.swarm.tools.serving import Site, serving

pytest.importorskip("playwright")
needs_browser = pytest.mark.needs_tool("bwrap", "chromium")

HOME = """<!doctype html><title>Shop</title><p id=out>waiting</p><div style="display:none">INVISIBLE</div>
<form action="/order"><input name=what placeholder="What?"><button>Buy</button></form><a href="/about">About</a>
<script>
document.getElementById('out').textContent = 'made by a script';
const port = location.port, tried = [];
const note = () => document.title = 'Shop ' + tried.join(' ');
fetch(`http://127.0.0.1:${port}/secret`).then(r => r.text()).then(t => tried.push(t))
  .catch(() => tried.push('blocked')).finally(note);
new WebSocket(`ws://127.0.0.1:${port}/secret`).onerror = () => { tried.push('blocked'); note(); };
new Image().src = `http://[::1]:${port}/secret`;
navigator.sendBeacon(`http://localhost:${port}/secret`, 'x');
document.cookie = 'id=1';
</script>"""


def page(text: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html")

    return answer


async def order(request: web.Request) -> web.Response:
    return web.Response(
        text=f"<p>ordered {request.query['what']} {request.headers.get('Cookie')}", content_type="text/html"
    )


PAGES = {
    "/": page(HOME),
    "/about": page("<p>About us<script>window.open('/popup')</script>"),
    "/order": order,
    "/secret": page("SECRET"),
    "/liar": page(
        "<p>honest words<form onclick=1><input name=getAttribute><input name=getBoundingClientRect></form>"
        "<img name=querySelectorAll><script>document.title = 't'.repeat(1e6);"
        "Object.assign(String.prototype, {slice: () => 'x'.repeat(1e8)});"
        "Array.prototype.map = Array.prototype.filter = () => 'LIE'; Object.prototype.toJSON = () => 'LIE'</script>"
    ),
    "/file": page("<iframe src='file:///etc/passwd'></iframe><p>done"),
}


@asynccontextmanager
async def browsing() -> AsyncIterator[tuple[Site, Browser, dict[str, Tool]]]:
    async with serving(PAGES) as site, open_browser(site.policy, resolver=site.resolver) as browser:
        yield site, browser, {tool.name: tool for tool in browser_tools(browser)}


@needs_browser
def test_an_agent_reads_clicks_types_and_never_leaves_the_policy(tmp_path: Path) -> None:
    async def scene() -> None:
        async with browsing() as (site, browser, tools):
            place, other = context_in(tmp_path), context_in(tmp_path, agent="main/other-1.0")
            with pytest.raises(ToolError, match="no page is open"):
                await call(tools["browser_read"], place)
            text = (await call(tools["browser_open"], place, url=site.url())).text
            assert "made by a script" in text and "INVISIBLE" not in text
            assert "[1] input text: What?" in text and "[2] button: Buy" in text
            async with asyncio.timeout(30):
                while text.count("blocked") < 2:
                    text = (await call(tools["browser_read"], place)).text
            assert "SECRET" not in text and "refused: host '127.0.0.1'" in text
            assert "/secret" not in [request.path for request in site.seen]

            await call(tools["browser_screenshot"], place, path="shots/shop.png")
            assert (tmp_path / "shots" / "shop.png").read_bytes().startswith(b"\x89PNG")
            with pytest.raises(ToolError, match="leads upwards"):
                await call(tools["browser_screenshot"], place, path="../shop.png")
            await call(tools["browser_type"], place, number=1, text="tea & cake")
            assert "ordered tea & cake id=1" in (await call(tools["browser_click"], place, number=2)).text

            # Another agent shares nothing.
            theirs = await call(tools["browser_open"], other, url=site.url("/order?what=x"))
            assert "ordered x None" in theirs.text
            assert "root:" not in (await call(tools["browser_open"], other, url=site.url("/file"))).text
            # Scripts that replace what a reader calls change nothing about what is read, nor how much.
            liar = (await call(tools["browser_open"], other, url=site.url("/liar"))).text
            assert "honest words" in liar and "LIE" not in liar and "[1] form: " in liar and len(liar) < 5_000

            for url in (
                f"http://127.0.0.1:{site.port}/secret",
                "file:///etc/passwd",
                "chrome://version",
                "http://10.0.0.1/",
            ):
                with pytest.raises(ToolError, match="not opened|could not do it"):
                    await call(tools["browser_open"], other, url=url)
            assert "/secret" not in [request.path for request in site.seen]

    asyncio.run(scene())


@needs_browser
def test_the_room_holds_no_environment_no_home_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher with a shell in Chromium's place: what a page could reach if it took the browser over."""
    monkeypatch.setenv("OPENAI_API_KEY", "canary-secret")
    monkeypatch.setattr(browser_room, "chromium_path", lambda: "/bin/sh")
    (tmp_path / "outside.txt").write_text("SECRET")

    async def scene() -> str:
        door = Door(policy=NetworkPolicy())
        await door.open(tmp_path / "door")
        browser_room.write_launcher(tmp_path / "launch", tmp_path / "door")
        script = (
            f"env; id -u; ls /; cat /proc/net/dev /proc/net/route; cat {tmp_path}/outside.txt; ls -la /run; touch /x"
        )
        # The launcher passes on descriptors 3 and 4, which playwright would open.
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", 'exec 3</dev/null 4>/dev/null; exec "$0" "$@"', str(tmp_path / "launch"), "-c", script,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        await door.close()
        return output

    output = asyncio.run(scene())
    assert "canary" not in output and "SECRET" not in output
    assert "65534" in output and "home" not in output.split("\n") and "Read-only file system" in output
    devices = [line.split(":")[0].strip() for line in output.splitlines() if ":" in line and "|" not in line]
    assert "lo" in devices and not any(name.startswith(("eth", "en", "wl", "veth")) for name in devices)


@pytest.mark.parametrize(
    "missing, complaint",
    [("bwrap", "bubblewrap is not installed"), ("chromium", "chromium is not installed")],
)
def test_without_its_parts_there_is_a_reason_and_no_browser(
    missing: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == missing else f"/usr/bin/{name}")
    monkeypatch.setattr(browser_room, "chromium_path", lambda: None)

    async def scene() -> None:
        async with open_browser(NetworkPolicy()):
            pass

    with pytest.raises(ValueError, match=complaint):
        asyncio.run(scene())


def test_an_agent_with_narrower_rights_than_the_run_has_no_browser(tmp_path: Path) -> None:
    policy = NetworkPolicy(allow=("a.example.org", "b.example.org"))
    opening = browser_tools(Browser(policy=policy, folder=tmp_path, door=Door(policy=policy)))[0]
    narrow = context_in(tmp_path, rights=Rights(network=frozenset({"a.example.org"})))
    with pytest.raises(ToolError, match="narrower than those of the browser"):
        asyncio.run(call(opening, narrow, url="https://a.example.org/"))


# The door ------------------------------------------------------------------------------------------------------------


async def through_the_door(door: Door, socket: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "request_line",
    [
        "CONNECT 127.0.0.1:PORT",
        "CONNECT localhost:PORT",
        "CONNECT [::1]:PORT",
        "CONNECT 169.254.169.254:80",
        "CONNECT site.example.com:22",
        "CONNECT site.example.com",
        "CONNECT user@site.example.com:PORT",
        "GET http://127.0.0.1:PORT/secret",
        "GET http://2130706433:PORT/secret",
        "GET https://site.example.com/secret",
        "GET /secret",
        "GET ftp://site.example.com/",
        "nonsense",
    ],
)
def test_the_door_refuses_what_the_guard_refuses(tmp_path: Path, request_line: str) -> None:
    async def scene() -> None:
        async with serving(PAGES) as site:
            door = Door(policy=site.policy, resolver=site.resolver)
            await door.open(tmp_path / "door")
            line = request_line.replace("PORT", str(site.port))
            answer = await through_the_door(door, tmp_path / "door", f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await door.close()
            assert answer.startswith(b"HTTP/1.1 403") and len(door.refused) == 1 and site.seen == []

    asyncio.run(scene())


def test_the_door_lets_through_what_the_guard_allows_and_counts_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(PAGES) as site:
            door = Door(policy=site.policy, resolver=site.resolver)
            await door.open(tmp_path / "door")
            request = f"GET {site.url('/secret')} HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: x\r\n\r\n".encode()
            assert b"SECRET" in await through_the_door(door, tmp_path / "door", request)
            assert site.seen[0].headers["Host"] == f"site.example.com:{site.port}"
            assert "Proxy-Authorization" not in site.seen[0].headers
            tunnel = f"CONNECT site.example.com:{site.port} HTTP/1.1\r\n\r\nGET /secret HTTP/1.0\r\n\r\n".encode()
            assert b"SECRET" in await through_the_door(door, tmp_path / "door", tunnel)
            door.total_bytes = door.passed
            assert b"SECRET" not in await through_the_door(door, tmp_path / "door", request)
            await door.close()

    asyncio.run(scene())


def test_a_connection_through_the_door_does_not_last_for_ever(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(PAGES) as site:
            door = Door(policy=site.policy, resolver=site.resolver, longest_seconds=0.2)
            await door.open(tmp_path / "door")
            silent = f"CONNECT site.example.com:{site.port} HTTP/1.1\r\n\r\n".encode()
            assert (await through_the_door(door, tmp_path / "door", silent)).startswith(b"HTTP/1.1 200")
            await door.close()

    asyncio.run(scene())


@pytest.mark.skipif(sys.platform != "linux", reason="the room is a matter of Linux")
def test_a_room_that_takes_too_much_is_ended_with_all_that_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "ROOM_LIMITS", Limits(processes=2))
    connect = "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('door'); time.sleep(1000)"

    async def scene() -> None:
        policy = NetworkPolicy()
        room = Browser(policy=policy, folder=tmp_path, door=Door(policy=policy))
        room.door.on_caller = room._watch_room
        await room.door.open(tmp_path / "door")
        many = " ".join(["sleep 1000 &"] * 5)
        # As in the room: a first process, and beneath it the one that talks to the door.
        first = await asyncio.create_subprocess_exec(
            "sh", "-c", f'{many} {sys.executable} -S -c "{connect}"; true', cwd=tmp_path, start_new_session=True
        )
        try:
            assert await asyncio.wait_for(first.wait(), 60) == -signal.SIGKILL
            assert any("took too much (processes)" in each for each in room.door.refused)
            await room.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)

    asyncio.run(scene())


GREEDY = """<p>hungry<script>
const kept = []; setInterval(() => { for (let i = 0; i < 4; i++) kept.push(new Uint8Array(16 << 20).fill(7)); }, 20);
</script>"""


@pytest.mark.long
@needs_browser
def test_a_page_that_takes_the_memory_ends_the_browser_and_the_next_page_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "ROOM_LIMITS", Limits(memory_bytes=1 << 30, processes=256))

    async def scene() -> None:
        pages = {"/": page(GREEDY), "/calm": page("<p>calm")}
        async with serving(pages) as site, open_browser(site.policy, resolver=site.resolver) as room:
            tools = {tool.name: tool for tool in browser_tools(room)}
            await call(tools["browser_open"], context_in(tmp_path), url=site.url())
            async with asyncio.timeout(60):
                while room._chromium is not None and room._chromium.is_connected():
                    await asyncio.sleep(0.05)
            shown = await call(tools["browser_open"], context_in(tmp_path), url=site.url("/calm"))
            assert "calm" in shown.text and "took too much (memory)" in shown.text

    asyncio.run(scene())


def test_clicking_and_typing_reach_outside_whatever_the_lists_say(tmp_path: Path) -> None:
    for policy, opening in ((NetworkPolicy(), "outside"), (NetworkPolicy(allow=("example.org",)), "none")):
        tools = browser_tools(Browser(policy=policy, folder=tmp_path, door=Door(policy=policy)))
        assert {tool.name.removeprefix("browser_"): tool.effects for tool in tools} == {
            "open": opening,
            "read": "none",
            "click": "outside",
            "type": "outside",
            "screenshot": "workspace",
        }
        assert all(tool.untrusted for tool in tools)
