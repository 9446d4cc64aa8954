"""Start a scripted server where it is needed: in a process of its own, or in a thread.

    with start_server("swarm", {"agents": 100, "steps": 14}, Behaviour(latency=0.2)) as server:
        ...                                    # server.base_url, server.counts(), server.reset()

A benchmark wants the process, so that the server's time is not counted as the runtime's. It ends with the one that
started it, however that one ends: it stops when its standard input closes. `ThreadedServer` takes any script, also one
made on the spot, for callers without an event loop of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from perilune.swarm.scripted.chaos import Chaos
from perilune.swarm.scripted.script import Script
from perilune.swarm.scripted.server import Behaviour, ScriptedServer

SCRIPTS: Mapping[str, str] = {
    "constant": "perilune.swarm.scripted.behaviours:constant",
    "demo": "perilune.swarm.scripted.research:research",
    "long_answer": "perilune.swarm.scripted.behaviours:long_answer",
    "obedient": "perilune.swarm.scripted.obedient:obedient",
    "orchestrator": "perilune.swarm.scripted.behaviours:orchestrator",
    "swarm": "perilune.swarm.scripted.behaviours:swarm",
    "table": "perilune.swarm.scripted.behaviours:table",
    "worker": "perilune.swarm.scripted.behaviours:worker",
}


_PROGRAM = "import sys; from perilune.swarm.scripted.launch import _main; _main(*sys.argv[1:])"


def load_script(name: str, options: Mapping[str, Any] | None = None) -> Script:
    """A script of the library by its name, or any by `package.module:function`, made with these options."""
    place = SCRIPTS.get(name, name)
    module, colon, function = place.partition(":")
    if not colon:
        raise ValueError(f"unknown script {name!r}; expected one of {', '.join(SCRIPTS)}, or package.module:function")
    try:
        make: Callable[..., Script] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"script {name!r} cannot be loaded: {error}") from None
    try:
        return make(**(options or {}))
    except TypeError as error:
        raise ValueError(f"script {name!r} does not take the options {dict(options or {})!r}: {error}") from None


class _Remote:
    """What a caller in another thread or process asks a server, over HTTP."""

    base_url: str

    def counts(self) -> dict[str, Any]:
        return self._ask("GET", "/_counts")

    def reset(self) -> None:
        self._ask("POST", "/_reset")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self.base_url.removesuffix("/v1") + path, method=method, data=None)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as response:
            return json.load(response)


class ServerProcess(_Remote):
    """A scripted server in a process of its own; a context manager, or `stop()`."""

    def __init__(self, process: subprocess.Popen[str], base_url: str) -> None:
        self.process = process
        self.base_url = base_url

    def stop(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_server(
    script: str = "swarm", options: Mapping[str, Any] | None = None, behaviour: Behaviour | None = None
) -> ServerProcess:
    """Start a server in a process of its own and wait until it listens."""
    load_script(script, options)  # a wrong name or option fails here, not in another process
    settings = json.dumps(dataclasses.asdict(behaviour or Behaviour()))
    command = [sys.executable, "-c", _PROGRAM, script, json.dumps(dict(options or {})), settings]
    path = os.pathsep.join(each for each in sys.path if each)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    base_url = process.stdout.readline().strip()
    server = ServerProcess(process, base_url)
    if not base_url.startswith("http"):
        server.stop()
        raise RuntimeError(f"the scripted server did not start (exit status {process.returncode})")
    return server


class ThreadedServer(_Remote):
    """A scripted server in a thread with its own loop; a context manager."""

    def __init__(self, script: Script, behaviour: Behaviour | None = None) -> None:
        self._script, self._behaviour = script, behaviour
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="scripted-server", daemon=True)
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.base_url = ""

    def _serve(self) -> None:
        async def serve() -> None:
            async with ScriptedServer(self._script, self._behaviour) as server:
                self.base_url = server.base_url
                self._ready.set()
                await self._stop.wait()

        self._loop.run_until_complete(serve())
        self._loop.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def serve_until_input_closes(server: ScriptedServer, *, watch_input: bool = True) -> None:
    """Print the address, then serve; until standard input closes when it is watched, else until interrupted."""
    async with server:
        print(server.base_url, flush=True)
        done = asyncio.Event()
        if watch_input:
            loop = asyncio.get_running_loop()

            def watch() -> None:
                while sys.stdin.buffer.read(4096):
                    pass
                loop.call_soon_threadsafe(done.set)

            threading.Thread(target=watch, daemon=True).start()
        await done.wait()


def _main(script: str, options: str, settings: str) -> None:
    fields = json.loads(settings)
    if isinstance(fields["latency"], list):
        fields["latency"] = tuple(fields["latency"])
    if fields["chaos"] is not None:
        fields["chaos"] = Chaos(**fields["chaos"] | {"faults": tuple(fields["chaos"]["faults"])})
    server = ScriptedServer(load_script(script, json.loads(options)), Behaviour(**fields))
    asyncio.run(serve_until_input_closes(server))


__all__ = ["SCRIPTS", "ServerProcess", "ThreadedServer", "load_script", "serve_until_input_closes", "start_server"]
