"""The ladders by name: rungs follow from one dial, arms are what they are called, shared runs are trained once."""

import dataclasses
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from perilune.cli import _with_set, main
from perilune.ladder import cost, dial
from perilune.ladder.design import Cell, Ladder, fingerprint
from perilune.ladder.results import read_results
from perilune.ladder.run import borrow, unfinished
from perilune.recipes.ladders import LADDERS, attention, muon, no_positions, qk_clip, residual, together
from tests.ladder.synthetic import write_synthetic

ROOT = Path(__file__).parents[2]
REAL = (muon, attention, residual, together)


def config_of(ladder: Ladder, arm: str, rung: str = "w128"):
    return Cell(rung=ladder.rung(rung), arm=ladder.arm(arm), seed=0).config()


@pytest.mark.parametrize("name", LADDERS)
def test_every_cell_of_every_ladder_has_a_valid_config(name: str):
    ladder = LADDERS[name]()
    assert ladder.name == name
    for rung in ladder.rungs:
        for arm in ladder.arms:
            found = cost.cost(ladder, rung, arm)
            assert found.parameters > 0 and found.trained_tokens > 0


@pytest.mark.parametrize("ladder", [function() for function in REAL], ids=lambda ladder: ladder.name)
def test_real_ladders_have_three_rungs_and_a_fourth_held_out(ladder: Ladder):
    assert [rung.name for rung in ladder.rungs] == ["w128", "w192", "w256", "w320"]
    assert [rung.is_held_out for rung in ladder.rungs] == [False, False, False, True]
    assert ladder.seeds == (0, 1, 2) and ladder.max_epochs == 4.0
    for rung in ladder.rungs:
        assert rung.config.model.num_hidden_layers == 8
        steps, config = cost.schedule(ladder, rung), config_of(ladder, ladder.baseline.name, rung.name)
        parameters = cost.active_parameters(config)
        assert steps.ends[1] * cost.tokens_per_step(config) == pytest.approx(20 * parameters, rel=0.01)
        assert steps.warmup_steps * cost.tokens_per_step(config) == pytest.approx(parameters, rel=0.02)


def test_the_dial_follows_its_rules():
    rungs = [dial.rung(width, source="x").config for width in (128, 192, 256, 320)]
    assert [run.trainer.global_batch_rows for run in rungs] == [32, 48, 64, 80]
    assert [run.model.kda.num_heads for run in rungs] == [2, 3, 4, 5]
    for run in rungs:
        size = cost.active_parameters(run) / 108e6
        assert run.optimizer.lr == pytest.approx(0.0047 / 2 * size ** (-1 / 3), rel=5e-3)
        assert cost.tokens_per_step(run) == pytest.approx(2048 * 160 * size ** (2 / 3), rel=0.15)
    assert dial.learning_rate(1.0) == 0.00235 and dial.batch_rows(1.0) * 1024 == 2048 * 160
    with pytest.raises(ValueError, match="multiple of 64"):
        dial.rung(200, source="x")


def test_patterns_of_attention_are_exact():
    counts = {
        arm.name: Counter(config_of(attention(), arm.name).model.layer_pattern())["mla"] for arm in attention().arms
    }
    assert counts == {"mla": 8, "3to1": 2, "1to1": 4, "7to1": 1, "kda": 0, "nope": 8}


def test_full_attention_has_positions_and_what_stands_between_kda_layers_has_none():
    rotated = {
        (ladder.name, arm.name)
        for ladder in (muon(), attention(), residual(), together())
        for arm in ladder.arms
        if config_of(ladder, arm.name).model.mla.rope is not None
    }
    assert rotated == {
        ("muon", "adamw"), ("muon", "muonclip"), ("attention", "mla"), ("together", "none"), ("together", "muon"),
        ("together", "attnres"),
    }  # fmt: skip


def test_adamw_has_the_learning_rate_of_muons_other_half_for_what_is_no_matrix():
    for rung in muon().rungs:
        adamw, muonclip = (config_of(muon(), arm, rung.name).optimizer for arm in ("adamw", "muonclip"))
        assert adamw.adam_lr == muonclip.lr == 4 * adamw.lr and muonclip.adam_lr is None
        assert config_of(no_positions(), "adamw", rung.name).optimizer.adam_lr is None


