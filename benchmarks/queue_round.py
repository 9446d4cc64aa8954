"""The head of the queue on a machine that is there for minutes and forgets everything: as many lines as fit.

    python benchmarks/queue_round.py show                                                          lines and minutes
    python benchmarks/queue_round.py run --seconds 560 --bundle OUT/results.tar.gz                 from the head on
    python benchmarks/queue_round.py run --seconds 560 --bundle OUT/results.tar.gz --lines 1 4 5   these, in this order
    python benchmarks/queue_round.py run --seconds 560 --bundle OUT/results.tar.gz --at-a-time 3   small ones at once
    python benchmarks/queue_round.py take results.tar.gz                                           at home

A line is begun if its minutes fit into what is left, and if the lines that it names in `after` are done; those that are
not part of the round count as done. One that is to be `alone`, since it is timed, is begun when all lines before it are
over, however they ended, and those after it wait for it. One that ends with status 75 (there is more to do) is given
again in the time that its minutes promised. Lines side by side share the cores (OMP_NUM_THREADS). At the end of the
time what still runs is asked to stop, which saves, and ended after a while. Whenever a line is over, the bundle holds
all files of benchmarks/results and models that are new or changed since the round began, complete or absent, so that a
round that is cut off brings home what was done. `take` puts them into this folder, and refuses what lies elsewhere.
Output of line N goes to line-N.log beside the bundle.
"""

import hashlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
BROUGHT_HOME = ("benchmarks/results", "models")
AGAIN = 75
"""Status of a command that has more to do: EX_TEMPFAIL."""
RESERVE_SECONDS = 25.0
"""Of the round, for whoever is asked to stop, and for the bundle."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[Literal["run", "take", "show"]]
    file: tyro.conf.Positional[Path | None] = None
    """For take: the bundle."""
    seconds: float = 540.0
    """All of the round."""
    bundle: Path = Path("round/results.tar.gz")
    lines: tuple[int, ...] = ()
    """Numbers as `show` gives them; none: all, from the head on."""
    at_a_time: int = 1
    queue: Path = ROOT / "benchmarks" / "queue.toml"
    folder: Path = ROOT
    """Where commands run and bundles are taken to."""


@dataclass(frozen=True, kw_only=True)
class Line:
    number: int
    command: str
    minutes: float
    result: str
    name: str = ""
    """What other lines call it in `after`."""
    after: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    line: Line
    how: str
    seconds: float


def read_queue(path: Path) -> list[Line]:
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("experiment", [])
    return [
        Line(number=number, **{**entry, "after": tuple(entry.get("after", ()))})
        for number, entry in enumerate(entries, start=1)
    ]


def chosen(settings: Settings) -> list[Line]:
    lines = read_queue(settings.queue)
    unknown = [number for number in settings.lines if not 1 <= number <= len(lines)]
    if unknown:
        raise SystemExit(f"--lines names {unknown}: the queue has lines 1 to {len(lines)}")
    return [lines[number - 1] for number in settings.lines] or lines


# Running --------------------------------------------------------------------------------------------------------------


class Round:
    """Lines one after the other, or some side by side, until the time is over."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.end = time.monotonic() + settings.seconds - RESERVE_SECONDS
        self.before = fingerprints(settings.folder)
        self._bundling = threading.Lock()
        self._changed = threading.Condition()
        self._waiting = chosen(settings)
        self._running: list[Line] = []
        self._ended: list[Ended] = []

    def run(self) -> list[Ended]:
        """What came of every line, in their order."""
        self.settings.bundle.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.settings.at_a_time) as pool:
            for lane in [pool.submit(self._lane) for _ in range(self.settings.at_a_time)]:
                lane.result()
        order = [line.number for line in chosen(self.settings)]
        return sorted(self._ended, key=lambda ended: order.index(ended.line.number))

    def _lane(self) -> None:
        while (line := self._next()) is not None:
            ended = Ended(line=line, how="failed", seconds=0.0)
            try:
                ended = self.line(line)
            finally:  # others may wait for it
                with self._changed:
                    self._running.remove(line)
                    self._ended.append(ended)
                    self._changed.notify_all()

    def _next(self) -> Line | None:
        """The first line that has not to wait for others, when there is one; None when none is left."""
        with self._changed:
            while self._waiting:
                ahead = {line.name for line in (*self._waiting, *self._running)} - {""}
                allowed = self._allowed()
                ready = [line for line in allowed if not ahead & set(line.after) or self._missing(line)]
                if not ready and not self._running:
                    ready = allowed  # they wait for each other
                if ready:
                    line = ready[0]
                    self._waiting.remove(line)
                    self._running.append(line)
                    return line
                self._changed.wait()
            return None

    def _allowed(self) -> list[Line]:
        """Of those that wait, the ones before the first that is to be alone; that one, when nothing else runs."""
        if any(line.alone for line in self._running):
            return []
        before = list(itertools.takewhile(lambda line: not line.alone, self._waiting))
        return before or ([] if self._running else self._waiting[:1])

    def _missing(self, line: Line) -> list[str]:
        """Lines that it needs and that ended otherwise than done."""
        return [ended.line.name for ended in self._ended if ended.how != "done" and ended.line.name in line.after]

    def line(self, line: Line) -> Ended:
        began, how = time.monotonic(), "no time left"
        with self._changed:
            missing = self._missing(line) or [each.name for each in self._waiting if each.name in line.after]
        if missing:
            how = f"not begun, {missing[0]} is not done"
        while not missing and (60 * line.minutes <= self.end - time.monotonic() or how == "again"):
            status = self._command(line)
            how = {0: "done", AGAIN: "again", None: "stopped"}.get(status, f"failed with status {status}")
            if how != "again" or time.monotonic() >= min(self.end, began + 60 * line.minutes):
                break
        seconds = time.monotonic() - began
        if how != "no time left" and not missing:
            self._bundle()
        said = f"line {line.number}: {how}, {seconds:.0f} s"
        print(said, flush=True)
        return Ended(line=line, how=how, seconds=seconds)

    def _bundle(self) -> None:
        """A file that another line is writing may be gone or short meanwhile: the next bundle has it."""
        with self._bundling:
            try:
                write_bundle(self.settings.bundle, self.settings.folder, self.before)
            except OSError as error:
                print(f"no bundle this time: {error}", flush=True)

    def _command(self, line: Line) -> int | None:
        """Its status; None where it had to be stopped."""
        # The interpreter that runs this, under the name that the queue gives it. Asked to stop, the shell waits for it.
        command = f'trap : TERM; python() {{ {shlex.quote(sys.executable)} "$@"; }}; {line.command}'
        log = self.settings.bundle.with_name(f"line-{line.number}.log")
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["bash", "-c", command], cwd=self.settings.folder, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, env=own_environment(self.settings.at_a_time),
            )  # fmt: skip
            try:
                return process.wait(max(0.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(0.6 * RESERVE_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                return None


def own_environment(at_a_time: int) -> dict[str, str]:
    """Lines side by side share the cores: ten processes, each with threads for all of them, had a load of 31 on 16."""
    share = {} if at_a_time == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_a_time))}
    return {**share, **os.environ}


