"""Parts of a benchmark that fail alone, within one limit of time, with their rows in one file.

    session = Session(settings.seconds, results_file("serve_prefill", None, tiny=False), settings.commit, device)
    session.run("kda", measure_kda)
    sys.exit(session.close())

Rows have the format of perilune.bench.rows and are written as they come. A part that fails says so with its traceback,
keeps the rows it had, and the next one runs; a part for which no time is left is not begun. `close` prints all rows as
a table and returns the exit code: 1 when a part failed.
"""

import gc
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from perilune.bench.rows import print_table
from perilune.bench.session import Bench
from perilune.train.environment import describe_environment


class Session:
    def __init__(self, seconds: float, results: Path, commit: str, device: torch.device) -> None:
        made = describe_environment(device)
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.device = device
        self.results = results
        self.bench = Bench(device, path=results, commit=commit or made.get("commit", ""))
        self.failed: list[str] = []
        print(", ".join(f"{name} {value}" for name, value in made.items()), flush=True)

    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def run(self, name: str, part: Callable[[], None]) -> None:
        if self.left() <= 0:
            self.note(f"{name}: not begun, the time is over")
            return
        began = time.monotonic()
        try:
            part()
        except Exception:
            self.failed.append(name)
            traceback.print_exc()
        self.free()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    def free(self) -> None:
        """Memory of what nobody holds any more: a runner and its graphs refer to each other."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def note(self, text: str) -> None:
        self.bench.note(text)

    def close(self) -> int:
        print_table(self.bench.rows, Console(width=150))
        for note in self.bench.notes:
            print(f"note: {note}")
        print(f"{time.monotonic() - self.began:.0f} s; {len(self.bench.rows)} rows in {self.results}")
        if self.failed:
            print(f"FAILED: {', '.join(self.failed)} (tracebacks above)")
        return 1 if self.failed else 0


def results_file(name: str, given: Path | None, *, tiny: bool) -> Path:
    """Where rows go when nobody says: those of a miniature never take the place of real ones."""
    if given is not None:
        return given
    return Path(tempfile.gettempdir() if tiny else "benchmarks/results") / f"{name}.json"


def pick_device(*, tiny: bool) -> torch.device:
    """A GPU if there is one; a CPU in miniature."""
    return torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
