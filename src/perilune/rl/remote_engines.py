"""Engines in other processes, on this machine or others, through Ray: the same weights in all, episodes over all.

    engines = RemoteEngines(model, tokenizer, EngineConfig(), processes=4, device="cpu")
    await engines.load_weights(model, 7)          once through the object store, in place everywhere, before it returns
    await engines.play(stage, job)                by whoever has least to do

A process that dies, or does not answer for `silent_seconds`, is given up and replaced by a new one with the weights of
the moment; its episodes are played again by others, from their beginning. That is counted (`num_lost`, `num_again`) and
changes nothing in what comes back. An episode whose processes died `MOST_LOSSES` times is given up: it may be the
reason.

Ray starts on this machine alone, unless the program has started or joined a cluster before (`ray.init`), or RAY_ADDRESS
names one: then processes run there, where Perilune and the environments have to be installed. On a GPU every process
takes `gpus` of one; on a CPU none is reserved. Several `RemoteEngines` of one process share its Ray; the last one ends
it, if one of them started it.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.rl.remote_player import EnginePlan, PlainWeights, Player, PlayerPlan, Stage, plain_weights
from perilune.rl.rollout import Failure, Job
from perilune.rl.trajectory import Trajectory
from perilune.serve.async_engine import EngineDead
from perilune.serve.engine import EngineConfig
from perilune.swarm.scale.local_ray import STORE_BYTES, EngineError, import_ray, importable_places, start_ray

MOST_LOSSES = 3
MOST_HIRES = 3
"""Processes in a row that may fail to start."""
OPEN_SECONDS = 600.0
"""For a process to import everything and to make its engine."""
PING_SECONDS = 5.0
STORED_VERSIONS = 3
"""Of the weights, that the object store of a Ray of our own has room for."""


class RemoteError(RuntimeError):
    """Processes cannot be started, or none is left."""


class _Lost(Exception):
    """The process that was asked is gone."""


class _OwnRay:
    """The Ray that this process has started, and how many use it: there is one for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def enter(self, ray: Any, start: Callable[[], None]) -> bool:
        """Start Ray if there is none; whether it is our own, which has to be left again."""
        with self._lock:
            if not ray.is_initialized():
                start()
                self._users = 0
            elif not self._users:
                return False
            self._users += 1
            return True

    def leave(self, ray: Any) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                ray.shutdown()


_OWN_RAY = _OwnRay()


@dataclass(eq=False)
class _Post:
    """A process as the run sees it."""

    actor: Any
    host: str = ""
    pid: int = 0
    version: int = -1
    num_playing: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Task[None] | None = None


