"""A tiny orchestrator and its workers, one model for both: made and taught within a minute on a CPU.

It is taught what scripted players do in `Gathering` (environments/gathering.py): one take after the other, or workers,
and most of those clumsily (no sub-agent was made, tasks are empty, one piece alone). So it begins where reinforcement
learning has something to find: a policy that works alone, and could do otherwise. A function of its seed on any machine
with the same torch.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perilune.data.chat import encode, parse_messages, parse_tools, render
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
from perilune.rl.critical_steps import ASSIGN, CREATE
from perilune.rl.environment import Message
from perilune.rl.environments.gathering import Gathering
from perilune.train.batches import DataConfig
from perilune.train.optimizer import OptimizerConfig, build_optimization
from perilune.train.run_config import RunConfig

VOCAB_SIZE = 640
TOKENIZER_TRACES = 300
TEACHING_STEPS = 160
Progress = Callable[[str, int, int | None], None]
Trace = tuple[list[Message], Sequence[Mapping[str, Any]]]
"""A dialogue with the tools it had."""


@dataclass(frozen=True, kw_only=True)
class Teaching:
    steps: int = TEACHING_STEPS
    rows: int = 6
    """Dialogues in a step."""
    lr: float = 1e-2
    delegating: float = 0.3
    """Share of wide questions that are given to workers."""
    well_formed: float = 0.2
    """Of those, the share that is done well."""


def tiny_config(name: str, *, seed: int = 0) -> RunConfig:
    model = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=("kda", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
        intermediate_size=128,
        residual="plain",
        initializer_range=0.05,
    )
    return RunConfig(name=name, seed=seed, model=model, data=DataConfig(vocab_size=VOCAB_SIZE, seq_len=512))


# ---------------------------------------------------------------------------------------------------------------------
# Scripted players


Calls = Sequence[tuple[str, Mapping[str, Any]]]
Script = Iterator[Calls | str]


@dataclass(kw_only=True)
class Scripted:
    """A `Talk` whose replies come from a script that sees the results of its last calls."""

    script: Callable[[list[Message]], Script]
    worker: Callable[[list[Message]], Script]
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    asides: dict[str, "Scripted"] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = self.script(self.messages)

    def add(self, *messages: Message) -> None:
        self.messages += messages

    def note(self, *events: Mapping[str, Any]) -> None:
        self.events += events

    def aside(self, name: str) -> "Scripted":
        if name not in self.asides:
            self.asides[name] = Scripted(script=self.worker, worker=self.worker)
        return self.asides[name]

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        self.tools = tools
        said = next(self._lines)
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else ""}
        if not isinstance(said, str):
            message["tool_calls"] = [
                {"id": f"functions.{name}:{place}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for place, (name, arguments) in enumerate(said)
            ]  # fmt: skip
        self.messages.append(message)
        return message


ANSWER: Calls = [("answer", {})]


def serial(cap: int) -> Callable[[list[Message]], Script]:
    """One piece after the other, as far as the cap goes."""

    def script(messages: list[Message]) -> Script:
        for _ in range(cap):
            yield [("take", {})]
            if messages[-1]["content"] != "more":
                break
        yield ANSWER

    return script


def delegating(count: int, how: str) -> Callable[[list[Message]], Script]:
    """Well: a worker for each piece, all at once. Else without a sub-agent, with empty tasks, or for one piece."""

    def script(messages: list[Message]) -> Script:
        if how != "nobody":
            yield [(CREATE, {"name": "r", "system_prompt": "go"})]
        yield [(ASSIGN, {"agent": "r", "prompt": "" if how == "empty" else "go"})] * (1 if how == "one" else count)
        yield ANSWER

    return script


def worker(messages: list[Message]) -> Script:
    """One piece; an empty task cannot be done."""
    if messages[1]["content"]:
        yield [("take", {})]
        yield "done"
    yield "none"


def traces(episodes: int, teaching: Teaching, *, seed: int, environment: Gathering | None = None) -> list[Trace]:
    """Dialogues of orchestrators and workers from so many episodes, played through the real runtime."""
    environment = environment or Gathering()
    drawn = np.random.default_rng([seed, 7])

    async def play() -> list[Trace]:
        found: list[Trace] = []
        for number in range(episodes):
            task = environment.task(seed * 1_000_003 + number, "train")
            count, script = task.data["count"], serial(environment.critical_steps)
            if task.data["kind"] == "wide" and drawn.random() < teaching.delegating:
                is_well = drawn.random() < teaching.well_formed
                script = delegating(count, "well" if is_well else str(drawn.choice(["nobody", "empty", "one"])))
            talk = Scripted(script=script, worker=worker)
            await environment.episode(task, talk)
            found.append((talk.messages, talk.tools))
            if number % 3 == 0:  # workers are rare in such episodes, and have to be good
                well = Scripted(script=delegating(count, "well"), worker=worker)
                await environment.episode(task, well)
                talk.asides |= well.asides
            found += [(aside.messages, aside.tools) for aside in talk.asides.values()][:2]
        return found

    return asyncio.run(play())


# ---------------------------------------------------------------------------------------------------------------------
# Teaching


def tiny_tokenizer(seed: int = 0) -> Tokenizer:
    texts = [
        "".join(segment.text for segment in _rendered(trace) if segment.kind == "text")
        for trace in traces(TOKENIZER_TRACES, Teaching(delegating=0.5), seed=seed + 1)
    ]
    return Tokenizer.train(texts, VOCAB_SIZE)


def _rendered(trace: Trace) -> Any:
    messages, tools = trace
    return render(parse_messages(messages), parse_tools(list(tools)), thinking=False, add_generation_prompt=False)


def taught(
    config: RunConfig,
    tokenizer: Tokenizer,
    teaching: Teaching | None = None,
    *,
    environment: Gathering | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Decoder:
    """The model of `config`, taught by traces."""
    teaching = teaching or Teaching(steps=TEACHING_STEPS)
    model = Decoder(config.model, seed=config.seed)
    rows = [
        encode(tokenizer, _rendered(trace))
        for trace in traces(teaching.steps * 2, teaching, seed=config.seed + 2, environment=environment)
    ]
    drawn = np.random.default_rng([config.seed, 11])
    optimization = build_optimization(model, OptimizerConfig(lr=teaching.lr, weight_decay=0.0))
    steps = teaching.steps
    for step in range(steps):
        optimization.set_lr(min(1.0, (step + 1) / 10, 0.05 + 2 * (steps - step) / steps))
        tokens, targets, borders = [], [], [0]
        chosen = [rows[int(place)] for place in drawn.integers(0, len(rows), size=teaching.rows)]
        for made in chosen:
            tokens += made.tokens[:-1]
            targets += [token if is_said else -100 for token, is_said in zip(made.tokens[1:], made.produced[1:])]
            borders.append(len(tokens))
        row, wanted = torch.tensor([tokens]), torch.tensor([targets])
        loss = model.loss(row, wanted, torch.tensor(borders, dtype=torch.int32)) / (wanted != -100).sum()
        loss.backward()
        optimization.clip_gradients(1.0)
        optimization.step()
        progress("teaching a tiny swarm", step + 1, steps)
    return model
