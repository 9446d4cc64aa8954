"""How well a model looks things up as a worker: single lookups on test things, through the real runtime.

    scores = await look_up(WideSearch(), workers, lookups(WideSearch(), 200))

Tasks are given by a scripted orchestrator, `at_once` in each episode; every reply of a worker comes from the model. A
lookup is right when a line of the worker's last message has the item with its value. What counts for a frozen worker:
at least 90% right, in at most `worker_steps` steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perilune.rl.critical_steps import steps_of
from perilune.rl.environment import Message, Task, draws
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_judge import lines_of, normal
from perilune.rl.environments.wide_search_play import ScriptedTalk
from perilune.rl.environments.wide_search_policies import errand
from perilune.rl.environments.wide_search_questions import Question, draw_question, truth_of
from perilune.rl.environments.wide_search_traces import worker_name
from perilune.rl.talk import EngineTalk, Workers
from perilune.serve.sessions import Sessions

ENOUGH = 0.9


@dataclass(frozen=True, kw_only=True)
class Lookup:
    question: Question
    value: str


@dataclass(frozen=True, kw_only=True)
class Found:
    lookup: Lookup
    said: str
    """The worker's last message."""
    steps: int
    did: tuple[str, ...] = ()
    """Its calls in order, as `open {"page": "p37433"}`: where it went wrong is seen there."""

    @property
    def is_right(self) -> bool:
        return (normal(self.lookup.question.names[0]), normal(self.lookup.value)) in lines_of(self.said)

    @property
    def hops(self) -> int:
        return len(self.lookup.question.path)


def lookups(environment: WideSearch, count: int, *, two_hops: float = 0.3) -> list[Lookup]:
    """Of test things; the same every time."""
    corpus, found = environment.library.corpus, []
    for number in range(count):
        drawn = draws("wide_search/lookups", "test", number)
        question = draw_question(corpus, "narrow", "test", drawn, two_hops=two_hops)
        question = question.one(question.names[0])
        found.append(Lookup(question=question, value=truth_of(corpus, question)[0][1]))
    return found


async def look_up(
    environment: WideSearch, workers: Workers, wanted: Sequence[Lookup], *, seed: int = 0, at_once: int = 100
) -> list[Found]:
    found = []
    for start in range(0, len(wanted), at_once):
        part = wanted[start : start + at_once]
        found += await _episode(environment, workers, part, name=f"lookups/{start}", seed=seed)
    return found


class _Errand(ScriptedTalk):
    """A scripted orchestrator whose workers are a model."""

    def __init__(self, prompts: Sequence[str], workers: Workers, *, name: str, seed: int) -> None:
        super().__init__(errand(prompts))
        self._model, self._name, self._seed = workers, name, seed
        self.workers: dict[str, EngineTalk] = {}

    def aside(self, name: str) -> EngineTalk:  # pyrefly: ignore
        if name not in self.workers:
            model = self._model
            self.workers[name] = EngineTalk(
                model.engine, Sessions(model.tokenizer), model.tokenizer, model.config,
                name=f"{self._name}@{name}", seed=self._seed,
            )  # fmt: skip
        return self.workers[name]


async def _episode(
    environment: WideSearch, workers: Workers, wanted: Sequence[Lookup], *, name: str, seed: int
) -> Sequence[Found]:
    talk = _Errand([each.question.text for each in wanted], workers, name=name, seed=seed)
    room = replace(environment, max_workers=len(wanted), critical_steps=environment.worker_steps + 2)
    data = {"kind": "wide", "question": "Share out the work.", "items": [], "critical_steps": room.critical_steps}
    await room.episode(Task(name=name, data=data), talk)
    return list(_found(talk, wanted))


def _found(talk: _Errand, wanted: Sequence[Lookup]) -> Iterator[Found]:
    steps = steps_of(talk.events).workers
    called = {event["body"]["call"]: event["chain"] for event in talk.events if event["kind"] == "started"}
    texts = {event["chain"]: event["body"].get("text") or "" for event in talk.events if event["kind"] == "outcome"}
    for number, lookup in enumerate(wanted):
        call = f"1.{number}"
        worker = talk.workers.get(worker_name(number))
        yield Found(
            lookup=lookup, said=texts.get(f"main#{call}", ""), steps=steps.get(called.get(call, ""), 0),
            did=() if worker is None else tuple(_calls(worker.messages)),
        )  # fmt: skip


def _calls(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield f"{call['function']['name']} {call['function']['arguments']}"