def test_arms_differ_in_what_their_ladder_asks_about():
    found = residual()
    models = {arm.name: config_of(found, arm.name).model for arm in found.arms}
    assert {name: model.residual for name, model in models.items()} == {
        "plain": "plain", "scalars": "scalars", "block": "block_attnres", "block2": "block_attnres", "full": "attnres",
    }  # fmt: skip
    assert (models["block"].block_sublayers, models["block2"].block_sublayers) == (4, 2)
    everything, nothing = config_of(together(), "all"), config_of(together(), "none")
    assert (everything.optimizer.kind, nothing.optimizer.kind) == ("muonclip", "adamw")
    assert (everything.model.residual, nothing.model.residual) == ("block_attnres", "plain")
    assert set(nothing.model.layer_pattern()) == {"mla"}


def test_qk_clip_runs_hot_and_leaves_what_adamw_trains_alone():
    ladder = qk_clip()
    for rung in ladder.rungs:
        base = rung.config.optimizer
        found = {arm.name: config_of(ladder, arm.name, rung.name).optimizer for arm in ladder.arms}
        assert {name: each.qk_clip_tau for name, each in found.items()} == {"off": None, "tau100": 100.0, "tau30": 30.0}
        assert {(each.lr, each.adam_lr) for each in found.values()} == {(8 * base.lr, base.lr)}


def test_a_run_that_two_ladders_ask_for_is_trained_once(tmp_path: Path):
    lender, borrower = muon(), together()
    theirs = write_synthetic(lender, tmp_path / "muon", rho={"muonclip": 1.6})
    cells = list(borrower.cells())
    count = borrow(borrower, cells, tmp_path / "together", tmp_path.glob("*"))
    assert count == len(theirs) == 36
    found = read_results(tmp_path / "together")
    assert {result.borrowed_from for result in found} == {"muon"}
    assert {result.arm for result in found} == {"none", "muon"}
    assert {cell.arm.name for cell in unfinished(borrower, tmp_path / "together", held_out=False)} == {
        "linear", "attnres", "all",
    }  # fmt: skip
    assert borrow(borrower, cells, tmp_path / "together", tmp_path.glob("*")) == 0
    # The same arm that starts from another model's weights is another run.
    assert borrow(residual(), residual().cells(), tmp_path / "residual", tmp_path.glob("*")) == 0


def test_a_fingerprint_holds_the_run_and_its_start_but_no_names():
    linear, mla = config_of(attention(), "3to1"), config_of(attention(), "mla")
    mark = fingerprint(linear, start=mla.model)
    assert mark != fingerprint(linear, start=linear.model)  # other initial weights
    assert mark == fingerprint(linear, start=config_of(attention(), "nope").model)  # positions have no weights
    assert mark != fingerprint(dataclasses.replace(linear, seed=1), start=mla.model)
    elsewhere = _with_set(linear, ["name=other", "trainer.device=cuda", "data.corpus.source=/other/place"])
    assert mark == fingerprint(elsewhere, start=mla.model)
    assert mark != fingerprint(_with_set(linear, ["data.corpus.source=stdlib"]), start=mla.model)


def test_missing_text_is_one_clear_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["ladder", "plan", "muon"])
    captured = capsys.readouterr()
    assert ".cache/corpus" in captured.err and captured.err.count("\n") == 1


def test_lines_of_the_queue_name_ladders_steps_and_results_that_exist():
    queue = tomllib.loads((ROOT / "benchmarks" / "queue.toml").read_text())["experiment"]
    rounds = [line for line in queue if "ladder_round.py" in line["command"]]
    for line in rounds:
        words = line["command"].split()
        name = words[2]
        assert name in LADDERS and line["minutes"] > 0
        ladder = LADDERS[name]()
        result = Path(line["result"])
        folder = words[words.index("--results") + 1] if "--results" in words else "benchmarks/results/ladder"
        assert result.is_relative_to(Path(folder) / name)
        if result.name in ("tuned.json", "speeds.json"):
            continue
        held_out = "held-out" in words
        known = {f"{cell.name}+{h.name}.json" for cell in ladder.cells(held_out=held_out) for h in ladder.horizons}
        assert result.name in known and result.name.split("+")[2] in words
