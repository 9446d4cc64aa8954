"""Which tools a run offers, and why others are missing."""

import asyncio
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from perilune.public_web import NetworkPolicy
from perilune.swarm.tools.browser import Browser
from perilune.swarm.tools.documents import build_index
from perilune.swarm.tools.door import Door
from perilune.swarm.tools.mcp import McpServer, McpServers, ServerSpec
from perilune.swarm.tools.mcp_pins import Pins
from perilune.swarm.tools.registry import standard_tools, tools_report
from perilune.swarm.tools.tool import declarations, tool
from perilune.swarm.tools.web import SearchEndpoint

FILES = {"read_file", "write_file", "edit_file", "list_files", "search_files"}


def test_the_least_run_has_files_and_a_reason_for_all_else() -> None:
    box = standard_tools(sandbox_missing="bubblewrap is not installed")
    assert set(box.tools) == FILES
    assert set(box.missing) == {
        *("shell", "python", "search_documents", "read_document", "web_fetch", "web_search", "browser")
    }
    assert box.missing["shell"] == "nothing runs outside of a sandbox: bubblewrap is not installed"


def test_the_fullest_run_offers_all_with_declarations_that_endpoints_take(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    index = asyncio.run(build_index(tmp_path / "papers", tmp_path / "documents.db"))
    policy = NetworkPolicy()
    server = McpServer(spec=ServerSpec(name="git", command=("x",)), pins=Pins(), reason="it closed its output")
    server.offered = {"log": {"description": "Shows the log.", "parameters": {}, "annotations": {}}}
    server.withdrawn = {"push": "tool 'push' is new"}
    box = standard_tools(
        sandbox_missing=None,
        documents=index,
        network=policy,
        search=SearchEndpoint(url="http://localhost:8888/search"),
        browser=Browser(policy=policy, folder=tmp_path, door=Door(policy=policy)),
        servers=McpServers(servers={"git": server}),
    )
    assert len(box.tools) == len(FILES) + 2 + 2 + 2 + 5 + 1 and "git__log" in box.tools
    assert box.missing == {"MCP server git": "it closed its output", "git__push": "tool 'push' is new"}
    for each in orjson.loads(declarations(box.tools)):
        function = each["function"]
        assert function["parameters"]["type"] == "object" and "properties" in function["parameters"]
        assert 10 <= len(function["description"]) <= 300
        assert function["name"].replace("_", "").isalnum()


def test_every_tool_that_returns_what_others_wrote_is_untrusted(tmp_path: Path) -> None:
    box = standard_tools(sandbox_missing=None, network=NetworkPolicy(), search=SearchEndpoint(url="http://localhost/"))
    assert {name for name, each in box.tools.items() if not each.untrusted} == {"write_file", "edit_file"}
    assert all(each.effects is not None for each in box.tools.values())


def test_two_tools_of_one_name_are_refused() -> None:
    @tool(effects="none", name="shell")
    def imposter() -> str:
        """Pretends to be the shell."""
        return ""

    with pytest.raises(ValueError, match="two tools are called 'shell'"):
        standard_tools(sandbox_missing=None, more=[imposter])


def test_the_report_names_every_part_of_the_machine() -> None:
    rows = dict(tools_report())
    assert set(rows) == {"files", "shell and python", "documents", "web", "browser", "MCP servers"}
    assert all(rows.values())


def test_the_registry_imports_nothing_heavy() -> None:
    heavy = ("torch", "playwright", "pypdf", "mcp")
    code = f"import sys, perilune.swarm.tools.registry; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
