"""Constrained output: only tokens that keep the answer inside a JSON schema, a regular expression or a Lark grammar.

    compiler = GrammarCompiler(tokenizer)
    state = compiler.start(Grammar.json_schema({"type": "object"}), stop_ids=frozenset({tokenizer.eos_id}))
    mask = state.mask(vocab_size)        # a bit per token, before each draw
    state.accept(token_id)               # after it

What is promised:
  * every text up to its end is in the language, byte by byte; a stop id is allowed where the text may end, and nothing
    else where it must. `is_finished` says that nothing can follow;
  * special tokens are never part of a text. A Lark grammar may name them by id, as <[163588]>;
  * a schema cannot stall the server: sources have a longest size, each is first built in a worker process under limits
    of CPU time and memory (grammar_worker.py), masks have the limits of llguidance, and no `$ref` is fetched. `compile`
    waits for that: call it outside the thread that runs the engine, which then finds the result in the cache;
  * compiled grammars, and refusals, are kept: the least recently used go first.

The engine of this is llguidance (an optional dependency: perilune[serve]).
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np

from perilune.serve import grammar_worker
from perilune.serve.grammar_worker import json_literal, make_matcher, make_tokenizer, readable, regex_literal
from perilune.serve.request import QueueFull, RequestError

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarLimits",
    "GrammarState",
    "json_literal",
    "regex_literal",
]

MAX_SOURCE_BYTES = 1 << 20
NOUNS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


class GrammarError(RequestError):
    """A grammar that cannot be used, with the reason."""

    def __init__(self, message: str) -> None:
        super().__init__("grammar", message)


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like. Cheap to make: it is compiled later, under limits."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in NOUNS:
            raise GrammarError(f"kind is {self.kind!r}, expected one of {', '.join(NOUNS)}")
        if not isinstance(self.source, str):
            raise GrammarError(f"the {NOUNS[self.kind]} is {type(self.source).__name__}, expected a text")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(f"the {NOUNS[self.kind]} holds half a character at position {error.start}") from None
        if size > MAX_SOURCE_BYTES:
            raise GrammarError(f"the {NOUNS[self.kind]} has {size:,} bytes, expected at most {MAX_SOURCE_BYTES:,}")

    @staticmethod
    def json_schema(schema: str | Mapping[str, Any]) -> "Grammar":
        """JSON that a schema admits, given as JSON text or as what that means."""
        if isinstance(schema, str):
            Grammar("json_schema", schema)  # its size, before it is read
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise GrammarError(f"the JSON schema is {_shown(schema)}, expected an object")
        try:
            source = json.dumps(dict(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema cannot be written as JSON: {error}") from None
        return Grammar("json_schema", source)

    @staticmethod
    def json_object() -> "Grammar":
        """Any JSON object: `response_format: {"type": "json_object"}`."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole: Rust's syntax, no look-around, \\d and \\w of ASCII."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(source: str) -> "Grammar":
        """The Lark dialect of llguidance. Schemas go into it by `json_literal`, expressions by `regex_literal`."""
        return Grammar("lark", source)


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """`lexer_states` and `step_fuel` bound the work of one mask: some 50 ms for the worst found, then it fails."""

    seconds: float = 3.0
    """CPU time a grammar may take to build."""
    memory_bytes: int = 1 << 30
    """Address space a grammar may take to build."""
    workers: int = 2
    waiting: int = 16
    """Compilations that wait for a worker; one more is told to come back later (QueueFull)."""
    cached: int = 128
    lexer_states: int = 30_000
    step_fuel: int = 100_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value!r}, expected a number above 0")

    @property
    def of_llguidance(self) -> dict[str, int]:
        return {"max_lexer_states": self.lexer_states, "step_lexer_fuel": self.step_fuel}


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Any thread may use it."""

    def __init__(self, tokenizer: TokenBytes, limits: GrammarLimits | None = None) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise GrammarError("constrained output needs llguidance: pip install 'perilune[serve]'")
        self.limits = limits or GrammarLimits()
        self.end_id: int = tokenizer.vocab_size
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self._tokenizer = make_tokenizer(tokens)
        self._setup = {
            "tokens": [token.hex() for token in tokens],
            "limits": self.limits.of_llguidance,
            "seconds": self.limits.seconds,
            "memory_bytes": self.limits.memory_bytes,
        }
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._free = threading.Semaphore(self.limits.workers)
        self._under_way = 0
        self._idle: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._idle)

    def compile(self, grammar: Grammar) -> None:
        """Wait until the grammar is in the cache; GrammarError if it cannot be, QueueFull if too many wait already."""
        self._matcher(grammar)

    def start(self, grammar: Grammar, stop_ids: Iterable[int]) -> "GrammarState":
        """A fresh state for one sequence; quick when the grammar is compiled."""
        matcher = self._matcher(grammar)
        with self._lock:
            return GrammarState(matcher.deep_copy(), frozenset(stop_ids), self.end_id)

    def close(self) -> None:
        """End the worker processes. What is compiled stays usable."""
        with self._lock:
            _end(self._idle)

    def _matcher(self, grammar: Grammar) -> Any:
        with self._lock:
            future = self._cache.get(grammar)
            is_new = future is None
            if future is None:
                future = self._cache[grammar] = Future()
                if len(self._cache) > self.limits.cached:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(grammar)
        if is_new:
            try:
                future.set_result(self._built(grammar))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, GrammarError):  # no fault of the grammar: the next one may have more luck
                    with self._lock:
                        self._cache.pop(grammar, None)
        return future.result()

    def _built(self, grammar: Grammar) -> Any:
        error = self._tried(grammar)
        if error is None:
            matcher, error = make_matcher(self._tokenizer, grammar.kind, grammar.source, self.limits.of_llguidance)
            if error is None:
                return matcher
        raise GrammarError(f"the {NOUNS[grammar.kind]} cannot be used: {error}")

    def _tried(self, grammar: Grammar) -> str | None:
        """Why a worker cannot build it."""
        with self._place(), self._free:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _Worker(self._setup)
            try:
                error = worker.ask(grammar)
            except _Died:
                return f"it takes more than {self.limits.seconds:g} s of computing, or too much memory; make it simpler"
            except BaseException:
                worker.end()
                raise
            with self._lock:
                self._idle.append(worker)
            return error

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Threads that wait are scarce: nobody can take all of them with grammars that take long."""
        with self._lock:
            if self._under_way >= self.limits.workers + self.limits.waiting:
                raise QueueFull(f"{self._under_way} grammars are being compiled, as many as may be: try later")
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1


