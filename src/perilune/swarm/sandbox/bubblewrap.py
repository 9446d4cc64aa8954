"""The default backend: each run in namespaces of its own, made by bubblewrap, then confined further by launch.py.

    runtime -> bwrap (outer) -> bwrap (first process inside) -> launch.py, which becomes the program

The outer process dies with the runtime, the first one inside with the outer, and the kernel ends every process of a PID
namespace with its first. So neither a cancelled task nor a killed runtime leaves anything behind.
"""

import asyncio
import contextlib
import functools
import importlib.util
import marshal
import math
import os
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.swarm.sandbox import launch
from perilune.swarm.sandbox.accounting import folder_bytes
from perilune.swarm.sandbox.cgroup import SPARE_PROCESSES, Group, make_group, prepared_folder
from perilune.swarm.sandbox.contract import (
    INSIDE_UID,
    SEARCH_PATH,
    WORKSPACE,
    Completed,
    Limits,
    Mount,
    SandboxUnavailable,
    check_command,
)
from perilune.swarm.sandbox.interpreter import ENVIRONMENT, find_interpreter
from perilune.swarm.sandbox.layout import LAUNCHER, OWN_FILES, describe, find_bubblewrap, find_places
from perilune.swarm.sandbox.process import (
    Output,
    Started,
    Streams,
    data_descriptor,
    hear_ready,
    parent_of,
    start,
    starting_turn,
)
from perilune.swarm.sandbox.seccomp import build_filter
from perilune.swarm.sandbox.supervisor import Watch, start_watching, stop_watching

START_SECONDS = 60.0
QUICK_SCAN = 0.05  # a workspace that takes longer to measure is not measured again after each run
SPARE_FILE_BYTES = 1 << 20  # a single file may pass the disk limit by this, so that passing it is seen
# What the launcher needs when root starts it, until it leaves root.
ROOT_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_OVERRIDE")
BASE_ENVIRONMENT = {
    "PATH": f"{ENVIRONMENT}/bin:{SEARCH_PATH}",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "nobody",
    "LANG": "C.UTF-8",
}


