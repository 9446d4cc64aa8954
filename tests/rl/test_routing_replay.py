"""Routing replay from the engine to the gradient: what is kept of a rollout, and what it does to the gap."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.model import Decoder
from perilune.rl.learner import Learner, LearnerConfig, Sample
from perilune.rl.loop import Loop, RLConfig
from perilune.rl.rollout import Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig, Workers
from perilune.rl.trajectory import Branch, Recording, TrajectoryError, load_trajectories, save_trajectories
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.train.optimizer import OptimizerConfig
from tests.rl.test_rollout import Asking, jobs
from tests.rl.test_trajectory import trajectory
from tests.serve.test_routes import MOE, build, forward_routes
from tests.serve.tiny import fresh_model, tokenizer

ENGINE = EngineConfig(
    page_size=64, num_pages=64, max_sequences=4, token_budget=128, num_snapshots=8, snapshot_interval=64,
    record_routes=True,
)  # fmt: skip
TALK = TalkConfig(max_tokens=60, record_routes=True)


def collect(model: Decoder, todo: list[Job], environment, *, deterministic: bool = False, **config):
    async def work():
        engine = Engine(model, tokenizer(), replace(ENGINE, deterministic=deterministic))
        async with AsyncEngine(engine) as served:
            rollout = RolloutConfig(**{"talk": TALK, **config})
            return await Rollouts(served, tokenizer(), {environment.name: environment}, rollout).collect(
                todo, iteration=0
            )

    found = asyncio.run(work())
    assert not found.failures, found.examples
    return found


def played(dtype="float32", *, deterministic: bool = False, count: int = 4) -> list[Sample]:
    environment = Asking(turns=2)
    found = collect(build("hybrid", dtype=dtype), jobs(environment, count), environment, deterministic=deterministic)
    return [
        Sample(branches=each.branches, advantage=number - 1.5) for number, each in enumerate(found.trajectories)
    ]  # fmt: skip


def learner(dtype="float32", *, replay: bool, moved: float = 0.0, deterministic: bool = False, **config) -> Learner:
    """A trainer whose routers would choose other experts: their biases have moved, which select and never weigh."""
    model = build("hybrid", dtype=dtype)
    model.deterministic = deterministic
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("correction_bias"):
                bias += moved * torch.linspace(1.0, 0.0, MOE.num_experts)
    given = {"optimizer": OptimizerConfig(kind="adamw", lr=1e-3), "max_grad_norm": None, **config}
    return Learner(model, LearnerConfig(routing_replay=replay, **given))


def test_the_gap_is_large_where_routers_choose_otherwise_and_gone_with_replay():
    samples = played()
    assert learner(replay=False).update(samples).largest_gap <= 1e-4  # the same weights, the same routers
    without = learner(replay=False, moved=0.3).update(samples)
    replayed = learner(replay=True, moved=0.3).update(samples)
    assert without.gap > 0.05 and without.largest_gap > 0.5
    assert replayed.largest_gap <= 1e-4


def test_a_deterministic_engine_leaves_no_gap_at_all():
    samples = played(deterministic=True)
    for moved in (0.0, 0.3):
        update = learner(replay=True, moved=moved, deterministic=True).update(samples)
        assert update.tokens > 0 and update.gap == 0.0 and update.largest_gap == 0.0
    assert learner(replay=False, moved=0.3, deterministic=True).update(samples).largest_gap > 0.1


def test_the_gradient_with_replay_does_not_depend_on_packing_and_reaches_the_router():
    samples = played("float64")
    found = []
    for tokens in (10_000, 1):
        each = learner("float64", replay=True, moved=0.3, row_tokens=tokens)
        each.optimization.step = lambda: None
        each.update(samples)
        found.append({name: value.grad for name, value in each.model.named_parameters() if value.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-12, msg=name)
    assert all(found[0][f"layers.{layer}.mlp.gate.weight"].abs().max() > 0 for layer in (1, 2, 3))


def test_an_episode_of_many_turns_parked_and_saved_in_between_has_the_routes_of_one_forward():
    environment = Asking()
    model = build("hybrid", dtype="float64")
    todo, parts, rounds = jobs(environment), [], 0
    while todo:
        found = collect(model, todo, environment, iteration_tokens=5)
        parts += found.trajectories
        todo, rounds = [Job.of(json.loads(json.dumps(job.plain()))) for job in found.parked], rounds + 1
    assert rounds > 2 and len(parts) == 4
    for each in parts:
        (branch,) = each.branches
        assert branch.routes.dtype == np.uint8
        np.testing.assert_array_equal(branch.routes, forward_routes(model, branch.tokens[:-1].tolist()))


def test_a_parked_episode_keeps_the_experts_of_the_weights_that_sampled():
    environment = Asking(turns=1)
    first, second = build("hybrid"), build("hybrid", seed=1)
    (parked,) = collect(build("hybrid"), jobs(environment, 1), environment, iteration_tokens=5).parked
    (whole,) = collect(build("hybrid", seed=1), [parked], environment, iteration_tokens=None).trajectories
    (branch,) = whole.branches
    border, computed = len(parked.turns[0].prompt) + 4, branch.tokens[:-1].tolist()
    np.testing.assert_array_equal(branch.routes[:border], forward_routes(first, computed)[:border])
    np.testing.assert_array_equal(branch.routes[border:], forward_routes(second, computed)[border:])


class Delegating(Asking):
    """Asks a worker once, and tells the policy what it said."""

    name = "delegating"

    async def episode(self, task, talk):
        worker = talk.aside("main/reader.0")
        worker.add({"role": "user", "content": "aside"})
        said = (await worker.ask(max_tokens=6)).get("content") or ""
        talk.add({"role": "user", "content": said[:9]})
        await talk.ask(max_tokens=6)


@pytest.mark.parametrize("trained", [True, False])
def test_workers_record_routes_where_they_are_trained(trained: bool):
    environment, model = Delegating(), build("hybrid")

    async def work():
        async with AsyncEngine(Engine(model, tokenizer(), ENGINE)) as served:
            workers = Workers(engine=served, tokenizer=tokenizer(), config=TalkConfig(), trained=trained)
            names = {environment.name: environment}
            rollouts = Rollouts(served, tokenizer(), names, RolloutConfig(talk=TALK), workers=workers)
            return await rollouts.collect(jobs(environment, 1), iteration=0)

    (whole,) = asyncio.run(work()).trajectories
    assert len(whole.branches) == 1 + trained
    for branch in whole.branches:
        np.testing.assert_array_equal(branch.routes, forward_routes(model, branch.tokens[:-1].tolist()))


def test_the_loop_records_and_replays_when_the_learner_asks_for_it(tmp_path):
    environment = Asking(turns=1)
    config = RLConfig(
        iterations=1, tasks=2, pool=2, warmup=0, seed=3, engine=replace(ENGINE, record_routes=False),
        rollout=RolloutConfig(group_size=2, talk=TalkConfig(max_tokens=12)),
        learner=LearnerConfig(routing_replay=True, optimizer=OptimizerConfig(kind="adamw", lr=1e-3)),
    )  # fmt: skip

    async def work() -> dict:
        async with Loop(
            build("hybrid", dtype="float32"), tokenizer(), {"asking": environment}, config, folder=tmp_path
        ) as loop:  # fmt: skip
            record = await loop.step()
            assert not (await loop.evaluate(1)).failures
            return record

    record = asyncio.run(work())
    assert record["trained_tokens"] > 0 and record["largest_gap"] <= 1e-4
    (file,) = (tmp_path / "trajectories").iterdir()
    assert all(branch.routes is not None for each in load_trajectories(file) for branch in each.branches)


# --- what is kept -----------------------------------------------------------------------------------------------------


def some_routes(count: int, seed: int = 0, dtype=np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (count, 3, 2)).astype(dtype)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_routes_of_turns_are_joined_and_what_was_recorded_first_stays(turns):
    recording, row, expected = Recording(), [], some_routes(0)
    for number, (added, sampled, is_short) in enumerate(turns):
        row = row + [7] * added
        known = recording.known_routes(row)
        assert known == len(expected)
        count = len(row) + sampled - 1
        given_routes = some_routes(count, seed=number)[known if is_short else 0 :]
        recording.add(row, [8] * sampled, [-0.5] * sampled, 0, routes=given_routes)
        expected = np.concatenate([expected, some_routes(count, seed=number)[known:]])
        row = row + [8] * sampled
    np.testing.assert_array_equal(recording.branches[0].routes, expected)
    assert recording.known_routes([1, *row]) == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_file_gives_back_routes_and_knows_where_there_are_none(tmp_path, dtype):
    with_routes, without = Recording(), Recording()
    routes = some_routes(4, dtype=dtype) * (1 if dtype == np.uint8 else 200)
    with_routes.add([1, 2, 3], [4, 5], [-1.0, -1.0], 0, routes=routes)
    without.add([1, 2, 3], [4, 5], [-1.0, -1.0], 0)
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [trajectory(with_routes), trajectory(without)])
    first, second = load_trajectories(path)
    np.testing.assert_array_equal(first.branches[0].routes, routes)
    assert first.branches[0].routes.dtype == dtype
    np.testing.assert_array_equal(first.branches[0].since(1).routes, routes)
    assert second.branches[0].routes is None
    assert "routes" not in path.read_text().splitlines()[1]  # as files were written before there were routes
    text = path.read_text()
    place = text.index('"packed": "') + 14
    path.write_text(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
    with pytest.raises(TrajectoryError, match="line 1 is damaged"):
        load_trajectories(path)


def test_routes_that_do_not_fit_are_refused():
    recording = Recording()
    with pytest.raises(TrajectoryError, match="last 2 tokens of 4"):
        recording.add([1, 2, 3], [4, 5], [-1.0, -1.0], 0, routes=some_routes(2))
    recording.add([1, 2, 3], [4, 5], [-1.0, -1.0], 0, routes=some_routes(4))
    (branch,) = recording.branches
    with pytest.raises(TrajectoryError, match="of all tokens but the last"):
        Branch(**{**vars(branch), "routes": some_routes(5)})
    each = learner(replay=True)
    bare = replace(branch, routes=None)
    with pytest.raises(ValueError, match="has no routes and learner.routing_replay is True"):
        each.update([Sample(branches=[bare], advantage=1.0)])
    with pytest.raises(ValueError, match="another model sampled it"):
        each.update([Sample(branches=[branch], advantage=1.0)])
    with pytest.raises(ValueError, match="expected False: the model has no experts"):
        Learner(fresh_model(), LearnerConfig(routing_replay=True))
