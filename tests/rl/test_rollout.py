"""Episodes on a real engine: served tokens are recorded exactly, failures cost only themselves, parked ones go on."""

import asyncio
import json
from types import MappingProxyType

import numpy as np
import pytest
import torch

from perilune.data.chat_messages import ChatError
from perilune.rl.environment import OUTCOME, Task
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.rollout import Job, RolloutConfig, Rollouts, replayed
from perilune.rl.talk import EngineTalk, TalkConfig, Turn, _tools_of
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from tests.serve.tiny import fresh_model, model, tokenizer

CONFIG = EngineConfig(
    page_size=16, num_pages=128, max_sequences=8, token_budget=128, num_snapshots=8, snapshot_interval=64
)  # fmt: skip


class Asking:
    """Asks `turns` times, each time with what was said last; the reward is the share of vowels."""

    name = "asking"

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def task(self, number, split):
        return Task(name=f"{split}/{number}", data={"number": number})

    async def episode(self, task, talk):
        talk.add({"role": "system", "content": "count"})
        said = ""
        for turn in range(self.turns):
            talk.add({"role": "user", "content": f"{task.data['number']}.{turn} {said[:9]!r}"})
            said = (await talk.ask(max_tokens=12)).get("content") or ""

    def judge(self, task, messages):
        text = "".join(str(message.get("content")) for message in messages if message["role"] == "assistant")
        return {OUTCOME: sum(letter in "aeiou" for letter in text) / max(1, len(text)), "length": float(len(text))}


