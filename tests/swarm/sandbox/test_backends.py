"""The container's command line, control groups on a pretended hierarchy, the interpreter's place, and the report."""

import asyncio
from pathlib import Path

import pytest

from perilune.swarm.sandbox import (
    Limits,
    Mount,
    SandboxUnavailable,
    bubblewrap,
    cgroup,
    container,
    layers,
    open_sandbox,
    sandbox_report,
)
from perilune.swarm.sandbox.cgroup import enable_controllers, find_delegation, make_group
from perilune.swarm.sandbox.container import container_argv
from perilune.swarm.sandbox.interpreter import place_interpreter
from perilune.swarm.sandbox.layout import find_places

LIMITS = Limits(wall_seconds=7.5, memory_bytes=100, processes=9, disk_bytes=300, output_bytes=50)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


# Containers ----------------------------------------------------------------------------------------------------------


def command(workspace: Path, *mounts: Mount, network: bool = False, engine: str = "/usr/bin/docker") -> list[str]:
    places = find_places(workspace, mounts)
    argv = ["sh", "-c", "ls"]
    return container_argv(
        engine, "image:1", "name", places, argv, cwd="/workspace", env={"A": "b"}, limits=LIMITS, network=network
    )


def test_a_container_is_confined_by_its_command_line(workspace: Path, tmp_path: Path) -> None:
    words = command(workspace, Mount(source=tmp_path, target="/mnt/shown"))
    text = " ".join(words)
    for part in (
        "--rm", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--network none", "--init",
        "--pids-limit 11", "--memory 100", "--memory-swap 100", "--ulimit core=0", "--workdir /workspace", "--env A=b",
        "--tmpfs /tmp:rw,nosuid,nodev,mode=1777,size=300", "--name name",
        f"--mount type=bind,source={workspace},target=/workspace",
        f"--mount type=bind,source={tmp_path},target=/mnt/shown,readonly",
    ):  # fmt: skip
        assert part in text
    assert words[words.index("image:1") + 1 :] == ["-s", "KILL", "9", "sh", "-c", "ls"]
    assert words[words.index("--user") + 1].split(":")[0] != "0"
    assert "--privileged" not in text


def test_a_container_has_a_network_only_when_granted(workspace: Path) -> None:
    words = command(workspace, network=True)
    assert words[words.index("--network") + 1] == "bridge"


def test_a_path_that_a_mount_cannot_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    with pytest.raises(ValueError, match="comma"):
        command(tmp_path / "a,b")


def test_without_an_engine_a_container_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "find_engine", lambda: None)
    with pytest.raises(SandboxUnavailable, match="neither podman nor docker"):
        open_sandbox(workspace, backend="container")


