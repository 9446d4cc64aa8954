"""The tools of a run: what the machine has and the person allowed, and a reason for what is not there.

    box = standard_tools(documents=index, network=NetworkPolicy(allow=("*.wikipedia.org",)), sandbox_missing=None)
    Swarm(..., tools=box.tools.values())

A tool that could only refuse is not offered: a model spends steps on it. `missing` says why, for people
(`perilune doctor`, the start of a run).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.public_web import NetworkPolicy
from perilune.swarm.sandbox import sandbox_report
from perilune.swarm.tools.browser import Browser, browser_tools
from perilune.swarm.tools.browser_room import room_missing
from perilune.swarm.tools.documents import DocumentIndex, document_tools, fts5_missing
from perilune.swarm.tools.files import FILE_TOOLS
from perilune.swarm.tools.programs import python, shell
from perilune.swarm.tools.tool import Tool
from perilune.swarm.tools.web import SearchEndpoint, fetch_tool, search_tool

if TYPE_CHECKING:  # the package behind it takes a second to import
    from perilune.swarm.tools.mcp import McpServers


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    tools: dict[str, Tool]
    missing: dict[str, str]
    """Tool, or server -> why it is not offered."""


def standard_tools(
    *,
    sandbox_missing: str | None,
    documents: DocumentIndex | None = None,
    network: NetworkPolicy | None = None,
    search: SearchEndpoint | None = None,
    browser: Browser | None = None,
    servers: McpServers | None = None,
    more: Iterable[Tool] = (),
) -> Toolbox:
    """All tools that can work in this run. `sandbox_missing` is why there is no sandbox, None where there is one."""
    tools: dict[str, Tool] = {}
    missing: dict[str, str] = {}

    def offer(each: Iterable[Tool]) -> None:
        for one in each:
            if one.name in tools:
                raise ValueError(f"two tools are called {one.name!r}; give one of them another name")
            tools[one.name] = one

    offer(FILE_TOOLS)
    if sandbox_missing is None:
        offer((shell, python))
    else:
        missing |= dict.fromkeys(("shell", "python"), f"nothing runs outside of a sandbox: {sandbox_missing}")
    if documents is not None:
        offer(document_tools(documents))
    else:
        missing |= dict.fromkeys(("search_documents", "read_document"), "no folder of documents was given")
    if network is not None:
        offer([fetch_tool(network)])
    else:
        missing["web_fetch"] = "the run was given no network"
    if search is not None:
        offer([search_tool(search)])
    else:
        missing["web_search"] = "no search service was configured"
    if browser is not None:
        offer(browser_tools(browser))
    else:
        missing["browser"] = room_missing() or "the run was given no browser"
    if servers is not None:
        offer(servers.tools().values())
        missing |= {f"MCP server {name}": why for name, why in servers.missing().items()}
        missing |= servers.withdrawn()
    offer(more)
    return Toolbox(tools=tools, missing=missing)


def tools_report() -> list[tuple[str, str]]:
    """Rows (what, state) for `perilune doctor`: what tools could do on this machine."""
    sandbox = sandbox_report()[0][1]
    pdf = (
        "ready" if importlib.util.find_spec("pypdf") else "PDF is left out: pypdf is not installed (pip install pypdf)"
    )
    return [
        ("files", "ready"),
        ("shell and python", sandbox),
        ("documents", fts5_missing() or (pdf if sandbox == "ready" else f"text, Markdown and HTML alone; {sandbox}")),
        ("web", "ready"),
        ("browser", room_missing() or "ready"),
        ("MCP servers", "ready" if importlib.util.find_spec("mcp") else "mcp is not installed (pip install mcp)"),
    ]