@functools.cache
def launcher_code() -> bytes:
    """launch.py compiled, so that no run spends time on compiling it or depends on a cache next to it."""
    source = Path(launch.__file__).read_text()
    code = compile(source, LAUNCHER, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def is_host_root() -> bool:
    """Root of the machine, not of a user namespace whose root is an ordinary user outside."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError, ValueError):
        inside, outside, _ = Path("/proc/self/uid_map").read_text().split("\n")[0].split()
        return inside == outside == "0"
    return True


@dataclass(kw_only=True, eq=False)
class Run:
    """One run while it lasts. The first reason to stop it is the one that counts."""

    started: Started | None = None
    stopped: str | None = None
    over: bool = False
    layers: dict[str, str] = field(default_factory=dict)

    def stop(self, reason: str) -> None:
        if self.stopped is None and not self.over:
            self.stopped = reason
            if self.started is not None:
                self.started.kill()


class Bubblewrap:
    """A Sandbox over bubblewrap; see contract.Sandbox."""

    def __init__(self, workspace: Path, mounts: Sequence[Mount] = ()) -> None:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise SandboxUnavailable(f"bubblewrap needs Linux, this is {sys.platform}; use backend='container'")
        program = find_bubblewrap()
        if program is None:
            raise SandboxUnavailable("no bwrap on PATH; install the package bubblewrap (make system-deps on Debian)")
        filter_program = build_filter(unix_sockets=not mounts)
        if filter_program is None:
            raise SandboxUnavailable(
                f"no system-call filter for the processor {os.uname().machine!r}, only for x86_64 and aarch64; "
                "use backend='container'"
            )
        self._program = program
        self._filter = filter_program
        self._places = find_places(workspace, mounts)
        self._folders = tuple(place.source for place in self._places if place.writable)
        self._interpreter = find_interpreter()
        self._runs: dict[asyncio.Task[Completed], Run] = {}
        self._closed = False
        self._first_size: int | None = None
        self._size = 0
        self._scan_seconds = 0.0

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
        run = Run()
        job = self._job(list(argv), cwd, env, limits)
        # A task of its own: when the caller is cancelled, this one goes on until every process is gone.
        task = asyncio.create_task(self._execute(run, job, stdin, limits, network=network))
        self._runs[task] = run
        task.add_done_callback(self._runs.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.stop("cancelled")
            await asyncio.wait({task})
            task.cancelled() or task.exception()  # seen, so that nobody is warned about it
            raise

    async def close(self) -> None:
        """Stop what runs, as cancelled, and refuse to run anything more."""
        self._closed = True
        for run in self._runs.values():
            run.stop("cancelled")
        if self._runs:
            await asyncio.wait(set(self._runs))

    async def find_layers(self) -> dict[str, str]:
        """The layers that are in force in a run, as the launcher reports them."""
        run = Run()
        job = self._job(["true"], "/", {}, Limits())
        await self._execute(run, job, b"", Limits(wall_seconds=START_SECONDS), network=False)
        return run.layers

    # What is started ----------------------------------------------------------------------------------------------

    def _job(self, argv: list[str], cwd: str, env: Mapping[str, str], limits: Limits) -> dict[str, Any]:
        rlimits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 1024,
            "RLIMIT_NPROC": limits.processes + SPARE_PROCESSES,
            "RLIMIT_FSIZE": limits.disk_bytes + SPARE_FILE_BYTES,
            # Of one process, and more than the limit: between two looks of the supervisor the kernel says no.
            "RLIMIT_DATA": 2 * limits.memory_bytes,
        }
        if limits.cpu_seconds is not None:
            rlimits["RLIMIT_CPU"] = math.ceil(limits.cpu_seconds) + 1
        return {
            "argv": argv,
            "cwd": cwd,
            "env": {**BASE_ENVIRONMENT, **env},
            "uid": INSIDE_UID,
            "workspace": WORKSPACE,
            "mounts": [place.target for place in self._places[1:]],
            "writable": [place.target for place in self._places if place.writable] + ["/tmp", "/dev/shm"],
            "identities": [(place.target, place.device, place.inode) for place in self._places],
            "rlimits": rlimits,
            "filter": self._filter,
        }

    def _words(self, limits: Limits, *, network: bool) -> list[str]:
        words = ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if is_host_root():
            # No user namespace yet: see launch.py.
            words += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
            words += [] if network else ["--unshare-net"]
            for capability in ROOT_CAPABILITIES:
                words += ["--cap-add", capability]
        else:
            words += ["--unshare-all", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
            words += ["--share-net"] if network else []
        words += describe(self._places, self._interpreter, limits)
        if network:
            words += ["--ro-bind-try", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
        return words

    @contextlib.contextmanager
    def _command(
        self, control: socket.socket, limits: Limits, *, network: bool
    ) -> Generator[tuple[list[str], list[int]]]:
        """bubblewrap's command and the descriptors it inherits, which are closed here afterwards."""
        words = self._words(limits, network=network)
        files = {LAUNCHER: launcher_code(), **{name: text.encode() for name, text in OWN_FILES.items()}}
        files |= dict(self._interpreter.files)
        with contextlib.ExitStack() as cleanup:

            def give(data: bytes) -> int:
                descriptor = data_descriptor(data)
                cleanup.callback(os.close, descriptor)
                return descriptor

            inherited = [control.fileno()]
            for name, data in files.items():
                inherited.append(give(data))
                words += ["--perms", "0644", "--ro-bind-data", str(inherited[-1]), name]
            words += ["--remount-ro", "/dev", "--remount-ro", "/"]
            # Through a descriptor: the command line of the first process can be read inside, and these are host paths.
            inherited.append(give(os.fsencode("\0".join(words)) + b"\0"))
            command = [self._program, "--args", str(inherited[-1]), "--", self._interpreter.base_executable]
            yield [*command, "-I", "-S", LAUNCHER, str(control.fileno())], inherited

    # A run, from start to end -------------------------------------------------------------------------------------

    async def _execute(
        self, run: Run, job: dict[str, Any], stdin: bytes, limits: Limits, *, network: bool
    ) -> Completed:
        loop = asyncio.get_running_loop()
        outputs = Output(limit=limits.output_bytes), Output(limit=limits.output_bytes)
        streams = Streams(loop, lambda: run.stop("output"))
        most_disk = await self._most_disk(limits)
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.callback(streams.close)
            turn = await cleanup.enter_async_context(contextlib.AsyncExitStack())
            await turn.enter_async_context(starting_turn())
            control, theirs = socket.socketpair()
            cleanup.callback(control.close)
            control.setblocking(False)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                with theirs, self._command(theirs, limits, network=network) as (command, given):
                    started = await start(command, with_input=bool(stdin), inherited=given)
            except OSError as problem:
                raise SandboxUnavailable(f"{self._program} could not be started: {problem}") from problem
            cleanup.callback(started.close)
            given_input, *read = started.take_pipes()
            for descriptor, output in zip(read, outputs):
                streams.read(descriptor, output)
            if given_input is not None:
                streams.write(given_input, stdin)
            try:
                inner = await asyncio.wait_for(hear_ready(control), START_SECONDS)
            except TimeoutError:
                started.process.kill()
                raise SandboxUnavailable(f"bubblewrap did not start within {START_SECONDS:.0f} seconds") from None
            if inner is None or run.stopped:
                control.close()  # without a job the launcher ends, and everything with it
                return await self._never_started(run, started, streams, outputs)
            started.learn_inner(inner)
            run.started = started
            lines = _Lines(control)
            group = self._limit_by_kernel(limits, started.process.pid, inner)
            watch = Watch(
                root=started.process.pid,
                limits=limits,
                folders=self._folders,
                most_disk_bytes=most_disk,
                exceeded=lambda limit: _tell(loop, run, limit),
            )
            start_watching(watch)
            timer = loop.call_later(limits.wall_seconds, run.stop, "wall time")
            try:
                failure = await self._hand_over(job, control, lines, run)
                control.close()
                await turn.aclose()
                code = await started.wait()
                run.over = True
            finally:
                timer.cancel()
                stop_watching(watch)
            # Every writer is gone; what is left in the pipes is still to be read.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(streams.ended.wait(), 5)
            if group is not None:
                run.stopped = run.stopped or group.exceeded()
                group.remove()
        if run.stopped is None and await self._grown_beyond(most_disk):
            return _completed(code, outputs, failure, "disk")
        return _completed(None if run.stopped else code, outputs, failure, run.stopped)

    async def _hand_over(self, job: dict[str, Any], control: socket.socket, lines: "_Lines", run: Run) -> bytes:
        """Send the job and hear what became of it; returns what to add to stderr when there is no such program."""
        data = marshal.dumps(job)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(control, len(data).to_bytes(4, "big") + data)
        while (line := await lines.next()) is not None:
            kind, _, text = line.partition(" ")
            if kind == "refused":
                raise SandboxUnavailable(f"the sandbox could not be closed and was not used: {text}")
            if kind == "failed":
                return text.partition(" ")[2].encode() + b"\n"
            name, _, reason = text.partition("\t")
            run.layers[name] = reason
        if not run.layers and not run.stopped:
            raise SandboxUnavailable("the launcher inside the sandbox ended before the program began")
        return b""

    async def _never_started(
        self, run: Run, started: Started, streams: Streams, outputs: tuple[Output, Output]
    ) -> Completed:
        await started.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(streams.ended.wait(), 5)
        if run.stopped:
            return _completed(None, outputs, b"", run.stopped)
        raise SandboxUnavailable(_explain(bytes(outputs[1].kept).decode(errors="replace").strip()))

    def _limit_by_kernel(self, limits: Limits, outer: int, inner: int) -> Group | None:
        folder = prepared_folder()
        if folder is None:
            return None
        try:
            launcher = [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent_of(name) == inner]
            return make_group(folder, limits, [outer, inner, *launcher])
        except OSError:
            return None  # the supervisor counts all the same

    async def _most_disk(self, limits: Limits) -> int:
        """The size at which what can be written to is too large. What was too large before may shrink, not grow."""
        if self._first_size is None:
            size = await self._measure()
            self._first_size = size if self._first_size is None else self._first_size
        return max(self._first_size + limits.disk_bytes, self._size)

    async def _grown_beyond(self, most: int) -> bool:
        return self._scan_seconds < QUICK_SCAN and await self._measure() > most

    async def _measure(self) -> int:
        began = time.monotonic()
        self._size = await asyncio.to_thread(lambda: sum(map(folder_bytes, self._folders)))
        self._scan_seconds = time.monotonic() - began
        return self._size


class _Lines:
    """What the launcher says, line by line; None at the end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._data = b""

    async def next(self) -> str | None:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._data:
            try:
                part = await loop.sock_recv(self._control, 4096)
            except ConnectionError:
                part = b""
            if not part:
                return None
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        return line.decode(errors="replace")


def _tell(loop: asyncio.AbstractEventLoop, run: Run, limit: str) -> None:
    """From the supervisor's thread. A loop that is closed by now has no one left to tell: kill at once."""
    try:
        loop.call_soon_threadsafe(run.stop, limit)
    except RuntimeError:
        if run.started is not None:
            run.started.kill()


def _completed(code: int | None, outputs: tuple[Output, Output], failure: bytes, stopped: str | None) -> Completed:
    stdout, stderr = outputs
    return Completed(
        exit_code=None if code is not None and code < 0 else code,
        stdout=bytes(stdout.kept),
        stderr=bytes(stderr.kept) + failure,
        truncated=stdout.truncated or stderr.truncated,
        stopped=stopped,
    )


def _explain(complaint: str) -> str:
    text = f"bubblewrap could not start: {complaint or 'it said nothing'}"
    if "namespace" in complaint or "Operation not permitted" in complaint or "uid map" in complaint:
        text += (
            ". User namespaces are forbidden here; allow them (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0), "
            "or in a container give it the capability SYS_ADMIN, or use backend='container'"
        )
    elif "nknown option" in complaint:
        text += ". Version 0.8 or newer is needed"
    return text
