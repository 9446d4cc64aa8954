"""Ladders run: horizons branch off, arms are paired, nothing finished is done again."""

import dataclasses
from pathlib import Path

import pytest
import torch

from perilune.data import ValidationSet
from perilune.ladder import cost, run
from perilune.ladder.design import Arm, Cell, Horizon, Ladder, branch, trunk
from perilune.recipes.ladders import tiny
from perilune.train import RunError, load_run, train
from perilune.train.copying import copy_accuracy
from perilune.train.evaluate import validate


def small(**changes) -> Ladder:
    """One rung, two seeds, two arms that differ in their residual path."""
    whole = tiny()
    arms = (Arm(name="plain"), Arm(name="attnres", changes={"model.residual": "attnres"}))
    return dataclasses.replace(
        whole, name="small", rungs=whole.rungs[:1], arms=arms, seeds=(0,), horizons=whole.horizons, **changes
    )


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_horizon_that_branches_off_is_the_run_that_decays_from_the_start(tmp_path: Path):
    ladder = small()
    cell = next(ladder.cells())
    results = {result.horizon: result for result in run.run_cell(ladder, cell, tmp_path / "ladder", ran_alone=True)}
    steps, config = cost.schedule(ladder, cell.rung), cell.config()
    for horizon, start, end in zip(ladder.ordered_horizons(), steps.starts, steps.ends, strict=True):
        whole = branch(config, horizon=horizon, start=start, steps=end, warmup_steps=steps.warmup_steps)
        summary = train(whole, runs_folder=tmp_path / "whole", quiet=True)
        assert summary["valid_loss"] == results[horizon.name].loss
        assert summary["tokens"] == results[horizon.name].tokens == end * cost.tokens_per_step(config)


def test_a_result_says_what_the_model_does_with_kinds_of_text_and_with_copies(tmp_path: Path, monkeypatch):
    ladder = small()
    cell = next(ladder.cells())
    kept = {}

    def keep(result, folder, data):
        kept[result.horizon] = load_run(folder), data
        return with_downstream(result, folder, data)

    with_downstream = run._with_downstream
    monkeypatch.setattr(run, "_with_downstream", keep)
    for result in run.run_cell(ladder, cell, tmp_path / "ladder", ran_alone=True):
        (model, tokenizer, config), data = kept[result.horizon]
        rows = {"rows": 10_000, "micro_batch_rows": 16, "device": torch.device("cpu")}
        stores = data.valid.store.by_domain()
        # As many rows as the domains have, where those are no more than what is looked at.
        small_ones = [domain for domain, store in stores.items() if store.num_tokens <= 16 * config.data.seq_len]
        assert list(result.domains) == list(stores) and small_ones
        for domain in small_ones:
            whole = ValidationSet(stores[domain], config.data.seq_len)
            assert result.domains[domain] == pytest.approx(validate(model, whole, **rows)["bits_per_byte"], rel=1e-5)
        assert list(result.copying) == [str(n) for n in (16, 64) if 2 * n <= config.data.seq_len]
        copies = copy_accuracy(model, tokenizer, length=16, rows=16, device=torch.device("cpu"))
        assert result.copying["16"] == copies["accuracy"]
    read = {result.horizon: result for result in run.read_results(tmp_path / "ladder")}
    assert read == {each.horizon: each for each in run.run_cell(ladder, cell, tmp_path / "ladder", ran_alone=True)}


def test_arms_start_from_the_same_weights_and_see_the_same_rows(tmp_path: Path):
    ladder = small()
    starts, batches = {}, {}

    for cell in ladder.cells():
        config = trunk(cell.config(), steps=1, warmup_steps=1)
        initialize = run._baseline_weights(ladder, cell)

        def keep(model, name=cell.arm.name, initialize=initialize):
            initialize(model)
            starts[name] = {key: value.clone() for key, value in model.named_parameters()}

        train(config, runs_folder=tmp_path, quiet=True, initialize=keep)
        batches[cell.arm.name] = run.run_folder.read_config(tmp_path / config.name).data
    shared = starts["plain"].keys() & starts["attnres"].keys()
    assert len(shared) > 20 and len(starts["attnres"]) > len(shared)
    assert all(torch.equal(starts["plain"][name], starts["attnres"][name]) for name in shared)
    assert batches["plain"] == batches["attnres"]


