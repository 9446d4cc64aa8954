"""The engine behind asyncio: one thread owns it, streams read from it.

    async with AsyncEngine(engine) as served:
        async for output in served.stream(request): ...

What is promised:
  * leaving the loop over a stream, in whatever way, cancels its request;
  * a reader that is slow, or gone, holds no slot and makes nobody wait: events gather until they are read, and several
    are read as one; there is never more than one wake-up under way to an event loop;
  * when a step fails, every open stream gets an event with finish_reason "error", and the engine starts again, empty.
    If it fails a probe too, or again and again, it is dead: `health` says why, and streams raise `EngineDead`.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, Self, TypeVar

from perilune.serve.request import Output, Request

logger = logging.getLogger("perilune.serve")
Result = TypeVar("Result")
MAX_FAILURES = 3
"""Steps that may fail in a row, without one that gives a token, or many that go well, in between."""
ENOUGH_STEPS = 32
"""Steps that go well, whatever they give: answers that are wanted whole give nothing for a long time."""


GRAMMAR_THREADS = 4


class EngineDead(RuntimeError):
    """The engine has stopped for good."""


class StepEngine(Protocol):
    """What is needed of an engine (engine.py). All but `stats` and `prepare` is called from one thread."""

    @property
    def has_work(self) -> bool: ...
    def prepare(self, request: Request) -> None: ...
    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def reset(self, error: str) -> list[Output]: ...
    def probe(self) -> None: ...
    def stats(self) -> object: ...
    def load_weights(self, weights: Any, version: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Health:
    alive: bool
    reason: str | None = None
    """Why it is dead."""
    seconds_in_step: float = 0.0
    """How long the step under way has taken; 0 between steps."""
    failures: int = 0
    """Steps that failed since the start."""


class AsyncEngine:
    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # of the engine's thread
        self._posts: dict[asyncio.AbstractEventLoop, _Post] = {}
        self._lock = threading.Lock()  # a command is either put before the end, and run, or refused
        self._dead: str | None = None
        self._closing = False
        self._in_step_since: float | None = None
        self._failures_in_a_row = self._steps_since_failure = 0
        self._failures = 0
        # Of its own: a flood of slow grammars must not take every thread that others wait for.
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="perilune-grammar")
        self._thread = threading.Thread(target=self._serve, name="perilune-engine", daemon=True)
        self._thread.start()

    # --- for readers ------------------------------------------------------------------------------------------------

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[Output, None]:
        """Events of a request; the last has a finish_reason. Raises RequestError, QueueFull, EngineDead.

        With `whole` they come when the last is there, few of them: a reader of many answers is not woken by each token,
        and an engine that knows `Request.whole` makes no event of it.
        """
        if self._closing:
            raise EngineDead("the engine is closing")
        if request.params.grammar is not None:  # takes long, and the engine has other things to do
            await asyncio.get_running_loop().run_in_executor(self._grammar_threads, self._engine.prepare, request)
        mailbox = _Mailbox(request.request_id, self._post(asyncio.get_running_loop()), whole=whole)
        try:
            asked = replace(request, whole=True) if whole else request
            await self._ask(lambda: self._add(asked, mailbox))
            while True:
                for output in merged(await mailbox.take()):
                    yield output
                    if output.finished:
                        return
        finally:
            if not mailbox.is_over:
                self._tell(lambda: self._cancel(mailbox))

    async def load_weights(self, weights: Mapping[str, object] | object, version: int) -> None:
        """Between two steps; requests under way go on with the new weights."""
        await self._ask(lambda: self._engine.load_weights(weights, version))

    @property
    def max_length(self) -> int | None:
        """Tokens of a prompt and its answer together; None where the engine does not say."""
        return getattr(self._engine, "max_length", None)

    def stats(self) -> object:
        """Numbers of the moment, read beside the engine's thread."""
        return self._engine.stats()

    def health(self) -> Health:
        since = self._in_step_since
        return Health(
            alive=self._dead is None,
            reason=self._dead,
            seconds_in_step=0.0 if since is None else time.monotonic() - since,
            failures=self._failures,
        )

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let those under way finish for so long, cancel the others, end the thread."""
        self._closing = True
        end = time.monotonic() + drain_seconds
        while self._dead is None and self._mailboxes and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._tell(self._end)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _post(self, loop: asyncio.AbstractEventLoop) -> "_Post":
        with self._lock:
            if loop not in self._posts:
                self._posts = {each: post for each, post in self._posts.items() if not each.is_closed()}
                self._posts[loop] = _Post(loop)
            return self._posts[loop]

    async def _ask(self, call: Callable[[], Result]) -> Result:
        """The result of a call in the engine's thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if future.done():  # whoever asked is gone
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyrefly: ignore[bad-argument-type]

        def run() -> None:
            try:
                result, error = (None, EngineDead(self._dead)) if self._dead is not None else (call(), None)
            except Exception as raised:
                result, error = None, raised
            _call_soon(loop, lambda: settle(result, error))

        if not self._tell(run):
            raise EngineDead(self._dead)
        return await future

    def _tell(self, command: Callable[[], None]) -> bool:
        """Have `command` run in the engine's thread; False when there is nobody to run it."""
        with self._lock:
            if self._dead is not None:
                return False
            self._commands.put(command)
            return True

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._work()
        except Exception as error:  # a fault of this file: nobody may wait for ever because of it
            logger.exception("the thread of the engine ended")
            self._stop(f"the thread of the engine ended: {type(error).__name__}: {error}")
        while not self._commands.empty():  # put before the end was known: each says so to whoever asked
            self._commands.get()()

    def _work(self) -> None:
        while self._dead is None:
            self._obey(wait=not self._engine.has_work)
            if self._dead is not None or not self._engine.has_work:
                continue
            self._in_step_since = time.monotonic()
            try:
                outputs = self._engine.step()
            except Exception as error:
                logger.exception("a step of the engine failed")
                self._recover(f"{type(error).__name__}: {error}")
            else:
                self._steps_since_failure += 1
                if self._failures_in_a_row and (
                    self._steps_since_failure >= ENOUGH_STEPS or any(output.token_ids for output in outputs)
                ):
                    self._failures_in_a_row = 0
                self._deliver(outputs)
            finally:
                self._in_step_since = None

    def _obey(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while self._dead is None:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, request: Request, mailbox: "_Mailbox") -> None:
        self._engine.add(request)
        self._mailboxes[request.request_id] = mailbox

    def _cancel(self, mailbox: "_Mailbox") -> None:
        # Another request may have the name by now.
        if self._mailboxes.get(mailbox.request_id) is mailbox:
            del self._mailboxes[mailbox.request_id]
            self._engine.cancel(mailbox.request_id)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finished:
                del self._mailboxes[output.request_id]
            elif mailbox.held is not None:
                mailbox.held.append(output)
                continue
            *earlier, output = [output] if mailbox.held is None else merged([*mailbox.held, output])
            for event in earlier:
                mailbox.post.send(mailbox, event)
            if not mailbox.post.send(mailbox, output) and not output.finished:
                self._cancel(mailbox)  # its event loop is closed

    def _recover(self, reason: str) -> None:
        self._failures += 1
        self._failures_in_a_row += 1
        self._steps_since_failure = 0
        try:
            self._deliver(self._engine.reset(f"the engine failed and was started again: {reason}"))
            if self._failures_in_a_row < MAX_FAILURES:
                self._engine.probe()
                return
        except Exception as error:
            logger.exception("the engine could not be started again")
            reason = f"{reason}; and when started again: {type(error).__name__}: {error}"
        self._stop(f"the engine failed: {reason}")

    def _end(self) -> None:
        for mailbox in list(self._mailboxes.values()):
            self._engine.cancel(mailbox.request_id)
        self._stop("the engine was closed")

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._dead = reason
        gone, self._mailboxes = self._mailboxes, {}
        for name, mailbox in gone.items():
            mailbox.post.send(mailbox, Output(request_id=name, finish_reason="error", error=reason))


