"""A secret of the environment, and every tool that starts a program or talks to somebody: none hands it over."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perilune.swarm.sandbox import open_sandbox
from perilune.swarm.tools.documents import build_index
from perilune.swarm.tools.mcp import ServerSpec, mcp_servers
from perilune.swarm.tools.registry import standard_tools
from perilune.swarm.tools.tool import ToolError
from perilune.swarm.tools.web import SearchEndpoint
from tests.swarm.tools import office
from tests.swarm.tools.calling import call, context_in
from tests.swarm.tools.serving import serving
from tests.swarm.tools.test_mcp import HOSTILE

CANARY = "sk-canary-5f1d"
EVERYTHING = "env; cat /proc/*/environ /proc/*/cmdline; cat /proc/self/mountinfo"
DUMP = "import os, glob; print(os.environ, [open(p, 'rb').read() for p in glob.glob('/proc/*/environ')])"


@pytest.mark.needs_tool("bwrap")
def test_no_tool_hands_over_a_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_CANARY", "http_proxy_password"):
        monkeypatch.setenv(name, CANARY)
    heard: list[Any] = []

    async def listen(request: web.Request) -> web.Response:
        heard.append((request.path_qs, dict(request.headers), await request.text()))
        return web.json_response({"results": [{"title": "t", "url": "u", "content": "c"}]})

    async def scene() -> list[str]:
        workspace, docs = tmp_path / "workspace", tmp_path / "docs"
        workspace.mkdir()
        docs.mkdir()
        (docs / "a.docx").write_bytes(office.docx("words"))
        (tmp_path / "state").mkdir()
        sandbox = open_sandbox(workspace)
        index = await build_index(docs, tmp_path / "index.db", sandbox=sandbox)
        command = (sys.executable, "-S", str(HOSTILE), str(tmp_path / "state"))
        async with serving({"/": listen}) as site, mcp_servers([ServerSpec(name="h", command=command)]) as servers:
            box = standard_tools(
                sandbox_missing=None,
                documents=index,
                network=site.policy,
                search=SearchEndpoint(url=f"http://127.0.0.1:{site.port}/"),
                servers=servers,
            )
            tries: list[tuple[str, dict[str, Any]]] = [
                ("shell", {"command": EVERYTHING}),
                ("shell", {"command": "no-such-program"}),
                ("python", {"code": DUMP}),
                ("python", {"code": "1 / 0"}),
                ("write_file", {"path": "a", "content": "b"}),
                ("read_file", {"path": "/proc/self/environ"}),
                ("read_file", {"path": "a"}),
                ("search_files", {"text": "b", "regex": True}),
                ("search_documents", {"query": "words"}),
                ("web_search", {"query": "q"}),
                ("web_fetch", {"url": site.url()}),
                ("h__environment", {}),
            ]
            said = []
            for name, arguments in tries:
                try:
                    said.append((await call(box.tools[name], context_in(workspace, sandbox=sandbox), **arguments)).text)
                except ToolError as refusal:
                    said.append(str(refusal))
        await sandbox.close()
        return said

    said = asyncio.run(scene())
    assert "PATH=" in said[0] and "environ" in said[2] and "PATH" in said[-1]  # they did look
    assert heard
    assert CANARY not in "".join(said) + repr(heard)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