def test_what_was_interrupted_goes_on_and_what_is_finished_is_not_repeated(tmp_path: Path, monkeypatch):
    ladder = small()
    expected = run.run_ladder(ladder, tmp_path / "straight")
    begun = []
    original = run.train

    def broken(config, **options):
        begun.append(config.name)
        if len(begun) == 6:  # inside the second cell
            raise KeyboardInterrupt
        return original(config, **options)

    monkeypatch.setattr(run, "train", broken)
    with pytest.raises(KeyboardInterrupt):
        run.run_ladder(ladder, tmp_path / "stopped")
    assert 0 < len(run.read_results(tmp_path / "stopped")) < len(expected)
    before = len(begun)
    found = run.run_ladder(ladder, tmp_path / "stopped")
    first = next(ladder.cells()).name
    assert not any(name.startswith(first) for name in begun[before:])
    assert [(x.rung, x.arm, x.seed, x.horizon, x.loss) for x in found] == [
        (x.rung, x.arm, x.seed, x.horizon, x.loss) for x in expected
    ]
    assert list(run.unfinished(ladder, tmp_path / "stopped", held_out=False)) == []
    count = len(begun)
    run.run_ladder(ladder, tmp_path / "stopped")
    assert len(begun) == count


def test_results_of_another_design_are_refused(tmp_path: Path):
    ladder = dataclasses.replace(small(), arms=small().arms[:1], horizons=small().horizons[:1])
    run.run_ladder(ladder, tmp_path)
    changed = dataclasses.replace(ladder, arms=(Arm(name="plain", changes={"optimizer.lr": 1e-4}),))
    with pytest.raises(RunError, match="another configuration"):
        run.run_ladder(changed, tmp_path)
    for path in (tmp_path / run.RESULTS).iterdir():
        path.unlink()
    with pytest.raises(RunError, match="begun with another configuration"):
        run.run_ladder(changed, tmp_path)


def test_a_result_has_what_a_fit_needs(tmp_path: Path):
    ladder = dataclasses.replace(small(), horizons=small().horizons[:1])
    plain, attnres = sorted(run.run_ladder(ladder, tmp_path), key=lambda result: result.arm != "plain")
    assert plain.baseline_flops == attnres.baseline_flops == plain.flops < attnres.flops
    assert plain.tokens == attnres.tokens and plain.parameters < attnres.parameters
    assert 0 < plain.epochs < 1 and plain.tokens_per_s and plain.ran_alone
    assert not list((tmp_path / run.CELLS).glob("*/checkpoints/*"))


@pytest.mark.parametrize(
    "arm, message",
    [
        (Arm(name="x", changes={"optimizer.speed": 1}), "not a field"),
        (Arm(name="x", changes={"optimizer.lr.scale": 1}), "not a field"),
        (Arm(name="x", changes={"optimizer.lr": "high"}), "expected a number"),
    ],
)
def test_an_arm_that_changes_what_is_not_there_gets_one_clear_error(arm: Arm, message: str):
    with pytest.raises(ValueError, match=message):
        Cell(rung=tiny().rungs[0], arm=arm, seed=0).config()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"arms": ()}, "no arms"),
        ({"seeds": (1, 1)}, "not all different"),
        ({"arms": (Arm(name="a/b"),)}, "names files"),
        ({"arms": (Arm(name="a", by_rung={"w99": {}}),)}, "not in the ladder"),
        ({"decay_fraction": 0.0}, "shares"),
        ({"horizons": (Horizon(name="none", tokens_per_parameter=0.0),)}, "more than 0"),
    ],
)
def test_a_ladder_that_makes_no_sense_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny(), **changes)


def test_flops_count_parameters_and_attention():
    config = Cell(rung=tiny().rungs[0], arm=tiny().arms[0], seed=0).config()
    longer = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=128))
    # One MLA layer: 48 channels of one head, 32 more keys on average, six operations each.
    assert cost.flops_per_token(longer) - cost.flops_per_token(config) == 6 * 48 * 32
    assert cost.flops_per_token(config) > 6 * cost.active_parameters(config)
