"""A wide-search question answered by a model behind an endpoint, in the swarm's own runtime with its journal on disk.

    client = LibraryClient(EndpointTalk(http_client, "model"), WideSearch(), task)
    await conduct(task.data["question"], folder, settings, client=client, prepare=client.prepare, ...)

What the model sees is what an episode of training shows it: the same prompts, tools, declarations and cap of critical
steps (rl/swarm_episode.py). Only the transport differs, and that the run is kept: it can be viewed, played again and
audited like any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from perilune.rl.critical_steps import MAIN
from perilune.rl.environment import Message, Task
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_judge import final_rows, item_scores
from perilune.rl.environments.wide_search_questions import Question, parse_question, truth_of
from perilune.rl.environments.wide_search_tools import tools
from perilune.rl.swarm_episode import TalkClient
from perilune.swarm.client import ModelClient, ModelReply, ModelRequest, Usage
from perilune.swarm.messages import Message as WireMessage
from perilune.swarm.messages import message_from_plain
from perilune.swarm.swarm import Live

REPLY_TOKENS = 768
DEMO_NUMBER = 4
"""Of the test task that is shown: a table of nine towns, one hop each."""


@dataclass(frozen=True)
class Counted:
    """How long a prompt and its reply were, as the endpoint says."""

    prompt: range
    tokens: range


class EndpointTalk:
    """Implements `rl.environment.Talk` over any endpoint: nothing is recorded but what was said."""

    def __init__(self, client: ModelClient, model: str, name: str = MAIN) -> None:
        self._client, self._model, self._name = client, model, name
        self._messages: list[Message] = []
        self._asides: dict[str, EndpointTalk] = {}
        self.turns: list[Counted] = []

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    def add(self, *messages: Message) -> None:
        self._messages += messages

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        request = ModelRequest(
            agent=self._name,
            model=self._model,
            messages=[message_from_plain(each) for each in self._messages],
            tools=orjson.dumps(list(tools)),
            max_tokens=max_tokens or REPLY_TOKENS,
            temperature=0.0,
            session=self._name,
        )
        reply = await self._client.complete(request)
        said = reply.message.plain()
        self._messages.append(said)
        usage = reply.usage or Usage()
        self.turns.append(Counted(range(usage.prompt_tokens), range(usage.completion_tokens)))
        return said

    async def close(self) -> None:
        await self._client.close()

    def aside(self, name: str) -> "EndpointTalk":
        return self._asides.setdefault(name, EndpointTalk(self._client, self._model, name))

    def note(self, *events: Mapping[str, Any]) -> None: ...


class LibraryClient(TalkClient):
    """The client of a run about the library; its last message is the table that was handed in."""

    def __init__(self, talk: EndpointTalk, environment: WideSearch, task: Task) -> None:
        given = {each.name: each for each in tools(environment.library)}
        super().__init__(talk, environment.settings(task), given)
        self._main, self._task = talk, task

    async def complete(self, request: ModelRequest) -> ModelReply:
        reply = await super().complete(request)
        if request.agent == MAIN and self.ledger.is_answered and not reply.message.tool_calls:
            return ModelReply(message=WireMessage("assistant", self.table()))
        return reply

    async def close(self) -> None:
        await self._main.close()

    def prepare(self, live: Live) -> None:
        """Give the run the tools of an episode, before it begins."""
        names = dict.fromkeys((*self._settings.main_tools, *self._settings.worker_tools))
        live.run.tools = {name: self.gated(live.run.tools[name]) for name in names}

    def rows(self) -> list[tuple[str, str]]:
        return [row for row in final_rows(self._main.messages) or () if row is not None]

    def table(self) -> str:
        """The answer in Markdown."""
        asked = {item.casefold(): item for item, _ in self._task.data["items"]}
        lines = [f"| {_cell(asked.get(item, item))} | {_cell(value)} |" for item, value in self.rows()]
        return "\n".join(["| item | value |", "| --- | --- |", *lines]) if lines else "The table is empty."

    def right(self) -> int:
        """Items of the question whose value in the table is the library's."""
        items = self._task.data["items"]
        return round(item_scores(items, self.rows())["recall"] * len(items))


def demo_task(environment: WideSearch, text: str | None = None) -> Task:
    """The task of the demonstration, or one that a person words in the grammar of wide_search_questions.py; ValueError
    for a question that the library cannot answer."""
    if text is None:
        return environment.task(DEMO_NUMBER, "test")
    question = parse_question(text)
    if question is None:
        raise ValueError(f"{text!r} is no question about the library; ask as in: {environment.task(2, 'test').name!r}")
    try:
        items = truth_of(environment.library.corpus, question)
    except KeyError as missing:
        raise ValueError(f"the library has no page about {missing.args[0]!r}") from None
    return Task(name=text, data=_data(environment, question, items))


def _data(environment: WideSearch, question: Question, items: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "kind": "wide",
        "question": question.text,
        "items": [list(row) for row in items],
        "critical_steps": environment.critical_steps,
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:200]


__all__ = ["EndpointTalk", "LibraryClient", "demo_task"]
