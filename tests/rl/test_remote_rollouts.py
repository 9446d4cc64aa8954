"""Episodes over processes of Ray: the same bits as in this one, new weights everywhere, and a process may die."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="needs ray (pip install 'perilune[scale]')")

from perilune.model import Decoder
from perilune.rl.environment import OUTCOME, Task, last_answer
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import TRAJECTORIES, Loop, RLConfig
from perilune.rl.remote_engines import RemoteEngines
from perilune.rl.remote_rollouts import RemoteRollouts, rollouts_on
from perilune.rl.rollout import Collected, Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.swarm.scale.local_ray import start_ray
from perilune.train.optimizer import OptimizerConfig
from tests.serve.tiny import fresh_model, tokenizer

CONFIG = EngineConfig(
    page_size=64, num_pages=64, max_sequences=8, token_budget=128, num_snapshots=8, snapshot_interval=64,
    deterministic=True,
)  # fmt: skip
ROLLOUT = RolloutConfig(concurrency=4, talk=TalkConfig(max_tokens=40))


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    """One Ray for the file: it takes seconds to start."""
    ray = start_ray()
    yield ray
    ray.shutdown()


class Asking:
    """Asks three times; task 3 goes wrong, and task 7 waits in its second turn until another process plays it."""

    name = "asking"

    def __init__(self, trace: Path | None = None) -> None:
        self.trace = trace

    def task(self, number, split):
        return Task(name=f"{split}/{number}", data={"number": number})

    async def episode(self, task, talk):
        number = task.data["number"]
        if number == 3:
            raise KeyError("a bug of the environment")
        for turn in range(3):
            talk.add({"role": "user", "content": f"{number}.{turn}"})
            await talk.ask(max_tokens=9)
            if self.trace is not None and number == 7 and turn == 1:
                with self.trace.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                while len(set(self.trace.read_text().split())) == 1:
                    await asyncio.sleep(0.01)

    def judge(self, task, messages):
        text = "".join(str(message.get("content")) for message in messages if message["role"] == "assistant")
        return {OUTCOME: sum(letter in "aeiou" for letter in text) / max(1, len(text))}


def jobs(environment, *numbers: int, iteration: int = 0) -> list[Job]:
    return [
        Job(environment="asking", task=environment.task(number, "train"), sample=0, seed=5, iteration=iteration)
        for number in numbers
    ]


def check_equal(found: Collected, expected: Collected) -> None:
    """Bit by bit."""
    assert (found.failures, found.examples, found.num_empty) == (
        expected.failures, expected.examples, expected.num_empty,
    )  # fmt: skip
    assert found.parked == expected.parked
    for one, other in zip(found.trajectories, expected.trajectories, strict=True):
        assert (one.task, one.reward, one.facets, one.messages) == (
            other.task, other.reward, other.facets, other.messages,
        )  # fmt: skip
        for mine, theirs in zip(one.branches, other.branches, strict=True):
            for name in ("tokens", "mask", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


async def here(environment, todo, *, weights, version: int, config: RolloutConfig = ROLLOUT) -> Collected:
    engine = Engine(weights, tokenizer(), CONFIG, weight_version=version)
    async with AsyncEngine(engine) as served:
        return await Rollouts(served, tokenizer(), {"asking": environment}, config).collect(todo, iteration=version)


def weights(seed: int) -> Decoder:
    return fresh_model(seed=seed, dtype="float32")


def test_processes_play_what_this_one_plays_with_every_version_of_the_weights_also_when_one_dies(tmp_path):
    async def work():
        plain = Asking()
        engines = RemoteEngines(weights(0), tokenizer(), CONFIG, processes=2)
        try:
            rollouts = rollouts_on(engines, tokenizer(), {"asking": plain}, ROLLOUT)
            assert isinstance(rollouts, RemoteRollouts)
            todo = jobs(plain, *range(6))
            found = await rollouts.collect(todo, iteration=0)
            check_equal(found, await here(plain, todo, weights=weights(0), version=0))
            assert found.failures == {"environment": 1} and found.num_again == 0

            await engines.load_weights(weights(1), 1)
            cut = replace(ROLLOUT, iteration_tokens=12)
            found = await rollouts_on(engines, tokenizer(), {"asking": plain}, cut).collect(todo, iteration=1)
            check_equal(found, await here(plain, todo, weights=weights(1), version=1, config=cut))
            assert found.parked and {v for job in found.parked for turn in job.turns for v in turn.versions} == {1}

            await check_loss(engines, tmp_path / "trace", signal.SIGKILL)
        finally:
            await engines.close()

    asyncio.run(asyncio.wait_for(work(), 300))


@pytest.mark.long
def test_a_process_that_does_not_answer_is_given_up(tmp_path):
    async def work():
        engines = RemoteEngines(weights(0), tokenizer(), CONFIG, processes=2, silent_seconds=10)
        try:
            await engines.load_weights(weights(1), 1)
            await check_loss(engines, tmp_path / "trace", signal.SIGSTOP)
        finally:
            await engines.close()

    asyncio.run(asyncio.wait_for(work(), 300))


async def check_loss(engines: RemoteEngines, trace: Path, sign: signal.Signals) -> None:
    """Send a signal to whoever plays task 7, in the middle of it; engines have weights(1)."""
    traced = Asking(trace)
    todo = jobs(traced, *range(4, 10))

    async def hit() -> int:
        while not trace.exists() or not trace.read_text().split():
            await asyncio.sleep(0.01)
        pid = int(trace.read_text().split()[0])
        os.kill(pid, sign)
        return pid

    hitting = asyncio.create_task(hit())
    found = await rollouts_on(engines, tokenizer(), {"asking": traced}, ROLLOUT).collect(todo, iteration=1)
    check_equal(found, await here(Asking(), todo, weights=weights(1), version=1))
    assert engines.num_lost >= 1 and found.num_again >= 1
    players = {int(pid) for pid in trace.read_text().split()}
    assert await hitting in players and len(players) == 2
    assert await hitting not in engines.processes


class Helped:
    """The policy is told what a frozen worker says to a task, and has to say something else."""

    name = "helped"
    uses_asides = True

    def task(self, number, split):
        return Task(name=f"{split}/{number % 4}", data={"number": number % 4})

    async def episode(self, task, talk):
        worker = talk.aside("worker")
        worker.add({"role": "user", "content": f"part {task.data['number']}"})
        said = await worker.ask(max_tokens=6)
        talk.add({"role": "user", "content": f"not {said.get('content')!r}"})
        await talk.ask(max_tokens=6)

    def judge(self, task, messages):
        return {OUTCOME: sum(letter in "aeiou" for letter in last_answer(messages)) / 10}


def test_a_run_over_processes_learns_the_same_bits_frozen_workers_included(tmp_path):
    settings = RLConfig(
        iterations=2, tasks=2, pool=4, warmup=0, engine=CONFIG,
        rollout=RolloutConfig(group_size=4, talk=TalkConfig(max_tokens=6)),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-2)),
    )  # fmt: skip
    models, records = [], []
    for processes in (0, 1):
        model = fresh_model("mla", seed=0, dtype="float32")

        async def work(model=model, processes=processes):
            config = replace(settings, processes=processes)
            folder = tmp_path / str(processes)
            async with Loop(model, tokenizer(), {"helped": Helped()}, config, folder=folder) as loop:
                found = [record async for record in loop.run()]
                return found, (await loop.evaluate(2)).trajectories

        models.append(model)
        records.append(asyncio.run(asyncio.wait_for(work(), 300)))
    (here_records, here_tested), (there_records, there_tested) = records
    names = ("reward", "loss", "gap", "grad_norm", "trained_tokens", "length")
    assert [[each[name] for name in names] for each in here_records] == [
        [each[name] for name in names] for each in there_records
    ]
    assert any(record["trained_tokens"] for record in here_records)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=0, msg=name)
    for iteration in range(2):
        played = [(tmp_path / run / TRAJECTORIES / f"{iteration:06d}.jsonl").read_bytes() for run in ("0", "1")]
        assert played[0] == played[1]
    assert [each.messages for each in here_tested] == [each.messages for each in there_tested]
    assert [record["played_again"] for record in there_records] == [0, 0]
