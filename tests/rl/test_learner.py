"""The step from trajectories: what is trained, that packing changes nothing, and how far engine and trainer differ."""

import asyncio

import numpy as np
import pytest
import torch

from perilune.data.media import Media
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.learner import BORDER_UNIT, ROW_UNIT, Learner, LearnerConfig, Sample, fill_up, longest_text
from perilune.rl.objective import ObjectiveConfig
from perilune.rl.rollout import Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig
from perilune.rl.trajectory import Branch, Recording
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.train.optimizer import OptimizerConfig
from tests.serve.tiny import fresh_model, tokenizer


def sample(seed: int, advantage: float = 1.0, branches: int = 1) -> Sample:
    drawn = np.random.default_rng(seed)
    made = []
    for _ in range(branches):
        recording, row = Recording(), []
        for _ in range(2):
            row = row + drawn.integers(0, 256, size=drawn.integers(1, 9)).tolist()
            said = drawn.integers(0, 256, size=drawn.integers(1, 9)).tolist()
            recording.add(row, said, (-drawn.random(len(said)) * 6).tolist(), 0)
            row = row + said
        made += recording.branches
    return Sample(branches=made, advantage=advantage)


def learner(dtype="float64", deterministic=False, name="hybrid", **config) -> Learner:
    model = fresh_model(name, dtype)
    model.deterministic = deterministic
    given = {"optimizer": OptimizerConfig(kind="adamw", lr=1e-3), "max_grad_norm": None, **config}
    return Learner(model, LearnerConfig(**given))


def gradients(each: Learner, samples) -> dict[str, torch.Tensor]:
    """Those of an update that does not move the weights."""
    found = {}
    each.optimization.clip_gradients = lambda limit: torch.tensor(float("nan"))
    keep = each.optimization.skip

    def skip():
        found.update({n: p.grad.clone() for n, p in each.model.named_parameters() if p.grad is not None})
        return keep()

    each.optimization.skip = skip
    assert each.update(samples).skipped
    return found


@pytest.mark.parametrize("kind", ["k25", "k2", "k15", "grpo"])
def test_the_loss_does_not_depend_on_how_samples_are_packed(kind):
    samples = [sample(seed, advantage=seed - 1.5, branches=1 + seed % 2) for seed in range(4)]
    objective = ObjectiveConfig(kind=kind, tau=0.3)
    one, many = (
        gradients(learner(objective=objective, row_tokens=tokens), samples) for tokens in (10_000, 1)
    )  # fmt: skip
    assert one.keys() == many.keys() and one
    for name, gradient in one.items():
        torch.testing.assert_close(many[name], gradient, rtol=1e-8, atol=1e-11, msg=name)


def test_rows_that_are_filled_up_have_whole_units_and_the_same_gradients(monkeypatch):
    samples = [sample(seed, advantage=seed - 1.5, branches=1 + seed % 2) for seed in range(4)]
    as_they_are = gradients(learner(), samples)
    monkeypatch.setattr(Learner, "_fills_up", lambda self: True)
    for row_tokens in (10_000, 1):
        each = learner(row_tokens=row_tokens)
        for row in each._rows(samples):
            assert row.tokens.shape[1] % ROW_UNIT == 0 and (row.cu_seqlens.numel() - 1) % BORDER_UNIT == 0
            assert row.cu_seqlens[-1] == row.tokens.shape[1] and bool((row.cu_seqlens.diff() >= 0).all())
        filled = gradients(each, samples)
        assert filled.keys() == as_they_are.keys()
        for name, gradient in as_they_are.items():
            torch.testing.assert_close(filled[name], gradient, rtol=1e-8, atol=1e-11, msg=name)


def test_what_fills_a_row_up_are_beginnings_of_a_text():
    tokens, borders = [np.arange(3), np.arange(100, 107)], [0, 3, 10]
    fill_up(tokens, borders, tokens[1])
    assert sum(map(len, tokens)) == borders[-1] == ROW_UNIT
    for start, end, document in zip(borders[2:], borders[3:], tokens[2:]):
        assert end - start == len(document) and document.tolist() == np.arange(100, 107)[: len(document)].tolist()
    whole = [np.arange(ROW_UNIT)] * BORDER_UNIT
    borders = [ROW_UNIT * number for number in range(BORDER_UNIT + 1)]
    before = list(borders)
    fill_up(whole, borders, whole[0])
    assert len(whole) == BORDER_UNIT and borders == before


def test_rows_are_filled_up_by_text_without_pictures():
    shown = Media(pixels=np.zeros((16, 3, 14, 14), np.uint8), grid=(1, 4, 4))  # 4 tokens
    tokens = np.arange(20, dtype=np.int32)
    blank = {"mask": tokens > 18, "logprobs": np.zeros(20, np.float32), "versions": np.zeros(20, np.int32)}
    for starts, expected in (((), (0, 19)), ((0,), (4, 19)), ((15,), (0, 15)), ((2, 8), (12, 19))):
        branch = Branch(tokens=tokens, **blank, media=(shown,) * len(starts), starts=starts)
        assert longest_text(branch).tolist() == list(range(*expected))


