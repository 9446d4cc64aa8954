"""Sweeps find the minimum they are given, go on beyond an edge, and arms take what they found by the stated rule."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.cli import main
from perilune.ladder import sweep
from perilune.ladder.design import Arm, Cell, Ladder
from perilune.ladder.results import read_results
from perilune.ladder.run import unfinished
from perilune.recipes.ladders import LADDERS, tiny, together
from perilune.train import TrainingStopped
from tests.ladder.synthetic import write_synthetic


def swept(ladder: Ladder, arm: Arm, best_lr: float, *, bend: float = 0.05, diverges_above: float = math.inf):
    """A sweep of the first rung on a parabola: the points it asked for, and what it found."""
    rung = ladder.rungs[0]
    losses: dict[str, float] = {}
    while steps := sweep.wanted_steps(rung, arm, 0, losses):
        for step in steps:
            lr = sweep.grid_lr(sweep.recipe_lr(rung, arm), step)
            loss = 2.0 + bend * math.log(lr / best_lr) ** 2
            losses[sweep.sweep_cell(rung, arm, 0, step).name] = loss if lr <= diverges_above else math.inf
    steps = sweep.known_steps(rung, arm, 0, losses)
    return steps, sweep.best_of(rung, arm, steps, seed_sd=None)


@settings(max_examples=25)
@given(shift=st.floats(-4.0, 4.0))
def test_a_parabola_in_log_lr_is_found_wherever_its_minimum_lies(shift: float):
    ladder = tiny()
    recipe = sweep.recipe_lr(ladder.rungs[0], ladder.baseline)
    steps, best = swept(ladder, ladder.baseline, recipe * 2.0**shift)
    assert not best.at_edge and len(steps) <= sweep.MAX_POINTS
    assert best.lr == pytest.approx(recipe * 2.0**shift, rel=2e-3)  # the grid has four digits
    assert best.low is not None and best.high is not None and best.low < best.lr < best.high


@given(shift=st.sampled_from([-9.0, -6.5, 6.5, 9.0]))
def test_a_sweep_is_bounded_and_says_that_it_ended_at_an_edge(shift: float):
    ladder = together()
    recipe = sweep.recipe_lr(ladder.rungs[0], ladder.baseline)
    steps, best = swept(ladder, ladder.baseline, recipe * 2.0**shift)
    assert len(steps) == sweep.MAX_POINTS and best.at_edge and best.low is None


def test_a_diverged_run_is_worse_than_any_loss():
    ladder = together()
    recipe = sweep.recipe_lr(ladder.rungs[0], ladder.baseline)
    steps, best = swept(ladder, ladder.baseline, recipe * 4, diverges_above=recipe * 1.5)
    assert best.lr == sweep.grid_lr(recipe, 0)
    assert not best.at_edge and best.low is None and best.tried[-1][1] is None and len(steps) == 3


def test_the_interval_is_what_noise_does_to_the_minimum():
    offset, error = sweep.parabola(1.03, 1.0, 1.01, sd=1e-6)
    for place in range(3):
        losses = [1.03, 1.0, 1.01]
        losses[place] += 1e-6
        moved = sweep.parabola(*losses, sd=0.0)[0]
        error_of_one = abs(moved - offset)
        assert error_of_one <= error
    assert offset == pytest.approx(0.25) and 0 < error < 1e-4
    assert sweep.parabola(1.0, 1.0, 1.0, sd=1.0) == (0.0, math.inf)


def best(rung: str, arm: str, lr: float, recipe_lr: float) -> sweep.Best:
    return sweep.Best(
        rung=rung, arm=arm, lr=lr, low=None, high=None, at_edge=False, tried=(), recipe_lr=recipe_lr, noise=""
    )


def test_arms_take_learning_rates_by_the_rule():
    ladder = together()
    lr = {rung.name: sweep.recipe_lr(rung, ladder.arm("muon")) for rung in ladder.rungs}
    adamw = {rung.name: sweep.recipe_lr(rung, ladder.arm("none")) for rung in ladder.rungs}
    tuned = sweep.Tuned(
        best=tuple(best(rung, "none", 2 * adamw[rung], adamw[rung]) for rung in ("w128", "w192"))
        + (best("w256", "none", 4 * adamw["w256"], adamw["w256"]),)
        + tuple(best(rung, "muon", 3 * lr[rung], lr[rung]) for rung in ("w128", "w192", "w256"))
    )
    found = sweep.with_tuned(ladder, tuned)
    used = {
        (cell.rung.name, cell.arm.name): cell.config().optimizer.lr
        for held_out in (False, True)
        for cell in found.cells(held_out=held_out)
    }
    assert used["w256", "none"] == 4 * adamw["w256"]
    assert used["w320", "none"] == pytest.approx(2.0 ** (4 / 3) * adamw["w320"], rel=1e-3)
    assert used["w192", "linear"] == used["w192", "attnres"] == 2 * adamw["w192"]  # AdamW as the baseline
    assert used["w192", "muon"] == used["w192", "all"] == 3 * lr["w192"]
    source = {arm.name: sweep.taken(ladder, tuned, ladder.rungs[0], arm).source for arm in ladder.arms}
    assert source == {
        "none": "own sweep", "muon": "own sweep", "linear": "sweep of none", "attnres": "sweep of none",
        "all": "sweep of muon",
    }  # fmt: skip
    only_baseline = sweep.Tuned(best=tuned.best[:3])
    assert sweep.taken(ladder, only_baseline, ladder.rungs[0], ladder.arm("all")).source == sweep.NOT_TUNED


def test_what_has_run_keeps_its_learning_rate_and_a_later_sweep_is_a_check(tmp_path: Path):
    ladder = together()
    results = write_synthetic(dataclasses.replace(ladder, arms=ladder.arms[:1], combinations={}), tmp_path, rho={})
    lr = ladder.rungs[0].config.optimizer.lr
    after = sweep.merged(
        ladder, sweep.Tuned(), [best("w128", "none", 2 * lr, lr), best("w128", "muon", 3 * lr, lr)], results
    )
    assert [each.arm for each in after.checks] == ["none"] and [each.arm for each in after.best] == ["muon"]
    sweep.write_tuned(tmp_path, after)
    assert sweep.read_tuned(tmp_path) == after
    left = {cell.arm.name for cell in unfinished(sweep.with_tuned(ladder, after), tmp_path, held_out=False)}
    assert left == {"muon", "linear", "attnres", "all"}  # and no error: what is there still fits


@pytest.fixture
def one_rung(tmp_path: Path, monkeypatch) -> Path:
    """The command on one rung of `tiny`."""
    ladder = dataclasses.replace(tiny(), rungs=tiny().rungs[:1])
    monkeypatch.setitem(LADDERS, "tiny", lambda: ladder)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ladders" / "tiny"


def test_the_command_sweeps_once_and_runs_take_what_it_found(one_rung: Path, capsys):
    own = ["--quiet", "--set", "trainer.eval_rows=8"]
    main(["ladder", "sweep", "tiny", *own])
    capsys.readouterr()
    files = {path: path.stat().st_mtime_ns for path in (one_rung / "sweep" / "results").iterdir()}
    main(["ladder", "sweep", "tiny", *own])
    assert {path: path.stat().st_mtime_ns for path in (one_rung / "sweep" / "results").iterdir()} == files
    (found,) = sweep.read_tuned(one_rung).best
    assert f"lr {found.lr:.3g}" in capsys.readouterr().out
    main(["ladder", "run", "tiny", "--cell", "w16+adamw+0", *own])
    assert {result.lr for result in read_results(one_rung)} == {found.lr}
    main(["ladder", "report", "tiny"])
    assert f"| adamw | w16 | {found.lr:.4g} | own sweep |" in (one_rung / "report.md").read_text()


def test_a_run_that_breaks_is_an_answer_of_a_sweep(one_rung: Path, monkeypatch):
    ladder = LADDERS["tiny"]()
    cell = sweep.sweep_cell(ladder.rungs[0], ladder.baseline, 0, 1)

    def broken(*_, **__):
        raise TrainingStopped("not finite")

    monkeypatch.setattr(sweep, "run_cell", broken)
    sweep.run_sweep_cell(ladder, cell, one_rung)
    assert sweep.read_losses(one_rung) == {cell.name: math.inf}


def test_a_cell_of_a_sweep_is_found_by_its_name():
    ladder = together()
    for step in (-3, 0, 5):
        cell = sweep.sweep_cell(ladder.rungs[1], ladder.arms[2], 0, step)
        found = sweep.find_cell(ladder, cell.name)
        assert isinstance(found, Cell) and found.config() == cell.config()
    assert sweep.find_cell(ladder, "w128+none.lr0.123+0") is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sweep", "tiny", "--arms", "muonclipp"], "did you mean 'muonclip'"),
        (["sweep", "tiny", "--cell", "w16+adamw+0"], "not of this sweep"),
    ],
)
def test_wrong_names_are_one_clear_line(arguments: list[str], message: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["ladder", *arguments])
    assert message in capsys.readouterr().err
