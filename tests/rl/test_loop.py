"""The whole loop on a tiny model: it learns, it resumes to the same bits, and bad episodes do not stop it."""

import asyncio
import contextlib
import gc
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.data.chat import encode, parse_messages, render
from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.model import Decoder
from perilune.rl.environment import OUTCOME, Task, last_answer
from perilune.rl.groups import GroupConfig
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import Loop, LoopError, RLConfig
from perilune.rl.rollout import RolloutConfig, replayed
from perilune.rl.talk import TalkConfig
from perilune.rl.trajectory import load_trajectories
from perilune.serve.engine import EngineConfig
from perilune.train.optimizer import OptimizerConfig
from tests.serve.tiny import VARIANTS, tokenizer

LETTERS = "abcd"
SMALL = replace(VARIANTS["hybrid"], num_hidden_layers=2, layer_types=("kda", "mla"), compute_dtype="float32")
"""One layer of each kind."""


class Copying:
    """One letter is shown, the same one is to be said."""

    name = "copying"

    def task(self, number, split):
        return Task(name=f"{split}/{number % 4}", data={"letter": LETTERS[number % 4]})

    async def episode(self, task, talk):
        talk.add({"role": "user", "content": task.data["letter"]})
        await talk.ask()

    def judge(self, task, messages):
        return {OUTCOME: float(last_answer(messages) == task.data["letter"])}


class Bandit(Copying):
    """Four arms; the last one pays most."""

    name = "bandit"

    async def episode(self, task, talk):
        talk.add({"role": "user", "content": "pull"})
        await talk.ask()

    def judge(self, task, messages):
        return {OUTCOME: {"a": 0.1, "b": 0.3, "c": 0.6, "d": 1.0}.get(last_answer(messages), 0.0)}