def test_only_sampled_tokens_are_trained():
    each = learner()
    given = sample(0)
    (branch,) = given.branches
    (row,) = each._rows([given])
    assert row.places.tolist() == (np.flatnonzero(branch.mask) - 1).tolist()
    assert row.chosen.tolist() == branch.tokens[branch.mask].tolist()
    with torch.no_grad():
        expected = each.model(torch.from_numpy(branch.tokens.astype(np.int64))[None]).log_softmax(-1)[0]
    chosen = expected[np.flatnonzero(branch.mask) - 1, branch.tokens[branch.mask]]
    np.testing.assert_allclose(each.log_probs([branch])[0], chosen.numpy(), rtol=1e-9)


@pytest.mark.parametrize("row_tokens", [1, 40, 8192])
def test_log_probs_of_many_branches_are_those_of_each_alone(row_tokens):
    each = learner(row_tokens=row_tokens)
    asked = [branch for seed in range(5) for branch in sample(seed, branches=1 + seed % 2).branches]
    unsaid = Recording()
    unsaid.add([1, 2, 3], [4], [-1.0], 0)
    asked.insert(2, unsaid.branches[0].since(1))  # of older weights: nothing of it is trained
    found = each.log_probs(asked)
    assert [len(part) for part in found] == [branch.num_trained for branch in asked] and len(found[2]) == 0
    for branch, part in zip(asked, found, strict=True):
        np.testing.assert_allclose(part, each.log_probs([branch])[0], rtol=1e-9)
    assert each.log_probs([]) == []


def test_a_rewarded_answer_becomes_likelier_and_a_punished_one_less_likely():
    good, bad = sample(1, advantage=1.0), sample(2, advantage=-1.0)
    each = learner(objective=ObjectiveConfig(ratio_low=1e-9, ratio_high=1e9, tau=0.0))
    before = [each.log_probs(given.branches)[0].sum() for given in (good, bad)]
    for _ in range(3):
        update = each.update([good, bad])
    after = [each.log_probs(given.branches)[0].sum() for given in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]
    assert update.tokens == good.num_trained + bad.num_trained and update.grad_norm > 0 and not update.skipped


def test_a_gradient_that_is_not_finite_moves_nothing():
    each = learner()
    with torch.no_grad():
        each.model.norm.weight[0] = float("nan")
    before = {name: value.clone() for name, value in each.model.state_dict().items()}
    update = each.update([sample(3)])
    assert update.skipped
    for name, value in each.model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)


def test_nothing_to_learn_changes_nothing():
    each = learner()
    before = {name: value.clone() for name, value in each.model.state_dict().items()}
    assert each.update([]).tokens == 0 and not each.update([]).skipped
    assert all(torch.equal(value, before[name]) for name, value in each.model.state_dict().items())
    recording = Recording()
    recording.add([1, 2], [], [], 0)
    assert each.update([Sample(branches=recording.branches, advantage=1.0)]).tokens == 0


@pytest.mark.parametrize("name", ["hybrid", "experts", "block_attnres"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_engine_and_trainer_agree_exactly_in_deterministic_mode_and_closely_otherwise(name, deterministic):
    environment = Arithmetic(max_tokens=20)
    each = learner("float32", deterministic, name)
    served_model = fresh_model(name, "float32")

    async def work():
        config = EngineConfig(
            page_size=64, num_pages=64, max_sequences=4, token_budget=256, num_snapshots=4, snapshot_interval=64,
            deterministic=deterministic,
        )  # fmt: skip
        async with AsyncEngine(Engine(served_model, tokenizer(), config)) as served:
            rollouts = Rollouts(
                served, tokenizer(), {"arithmetic": environment}, RolloutConfig(talk=TalkConfig(max_tokens=20))
            )
            todo = [
                Job(environment="arithmetic", task=environment.task(n // 2, "train"), sample=n, seed=0, iteration=0)
                for n in range(4)
            ]
            return await rollouts.collect(todo, iteration=0)

    found = asyncio.run(work())
    samples = [Sample(branches=each.branches, advantage=1.0) for each in found.trajectories]
    update = each.update(samples)
    assert update.tokens > 0
    if deterministic:
        assert update.gap == 0.0 and update.largest_gap == 0.0
    else:
        assert 0.0 < update.largest_gap <= 1e-4


def test_supervised_rows_are_mixed_in_by_their_weight():
    from perilune.data.packing import PackedBatch

    tokens = np.arange(30, dtype=np.int64)
    batch = PackedBatch(
        tokens=tokens, targets=(tokens + 1) % 30, cu_seqlens=np.array([0, 30], dtype=np.int32), num_targets=30,
        num_bytes=30,
    )  # fmt: skip
    each = learner(ptx_weight=1.0)
    alone = learner(ptx_weight=1.0)  # where no group taught anything, dialogues still do
    first, second = (alone.update([], ptx=batch) for _ in range(2))
    assert second.ptx_loss < first.ptx_loss and first.tokens == 0 and first.loss == 0.0 and not first.skipped
    losses = [each.update([sample(5, advantage=0.0)], ptx=batch).ptx_loss for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert learner().update([sample(5)], ptx=batch).ptx_loss is None
