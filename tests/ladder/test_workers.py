"""Cells side by side in processes of their own."""

import sys
import time
from pathlib import Path

import pytest

from perilune.cli import main
from perilune.ladder import workers
from perilune.ladder.results import read_results
from perilune.ladder.workers import run_side_by_side
from perilune.recipes.ladders import tiny
from perilune.train import RunError


def test_the_command_starts_a_process_for_each_unfinished_cell(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = {}

    def two_of_them(cells, folder, *, command, **options):
        seen["cells"], seen["workers"] = [cell.name for cell in cells], options["num_workers"]
        run_side_by_side(cells[:2], folder, command=command, **options)

    monkeypatch.setattr(workers, "run_side_by_side", two_of_them)
    main(["ladder", "run", "tiny", "--workers", "2", "--seeds", "3", "--set", "trainer.eval_rows=8"])
    assert len(seen["cells"]) == 6 and seen["workers"] == 2
    results = read_results(tmp_path / "ladders" / "tiny")
    assert sorted((x.rung, x.arm, x.seed) for x in results) == [("w16", "adamw", 3)] * 2 + [("w16", "muonclip", 3)] * 2
    assert not any(result.ran_alone for result in results)
    assert "cell 2 of 6: w16+muonclip+3" in capsys.readouterr().err


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_cell_that_fails_is_named_and_the_others_finish(tmp_path: Path):
    cells = list(tiny().cells())[:3]
    done = tmp_path / "done"
    done.mkdir()

    def command(cell):
        if cell is cells[1]:
            return script("import sys; print('first'); sys.exit('out of luck')")
        return script(f"open({str(done / cell.name)!r}, 'w')")

    with pytest.raises(RunError, match=r"1 of 3 cells failed.*exit code 1\): out of luck"):
        run_side_by_side(cells, tmp_path, command=command, num_workers=2)
    assert sorted(path.name for path in done.iterdir()) == sorted([cells[0].name, cells[2].name])


def test_an_interrupt_asks_the_workers_to_save_and_waits_for_them(tmp_path: Path):
    saved = tmp_path / "saved"
    ready = tmp_path / "ready"
    text = (
        "import signal, sys, time\n"
        f"def save(*_): open({str(saved)!r}, 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(60)"
    )

    cells = list(tiny().cells())[:2]

    def command(cell):
        if cell is cells[1]:
            while not ready.exists():
                time.sleep(0.05)
            raise KeyboardInterrupt
        return script(text)

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(cells, tmp_path, command=command, num_workers=2)
    assert saved.exists()


def test_workers_are_spread_over_devices(tmp_path: Path):
    cells = list(tiny().cells())[:4]
    text = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.5)"
    run_side_by_side(cells, tmp_path, command=lambda cell: script(text), num_workers=4, devices=("0", "1"))
    logs = [(tmp_path / "logs" / f"{cell.name}.txt").read_text().strip() for cell in cells]
    assert sorted(logs) == ["0", "0", "1", "1"]


def test_no_cell_begins_that_would_not_end_in_time_and_a_later_one_that_does_goes_first(tmp_path: Path):
    cells = list(tiny().cells())[:3]
    ended = []
    left = run_side_by_side(
        cells,
        tmp_path,
        command=lambda cell: script("pass"),
        num_workers=1,
        seconds=60.0,
        estimate=lambda cell: 100.0 if cell is cells[0] else 1.0,
        on_end=lambda cell: ended.append(cell),
    )
    assert left == [cells[0]] and ended == cells[1:]


def test_what_still_runs_at_the_deadline_is_stopped(tmp_path: Path):
    cells = list(tiny().cells())[:2]
    left = run_side_by_side(
        cells, tmp_path, command=lambda cell: script("import time; time.sleep(600)"), num_workers=2, seconds=1.0
    )
    assert left == cells
