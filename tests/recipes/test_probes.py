"""Probe recipes: every task, length and arm is a run, and the arms of a ladder are the same runs."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests.benchmark_scripts import load_script

from perilune.cli import main
from perilune.data.probes import TASKS
from perilune.ladder import run as ladder_run
from perilune.recipes import recipe
from perilune.recipes.probes import ARMS, LENGTHS, probe, probe_ladder
from perilune.train.batches import open_data
from perilune.train.config_file import to_plain


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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "probes")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "probes_report")


def test_the_grid_writes_rows_and_does_not_repeat_them(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "probes.json"
    settings = benchmark.Settings(
        tasks=("palindrome",), arms=("kda", "mla"), lengths=(8,), steps=2, minutes=5.0, small=True, results=results,
        set=("trainer.eval_every=1", "trainer.global_batch_rows=2", "trainer.eval_rows=2"),
    )  # fmt: skip
    cells = benchmark.next_cells(settings, [])
    rows = [benchmark.run_cell(cell, stop_at=2.0, deadline=float("inf")) for cell in cells]
    assert [row["arm"] for row in rows] == ["kda", "mla"] and all(len(row["curve"]) == 2 for row in rows)
    assert all(row["finished"] and row["ended_by"] == "steps" and 0 <= row["accuracy"] <= 1 for row in rows)
    assert all((row["short_steps"], row["tokens_per_step"]) == (0, 16) for row in rows)
    early = benchmark.run_cell(cells[0], stop_at=0.0, deadline=float("inf"))
    assert (early["ended_by"], early["steps"]) == ("accuracy", 1)
    late = benchmark.run_cell(cells[0], stop_at=2.0, deadline=0.0)
    assert (late["finished"], late["ended_by"]) == (False, "time")
    benchmark.write_rows(results, rows, {})
    benchmark.main(settings)
    assert "2 rows are there already" in capsys.readouterr().out and json.loads(results.read_text())["rows"] == rows
    assert benchmark.next_cells(settings, rows) == []
    assert len(benchmark.next_cells(replace(settings, lrs=(1e-3,)), rows)) == 2


def test_an_arm_that_fails_gets_short_problems_first_and_twice_the_steps(benchmark: ModuleType) -> None:
    settings = benchmark.Settings(
        tasks=("mqar",), arms=("mla_rope",), small=True, steps=3,
        set=("trainer.eval_every=6", "trainer.global_batch_rows=2", "trainer.eval_rows=2"),
    )  # fmt: skip
    plain = benchmark.next_cells(settings, [])
    rows = [benchmark.run_cell(cell, stop_at=2.0, deadline=float("inf")) for cell in plain]
    (cell,) = benchmark.next_cells(settings, rows)
    assert (plain[0].config.data.probe.short_first, plain[0].config.trainer.steps) == (0, 3)
    assert (cell.config.data.probe.short_first, cell.config.trainer.steps) == (3 * 2, 6)
    row = benchmark.run_cell(cell, stop_at=2.0, deadline=float("inf"))
    assert (row["short_steps"], row["steps"], row["tokens_per_step"]) == (3, 6, 64)
    assert benchmark.next_cells(settings, [*rows, row]) == []


def test_rows_measured_without_short_problems_stay_valid(benchmark: ModuleType) -> None:
    """Their fingerprints are in files that took hours of a GPU."""
    cell = benchmark.cell_of(benchmark.Settings(), "mqar", 256, "mla", benchmark.Attempt(0.0005), 0)
    plain = to_plain(cell.config)
    plain["data"]["probe"].pop("short_first")
    for name in ("device", "log_every", "micro_batch_rows"):
        plain["trainer"].pop(name)
    expected = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    assert benchmark.fingerprint(cell.config) == expected
    short = benchmark.cell_of(benchmark.Settings(), "mqar", 256, "mla", benchmark.Attempt(0.0005, True), 0)
    assert benchmark.fingerprint(short.config) != expected


def _all_run(benchmark: ModuleType, accuracy) -> list[tuple[int, float, bool]]:
    """(length, lr, short problems first) of every cell that a call would run, in order, where this accuracy comes
    out."""
    settings = benchmark.Settings(tasks=("mqar",), arms=("kda",), lengths=(256, 512, 1024))
    rows, order = [], []
    while cells := benchmark.next_cells(settings, rows):
        cell = cells[0]
        place = cell.length, cell.config.optimizer.lr, bool(cell.config.data.probe.short_first)
        found = {"fingerprint": benchmark.fingerprint(cell.config), "finished": True, "steps": 100}
        rows.append({**found, "accuracy": accuracy(*place)})
        order.append(place)
    assert len(order) == len(set(order))
    return order


@pytest.mark.parametrize(
    "accuracy, run",
    [
        (lambda length, lr, short: 1.0, [(256, 0.0015, False), (512, 0.0015, False), (1024, 0.0015, False)]),
        (
            lambda length, lr, short: 1.0 if lr == 0.005 else 0.1,
            [
                *((256, lr, short) for lr, short in ((0.0015, False), (0.0015, True), (0.0005, False), (0.005, False))),
                *((length, 0.005, False) for length in (512, 1024)),
            ],
        ),
        (
            lambda length, lr, short: 0.3,
            [
                *((256, 0.0015, short) for short in (False, True)),
                *((256, lr, short) for short in (False, True) for lr in (0.0005, 0.005)),
            ],
        ),
        (
            lambda length, lr, short: float(short),
            [(256, 0.0015, False), *((length, 0.0015, True) for length in (256, 512, 1024))],
        ),
        (
            lambda length, lr, short: {256: 0.6, 512: 0.3}[length] if short else 0.1,
            [
                *((256, 0.0015, False), (256, 0.0015, True), (512, 0.0015, True)),
                *((256, lr, False) for lr in (0.0005, 0.005)),
                *((256, lr, True) for lr in (0.0005, 0.005)),
                *((512, lr, True) for lr in (0.0005, 0.005)),
            ],
        ),
        (
            lambda length, lr, short: {256: 1.0, 512: 0.7, 1024: 0.2}[length],
            [
                *((length, 0.0015, False) for length in (256, 512, 1024)),
                *((512, lr, short) for lr, short in ((0.0005, False), (0.005, False), (0.0015, True))),
                *((1024, lr, short) for lr, short in ((0.0005, False), (0.005, False), (0.0015, True))),
            ],
        ),
        (
            lambda length, lr, short: 1.0 if length == 256 or lr == 0.0005 else 0.2,
            [
                *((256, 0.0015, False), (512, 0.0015, False), (512, 0.0005, False), (1024, 0.0015, False)),
                *((512, lr, short) for lr, short in ((0.005, False), (0.0015, True))),
                *((1024, lr, short) for lr, short in ((0.0005, False), (0.005, False), (0.0015, True))),
            ],
        ),
    ],
    ids=[
        "solved",
        "another rate",
        "failed",
        "short problems first",
        "half solved",
        "fades",
        "longer needs a lower rate",
    ],
)
def test_longer_rows_follow_from_shorter_ones_and_other_attempts_come_last(
    benchmark: ModuleType, accuracy, run
) -> None:
    assert _all_run(benchmark, accuracy) == run


def _row(arm: str, length: int, accuracy: float, **changes) -> dict:
    common = {"task": "mqar", "seed": 0, "lr": 0.0015, "steps": 1000, "finished": True}
    return {**common, "arm": arm, "length": length, "accuracy": accuracy, **changes}


def test_the_report_shows_the_best_attempt_its_tokens_and_what_helped(report: ModuleType, tmp_path: Path) -> None:
    rows = [
        _row("kda", 256, 0.2, lr=0.0005),
        _row("kda", 256, 0.995, steps=500),
        _row("kda", 256, 0.999, lr=0.005, steps=900),
        _row("kda", 512, 0.8, finished=False),
        _row("mla", 256, 0.07),
        _row("mla", 256, 0.991, steps=2000, short_steps=1500, tokens_per_step=32_768),
        _row("hybrid", 256, 0.4),
        _row("hybrid", 256, 0.9, lr=0.005, finished=False),
        _row("hybrid", 512, None, finished=False),
    ]
    lines = report.table(rows)
    assert lines[0] == "| task | attention | 256 | 512 |"
    assert "| mqar | KDA | 99.5%, 16.4M | 80.0%, 32.8M ... |" in lines, "of attempts that solve it, the cheapest"
    assert "| mqar | MLA, no positions | 99.1%, 65.5M* | - |" in lines
    assert "| mqar | KDA, then MLA | 40.0%, 32.8M | - |" in lines, "a finished attempt before one that was stopped"
    assert "| mqar | a blind guess | 6.2% | 3.1% |" in lines
    text = "\n".join(lines)
    assert "at most 32.8M or 65.5M with *;" in text and "*: up to 49.2M of them" in text
    assert "*:" not in "\n".join(report.table(rows[:4]))
    picture, results = tmp_path / "probes.png", tmp_path / "probes.json"
    results.write_text(json.dumps({"rows": rows}))
    report.main(report.Settings(results=results, png=picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"run benchmarks/probes.py first"):
        report.main(report.Settings(results=tmp_path / "other.json"))


@pytest.mark.parametrize("task", TASKS)
def test_a_blind_guess_is_better_than_one_of_all_symbols_and_far_from_an_answer(report: ModuleType, task: str) -> None:
    guesses = [report.blind(task, length) for length in LENGTHS]
    assert guesses == sorted(guesses, reverse=True) and guesses[-1] > 4 / 1024 and guesses[0] < 0.07


def test_a_probe_has_no_corpus_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "mqar"])
    assert "it has no corpus" in capsys.readouterr().err