def pretend_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An engine that records its words and does what `script` says."""
    engine = tmp_path / "docker"
    engine.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n[ "$1" = rm ] && exit 0\n{script}\n')
    engine.chmod(0o755)
    monkeypatch.setattr(container, "find_engine", lambda: str(engine))
    return tmp_path / "words"


def test_an_engine_that_cannot_run_is_a_refusal(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_engine(tmp_path, monkeypatch, "echo Cannot connect to the daemon >&2; exit 125")
    with pytest.raises(SandboxUnavailable, match="Cannot connect to the daemon"):
        asyncio.run(open_sandbox(workspace, backend="container").run(["true"], limits=LIMITS))


@pytest.mark.parametrize(
    "script,stopped,exit_code",
    [("cat; echo done; exit 4", None, 4), ("exec sleep 3600", "wall time", None), ("exec yes", "output", None)],
)
def test_a_container_run_ends_as_any_other(
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    stopped: str | None,
    exit_code: int | None,
) -> None:
    words = pretend_engine(tmp_path, monkeypatch, script)
    limits = Limits(wall_seconds=1 if stopped == "wall time" else 60, output_bytes=5000)
    done = asyncio.run(open_sandbox(workspace, backend="container").run(["true"], stdin=b"given ", limits=limits))
    assert (done.stopped, done.exit_code) == (stopped, exit_code)
    if stopped is None:
        assert done.stdout == b"given done\n"
    assert len(done.stdout) <= 5000
    assert words.read_text().splitlines()[-1].startswith("rm --force perilune-")


def test_a_cancelled_container_is_removed(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = pretend_engine(tmp_path, monkeypatch, "exec sleep 3600")

    async def cancel() -> None:
        task = asyncio.create_task(open_sandbox(workspace, backend="container").run(["true"], limits=Limits()))
        while not words.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert words.read_text().splitlines()[-1].startswith("rm --force perilune-")


# Control groups ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hierarchy(tmp_path: Path) -> tuple[Path, Path]:
    """Files with the names of a version 2 hierarchy, and a /proc/self/cgroup that points into it."""
    mount = tmp_path / "cgroup"
    own = mount / "user" / "app"
    own.mkdir(parents=True)
    for folder in (mount, own):
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
        (folder / "cgroup.subtree_control").write_text("")
        (folder / "cgroup.procs").write_text("")
    membership = tmp_path / "membership"
    membership.write_text("3:cpu:/\n0::/user/app\n")
    return mount, membership


def test_a_group_is_used_only_where_it_was_given_away(
    hierarchy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, membership = hierarchy
    found = find_delegation(mount, membership)
    assert found.folder is None and "Delegate=yes" in found.reason
    monkeypatch.setattr(cgroup, "_given_away", lambda folder: folder == mount / "user/app")
    assert find_delegation(mount, membership).folder == mount / "user/app"
    (mount / "user/app/cgroup.controllers").write_text("cpu pids\n")
    assert "memory" in find_delegation(mount, membership).reason
    membership.write_text("3:cpu:/\n")
    assert find_delegation(mount, membership).folder is None
    assert find_delegation(tmp_path / "none", membership).folder is None


def test_the_root_of_a_container_is_given_away(hierarchy: tuple[Path, Path]) -> None:
    mount, membership = hierarchy
    membership.write_text("0::/\n")
    assert find_delegation(mount, membership).folder == mount


def test_a_group_limits_and_tells_which_limit_was_met(hierarchy: tuple[Path, Path]) -> None:
    mount, _ = hierarchy
    (mount / "cgroup.procs").write_text("77")
    assert enable_controllers(mount)
    assert (mount / "perilune" / "cgroup.procs").read_text() == "77"
    assert (mount / "cgroup.subtree_control").read_text() == "+pids +memory"
    group = make_group(mount, LIMITS, [11])
    assert (group.folder / "memory.max").read_text() == "100"
    assert int((group.folder / "pids.max").read_text()) >= 9
    assert (group.folder / "cgroup.procs").read_text() == "11"
    assert group.exceeded() is None
    (group.folder / "pids.events").write_text("max 3\n")
    assert group.exceeded() == "processes"
    (group.folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert group.exceeded() == "memory"


# The interpreter -----------------------------------------------------------------------------------------------------


def test_an_environment_moves_and_its_installation_stays(tmp_path: Path) -> None:
    for name in ("base/bin", "base/lib", "base/share", "env/lib"):
        (tmp_path / name).mkdir(parents=True)
    placed = place_interpreter(base=Path("/srv/python"), prefix=tmp_path / "env", version="python3.11")
    assert placed.executable == "/opt/environment/bin/python"
    assert ("/srv/python/bin/python3.11", "/opt/environment/bin/python") in placed.links
    assert placed.files == (
        ("/opt/environment/pyvenv.cfg", b"home = /srv/python/bin\ninclude-system-site-packages = false\n"),
    )
    assert (tmp_path / "env" / "lib", "/opt/environment/lib") in placed.binds


def test_an_installation_whose_place_is_taken_moves(tmp_path: Path) -> None:
    for base in ("/workspace/python", "/tmp/python", "/"):
        placed = place_interpreter(base=Path(base), prefix=Path(base), version="python3.11")
        assert placed.executable == "/opt/python/bin/python3.11"


def test_of_a_prefix_only_the_program_and_its_library_are_shown(tmp_path: Path) -> None:
    for name in ("bin", "lib", "documents"):
        (tmp_path / name).mkdir()
    placed = place_interpreter(base=tmp_path, prefix=tmp_path, version="python3.11")
    assert {source.name for source, _ in placed.binds} == {"bin", "lib"}
    assert place_interpreter(base=Path("/usr"), prefix=Path("/usr"), version="python3.11").binds == ()


# The report ----------------------------------------------------------------------------------------------------------


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_the_layers_are_those_of_a_real_run() -> None:
    found = {layer.name: layer for layer in layers()}
    for name in ("bubblewrap", "unprivileged user", "seccomp", "no network", "supervisor"):
        assert found[name].active, found[name].reason
    assert all(layer.reason for layer in found.values())
    rows = dict(sandbox_report())
    assert rows["sandbox"] == "ready"
    assert rows["seccomp"].startswith("on: ")


def test_layers_can_be_asked_from_within_an_event_loop() -> None:
    async def ask() -> str:
        return layers()[0].name

    assert asyncio.run(ask()) == "bubblewrap"


def test_the_report_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: None)
    first, second = sandbox_report()
    assert "install the package bubblewrap" in first[1]
    assert second[0] == "container"
