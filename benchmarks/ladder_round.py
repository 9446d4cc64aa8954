"""A round of scaling ladders on a machine that is there for minutes: as many unfinished cells as surely fit.

    python benchmarks/ladder_round.py muon --seconds 540 --seeds 0 --step sweep --arms adamw muonclip
    python benchmarks/ladder_round.py muon together attention --seconds 540 --seeds 0
    python benchmarks/ladder_round.py muon --seconds 540 --seeds 0 --step held-out
    python benchmarks/ladder_round.py muon --seconds 540 --step speed

Ladders are taken in the order given, while time is left; a run that two of them ask for is trained once. Cells go side
by side, largest first; none begins that is not expected to end in time (ladder/rounds.py), and what still runs when the
time is over is stopped. A finished cell is never lost: its result is a file as soon as it is there. Checkpoints lie in
a scratch folder that nobody has to keep.

Results are small JSON files under RESULTS/NAME. With --out they are copied there first and all new ones are written
there, so that a machine which hands back one folder hands back everything.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from perilune.cli import main as perilune

RESERVE_SECONDS = 20.0  # for stopping what still runs, and for the end of this process


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One round."""

    ladders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names, as `perilune ladder` knows them."""
    seconds: float
    """Time for all of it, from now on."""
    step: Literal["run", "held-out", "sweep", "speed"] = "run"
    results: Path = Path("benchmarks/results/ladder")
    out: Path | None = None
    """Work on a copy of the results here instead."""
    workers: int = 3
    """Cells at a time."""
    seeds: tuple[int, ...] = ()
    """In place of the ladders' own."""
    arms: tuple[str, ...] = ()
    """Arms to run, to sweep or to time; when none is named all are run or timed, and the baseline is swept."""
    rungs: tuple[str, ...] = ()
    """Rungs to time; when none is named all are."""
    set: tuple[str, ...] = ()
    """Fields of every rung: --set data.corpus.source=PATH"""
    commit: str | None = None
    """The commit to name in results, where there is no git."""


def commands(settings: Settings, folder: Path, scratch: Path, name: str, seconds: float) -> list[str]:
    """The arguments of `perilune` for one ladder."""
    shared = ["--folder", str(folder)]
    shared += ["--set", *settings.set] if settings.set else []
    shared += ["--seeds", *map(str, settings.seeds)] if settings.seeds else []
    shared += ["--commit", settings.commit] if settings.commit else []
    if settings.step == "speed":
        chosen = [*(["--rungs", *settings.rungs] if settings.rungs else [])]
        return ["ladder", "speed", name, *shared, *chosen, *(["--arms", *settings.arms] if settings.arms else [])]
    own = ["--workers", str(settings.workers), "--seconds", f"{seconds:.0f}", "--scratch", str(scratch), "--quiet"]
    own += ["--arms", *settings.arms] if settings.arms else []
    if settings.step == "sweep":
        return ["ladder", "sweep", name, *shared, *own]
    return ["ladder", "run", name, *shared, *own, *(["--held-out"] if settings.step == "held-out" else [])]


def main(settings: Settings) -> int:
    """The number of ladders that had to be left with an error."""
    deadline = time.monotonic() + settings.seconds - RESERVE_SECONDS
    folder = settings.results if settings.out is None else settings.out
    if settings.out is not None and settings.results.is_dir():
        shutil.copytree(settings.results, settings.out, dirs_exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
        for name in settings.ladders:
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"{name}: no time left", flush=True)
                continue
            try:
                perilune(commands(settings, folder, Path(scratch), name, left))
            except SystemExit as stopped:
                failed += stopped.code not in (0, None)
    return failed


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
