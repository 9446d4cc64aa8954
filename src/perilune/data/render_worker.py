"""A process that draws what strangers wrote, so that a source which hangs, eats memory or crashes costs one picture.

    with RenderWorker(program=SVG_PROGRAM) as worker:
        png = worker.render({"svg": source, "width": 112, "height": 112})      # or RenderFailed

The worker is started by the first picture and used for all that follow; after a death the next picture starts another.
It shares nothing with this process but one socket: no environment, no open files, an isolated interpreter, which is
told where the packages lie that it draws with (under PYTHONPATH, say), and, where it asks for one, a folder for its
temporary files that goes when it goes. It may be used from several threads (one picture
at a time) and survives a fork: the child starts a worker of its own.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from perilune.data.hostile import RendererMissing, RenderFailed
from perilune.data.svg_process import MODULES, receive, send

MEMORY_BYTES = 1 << 30
RENDER_SECONDS = 1.0
"""Processor time for one picture, counted inside the worker."""
WALL_SECONDS = 10.0
"""Time on the clock after which a silent worker is ended; longer, because the machine may be busy."""
START_SECONDS = 60.0
END_SECONDS = 2.0
"""What a process with a folder of its own has to put it in order after the socket has closed."""
SVG_PROGRAM = Path(__file__).with_name("svg_process.py")
PACKAGES = ("resvg_py", "jinja2", "markupsafe")
"""Of all programs."""


class RenderWorker:
    def __init__(
        self,
        *,
        program: Path = SVG_PROGRAM,
        memory_bytes: int = MEMORY_BYTES,
        render_seconds: float = RENDER_SECONDS,
        wall_seconds: float = WALL_SECONDS,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        own_folder: bool = False,
    ) -> None:
        self._program = program
        self._arguments = [str(memory_bytes), str(render_seconds), *arguments]
        self._environment = dict(environment or {})
        self._render_seconds = render_seconds
        self._wall_seconds = wall_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._own_folder = own_folder
        self._folder: str | None = None
        self.num_starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def folder(self) -> str | None:
        """Where it may leave files while it runs."""
        return self._folder

    def render(self, request: Mapping[str, Any]) -> bytes:
        """The PNG file that the worker drew; RenderFailed when it did not, whatever the reason."""
        message = json.dumps(dict(request)).encode()
        with self._lock:
            channel = self._running()
            try:
                channel.settimeout(self._wall_seconds)
                send(channel, message)
                answer = receive(channel)
            except TimeoutError:
                self._end()
                raise RenderFailed(f"no picture after {self._wall_seconds:g} s; the renderer was ended") from None
            except OSError:  # it died while we wrote
                answer = None
            except BaseException:  # an interrupt between question and answer: the next answer would be the wrong one
                self._end()
                raise
            if answer is None:
                raise RenderFailed(self._cause_of_death())
            if answer[:1] == b"E":  # what is left of it must not meet the next picture
                self._end()
        if answer[:1] != b"P":
            raise RenderFailed(answer[1:].decode("utf-8", "replace"))
        return answer[1:]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._owner != os.getpid():
            # Forked: process, socket and folder belong to the parent, who goes on using them.
            self._process, self._socket, self._folder = None, None, None
        if self._socket is None:
            self._start()
        assert self._socket is not None
        return self._socket

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {MODULES: os.pathsep.join(package_folders()), **self._environment}
        if self._own_folder:
            # Not beneath $TMPDIR: a browser has a socket there, whose path must not pass 108 characters.
            self._folder = tempfile.mkdtemp(prefix="perilune-", dir="/tmp")
            environment["TMPDIR"] = self._folder
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(self._program), str(theirs.fileno()), *self._arguments],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise RendererMissing(f"{sys.executable!r} does not start the renderer: {error.strerror}") from None
        self._socket, self._owner = ours, os.getpid()
        self.num_starts += 1
        ours.settimeout(START_SECONDS)
        try:
            greeting = receive(ours)
        except OSError:
            greeting = None
        if greeting != b"P":
            self._end()
            words = greeting[1:].decode("utf-8", "replace") if greeting else f"{self._program.name} does not start"
            raise RendererMissing(words)

    def _cause_of_death(self) -> str:
        process = self._process
        status: int | None = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=5)
        self._end()
        if status is not None and -status == signal.SIGPROF:
            return f"the picture takes more than {self._render_seconds:g} s to draw"
        return f"the renderer died (status {status}); perhaps the picture needs too much memory"

    def _end(self) -> None:
        process, self._process = self._process, None
        channel, self._socket = self._socket, None
        if channel is not None:
            channel.close()
        if process is not None and self._owner == os.getpid():
            if self._own_folder:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_SECONDS)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        folder, self._folder = self._folder, None
        if folder is not None and self._owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def package_folders() -> list[str]:
    """Where this process finds PACKAGES; those that it does not find are left out."""
    found = []
    for name in PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # there is something of that name, but it came from no file
            spec = None
        if spec is None:
            continue
        inside = next(iter(spec.submodule_search_locations or ()), spec.origin)  # its folder, or its only file
        if inside is not None:
            found.append(str(Path(inside).absolute().parent))
    return list(dict.fromkeys(found))
