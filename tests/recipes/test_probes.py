"""Probe recipes: every task, length and arm is a run, and the arms of a ladder are the same runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import probes as benchmark

from perilune.cli import main
from perilune.data.probes import TASKS
from perilune.ladder import run as ladder_run
from perilune.recipes import recipe
from perilune.recipes.probes import ARMS, LENGTHS, probe, probe_ladder
from perilune.train.batches import open_data


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_rows_at_every_length(task: str) -> None:
    assert recipe(task).data.probe == probe(task).data.probe
    for length in LENGTHS:
        config = probe(task, length=length)
        batch = open_data(config.data, seed=0).train.batch(0, 1)
        assert len(batch.tokens) == length and batch.num_targets >= length // 16
        assert config.trainer.global_batch_rows * length == 32_768


def test_arms_are_the_models_their_names_say() -> None:
    models = {arm: probe("mqar", arm=arm).model for arm in ARMS}
    assert all(model.num_hidden_layers == 2 and model.kda.num_heads == 2 for model in models.values())
    assert models["kda"].layer_types == ("kda", "kda") and models["mla"].layer_types == ("mla", "mla")
    assert models["kda_head_decay"].kda.decay == "head" and models["kda_no_conv"].kda.short_conv_kernel_size == 1
    assert models["mla"].mla.rope is None and models["mla_rope"].mla.rope is not None
    for wrong in ({"task": "maze"}, {"task": "mqar", "arm": "rnn"}):
        with pytest.raises(ValueError, match="known are"):
            probe(**wrong)


def test_cells_of_the_probe_ladder_are_the_recipes() -> None:
    ladder = probe_ladder("stack", steps=100)
    cells = {(cell.rung.name, cell.arm.name): cell.config() for cell in ladder.cells()}
    assert len(cells) == len(LENGTHS) * len(ARMS)
    for length in LENGTHS:
        for arm in ARMS:
            expected, found = probe("stack", length=length, arm=arm), cells[f"t{length}", arm]
            assert (found.model, found.data, found.optimizer) == (expected.model, expected.data, expected.optimizer)
    steps = {ladder_run.cost.schedule(ladder, rung).ends for rung in ladder.rungs}
    assert steps == {(100,)}


def test_the_grid_writes_rows_and_does_not_repeat_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "probes.json"
    settings = benchmark.Settings(
        tasks=("palindrome",), arms=("kda", "mla"), lengths=(8,), steps=2, minutes=5.0, small=True, results=results,
        set=("trainer.eval_every=1", "trainer.global_batch_rows=2", "trainer.eval_rows=2"),
    )  # fmt: skip
    cells = benchmark.next_cells(settings, [])
    rows = [benchmark.run_cell(cell, stop_at=2.0, deadline=float("inf")) for cell in cells]
    assert [row["arm"] for row in rows] == ["kda", "mla"] and all(len(row["curve"]) == 2 for row in rows)
    assert all(row["finished"] and row["ended_by"] == "steps" and 0 <= row["accuracy"] <= 1 for row in rows)
    early = benchmark.run_cell(cells[0], stop_at=0.0, deadline=float("inf"))
    assert (early["ended_by"], early["steps"]) == ("accuracy", 1)
    late = benchmark.run_cell(cells[0], stop_at=2.0, deadline=0.0)
    assert (late["finished"], late["ended_by"]) == (False, "time")
    benchmark.write_rows(results, rows, {})
    benchmark.main(settings)
    assert "2 rows are there already" in capsys.readouterr().out and json.loads(results.read_text())["rows"] == rows
    assert benchmark.next_cells(settings, rows) == []
    assert len(benchmark.next_cells(replace(settings, lrs=(1e-3,)), rows)) == 2


def _all_run(settings: benchmark.Settings, accuracy) -> list[tuple[int, float]]:
    """(length, lr) of every cell that a call would run, in order, where `accuracy(length, lr)` comes out."""
    rows, order = [], []
    while cells := benchmark.next_cells(settings, rows):
        cell = cells[0]
        lr = cell.config.optimizer.lr
        found = {"fingerprint": benchmark.fingerprint(cell.config), "finished": True, "steps": 100}
        rows.append({**found, "accuracy": accuracy(cell.length, lr)})
        order.append((cell.length, lr))
    return order


@pytest.mark.parametrize(
    "accuracy, run",
    [
        (lambda length, lr: 1.0, [(256, 0.0015), (512, 0.0015), (1024, 0.0015)]),
        (
            lambda length, lr: 1.0 if lr == 0.005 else 0.1,
            [(256, 0.0015), (256, 0.0005), (256, 0.005), (512, 0.005), (1024, 0.005)],
        ),
        (lambda length, lr: 0.3, [(256, 0.0015), (256, 0.0005), (256, 0.005)]),
        (
            lambda length, lr: {256: 1.0, 512: 0.7, 1024: 0.2}[length],
            [(256, 0.0015), (512, 0.0015), (1024, 0.0015), (512, 0.0005), (512, 0.005), (1024, 0.0005), (1024, 0.005)],
        ),
        (
            lambda length, lr: 1.0 if length == 256 or lr == 0.0005 else 0.2,
            [(256, 0.0015), (512, 0.0015), (512, 0.0005), (1024, 0.0015), (512, 0.005)],
        ),
    ],
    ids=["solved", "another rate", "failed", "fades", "longer needs a lower rate"],
)
def test_longer_rows_follow_from_shorter_ones_and_other_rates_come_last(accuracy, run) -> None:
    settings = benchmark.Settings(tasks=("mqar",), arms=("kda",), lengths=(256, 512, 1024))
    found = _all_run(settings, accuracy)
    assert found[: len(run)] == run and len(found) == len(set(found))
    assert set(found) - set(run) <= {(1024, 0.0005), (1024, 0.005)}


def test_a_probe_has_no_corpus_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "mqar"])
    assert "it has no corpus" in capsys.readouterr().err