def taught() -> Decoder:
    """A model that says some letter, the right one in two of five times: where reinforcement learning begins."""
    model = Decoder(SMALL, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets, borders = [], [], [0]
    for asked in (*LETTERS, "pull"):
        for said in LETTERS + asked[0] * (asked in LETTERS):
            messages = parse_messages([{"role": "user", "content": asked}, {"role": "assistant", "content": said}])
            made = encode(tokenizer(), render(messages, thinking=False, add_generation_prompt=False))
            tokens += made.tokens[:-1]
            targets += [token if is_said else -100 for token, is_said in zip(made.tokens[1:], made.produced[1:])]
            borders.append(len(tokens))
    row, wanted, cu_seqlens = torch.tensor([tokens]), torch.tensor([targets]), torch.tensor(borders, dtype=torch.int32)
    for _ in range(100):
        (model.loss(row, wanted, cu_seqlens) / (wanted != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def start() -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in taught().state_dict().items()}


def fresh(start: dict[str, torch.Tensor]) -> Decoder:
    model = Decoder(SMALL, seed=0)
    model.load_state_dict(start)
    return model


def config(iterations: int, *, deterministic: bool = False, **more) -> RLConfig:
    given = {
        "iterations": iterations, "tasks": 4, "pool": 4, "warmup": 0, "checkpoint_every": 0,
        "rollout": RolloutConfig(group_size=8, talk=TalkConfig(max_tokens=4)),
        "learner": LearnerConfig(optimizer=OptimizerConfig(lr=4e-3, weight_decay=0.0)),
        "engine": EngineConfig(page_size=64, num_pages=96, max_sequences=32, token_budget=512, num_snapshots=8,
                               deterministic=deterministic),
        **more,
    }  # fmt: skip
    return RLConfig(**given)


def run(model, environments, settings, folder, *, resume=False, stop_after=None, evaluate=0):
    async def work():
        async with Loop(model, tokenizer(), environments, settings, folder=folder, resume=resume) as loop:
            records = []
            async for record in loop.run():
                records.append(record)
                if stop_after is not None and loop.iteration == stop_after:
                    break
            return records, (await loop.evaluate(evaluate)).trajectories if evaluate else []

    return asyncio.run(work())


@pytest.mark.parametrize("environment,iterations", [(Bandit(), 25), (Copying(), 50)], ids=["bandit", "copying"])
def test_reward_rises_to_nearly_the_optimum(start, tmp_path, environment, iterations):
    settings = config(iterations, checkpoint_every=0, keep_trajectories=False)
    records, tested = run(fresh(start), {environment.name: environment}, settings, tmp_path, evaluate=4)
    rewards = [record["reward"] for record in records]
    assert np.mean(rewards[:3]) < 0.75
    assert np.mean(rewards[-10:]) > 0.95
    assert np.mean([trajectory.reward for trajectory in tested]) > 0.95
    assert max(record["largest_gap"] for record in records) < 1e-3
    assert all(record["finished"] > 0.9 for record in records[-5:])


def test_a_resumed_run_gives_the_same_bits(start, tmp_path):
    settings = config(
        5, deterministic=True, tasks=2, checkpoint_every=2,
        rollout=RolloutConfig(group_size=4, iteration_tokens=1, talk=TalkConfig(max_tokens=4)),
        groups=GroupConfig(max_staleness=8),
    )  # fmt: skip
    whole, resumed = fresh(start), fresh(start)
    expected, _ = run(whole, {"copying": Copying()}, settings, tmp_path / "whole")
    run(resumed, {"copying": Copying()}, settings, tmp_path / "cut", stop_after=3)  # one more than was saved
    again = fresh(start)
    found, _ = run(again, {"copying": Copying()}, settings, tmp_path / "cut", resume=True)
    assert [record["iteration"] for record in found] == [3, 4, 5]
    assert any(record["parked"] for record in expected)
    for name in ("reward", "loss", "gap", "clipped", "grad_norm", "trained_tokens", "parked", "length"):
        assert [record[name] for record in found] == [record[name] for record in expected[2:]], name
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert all(record["gap"] == 0.0 for record in expected if record["iteration"] == 1)
    lines = [json.loads(line) for line in (tmp_path / "cut" / "records.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]


class HalfBroken(Copying):
    def judge(self, task, messages):
        if task.data["letter"] == "b":
            raise RuntimeError("no verdict")
        return super().judge(task, messages)


def test_a_judge_that_raises_is_counted_and_the_run_goes_on(start, tmp_path):
    records, _ = run(fresh(start), {"copying": HalfBroken()}, config(2), tmp_path)
    assert [record["failures"] for record in records] == [{"judge": 8}] * 2
    assert all(record["episodes"] == 24 and record["trained_tokens"] > 0 for record in records)
    assert "no verdict" in records[0]["examples"][0]


def test_stored_trajectories_are_judged_again_to_the_same_bits(start, tmp_path):
    run(fresh(start), {"copying": Copying()}, config(1), tmp_path)
    stored = load_trajectories(tmp_path / "trajectories" / "000000.jsonl")
    assert len(stored) == 32
    for trajectory in stored:
        assert replayed(Copying(), trajectory) == (dict(trajectory.facets), trajectory.reward)


def test_a_folder_that_holds_a_run_is_not_overwritten(start, tmp_path):
    run(fresh(start), {"copying": Copying()}, config(1), tmp_path)
    with pytest.raises(LoopError, match="already holds a run"):
        run(fresh(start), {"copying": Copying()}, config(1), tmp_path)
    with pytest.raises(LoopError, match="no checkpoint"):
        run(fresh(start), {"copying": Copying()}, config(1), tmp_path / "none", resume=True)
    with pytest.raises(LoopError, match="no environment"):
        run(fresh(start), {}, config(1), tmp_path / "none")


def test_wrong_settings_are_named():
    for wrong in ({"iterations": 0}, {"tasks": 0}, {"warmup": -1}, {"cooldown": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(config(1), **wrong)


def test_the_learning_rate_rises_and_falls_and_what_an_iteration_had_is_recorded(start, tmp_path):
    copying = {"copying": Copying()}
    records, _ = run(fresh(start), copying, config(8, warmup=2, cooldown=3), tmp_path / "both")
    assert [record["rate"] for record in records] == [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    steady, _ = run(fresh(start), copying, config(8), tmp_path / "neither")
    assert steady[0]["grad_norm"] == records[0]["grad_norm"] and steady[1]["grad_norm"] != records[1]["grad_norm"]


@pytest.mark.parametrize("iterations,cooldown", [(80, 40), (40, 40), (7, 40), (1, 40), (8, 0), (3, 1)])
def test_a_cooldown_takes_at_most_half_of_a_run_and_no_rate_is_negative(iterations, cooldown):
    rates = [RLConfig(iterations=iterations, warmup=0, cooldown=cooldown).rate(each) for each in range(iterations + 3)]
    falling = min(cooldown, iterations // 2)
    assert rates[: iterations - falling] == [1.0] * (iterations - falling)
    assert rates == sorted(rates, reverse=True) and rates[iterations - 1] > 0 and rates[-1] >= 0
    assert sum(rate < 1 for rate in rates[:iterations]) == falling


def sampled_versions(folder, iteration: int) -> set[int]:
    found = load_trajectories(folder / "trajectories" / f"{iteration:06d}.jsonl")
    return {int(version) for each in found for branch in each.branches for version in branch.versions[branch.mask]}


def test_overlapped_episodes_are_one_version_behind_and_never_more(start, tmp_path):
    apart, together = (config(5, overlap=overlap, groups=GroupConfig(max_staleness=1)) for overlap in (False, True))
    records, _ = run(fresh(start), {"copying": Copying()}, apart, tmp_path / "apart")
    assert [record["staleness"] for record in records] == [0] * 5
    assert [sampled_versions(tmp_path / "apart", number) for number in range(5)] == [{0}, {1}, {2}, {3}, {4}]
    records, tested = run(fresh(start), {"copying": Copying()}, together, tmp_path / "together", evaluate=4)
    assert [record["staleness"] for record in records] == [0, 1, 1, 1, 1]
    assert [sampled_versions(tmp_path / "together", number) for number in range(5)] == [{0}, {0}, {1}, {2}, {3}]
    assert not any("samples too stale or empty" in record["dropped"] for record in records)
    assert {int(each.branches[0].versions.max()) for each in tested} == {5}  # evaluated with the newest weights


def test_an_overlapped_run_that_is_stopped_goes_on_without_losing_what_was_parked(start, tmp_path):
    settings = config(
        5, tasks=2, overlap=True, checkpoint_every=2,
        rollout=RolloutConfig(group_size=4, iteration_tokens=1, talk=TalkConfig(max_tokens=4)),
        groups=GroupConfig(max_staleness=8),
    )  # fmt: skip
    run(fresh(start), {"copying": Copying()}, settings, tmp_path, stop_after=3)
    found, _ = run(fresh(start), {"copying": Copying()}, settings, tmp_path, resume=True)
    assert [record["iteration"] for record in found] == [3, 4, 5]
    played = [load_trajectories(path) for path in sorted((tmp_path / "trajectories").glob("*.jsonl"))]
    ended = [(each.task, each.iteration, each.sample) for episodes in played for each in episodes]
    assert len(ended) == len(set(ended))  # no episode twice
    for began in (0, 1):
        assert len({key for key in ended if key[1] == began}) == 8  # all of those that had time to end


def test_an_overlapped_run_that_is_resumed_gives_the_same_bits(start, tmp_path):
    settings = config(
        6, deterministic=True, tasks=2, overlap=True, checkpoint_every=2, groups=GroupConfig(max_staleness=8),
        rollout=RolloutConfig(group_size=4, iteration_tokens=2, talk=TalkConfig(max_tokens=4)),
    )  # fmt: skip
    whole, again = fresh(start), fresh(start)
    expected, _ = run(whole, {"copying": Copying()}, settings, tmp_path / "whole")
    run(fresh(start), {"copying": Copying()}, settings, tmp_path / "cut", stop_after=3)
    found, _ = run(again, {"copying": Copying()}, settings, tmp_path / "cut", resume=True)
    assert [record["iteration"] for record in found] == [3, 4, 5, 6]
    for name in ("reward", "loss", "gap", "grad_norm", "trained_tokens", "parked", "length", "staleness"):
        assert [record[name] for record in found] == [record[name] for record in expected[2:]], name
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_a_record_that_a_kill_left_half_written_does_not_keep_a_run_from_going_on(start, tmp_path):
    settings = config(3, tasks=1, checkpoint_every=1)
    run(fresh(start), {"copying": Copying()}, settings, tmp_path, stop_after=2)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')
    run(fresh(start), {"copying": Copying()}, settings, tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]


class Suppressing(Copying):
    """Takes whatever happens for something of its own."""

    async def episode(self, task, talk):
        talk.add({"role": "user", "content": task.data["letter"]})
        for _ in range(3):
            with contextlib.suppress(Exception):
                await talk.ask()


def test_an_episode_is_parked_also_where_its_environment_lets_no_exception_pass(start, tmp_path):
    rollout = RolloutConfig(group_size=4, iteration_tokens=1, talk=TalkConfig(max_tokens=8, max_turns=3))
    settings = config(1, tasks=2, rollout=rollout)
    (record,), _ = run(fresh(start), {"copying": Suppressing()}, settings, tmp_path)
    assert record["parked"] == 8 and record["episodes"] == 0


def test_overlap_needs_room_for_a_version():
    with pytest.raises(ValueError, match="max_staleness is 0: expected at least 1"):
        config(1, overlap=True, groups=GroupConfig(max_staleness=0))


def test_supervised_rows_are_learnt_beside_the_episodes(start, tmp_path):
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "moon?"}, {"role": "assistant", "content": "perilune"}]
    chats.write_text(json.dumps({"messages": said}) + "\nno dialogue\n")
    rows = ChatRows(ChatDataConfig(sources=(str(chats),), valid_fraction=0.0), tokenizer(), seq_len=64, seed=0)
    settings = config(6, learner=replace(config(1).learner, ptx_weight=1.0))

    async def work():
        async with Loop(
            fresh(start), tokenizer(), {"copying": Copying()}, settings, folder=tmp_path / "run", ptx=rows
        ) as loop:
            return [record["ptx_loss"] async for record in loop.run()]

    losses = asyncio.run(work())
    assert losses[-1] < losses[0] and rows.broken.count == 1


def test_tasks_of_one_name_are_one_group(start, tmp_path):
    records, _ = run(fresh(start), {"copying": Copying()}, config(1, tasks=6, pool=8), tmp_path)
    assert records[0]["episodes"] in (16, 24, 32) and records[0]["failures"] == {}
    counted: dict[str, int] = {}
    for each in load_trajectories(tmp_path / "trajectories" / "000000.jsonl"):
        counted[each.task] = counted.get(each.task, 0) + 1
    assert set(counted.values()) == {8}


def test_what_was_there_before_a_loop_is_not_collected_again_and_again_while_it_runs(start, tmp_path):
    async def work():
        before = gc.get_freeze_count()
        async with Loop(fresh(start), tokenizer(), {"copying": Copying()}, config(1), folder=tmp_path):
            during = gc.get_freeze_count()
        return before, during, gc.get_freeze_count()

    before, during, after = asyncio.run(work())
    assert during > before == after == 0