class GrammarState:
    """Where one answer stands in its grammar. One thread at a time."""

    def __init__(self, matcher: Any, stop_ids: frozenset[int], end_id: int) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._end_id = end_id
        self._has_ended = False

    @property
    def is_finished(self) -> bool:
        """Nothing but a stop id can follow."""
        return self._has_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why it can go no further."""
        if not self._matcher.is_error():
            return None
        return f"the grammar failed: {readable(self._matcher.get_error())}"

    def mask(self, vocab_size: int) -> np.ndarray | None:
        """int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come next.

        None when the state has failed. Ids that the tokenizer does not have are not allowed.
        """
        content = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        given = np.frombuffer(content, dtype="<u4")
        words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        count = min(len(words), len(given))
        words[:count] = given[:count]
        word, bit = divmod(self._end_id, 32)
        if word < len(words):
            words[word] &= ~np.uint32(1 << bit)
        if given[word] >> bit & 1:
            for stop_id in self._stop_ids:
                if stop_id < vocab_size:
                    words[stop_id // 32] |= np.uint32(1 << stop_id % 32)
        return words.view(np.int32)

    def accept(self, token_id: int) -> bool:
        """Go on with a token that was sampled; False if the grammar does not allow it: the state has failed then."""
        if token_id in self._stop_ids:
            self._has_ended = True
            return True
        return self._matcher.consume_token(token_id)


class _Died(Exception):
    """The worker ended in the middle of its work."""


class _Worker:
    """A process that builds grammars; see grammar_worker.py."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(grammar_worker.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        try:
            self._exchange(setup)
        except _Died:
            code = self._process.returncode
            raise RuntimeError(f"the process that compiles grammars does not start (it ended with {code})") from None

    def ask(self, grammar: Grammar) -> str | None:
        """Why the grammar cannot be built, or None. _Died if the process ended over it."""
        return self._exchange({"kind": grammar.kind, "source": grammar.source})["error"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin: IO[str] | None = self._process.stdin
        stdout: IO[str] | None = self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.end()
            raise _Died
        return json.loads(line)


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