def jobs(environment, count: int = 4, **more) -> list[Job]:
    return [
        Job(environment=environment.name, task=environment.task(number // 2, "train"), sample=number % 2, seed=1,
            iteration=0, **more)
        for number in range(count)
    ]  # fmt: skip


def collect(environment, todo, *, engine_model=None, iteration=0, **config):
    async def work():
        engine = Engine(engine_model or model("hybrid"), tokenizer(), CONFIG)
        async with AsyncEngine(engine) as served:
            rollouts = Rollouts(served, tokenizer(), {environment.name: environment}, RolloutConfig(**config))
            return await rollouts.collect(todo, iteration=iteration)

    return asyncio.run(work())


def test_tools_may_be_declared_by_any_mapping_and_a_wrong_one_is_named():
    declared = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    (tool,) = _tools_of((MappingProxyType(declared),))
    assert (tool,) == _tools_of([declared])
    with pytest.raises(ChatError, match="tools"):
        _tools_of([{"type": "function", "function": {"name": object()}}])


def test_recorded_tokens_are_one_row_whose_log_probs_are_those_of_the_model():
    environment = Asking()
    found = collect(environment, jobs(environment))
    assert not found.failures and not found.parked and len(found.trajectories) == 4
    for trajectory in found.trajectories:
        (branch,) = trajectory.branches
        assert branch.num_trained == trajectory.num_trained > 0
        with torch.no_grad():
            tokens = torch.from_numpy(branch.tokens.astype(np.int64))[None]
            logprobs = model("hybrid")(tokens).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        expected = logprobs[torch.from_numpy(branch.mask[1:])].numpy()
        np.testing.assert_allclose(branch.logprobs[branch.mask], expected, rtol=1e-6, atol=1e-6)
        given = tokenizer().decode(branch.tokens[~branch.mask].tolist())
        assert given.count("<|im_assistant|>") == given.count("<|im_user|>") == 3
        assert replayed(environment, trajectory) == (dict(trajectory.facets), trajectory.reward)
    assert found.trajectories[0].task == found.trajectories[1].task
    assert found.trajectories[0].branches[0].tokens.tolist() != found.trajectories[1].branches[0].tokens.tolist()


def test_an_episode_does_not_depend_on_what_runs_beside_it():
    environment = Asking(turns=2)
    together = collect(environment, jobs(environment, 6)).trajectories
    for job, trajectory in zip(jobs(environment, 6), together):
        (alone,) = collect(environment, [job], concurrency=1).trajectories
        np.testing.assert_array_equal(alone.branches[0].tokens, trajectory.branches[0].tokens)
        assert alone.reward == trajectory.reward


def test_a_parked_episode_goes_on_with_other_weights_where_it_was_cut():
    environment = Asking()
    todo, parts = jobs(environment), []
    for iteration in range(30):
        weights = fresh_model("hybrid", seed=iteration % 2)
        found = collect(environment, todo, engine_model=weights, iteration=iteration, iteration_tokens=5)
        assert not found.failures, found.examples
        parts += found.trajectories
        for job in found.parked:
            assert sum(len(turn.tokens) for turn in job.turns) <= 5 * (iteration + 1)
        todo = [Job.of(json.loads(json.dumps(job.plain()))) for job in found.parked]
        if not todo:
            break
    assert len(parts) == 4 and iteration > 1
    for trajectory in parts:
        (branch,) = trajectory.branches
        assert tokenizer().decode(branch.tokens[~branch.mask].tolist()).count("<|im_user|>") == 3
        assert sum(message["role"] == "assistant" for message in trajectory.messages) == 3


class Faulty(Asking):
    """Tasks 0 to 3 go wrong, each in its own way."""

    async def episode(self, task, talk):
        if task.data["number"] == 0:
            raise KeyError("a bug of the environment")
        if task.data["number"] == 1:
            await asyncio.sleep(1000)
        talk.add({"role": "user", "content": "go"})
        await talk.ask(max_tokens=3)

    def judge(self, task, messages):
        number = task.data["number"]
        if number == 2:
            raise ZeroDivisionError("a bug of the judge")
        return {OUTCOME: float("nan") if number == 3 else 1.0}


def test_what_goes_wrong_is_counted_by_its_kind_and_costs_nothing_else():
    environment = Faulty()
    todo = [
        Job(environment="asking", task=environment.task(n, "train"), sample=0, seed=0, iteration=0)
        for n in (0, 2, 3, 4, 5)
    ]
    found = collect(environment, todo)
    assert found.failures == {"environment": 1, "judge": 1, "reward": 1}
    assert [trajectory.task for trajectory in found.trajectories] == ["train/4", "train/5"]
    assert any("KeyError" in example for example in found.examples) and any("nan" in text for text in found.examples)
    (hung,) = jobs(environment, 3)[2:]
    assert collect(environment, [hung], episode_seconds=0.3).failures == {"hung": 1}


def test_an_environment_that_does_not_repeat_itself_is_found_out():
    environment = Asking(turns=2)
    (trajectory,) = collect(environment, jobs(environment, 1)).trajectories
    branch = trajectory.branches[0]
    turn = Turn(
        prompt=tuple(branch.tokens[:5].tolist()), tokens=(1,), logprobs=(-1.0,), versions=(0,), is_over=True
    )  # fmt: skip
    found = collect(environment, jobs(environment, 1, turns=(turn,)))
    assert found.failures == {"not repeatable": 1}


def test_limits_end_an_episode_and_say_so():
    environment = Asking(turns=9)
    by_turns = collect(environment, jobs(environment, 1), talk=TalkConfig(max_turns=2)).trajectories[0]
    assert sum(message["role"] == "assistant" for message in by_turns.messages) == 2
    by_tokens = collect(environment, jobs(environment, 1), talk=TalkConfig(max_tokens=7)).trajectories[0]
    assert by_tokens.num_trained == 7 and by_tokens.finish == "length"


def test_a_shipped_environment_runs_on_the_engine():
    environment = Arithmetic(max_tokens=6)
    found = collect(environment, jobs(environment, 3))
    assert len(found.trajectories) == 3 and all(0 <= each.reward <= 1 for each in found.trajectories)


@pytest.mark.parametrize("wrong", [{"group_size": 0}, {"episode_seconds": 0.0}, {"iteration_tokens": 0}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RolloutConfig(**wrong)


def test_episodes_that_begin_together_are_all_prepared_before_the_engine_is_asked(monkeypatch):
    """The engine would otherwise decode the first few alone while the prompts of the others are written."""
    told = []
    ask, stream = EngineTalk._sampled, AsyncEngine.stream

    async def prepared(self, *given):
        told.append("prompt")
        return await ask(self, *given)

    def asked(self, *given, **more):
        told.append("asked")
        return stream(self, *given, **more)

    monkeypatch.setattr(EngineTalk, "_sampled", prepared)
    monkeypatch.setattr(AsyncEngine, "stream", asked)
    environment = Asking(turns=1)
    found = collect(environment, jobs(environment, 6))
    assert len(found.trajectories) == 6 and told == ["prompt"] * 6 + ["asked"] * 6
