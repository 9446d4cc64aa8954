"""Workers beside the policy: frozen ones are never trained and never change, joint ones are; runs resume with both."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.model import Decoder
from perilune.rl.environment import OUTCOME, Task, last_answer
from perilune.rl.groups import GroupConfig
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import Loop, LoopError, RLConfig
from perilune.rl.parl import ParlConfig
from perilune.rl.replay import replay_folder
from perilune.rl.rollout import RolloutConfig, replayed
from perilune.rl.talk import TalkConfig
from perilune.rl.trajectory import load_trajectories
from perilune.rl.workers import load_workers
from perilune.serve.engine import EngineConfig
from perilune.train.optimizer import OptimizerConfig
from tests.serve.tiny import VARIANTS, tokenizer

SMALL = replace(VARIANTS["hybrid"], num_hidden_layers=2, layer_types=("kda", "mla"), compute_dtype="float32")


class Led:
    """The policy speaks, two workers speak, the policy speaks again. Rewards differ with what was said."""

    name = "led"
    uses_asides = True

    def task(self, number, split):
        return Task(name=f"{split}/{number}", data={"number": number, "kind": "wide" if number % 2 else "narrow"})

    async def episode(self, task, talk):
        talk.add({"role": "user", "content": f"lead {task.data['number']}"})
        first = await talk.ask(max_tokens=6)

        async def one(name):
            worker = talk.aside(name)
            worker.add({"role": "user", "content": f"{name} {task.data['number']}"})
            return (await worker.ask(max_tokens=5)).get("content") or ""

        said = await asyncio.gather(one("b"), one("a"))
        talk.note({"said": list(said), "first": first.get("content")})
        talk.add({"role": "user", "content": repr(said)})
        await talk.ask(max_tokens=6)

    def judge(self, task, messages):
        raise AssertionError("the events are to be judged")

    def judge_events(self, task, messages, events):
        (event,) = events
        count = sum(map(ord, last_answer(messages) + "".join(event["said"]))) % 97
        return {OUTCOME: count / 97, "assigned": 2.0, "finished": 2.0 * (count % 2), "spawned": 2.0,
                "parallel": (count % 7) / 7, "finish": float(count % 2)}  # fmt: skip


def config(iterations: int, *, deterministic: bool = False, **more) -> RLConfig:
    given = {
        "iterations": iterations, "tasks": 2, "pool": 4, "warmup": 0, "checkpoint_every": 2,
        "rollout": RolloutConfig(group_size=4, talk=TalkConfig(max_tokens=16)),
        "learner": LearnerConfig(optimizer=OptimizerConfig(lr=4e-3, weight_decay=0.0)),
        "engine": EngineConfig(page_size=64, num_pages=96, max_sequences=32, token_budget=512, num_snapshots=8,
                               deterministic=deterministic),
        "parl": ParlConfig(kinds=(), finish_rate=0.2, window=1, over=3),
        **more,
    }  # fmt: skip
    return RLConfig(**given)


def run(model, settings, folder, *, resume=False, stop_after=None):
    async def work():
        async with Loop(model, tokenizer(), {"led": Led()}, settings, folder=folder, resume=resume) as loop:
            records = []
            async for record in loop.run():
                records.append(record)
                if stop_after is not None and loop.iteration == stop_after:
                    break
            return records

    return asyncio.run(work())


def trajectories(folder):
    return [each for path in sorted((folder / "trajectories").glob("*.jsonl")) for each in load_trajectories(path)]


def said(branches, wanted: str) -> bool:
    """Whether a prompt in one of the branches holds the text."""
    return any(wanted in tokenizer().decode(branch.tokens.tolist()) for branch in branches)


def test_frozen_workers_are_not_in_the_loss_and_joint_ones_are(tmp_path):
    run(Decoder(SMALL, seed=1), config(1), tmp_path / "frozen")
    run(Decoder(SMALL, seed=1), config(1, parl=ParlConfig(workers="joint", kinds=())), tmp_path / "joint")
    frozen, joint = trajectories(tmp_path / "frozen"), trajectories(tmp_path / "joint")
    assert len(frozen) == len(joint) == 8
    for one, other in zip(frozen, joint):
        (branch,) = one.branches
        assert not said([branch], "<|im_user|>user<|im_middle|>a ")
        assert len(other.branches) == 3
        np.testing.assert_array_equal(branch.tokens, other.branches[0].tokens)  # the same weights so far
        for worker, name in zip(other.branches[1:], "ab"):
            assert said([worker], f"<|im_user|>user<|im_middle|>{name} ") and worker.num_trained
        # What workers wrote stands in the policy's prompt as context.
        text = tokenizer().decode(branch.tokens[~branch.mask].tolist())
        assert repr(one.events[0]["said"][0])[1:-1][:3] in text


def test_frozen_workers_keep_their_weights_while_the_policy_learns(tmp_path):
    model = Decoder(SMALL, seed=1)
    began = {name: value.clone() for name, value in model.state_dict().items()}

    async def work():
        async with Loop(model, tokenizer(), {"led": Led()}, config(2), folder=tmp_path) as loop:
            for _ in range(2):
                await loop.step()
            await loop.evaluate(2)
            assert loop._workers is not None and loop._workers.engine is not loop.engine
            return loop._workers.engine._engine._model.state_dict(), loop.engine._engine._model.state_dict()

    workers, policy = asyncio.run(work())
    kept, _ = load_workers(tmp_path)
    for name, value in began.items():
        torch.testing.assert_close(workers[name], value, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(kept.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert any(not torch.equal(value, began[name]) for name, value in policy.items())


def test_a_resumed_run_has_the_same_workers_weights_and_bits(tmp_path):
    rollout = RolloutConfig(group_size=4, iteration_tokens=7, talk=TalkConfig(max_tokens=16))
    settings = config(4, deterministic=True, rollout=rollout, groups=GroupConfig(max_staleness=8))
    whole, again = Decoder(SMALL, seed=1), Decoder(SMALL, seed=1)
    expected = run(whole, settings, tmp_path / "whole")
    run(Decoder(SMALL, seed=1), settings, tmp_path / "cut", stop_after=3)  # one more than was saved
    found = run(again, settings, tmp_path / "cut", resume=True)
    assert [record["iteration"] for record in found] == [3, 4]
    assert any(record["parked"] for record in expected) and not any(record["failures"] for record in expected)
    assert 0 < expected[-1]["parl"]["share"] < 1
    for name in ("reward", "loss", "gap", "grad_norm", "trained_tokens", "parked", "parl", "kinds"):
        assert [record.get(name) for record in found] == [record.get(name) for record in expected[2:]], name
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("workers", ["frozen", "joint"])
def test_every_stored_episode_gives_its_reward_again_though_weights_fade(tmp_path, workers):
    run(
        Decoder(SMALL, seed=1),
        config(4, parl=ParlConfig(workers=workers, anneal="clock", over=3, kinds=("wide",))),
        tmp_path,
    )
    found = trajectories(tmp_path)
    wide = [each for each in found if each.task_data["kind"] == "wide"]
    assert len({each.iteration for each in wide}) > 1
    assert all(each.weights["parallel"] == pytest.approx(0.5 * max(0.0, 1 - each.iteration / 3)) for each in wide)
    assert all(each.weights["parallel"] == 0 for each in found if each.task_data["kind"] == "narrow")
    for each in found:
        assert replayed(Led(), each) == (dict(each.facets), each.reward)
        expected = sum(each.weights[name] * each.facets[name] for name in ("finish", "outcome", "parallel"))
        assert each.reward == pytest.approx(expected, abs=1e-12)
    assert replay_folder(tmp_path, {"led": Led()}) == {"files": 4, "episodes": 32, "equal": 32, "examples": []}


def test_a_run_without_its_workers_is_not_resumed_with_others(tmp_path):
    run(Decoder(SMALL, seed=1), config(2), tmp_path)
    (tmp_path / "workers" / "weights.safetensors").unlink()
    with pytest.raises(LoopError, match="holds no workers"):
        run(Decoder(SMALL, seed=1), config(4), tmp_path, resume=True)
