"""One sandboxed process for the event loop: started, fed, read, killed and awaited without ever blocking it.

Starting happens in one thread that lives as long as this process. That keeps a hundred starts at once off the event
loop, and it is what "die with the parent" hangs on: the kernel sends that signal when the starting *thread* ends.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CHUNK = 1 << 16
DRAINED = 16  # times the kept output is read and thrown away before a program counts as one that never stops
READY = b"ready\n"
CREDENTIALS = struct.Struct("3i")  # process, user, group
DEATH_SECONDS = 10.0  # how long the kernel may take to end a PID namespace before we stop waiting for it

STARTS_PER_PROCESSOR = 4
_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_starter: concurrent.futures.ThreadPoolExecutor | None = None
_starter_lock = threading.Lock()  # two executors would be one too many: what a thread started ends with it


def _forget_starter() -> None:
    global _starter, _starter_lock
    _starter = None  # its thread did not survive the fork
    _starter_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_starter)


def starting_turn() -> asyncio.Semaphore:
    """A turn to start. More starts at once than processors would only take the processors from the event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Semaphore(STARTS_PER_PROCESSOR * (os.cpu_count() or 1))
    return _turns[loop]


def starter() -> concurrent.futures.ThreadPoolExecutor:
    global _starter
    with _starter_lock:
        if _starter is None:
            _starter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="sandbox-start")
        return _starter


@dataclass(kw_only=True)
class Output:
    """The first bytes of a stream; the rest is counted and dropped, so that the writer never waits for a reader."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if (room := self.limit - len(self.kept)) > 0:
            self.kept += data[:room]

    @property
    def truncated(self) -> bool:
        return self.total > len(self.kept)

    @property
    def endless(self) -> bool:
        return self.total > self.limit * DRAINED


class Streams:
    """The pipes of a process on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_endless: Callable[[], None]) -> None:
        self._loop = loop
        self._on_endless = on_endless
        self._reading: set[int] = set()
        self._writing: dict[int, memoryview] = {}
        self.ended = asyncio.Event()

    def read(self, descriptor: int, output: Output) -> None:
        os.set_blocking(descriptor, False)
        self._reading.add(descriptor)
        self._loop.add_reader(descriptor, self._readable, descriptor, output)

    def write(self, descriptor: int, data: bytes) -> None:
        os.set_blocking(descriptor, False)
        self._writing[descriptor] = memoryview(data)
        self._loop.add_writer(descriptor, self._writable, descriptor)

    def _readable(self, descriptor: int, output: Output) -> None:
        try:
            data = os.read(descriptor, CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._stop_reading(descriptor)
            return
        output.add(data)
        if output.endless:
            self._on_endless()

    def _stop_reading(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        self._reading.discard(descriptor)
        os.close(descriptor)
        if not self._reading:
            self.ended.set()

    def _writable(self, descriptor: int) -> None:
        try:
            rest = self._writing[descriptor][os.write(descriptor, self._writing[descriptor][:CHUNK]) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the program reads no further
            rest = memoryview(b"")
        self._writing[descriptor] = rest
        if not rest:
            self._stop_writing(descriptor)

    def _stop_writing(self, descriptor: int) -> None:
        self._loop.remove_writer(descriptor)
        del self._writing[descriptor]
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._writing):
            self._stop_writing(descriptor)
        for descriptor in list(self._reading):
            self._stop_reading(descriptor)


class Started:
    """A child process with descriptors of its pipes, killed by descriptor and therefore never by a reused number."""

    def __init__(self, argv: Sequence[str], *, with_input: bool, inherited: Sequence[int]) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={},  # what a first process was started with stays readable in its /proc/PID/environ
            cwd="/",
            close_fds=True,
            pass_fds=tuple(inherited),
            start_new_session=True,
        )
        self.descriptor = os.pidfd_open(self.process.pid)
        self.inner: int | None = None  # of the first process of the PID namespace

    def take_pipes(self) -> tuple[int | None, int, int]:
        """The descriptors of stdin, stdout and stderr; whoever takes them closes them."""
        process = self.process
        assert process.stdout is not None and process.stderr is not None
        given = os.dup(process.stdin.fileno()) if process.stdin else None
        taken = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return given, *taken

    def learn_inner(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.inner = os.pidfd_open(number)

    def kill(self) -> None:
        """The first process inside takes its whole namespace with it; the outer one then has nothing left to do.

        Before the first one is known there is nothing foreign to kill, and the outer process must not be: bubblewrap's
        inner half then waits for a word from it for ever (0.8 to 0.11). It ends when the launcher gets no job.
        """
        if self.inner is None:
            return
        for descriptor in (self.inner, self.descriptor):
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit code of the outer process, once it and everything inside is gone."""
        await readable(self.descriptor)
        code = self.process.wait()
        if self.inner is not None:
            # The outer process may end first; then its death kills the inner one, whose end is everybody's.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(readable(self.inner), DEATH_SECONDS)
            # It became an orphan. Where this process adopts those (the first one of a container), it has to bury them.
            with contextlib.suppress(OSError):
                os.waitid(os.P_PIDFD, self.inner, os.WEXITED | os.WNOHANG)
        return code

    def close(self) -> None:
        self.kill()
        self.process.poll()
        inner, self.inner = self.inner, None  # from now on there is nothing to kill
        for descriptor in (inner, self.descriptor):
            if descriptor is not None:
                os.close(descriptor)


async def start(argv: Sequence[str], *, with_input: bool, inherited: Sequence[int]) -> Started:
    """Start in the one thread."""
    future = starter().submit(Started, argv, with_input=with_input, inherited=inherited)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # The loop is closing. The caller will close `inherited`, whose numbers may then mean something else: wait.
        concurrent.futures.wait([future])
        if not future.cancelled() and future.exception() is None:
            future.result().close()
        raise


async def readable(descriptor: int) -> None:
    """Until a descriptor has something to say: for that of a process, that it ended. One may wait at a time."""
    loop = asyncio.get_running_loop()
    said = loop.create_future()
    loop.add_reader(descriptor, lambda: said.done() or said.set_result(None))
    try:
        await said
    finally:
        loop.remove_reader(descriptor)


def data_descriptor(data: bytes) -> int:
    """A descriptor from which a child can read `data`."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def hear_ready(control: socket.socket) -> int | None:
    """The number of the first process inside, once the launcher there says it is ready; None when it never will be.

    The kernel adds the sender's number, as seen from here, to a message; its parent is the first process.
    """
    await readable(control.fileno())
    data, extras, _, _ = control.recvmsg(len(READY), socket.CMSG_SPACE(CREDENTIALS.size))
    if data != READY or not extras:
        return None
    launcher, _, _ = CREDENTIALS.unpack(extras[0][2][: CREDENTIALS.size])
    return parent_of(launcher)


def parent_of(number: int | str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{number}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return None
