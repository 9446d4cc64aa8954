"""Which layers of confinement are in force on this machine, found out by running something in the sandbox.

`sandbox_report` gives the same as rows for `perilune doctor`.
"""

import asyncio
import subprocess
import tempfile
import threading
from pathlib import Path

from perilune.swarm.sandbox.bubblewrap import Bubblewrap
from perilune.swarm.sandbox.cgroup import find_delegation
from perilune.swarm.sandbox.container import find_engine
from perilune.swarm.sandbox.contract import Layer, SandboxUnavailable
from perilune.swarm.sandbox.layout import find_bubblewrap


def layers() -> list[Layer]:
    """Every layer, in the order in which a program would have to pass them."""
    found, problem = _try_sandbox()
    if problem:
        program = Layer(name="bubblewrap", active=False, reason=problem)
        return [program, _container(needed=True)]
    cgroup = find_delegation()
    return [
        Layer(name="bubblewrap", active=True, reason=_version()),
        Layer(name="unprivileged user", active=True, reason=found["user"]),
        _layer("user namespace", found, "forbidden here; processes are counted by the supervisor alone"),
        Layer(name="no network", active=True, reason="an empty network namespace unless a run is granted the network"),
        _layer("seccomp", found, "no filter for this processor"),
        _layer("landlock", found, "not in this kernel; mounts alone confine files"),
        Layer(name="supervisor", active=True, reason="memory, processes and disk over each sandbox's process tree"),
        Layer(name="cgroup v2", active=cgroup.folder is not None, reason=cgroup.reason),
        _container(needed=False),
    ]


def sandbox_report() -> list[tuple[str, str]]:
    """Rows (name, text) for a person; the first says whether tools can run programs at all."""
    found = layers()
    usable = found[0].active
    first = "ready" if usable else f"no program can be run: {found[0].reason}"
    rest = found if usable else found[1:]
    return [("sandbox", first), *((layer.name, f"{'on' if layer.active else 'off'}: {layer.reason}") for layer in rest)]


def _layer(name: str, found: dict[str, str], otherwise: str) -> Layer:
    return Layer(name=name, active=name in found, reason=found.get(name, otherwise))


def _container(*, needed: bool) -> Layer:
    engine = find_engine()
    if engine is None:
        return Layer(name="container", active=False, reason="neither podman nor docker on PATH")
    use = "backend='container' may work" if needed else "not needed, backend='container' may work"
    return Layer(name="container", active=False, reason=f"{engine}: {use}")


def _version() -> str:
    program = find_bubblewrap()
    if program is None:
        return "gone"
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return f"{answer.stdout.strip() or 'unknown version'} at {program}"


def _try_sandbox() -> tuple[dict[str, str], str]:
    """What one run reports, or why there is none. In a thread, since the caller may be inside an event loop."""
    found: dict[str, str] = {}
    problems: list[str] = []

    def work() -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                found.update(asyncio.run(Bubblewrap(Path(folder)).find_layers()))
        except (SandboxUnavailable, OSError) as problem:
            problems.append(str(problem))

    thread = threading.Thread(target=work, name="sandbox-layers")
    thread.start()
    thread.join()
    return found, problems[0] if problems else ""
