"""Rounds fit into their time, hold every cell once, and learn from what has run; arrays and scripts start cells."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.cli import main
from perilune.ladder import rounds
from perilune.ladder.results import read_results
from perilune.ladder.slurm import array_script
from perilune.recipes.ladders import muon, tiny, together
from tests.ladder.synthetic import write_synthetic

ROOT = Path(__file__).parents[2]


@given(
    times=st.lists(st.floats(1, 100), min_size=1, max_size=30),
    workers=st.integers(1, 4),
    length=st.floats(60, 300),
)
def test_rounds_hold_every_cell_once_and_end_in_time(times: list[float], workers: int, length: float):
    cells = list(together().cells())[: len(times)]
    by_name = {cell.name: seconds for cell, seconds in zip(cells, times, strict=True)}
    found = rounds.split(cells, lambda cell: by_name[cell.name], seconds=length, num_workers=workers)
    assert sorted(name for each in found for name in each.cells) == sorted(by_name)
    for each in found:
        assert each.seconds <= length or (len(each.cells) == 1 and by_name[each.cells[0]] > length)


def test_a_larger_cell_is_expected_to_take_longer_and_begins_first():
    ladder = muon()
    estimate = rounds.estimator(ladder, [], num_workers=3)
    ordered = rounds.largest_first(list(ladder.cells()), estimate)
    assert [cell.rung.name for cell in ordered] == ["w256"] * 6 + ["w192"] * 6 + ["w128"] * 6
    assert ordered[0].seed == ordered[1].seed  # a pair
    assert all(estimate(cell) < 540 for held_out in (False, True) for cell in ladder.cells(held_out=held_out))


def test_times_come_from_cells_that_ran_beside_others(tmp_path: Path):
    ladder = muon()
    results = write_synthetic(ladder, tmp_path, rho={})  # 30 seconds for each horizon
    cell = next(ladder.cells())
    measured = rounds.estimator(ladder, results, num_workers=3)(cell)
    assert measured == pytest.approx(rounds.START_SECONDS + rounds.MARGIN * 60, rel=0.2)
    alone = [dataclasses.replace(result, ran_alone=True) for result in results]
    assert rounds.estimator(ladder, alone, num_workers=3)(cell) == rounds.estimator(ladder, [], num_workers=3)(cell)


def test_a_plan_shows_rounds(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(
        [
            "ladder",
            "plan",
            "tiny",
            "--h200",
            "--round-seconds",
            str(2.2 * rounds.START_SECONDS),
            "--workers",
            "2",
            "--json",
        ]
    )
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["rounds"]) == 4 and all(rung["is_assumed"] and rung["seconds"] > 0 for rung in plan["rungs"])
    main(["ladder", "plan", "tiny", "--h200"])
    shown = capsys.readouterr().out
    assert "1 rounds of at most 9 min 00 s" in shown and "assumed" in shown


def test_the_array_script_runs_the_cell_of_its_index(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["ladder", "slurm", "tiny", "--gpus", "0", "--set", "trainer.eval_rows=8"])
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-11" in script and "gpus" not in script
    (tmp_path / "array.sh").write_text(script)
    subprocess.run(["bash", "-n", "array.sh"], check=True)
    environment = {"SLURM_ARRAY_TASK_ID": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "array.sh"], check=True, capture_output=True, env=environment)
    found = {(result.rung, result.arm, result.seed) for result in read_results(tmp_path / "ladders" / "tiny")}
    assert found == {("w16", "muonclip", 0)}
    main(["ladder", "slurm", "tiny", "--set", "trainer.eval_rows=8"])
    left = capsys.readouterr().out
    assert "#SBATCH --array=0-10" in left and "w16+muonclip+0\n" not in left and "--gpus-per-task=1" in left


def test_a_finished_ladder_has_no_array():
    with pytest.raises(ValueError, match="is finished"):
        array_script("tiny", [], command=["perilune"], logs="logs", seconds=None)


def test_a_time_is_asked_for_where_speeds_are_known():
    script = array_script("tiny", list(tiny().cells()), command=["a b", "run"], logs="x y", seconds=600.0)
    assert "#SBATCH --time=20\n" in script and "exec 'a b' run --cell" in script


def round_script():
    spec = importlib.util.spec_from_file_location("ladder_round", ROOT / "benchmarks" / "ladder_round.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_round_begins_only_what_fits_and_hands_back_all_results(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = round_script()
    # Every cell of `tiny` is expected to take a process' start and next to nothing more.
    monkeypatch.setattr(rounds, "START_SECONDS", 1.0)
    common = {"ladders": ("tiny",), "seeds": (0,), "workers": 2, "set": ("trainer.eval_rows=8",)}
    known = write_synthetic(
        dataclasses.replace(tiny(), rungs=tiny().rungs[1:3], seeds=(0,)), tmp_path / "kept" / "tiny", rho={}
    )
    for path in (tmp_path / "kept" / "tiny" / "results").iterdir():
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"corpus": "", "fingerprint": _fingerprint(values)}))
    nothing = script.Settings(**common, seconds=20.5, results=tmp_path / "kept", out=tmp_path / "none")
    assert script.main(nothing) == 0
    assert len(read_results(tmp_path / "none" / "tiny")) == len(known)
    enough = script.Settings(**common, seconds=300.0, results=tmp_path / "kept", out=tmp_path / "back")
    assert script.main(dataclasses.replace(enough, arms=("muonclip",))) == 0
    some = [result for result in read_results(tmp_path / "back" / "tiny") if result.rung == "w16"]
    assert [result.arm for result in some] == ["muonclip"] * 2
    assert script.main(enough) == 0
    found = read_results(tmp_path / "back" / "tiny")
    assert len(found) == len(known) + 4 and {r.rung for r in found if r.ran_alone is False and r.corpus} == {"w16"}
    assert not (tmp_path / "back" / "tiny" / "cells").exists()  # results alone travel
    assert len(read_results(tmp_path / "kept" / "tiny")) == len(known)


def _fingerprint(values: dict) -> str:
    """Of the cell as the command has it, with its --set."""
    from perilune.cli import _with_set
    from perilune.ladder.run import legs

    ladder = tiny()
    changed = tuple(
        dataclasses.replace(rung, config=_with_set(rung.config, ["trainer.eval_rows=8"])) for rung in ladder.rungs
    )
    ladder = dataclasses.replace(ladder, rungs=changed)
    cells = {(cell.rung.name, cell.arm.name, cell.seed): cell for cell in ladder.cells()}
    found = legs(ladder, cells[values["rung"], values["arm"], values["seed"]])
    return next(leg.fingerprint for leg in found if leg.horizon.name == values["horizon"])