class _Mailbox:
    """Events of one stream that nobody has read yet."""

    def __init__(self, request_id: str, post: "_Post", *, whole: bool = False) -> None:
        self.request_id = request_id
        self.post = post
        self.held: list[Output] | None = [] if whole else None
        """Of the engine's thread: what waits for the last event; None: nothing does."""
        self.is_over = False
        """The last event has been put in: there is nothing left to cancel."""
        self._outputs: list[Output] = []
        self._filled = asyncio.Event()

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self.is_over = output.finished
        self._filled.set()

    async def take(self) -> list[Output]:
        await self._filled.wait()
        self._filled.clear()
        taken, self._outputs = self._outputs, []
        return taken


class _Post:
    """Carries events into one event loop; however many there are, one wake-up at a time is under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._sent: list[tuple[_Mailbox, Output]] = []

    def send(self, mailbox: _Mailbox, output: Output) -> bool:
        """From the engine's thread; False when the loop is closed."""
        with self._lock:
            self._sent.append((mailbox, output))
            is_first = len(self._sent) == 1
        return _call_soon(self._loop, self._arrive) if is_first else not self._loop.is_closed()

    def _arrive(self) -> None:
        with self._lock:
            sent, self._sent = self._sent, []
        for mailbox, output in sent:
            mailbox.put(output)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop is closed
        return False
    return True


def merged(outputs: list[Output]) -> list[Output]:
    """The same events as few: one for each version of the weights, and errors by themselves."""
    return [_joined(list(group)) for _, group in groupby(outputs, key=lambda each: (each.weight_version, each.error))]


def _joined(outputs: list[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        pieces=tuple(piece for output in outputs for piece in output.pieces),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
