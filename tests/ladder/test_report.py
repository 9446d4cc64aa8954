"""The report says what is there, what was predicted and what is missing; it refuses to say anything of nothing."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from perilune.cli import main
from perilune.ladder import prediction, report_tables, sweep
from perilune.ladder.design import Arm, Ladder
from perilune.ladder.evidence import read_evidence
from perilune.ladder.report import as_text, headlines, page, write_report
from perilune.ladder.report_plots import accuracy_plots, logit_plots, loss_plots, multiplier_plots, sweep_plots
from perilune.ladder.results import read_results, write_result
from perilune.ladder.speed import write_speeds
from perilune.recipes.ladders import LADDERS, qk_clip, together
from perilune.report import render_page
from perilune.train import RunError
from tests.ladder.synthetic import write_synthetic

RHO = {"muon": 1.6, "linear": 1.08, "attnres": 1.1, "all": 1.9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "together"


def test_no_results_are_one_clear_error(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for step in ("report", "predict", "fit"):
        with pytest.raises(SystemExit):
            main(["ladder", step, "muon"])
        assert "'muon' has no results yet" in capsys.readouterr().err


def test_multipliers_intervals_and_combinations_stand_in_both_forms(folder: Path):
    ladder = together()
    write_synthetic(ladder, folder, rho=RHO)
    write_speeds(
        folder,
        {(r.name, a.name): [1e6 * (1 - 0.1 * n)] * 3 for r in ladder.rungs for n, a in enumerate(ladder.arms)},
        torch.device("cpu"),
    )
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None
    for arm, rho in RHO.items():
        found = evidence.fit.arm(arm).rho
        assert found.low < rho < found.high and found.high - found.low < 0.1
    wall = evidence.fit.arm("muon").wall_clock
    assert wall.value == pytest.approx(0.9 * evidence.fit.arm("muon").rho.value, rel=1e-6)
    (combination,) = evidence.fit.combinations
    assert combination.ratio.holds(1.9 / (1.6 * 1.08 * 1.1))
    text, html = as_text(evidence), render_page(page(evidence))
    for piece in ("Do the gains multiply?", combination.verdict, "not tuned", "model.residual: ", "abc1234"):
        assert piece in text and piece in html.replace("&#39;", "'")
    assert [headline.label for headline in headlines(evidence)] == ["muon", "linear", "attnres", "all"]
    assert [plot.title for plot in multiplier_plots(evidence)] == [
        "What an arm is worth in compute", "What an arm is worth in time", "The multiplier over compute",
    ]  # fmt: skip


def test_the_held_out_rung_is_compared_with_what_was_said_before(folder: Path):
    ladder = together()
    write_synthetic(ladder, folder, rho=RHO)
    before = read_evidence(ladder, folder)
    assert before.fit is not None
    made = prediction.predict(ladder, before.fit, before.results, commit="fedcba9")
    prediction.write_prediction(folder, made, ladder, before.results)
    assert "not run yet" in as_text(read_evidence(ladder, folder))
    write_synthetic(ladder, folder, rho=RHO, held_out=True, started="2099-01-01T00:00:00+00:00")
    after = read_evidence(ladder, folder)
    assert after.fit == before.fit  # the held-out rung takes no part
    assert len(after.outcomes) == 10 and all(abs(outcome.error) < 0.01 for outcome in after.outcomes)
    assert "fedcba9" in as_text(after) and not any("prediction" in note for note in after.notes)
    assert headlines(after)[-1].label == "held out, w320"


def test_an_arm_of_one_rung_is_fitted_and_not_predicted(folder: Path):
    ladder = together()
    for result in write_synthetic(ladder, folder, rho=RHO):
        if result.arm == "linear" and result.rung != "w128":
            (folder / "results" / f"{result.rung}+linear+{result.seed}+{result.horizon}.json").unlink()
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None and evidence.fit.arm("linear").num_pairs == len(ladder.seeds)
    made = prediction.predict(ladder, evidence.fit, evidence.results, commit="")
    assert {each.arm for each in made.predicted} == {"none", "muon", "attnres", "all"}


def test_an_arm_whose_pairs_are_all_unsettled_is_named_and_the_others_are_fitted(folder: Path):
    ladder = together()
    for result in write_synthetic(ladder, folder, rho=RHO):
        path = folder / "results" / f"{result.rung}+{result.arm}+{result.seed}+{result.horizon}.json"
        if result.arm == "linear" and (result.rung, result.horizon) != ("w128", "10x"):
            path.unlink()
        elif (result.arm, result.rung, result.horizon, result.seed) == ("none", "w128", "10x", 1):
            path.write_text(path.read_text().replace(f'"loss": {result.loss}', f'"loss": {result.loss + 1}'))
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None and {arm.arm for arm in evidence.fit.arms} == {"muon", "attnres", "all"}
    assert not evidence.fit.combinations
    assert any(note.startswith("w128 at 10x is not settled: seeds of none") for note in evidence.notes)
    assert any(note.startswith("linear is not fitted") for note in evidence.notes)
    made = prediction.predict(ladder, evidence.fit, evidence.results, commit="")
    assert not any(name.startswith("w128") and name.endswith("10x") for name in made.losses)


def test_a_held_out_run_without_or_before_its_prediction_is_called_that(folder: Path):
    ladder = together()
    write_synthetic(ladder, folder, rho=RHO)
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None
    made = prediction.predict(ladder, evidence.fit, evidence.results, commit="")
    prediction.write_prediction(folder, made, ladder, evidence.results)
    write_synthetic(ladder, folder, rho=RHO, held_out=True, started="2020-01-01T00:00:00+00:00")
    assert any("before the prediction's date" in note for note in read_evidence(ladder, folder).notes)
    (folder / prediction.FILE).unlink()
    assert any("without a prediction" in note for note in read_evidence(ladder, folder).notes)
    with pytest.raises(RunError, match="has results already"):
        prediction.write_prediction(folder, made, ladder, read_results(folder))
    assert not (folder / prediction.FILE).exists()


def test_arms_without_a_pair_are_left_out_and_named(folder: Path):
    ladder = together()
    write_synthetic(ladder, folder, rho=RHO)
    for path in (folder / "results").glob("*+none+[12]+*"):
        path.unlink()
    for path in (folder / "results").glob("*+muon+0+*"):
        path.unlink()
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None and "muon" not in evidence.fit.spreads and "linear" in evidence.fit.spreads
    assert not evidence.fit.combinations
    assert any(note.startswith("muon is not fitted") for note in evidence.notes)
    assert any("are not there yet" in note for note in evidence.notes)


def test_one_rung_gives_a_report_without_a_fit(folder: Path):
    ladder = together()
    write_synthetic(ladder.with_rungs(ladder.rungs[:1]), folder, rho=RHO)
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is None and any("one rung shows no slope" in note for note in evidence.notes)
    assert len(loss_plots(evidence)) == 2 and not multiplier_plots(evidence)
    assert "## Losses" in as_text(evidence) and "## Multipliers" not in as_text(evidence)
    assert write_report(evidence, folder)[0].exists()


def test_two_rungs_take_no_floor_and_say_so(folder: Path):
    ladder = together()
    write_synthetic(ladder.with_rungs(ladder.rungs[:2]), folder, rho=RHO)
    evidence = read_evidence(ladder, folder)
    assert evidence.fit is not None and evidence.fit.curve.floor.value == 0.0
    assert any(note.startswith("E = 0 was taken") for note in evidence.notes)


def test_logits_are_drawn_where_arms_clip_differently(tmp_path: Path):
    ladder = qk_clip()
    write_synthetic(ladder, tmp_path, rho={})
    plots = logit_plots(read_evidence(ladder, tmp_path))
    assert [series.name for series in plots[0].series] == ["off", "tau100", "tau30"]
    assert [limit.value for limit in plots[0].thresholds] == [30.0, 100.0]
    other = together()
    write_synthetic(other, tmp_path / "other", rho={})
    assert not logit_plots(read_evidence(other, tmp_path / "other"))


def test_probes_are_shown_by_accuracy(tmp_path: Path):
    ladder = LADDERS["probe-mqar"]()
    for result in write_synthetic(ladder, tmp_path, rho={}):
        write_result(tmp_path, dataclasses.replace(result, bits_per_byte=None, accuracy=0.75, exact_match=0.5))
    evidence = read_evidence(ladder, tmp_path)
    assert "0.750 (0.500)" in as_text(evidence)
    (plot,) = accuracy_plots(evidence)
    assert list(plot.x_names) == [rung.name for rung in ladder.rungs]
    assert all(math.isclose(value, 0.75) for value in plot.series[0].y)


def test_what_stands_beside_the_loss_is_shown_where_it_was_measured(folder: Path):
    ladder = together()
    results = write_synthetic(ladder, folder, rho=RHO)
    assert report_tables.downstream(read_evidence(ladder, folder)) is None
    for result in results:
        if result.arm == "muon" and result.rung in ("w128", "w192"):
            found = {"domains": {"prose": 1.25, "python": 0.75}, "copying": {"16": 0.5}}
            write_result(folder, dataclasses.replace(result, **found))
    evidence = read_evidence(ladder, folder)
    shown = report_tables.downstream(evidence)
    place = shown.columns.index("muon")
    assert [(row[0], row[1], row[place]) for row in shown.rows] == [
        ("w128", "copies of 16 tokens", "0.500"), ("w192", "copies of 16 tokens", "0.500"),
        ("w192", "prose", "1.2500"), ("w192", "python", "0.7500"),
    ]  # fmt: skip
    assert all(cell == "-" for row in shown.rows for at, cell in enumerate(row[2:], start=2) if at != place)
    assert "## Beside the loss" in as_text(evidence) and "copies of 16 tokens" in render_page(page(evidence))


def test_names_and_notes_cannot_break_the_page_or_a_table(tmp_path: Path):
    base = together()
    hostile: Ladder = dataclasses.replace(
        base,
        question="<script>alert(1)</script> | x",
        arms=(*base.arms[:1], Arm(name="a-b_c", changes={**base.arms[1].changes, "data.corpus.text_field": "a|b<i>"})),
        combinations={},
    )
    write_synthetic(hostile, tmp_path, rho={})
    evidence = read_evidence(hostile, tmp_path)
    assert "<script>" not in render_page(page(evidence))
    table = [line for line in as_text(evidence).splitlines() if "text_field" in line]
    assert table and all("a\\|b" in line for line in table)


def test_what_was_tuned_is_said_for_every_arm_and_an_edge_is_called_one(folder: Path):
    ladder = together()
    bests = []
    falling = {step: 2.0 - 0.1 * step for step in range(-1, 6)}
    for arm, steps in (("none", {-1: 2.1, 0: 2.0, 1: 2.05}), ("muon", falling)):
        bests.append(sweep.best_of(ladder.rungs[0], ladder.arm(arm), steps, seed_sd=None))
    sweep.write_tuned(folder, sweep.merged(ladder, sweep.Tuned(), bests, []))
    write_synthetic(sweep.with_tuned(ladder, sweep.read_tuned(folder)), folder, rho=RHO)
    evidence = read_evidence(ladder, folder)
    rows = {(row[0], row[1]): row for row in report_tables.tuning(evidence).rows}
    used = {(result.arm, result.rung): f"{result.lr:.4g}" for result in evidence.results}
    assert all(rows[place][2] == lr for place, lr in used.items())
    assert rows["linear", "w128"][3] == "sweep of none" and rows["all", "w320"][3] == "sweep of muon on other rungs"
    assert rows["none", "w128"][6] == "no" and rows["muon", "w128"][6] == "YES"
    assert any(note.startswith("muon on w128 is at the edge") for note in evidence.notes)
    assert not any("not tuned" in note for note in evidence.notes)
    assert [plot.title for plot in sweep_plots(evidence)] == ["Learning rates of none", "Learning rates of muon"]


def test_a_prediction_needs_an_interval(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ladders" / "together"
    write_synthetic(dataclasses.replace(together(), seeds=(0,)), folder, rho=RHO)
    with pytest.raises(SystemExit):
        main(["ladder", "predict", "together"])
    assert "give --seed-sd" in capsys.readouterr().err and not (folder / prediction.FILE).exists()
    main(["ladder", "predict", "together", "--seed-sd", "0.004"])
    made = prediction.read_prediction(folder)
    assert made is not None and made.seed_sd == pytest.approx(0.004)
    assert all(each.low is not None and each.low < each.loss for each in made.predicted)
    # A second seed of the smallest rung shows the noise as well.
    ladder = together()
    write_synthetic(dataclasses.replace(ladder.with_rungs(ladder.rungs[:1]), seeds=(1,)), folder, rho=RHO)
    main(["ladder", "predict", "together"])