# What comes home ------------------------------------------------------------------------------------------------------


def kept_files(folder: Path) -> Iterator[Path]:
    for name in BROUGHT_HOME:
        paths = sorted((folder / name).rglob("*"))
        yield from (path for path in paths if path.is_file() and not path.name.startswith("."))


def fingerprints(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _hash(path) for path in kept_files(folder)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bundle(bundle: Path, folder: Path, before: Mapping[str, str]) -> list[str]:
    """All that is new or changed; the names of it. Complete or as it was."""
    now = fingerprints(folder)
    names = [name for name, mark in now.items() if before.get(name) != mark]
    partial = bundle.with_name(f".{bundle.name}")
    with tarfile.open(partial, "w:gz") as archive:
        for name in names:
            archive.add(folder / name, arcname=name)
    os.replace(partial, bundle)
    return names


def take(bundle: Path, folder: Path) -> list[str]:
    """Put what a bundle holds into `folder`; SystemExit, before anything is written, if it holds something else."""
    with tarfile.open(bundle, "r:gz") as archive:
        members = archive.getmembers()
        for member in members:
            path = (folder / member.name).resolve()
            if not member.isfile() or not any(path.is_relative_to((folder / each).resolve()) for each in BROUGHT_HOME):
                raise SystemExit(
                    f"{bundle} holds {member.name!r}, expected files of {' and '.join(BROUGHT_HOME)} alone"
                )
        archive.extractall(folder, members=members, filter="data")
    return [member.name for member in members]


def told(lines: Sequence[Line]) -> str:
    rows = [f"{line.number:4}  {line.minutes:4g} min  {line.command}" for line in lines]
    return "\n".join([*rows, f"{sum(line.minutes for line in lines):g} minutes in all"])


def main(settings: Settings) -> None:
    if settings.step == "show":
        print(told(chosen(settings)))
    elif settings.step == "take":
        if settings.file is None or not settings.file.exists():
            raise SystemExit(f"take needs the bundle of a round, got {settings.file}")
        for name in take(settings.file, settings.folder):
            print(name)
    else:
        ended = Round(settings).run()
        counts = {how: sum(each.how == how for each in ended) for how in dict.fromkeys(each.how for each in ended)}
        print(", ".join(f"{count} {how}" for how, count in counts.items()) + f"; {settings.bundle}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
