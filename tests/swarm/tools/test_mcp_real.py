"""Other people's MCP servers, over stdio and over HTTP."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from perilune.swarm.tools.mcp import OutcomeUnknown, ServerSpec, mcp_servers
from perilune.swarm.tools.tool import ToolError
from tests.swarm.tools.calling import call, context_in
from tests.swarm.tools.serving import serving


def needs_package(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name} (pip install {name})")


@needs_package("mcp_server_time")
@needs_package("mcp_server_git")
@needs_package("mcp_server_fetch")
@pytest.mark.needs_tool("git")
def test_time_git_and_fetch_serve_agents_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-secret")
    repository = tmp_path / "repository"
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(tmp_path)}
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    environment = {"PATH": os.environ["PATH"], **settings}
    subprocess.run([*git, "init", "-q", str(repository)], check=True, env=environment)
    subprocess.run(
        [*git, "commit", "-q", "--allow-empty", "-m", "first light"], cwd=repository, check=True, env=environment
    )

    def spec(name: str, *words: str) -> ServerSpec:
        command = (sys.executable, "-m", f"mcp_server_{name}", *words)
        return ServerSpec(name=name, command=command, variables=settings, start_seconds=120, call_seconds=60)

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<h1>Perilune</h1><p>closest to the Moon</p>", content_type="text/html")

    async def scene() -> None:
        specs = [
            spec("time", "--local-timezone", "UTC"),
            spec("git", "--repository", str(repository)),
            spec("fetch", "--ignore-robots-txt", "--allow-private-ips"),
        ]
        place = context_in(tmp_path)
        async with serving({"/": page}) as site, mcp_servers(specs) as servers:
            assert servers.missing() == {} and servers.withdrawn() == {}
            tools = servers.tools()
            clock, log, fetch = tools["time__convert_time"], tools["git__git_log"], tools["fetch__fetch"]
            noon, history, text = await asyncio.gather(
                call(clock, place, source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo"),
                call(log, place, repo_path=str(repository)),
                call(fetch, place, url=f"http://127.0.0.1:{site.port}/"),
            )
            assert "T21:00" in noon.text
            assert "first light" in history.text
            assert "closest to the Moon" in text.text
            with pytest.raises(ToolError, match="is missing"):
                await call(log, place)
            wrong = await call(clock, place, source_timezone="Moon/Far", time="12:00", target_timezone="UTC")
            assert wrong.is_error
            assert all(tool.effects is None and tool.untrusted for tool in tools.values())

    asyncio.run(scene())


SERVER = """
import sys
from mcp.server.mcpserver import MCPServer, Context
server = MCPServer("counter")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


def started(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_a_server_over_http_is_used_and_found_again_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = started(port)
    spec = ServerSpec(
        name="web", url=f"http://127.0.0.1:{port}/mcp", backoff_seconds=0.05, wait_seconds=60, start_seconds=60
    )

    async def scene() -> None:
        nonlocal process
        async with mcp_servers([spec]) as servers:
            server = servers.servers["web"]
            answer = await server.call("add", {"a": 2, "b": 3}, agent="main") if server.offered else None
            while answer is None:  # it may still be starting
                await asyncio.sleep(0.05)
                if server.state == "ready":
                    answer = await server.call("add", {"a": 2, "b": 3}, agent="main")
            assert answer.text == "5"
            process.kill()
            process.wait()
            with pytest.raises(OutcomeUnknown):
                await server.call("add", {"a": 2, "b": 3}, agent="main")
            process = started(port)
            assert (await server.call("add", {"a": 20, "b": 3}, agent="main")).text == "23"

    try:
        asyncio.run(scene())
    finally:
        process.kill()
        process.wait()
