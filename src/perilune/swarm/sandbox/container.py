"""The other backend: each run in a container of its own, through the command line of podman or docker.

For machines without bubblewrap. The image needs only a shell and `timeout`; it is named by PERILUNE_SANDBOX_IMAGE.
A cancelled run removes its container. A killed runtime cannot, so `timeout` inside ends the program at its wall time.
"""

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from perilune.swarm.sandbox.contract import (
    INSIDE_UID,
    WORKSPACE,
    Completed,
    Limits,
    Mount,
    SandboxUnavailable,
    check_command,
)
from perilune.swarm.sandbox.layout import Place, find_places
from perilune.swarm.sandbox.process import Output, Streams

IMAGE = "docker.io/library/python:3.13-slim"
CANNOT_RUN = 125  # exit code of both programs for their own failures
KEPT = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "CONTAINER_HOST")  # what the program needs to find its engine


def find_engine() -> str | None:
    return shutil.which("podman") or shutil.which("docker")


def container_argv(
    engine: str,
    image: str,
    name: str,
    places: Sequence[Place],
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    limits: Limits,
    network: bool,
) -> list[str]:
    """The command that runs `argv` in a fresh container."""
    owner = places[0].source.stat()
    uid, gid = (owner.st_uid, owner.st_gid) if owner.st_uid != 0 else (INSIDE_UID, INSIDE_UID)
    words = [
        engine, "run", "--rm", "--interactive", "--init", "--name", name, "--pull", "missing",
        "--network", "bridge" if network else "none", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ipc", "private", "--user", f"{uid}:{gid}", "--hostname", "sandbox",
        "--pids-limit", str(limits.processes + 2), "--memory", str(limits.memory_bytes),
        "--memory-swap", str(limits.memory_bytes), "--shm-size", str(limits.disk_bytes),
        "--ulimit", "core=0", "--ulimit", f"fsize={limits.disk_bytes}",
        "--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.disk_bytes}", "--workdir", cwd,
    ]  # fmt: skip
    if os.path.basename(engine) == "podman" and os.geteuid() != 0:
        words += ["--userns", "keep-id"]  # else the owner of the workspace is root inside
    for place in places:
        if "," in str(place.source):
            raise ValueError(f"the path {str(place.source)!r} holds a comma, which a container's mount cannot name")
        mode = "" if place.writable else ",readonly"
        words += ["--mount", f"type=bind,source={place.source},target={place.target}{mode}"]
    for key, value in {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", **env}.items():
        words += ["--env", f"{key}={value}"]
    return [*words, "--entrypoint", "timeout", image, "-s", "KILL", str(math.ceil(limits.wall_seconds) + 1), *argv]


class Container:
    """A Sandbox over podman or docker; see contract.Sandbox."""

    def __init__(self, workspace: Path, mounts: Sequence[Mount] = ()) -> None:
        engine = find_engine()
        if engine is None:
            raise SandboxUnavailable("neither podman nor docker on PATH; install one, or bubblewrap on Linux")
        self._engine = engine
        self._image = os.environ.get("PERILUNE_SANDBOX_IMAGE", IMAGE)
        self._places = find_places(workspace, mounts)
        self._stopping: set[asyncio.Event] = set()
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] = {},
        limits: Limits,
        network: bool = False,
    ) -> Completed:
        check_command(argv, cwd, env)
        if self._closed:
            raise SandboxUnavailable("the sandbox is closed; open another one")
        name = f"perilune-{secrets.token_hex(8)}"
        command = container_argv(
            self._engine, self._image, name, self._places, argv, cwd=cwd, env=env, limits=limits, network=network
        )
        stop, endless = asyncio.Event(), asyncio.Event()
        self._stopping.add(stop)
        outputs = Output(limit=limits.output_bytes), Output(limit=limits.output_bytes)
        streams = Streams(asyncio.get_running_loop(), endless.set)
        try:
            client = await self._start(command, streams, outputs, stdin)
            stopped = await self._wait(client, stop, endless, limits)
        except OSError as problem:
            raise SandboxUnavailable(f"{self._engine} could not be started: {problem}") from problem
        finally:
            self._stopping.discard(stop)
            # Shielded: a cancelled caller must not cancel the removal too.
            await asyncio.shield(asyncio.ensure_future(self._remove(name)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(streams.ended.wait(), 5)
            streams.close()
        if client.returncode == CANNOT_RUN and stopped is None:
            complaint = bytes(outputs[1].kept).decode(errors="replace").strip()
            raise SandboxUnavailable(f"{self._engine} could not start a container: {complaint}")
        return Completed(
            exit_code=None if stopped else client.returncode,
            stdout=bytes(outputs[0].kept),
            stderr=bytes(outputs[1].kept),
            truncated=outputs[0].truncated or outputs[1].truncated,
            stopped=stopped,
        )

    async def _start(
        self, command: Sequence[str], streams: Streams, outputs: tuple[Output, Output], stdin: bytes
    ) -> asyncio.subprocess.Process:
        """The engine's client, with our ends of its pipes on the event loop."""
        pipes = [os.pipe() for _ in range(3)]
        theirs, ours = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        streams.write(ours[0], stdin)
        streams.read(ours[1], outputs[0])
        streams.read(ours[2], outputs[1])
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                env={key: os.environ[key] for key in KEPT if key in os.environ},
                start_new_session=True,
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    async def _wait(
        self, client: asyncio.subprocess.Process, stop: asyncio.Event, endless: asyncio.Event, limits: Limits
    ) -> str | None:
        reasons = {
            asyncio.ensure_future(client.wait()): None,
            asyncio.ensure_future(stop.wait()): "cancelled",
            asyncio.ensure_future(endless.wait()): "output",
        }
        try:
            done, _ = await asyncio.wait(reasons, timeout=limits.wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            return reasons[done.pop()] if done else "wall time"
        finally:
            for waiting in reasons:
                waiting.cancel()
            if client.returncode is None:
                client.kill()

    async def _remove(self, name: str) -> None:
        client = await asyncio.create_subprocess_exec(
            self._engine, "rm", "--force", name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        await client.wait()

    async def close(self) -> None:
        self._closed = True
        for stop in self._stopping:
            stop.set()
