"""Plans count, refuse what cannot be, and the command shows both."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from perilune.cli import main
from perilune.ladder import cost
from perilune.ladder.design import Horizon
from perilune.ladder.plan import make_plan
from perilune.ladder.results import Result, write_result
from perilune.ladder.speed import known_speeds, measure_speed
from perilune.recipes.ladders import tiny


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_counts_what_will_be_trained():
    ladder = tiny()
    plan = make_plan(ladder, speeds={(rung.name, arm.name): 1e3 for rung in ladder.rungs for arm in ladder.arms})
    assert plan.num_cells == 16 and not plan.problems
    for rung, row in zip(ladder.rungs, plan.rungs, strict=True):
        costs = [cost.cost(ladder, rung, arm) for arm in ladder.arms]
        assert row.flops == pytest.approx(2 * sum(each.flops for each in costs))
        assert row.seconds == pytest.approx(2 * sum(each.trained_tokens for each in costs) / 1e3)
        assert costs[0].tokens[-1] < costs[0].trained_tokens < sum(costs[0].tokens)  # decays are trained apart
        assert row.tokens[-1] >= 0.5 * row.parameters > row.tokens[-1] - 8 * 64


def test_too_many_epochs_and_too_little_memory_are_refused():
    ladder = dataclasses.replace(tiny(), horizons=(Horizon(name="long", tokens_per_parameter=50.0),))
    plan = make_plan(ladder, available_bytes=1000)
    assert sum("epochs of the corpus" in problem for problem in plan.problems) == 4
    assert sum("GiB there are" in problem for problem in plan.problems) == 4


def test_speeds_come_from_runs_that_had_the_device_alone_first():
    common = dict(
        rung="w16", arm="a", horizon="h", loss=1.0, bits_per_byte=1.0, tokens=1, flops=1.0, baseline_flops=1.0,
        parameters=1, epochs=0.1, skipped_steps=0, lr=0.1, fingerprint="", seconds=1.0,
    )  # fmt: skip
    alone = Result(**common, seed=0, tokens_per_s=100.0, ran_alone=True)
    crowded = Result(**common, seed=1, tokens_per_s=30.0, ran_alone=False)
    assert known_speeds([alone, crowded], {}) == known_speeds([crowded, alone], {}) == {("w16", "a"): 100.0}
    assert known_speeds([alone], {("w16", "a"): [80.0, 90.0, 130.0]}) == {("w16", "a"): 90.0}


def test_speed_is_measured_on_steps_of_the_run_itself():
    config = next(tiny().cells()).config()
    assert measure_speed(config, torch.device("cpu"), steps=1) > 0


def test_the_command_plans_and_runs_a_cell(capsys: pytest.CaptureFixture[str]):
    main(["ladder", "plan", "tiny", "--json"])
    assert json.loads(capsys.readouterr().out)["num_cells"] == 16
    main(["ladder", "plan", "tiny"])
    assert "not known" in capsys.readouterr().out
    main(["ladder", "run", "tiny", "--cell", "w16+muonclip+1", "--json"])
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert [(result["rung"], result["arm"], result["seed"]) for result in results] == [("w16", "muonclip", 1)] * 2
    main(["ladder", "run", "tiny", "--cell", "w16+muonclip+1"])
    captured = capsys.readouterr()
    assert "cell 1 of 1: w16+muonclip+1" in captured.err and "validation loss" in captured.out


def test_the_command_fits_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ladder, folder = tiny(), tmp_path / "ladders" / "tiny"
    for cell in ladder.cells():
        costs = cost.cost(ladder, cell.rung, cell.arm)
        for horizon, tokens in zip(cost.horizon_names(ladder), costs.tokens, strict=True):
            flops = costs.flops_per_token * tokens
            rho = 2.0 if cell.arm.name == "muonclip" else 1.0
            noise = 0.01 * (-1) ** cell.seed * (1.5 if rho > 1 else 1.0)
            write_result(
                folder,
                Result(
                    rung=cell.rung.name, arm=cell.arm.name, seed=cell.seed, horizon=horizon,
                    loss=1.5 + (1.0 if horizon == "half" else 1.1) * (rho * flops / 1e9) ** -0.3 + noise,
                    bits_per_byte=1.0, tokens=tokens, flops=flops, baseline_flops=flops, parameters=costs.parameters,
                    epochs=0.1, tokens_per_s=1000.0 / rho, ran_alone=True, skipped_steps=0, lr=0.1, fingerprint="",
                    seconds=1.0,
                ),
            )  # fmt: skip
    main(["ladder", "fit", "tiny", "--json"])
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert arm["rho"]["low"] < 2.0 < arm["rho"]["high"] < 2.5
    assert arm["wall_clock"]["value"] == pytest.approx(arm["rho"]["value"] / 2)
    main(["ladder", "fit", "tiny"])
    shown = capsys.readouterr().out
    assert "wall-clock" in shown and "own seeds" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ladder"], "STEP is missing"),
        (["ladder", "fit", "tiny"], "has no results yet"),
        (["ladder", "run", "tiny", "--workers", "0"], "expected 1 or more"),
        (["ladder", "climb", "tiny"], "unknown step 'climb'"),
        (["ladder", "run", "tinny"], "did you mean 'tiny'"),
        (["ladder", "run", "tiny", "--cell", "w16+muon+1"], "is not in the ladder"),
        (["ladder", "plan", "tiny", "--set", "data.corpus.sauce=1"], "did you mean 'source'"),
        (["ladder", "plan", "tiny", "--set", "data.corpus.num_documents=20"], "epochs of the corpus"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
