"""The sandbox of tools: programs run confined or not at all, and files are opened beneath their folder or not at all.

    sandbox = open_sandbox(Path("workspace"))
    done = await sandbox.run(["sh", "-c", "ls -la"], limits=Limits(wall_seconds=10))

Linux namespaces (bubblewrap), an unprivileged user, a system-call filter, Landlock, rlimits, cgroups where delegated
and a supervisor; `layers()` says which of these are in force on this machine. `read_file`, `write_file`, `list_files`
and `search_files` serve tools that need no process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from perilune.swarm.sandbox.bubblewrap import Bubblewrap
from perilune.swarm.sandbox.container import Container
from perilune.swarm.sandbox.contract import Completed, Layer, Limits, Mount, Sandbox, SandboxUnavailable
from perilune.swarm.sandbox.files import Entry, FileContent, Match, list_files, read_file, search_files, write_file
from perilune.swarm.sandbox.interpreter import python_argv
from perilune.swarm.sandbox.paths import PathRefused, open_beneath
from perilune.swarm.sandbox.report import layers, sandbox_report

__all__ = [
    "open_sandbox",
    "Sandbox",
    "Limits",
    "Mount",
    "Completed",
    "SandboxUnavailable",
    "python_argv",
    "layers",
    "Layer",
    "sandbox_report",
    "open_beneath",
    "PathRefused",
    "read_file",
    "FileContent",
    "write_file",
    "list_files",
    "Entry",
    "search_files",
    "Match",
]


def open_sandbox(
    workspace: Path,
    *,
    mounts: Sequence[Mount] = (),
    backend: Literal["bubblewrap", "container"] = "bubblewrap",
) -> Sandbox:
    """A sandbox over a folder, which its programs see as /workspace; SandboxUnavailable when the backend is missing."""
    if backend == "bubblewrap":
        return Bubblewrap(workspace, mounts)
    if backend == "container":
        return Container(workspace, mounts)
    raise ValueError(f"backend is {backend!r}; expected 'bubblewrap' or 'container'")