class RemoteEngines:
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        processes: int,
        device: torch.device | str = "cpu",
        gpus: float = 1.0,
        silent_seconds: float = 60.0,
    ) -> None:
        """Nothing starts before it is needed. RemoteError without Ray."""
        if processes < 1:
            raise ValueError(f"processes is {processes!r}, expected 1 or more")
        try:
            self._ray = import_ray(f"processes={processes}")
        except EngineError as error:
            raise RemoteError(str(error)) from None
        place = torch.device(device)
        threads = torch.get_num_threads()
        self._plan = PlayerPlan(
            policy=EnginePlan(model=model.config, tokenizer=tokenizer, config=config),
            frozen=None,
            device=place.type,
            num_threads=threads if config.deterministic else max(1, threads // processes),
            folder=os.getcwd(),
        )
        self._gpus = gpus if place.type == "cuda" else 0.0
        self._count, self._silent_seconds = processes, silent_seconds
        self._given = (plain_weights(model), 0)
        self._given_frozen: PlainWeights | None = None
        self._weights: Any = None
        self._frozen_weights: Any = None
        self._version = 0
        self._opening, self._is_open, self._is_own = asyncio.Lock(), False, False
        self._posts: list[_Post] = []
        self._hiring: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._why = "no reason is known"
        self._failed_hires = 0
        self._names = itertools.count()
        self.num_lost = 0
        """Processes that were given up."""
        self.num_again = 0
        """Episodes that were played again."""

    # --- for a run ----------------------------------------------------------------------------------------------------

    def add_frozen(self, model: Decoder, tokenizer: Tokenizer, config: EngineConfig) -> None:
        """Who plays the asides of episodes and is not trained: an engine more in every process. Before `open`."""
        assert not self._is_open
        plan = EnginePlan(model=model.config, tokenizer=tokenizer, config=config)
        self._plan, self._given_frozen = replace(self._plan, frozen=plan), plain_weights(model)

    async def open(self) -> None:
        """Start the processes; RemoteError when not a single one can be."""
        async with self._opening:
            if self._is_open:
                return
            ray = self._ray
            # In a thread: it takes seconds, and on the main thread it would replace the handler of SIGTERM.
            self._is_own = await asyncio.to_thread(_OWN_RAY.enter, ray, self._start_ray)
            weights, self._version = self._given
            self._weights = await asyncio.to_thread(ray.put, weights)
            if self._given_frozen is not None:
                self._frozen_weights = await asyncio.to_thread(ray.put, self._given_frozen)
            for _ in range(self._count):
                self._hire()
            self._is_open = True
            while self._hiring:
                await asyncio.gather(*self._hiring)
            if not self._posts:
                raise RemoteError(f"no process can be started: {self._why}")

    async def load_weights(self, weights: torch.nn.Module, version: int) -> None:
        """To every process, in place; whoever is late is given up."""
        plain = await asyncio.to_thread(plain_weights, weights)
        async with self._opening:  # while it opens, others are on their way to the processes
            if not self._is_open:
                self._given = (plain, version)
                return
            self._weights, self._version = await asyncio.to_thread(self._ray.put, plain), version
            await asyncio.gather(*(self._update(post) for post in list(self._posts)))

    async def play(self, name: str, stage: Any, job: Job, *, most: int) -> Trajectory | Job | Failure:
        """One episode, by one of the processes, which plays at most `most` at a time."""
        for _ in range(MOST_LOSSES):
            post = await self._least_busy(most)
            post.num_playing += 1
            try:
                return await self._ask(post, lambda actor: actor.play.remote(name, [stage], job))
            except (_Lost, EngineDead) as error:
                await self._lose(post, str(error))
                self.num_again += 1
            finally:
                post.num_playing -= 1
                async with self._changed:
                    self._changed.notify_all()
        self.num_again -= 1  # the last time it was not
        return Failure("process", f"its process was lost {MOST_LOSSES} times: {self._why}")

    async def put(self, stage: Stage) -> tuple[str, Any]:
        """A stage for `play`: its name and where it lies."""
        await self.open()
        return f"stage {next(self._names)}", await asyncio.to_thread(self._ray.put, stage)

    @property
    def processes(self) -> dict[int, int]:
        """Episodes under way, by process."""
        return {post.pid: post.num_playing for post in self._posts}

    async def close(self) -> None:
        for task in [*self._hiring, *(post.watching for post in self._posts if post.watching is not None)]:
            task.cancel()
        for post in self._posts:
            self._ray.kill(post.actor, no_restart=True)
        self._posts.clear()
        self._is_open = False
        async with self._changed:
            self._changed.notify_all()
        if self._is_own:
            self._is_own = False
            await asyncio.to_thread(_OWN_RAY.leave, self._ray)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            logging.getLogger("ray").setLevel(logging.ERROR)
            try:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
            except Exception as error:
                raise RemoteError(f"the cluster of RAY_ADDRESS={address!r} cannot be joined: {error}") from error
            return
        size = sum(flat.nbytes for flat, _, _ in self._given[0].values())
        frozen = sum(flat.nbytes for flat, _, _ in (self._given_frozen or {}).values())
        start_ray(store_bytes=STORE_BYTES + STORED_VERSIONS * size + frozen)

    def _hire(self) -> None:
        task = asyncio.create_task(self._open_post())
        self._hiring.add(task)
        task.add_done_callback(self._hiring.discard)

    async def _open_post(self) -> None:
        """A new process, with the weights of the moment it is ready."""
        actor = self._ray.remote(Player).options(
            num_cpus=0,
            num_gpus=self._gpus,
            max_concurrency=100_000,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": importable_places()},
        ).remote(self._plan)  # fmt: skip
        post = _Post(actor)
        version = self._version
        try:
            opening = actor.open.remote(self._weights, version, self._frozen_weights)
            post.host, post.pid = await asyncio.wait_for(_result(opening), OPEN_SECONDS)
        except Exception as error:
            self._ray.kill(actor, no_restart=True)
            late = f"not ready after {OPEN_SECONDS:g} s; does Ray have {self._gpus:g} of a GPU for it?"
            self._why = late if isinstance(error, TimeoutError) else str(getattr(error, "cause", None) or error)
            self._failed_hires += 1
            is_lost = isinstance(error, self._ray.exceptions.ActorDiedError)
            if self._is_open and is_lost and self._failed_hires < MOST_HIRES:
                self._hire()
        else:
            self._failed_hires = 0
            post.version = version
            self._posts.append(post)
            await self._update(post)
            post.watching = asyncio.create_task(self._watch(post))
        async with self._changed:
            self._changed.notify_all()

    async def _update(self, post: _Post) -> None:
        """The newest weights, where it has others."""
        while post.version != self._version and not post.lost.is_set():
            version, weights = self._version, self._weights
            try:
                await self._ask(post, lambda actor, w=weights, v=version: actor.load.remote(w, v))
                post.version = version
            except (_Lost, EngineDead) as error:
                await self._lose(post, str(error))

    async def _watch(self, post: _Post) -> None:
        """Until it is lost."""
        while not post.lost.is_set():
            await asyncio.sleep(min(PING_SECONDS, self._silent_seconds))
            try:
                async with asyncio.timeout(self._silent_seconds):
                    await self._ask(post, lambda actor: actor.ping.remote())
            except TimeoutError:
                await self._lose(post, f"process {post.pid} did not answer for {self._silent_seconds:g} s")
            except _Lost as error:
                await self._lose(post, str(error))

    async def _ask(self, post: _Post, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """What a process answers; _Lost when it is gone, also when that is found out elsewhere meanwhile."""
        lost_of = self._ray.exceptions
        try:
            asked = call(post.actor)
        except Exception as error:
            if "Can't find actor" not in str(error):  # a bare Exception of Ray: it knows of the death before we do
                raise
            raise _Lost(f"process {post.pid} is gone") from None
        answer, lost = asyncio.ensure_future(_result(asked)), asyncio.ensure_future(post.lost.wait())
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _Lost(self._why)
            return answer.result()
        except (lost_of.ActorDiedError, lost_of.ActorUnavailableError, lost_of.ObjectLostError) as error:
            raise _Lost(str(error).partition("\n")[0]) from None
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                self._ray.cancel(asked)
            raise
        finally:
            for task in (answer, lost):
                task.cancel()

    async def _lose(self, post: _Post, why: str) -> None:
        if post.lost.is_set():
            return
        self._why = why
        post.lost.set()
        self.num_lost += 1
        with contextlib.suppress(ValueError):
            self._posts.remove(post)
        self._ray.kill(post.actor, no_restart=True)
        if post.host == socket.gethostname():  # Ray asks a process to end, and one that is stopped does not hear it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(post.pid, signal.SIGKILL)
        if self._is_open:
            self._hire()
        async with self._changed:
            self._changed.notify_all()

    async def _least_busy(self, most: int) -> _Post:
        """The process with the fewest episodes, and room for another."""
        while True:
            async with self._changed:
                if not self._is_open:
                    raise RemoteError("the processes were ended while episodes were played")
                free = [post for post in self._posts if post.num_playing < most and post.version == self._version]
                if free:
                    return min(free, key=lambda post: post.num_playing)
                if not self._posts and not self._hiring:
                    if self._failed_hires >= MOST_HIRES:
                        raise RemoteError(f"no process is left, and no other can be started: {self._why}")
                    self._hire()
                await self._changed.wait()


async def _result(reference: Any) -> Any:
    return await reference
