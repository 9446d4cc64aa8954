"""What the scripts of reinforcement learning write: rows of results, and lines with the time. No script of its own.

Rows lie in one file, a JSON list with a row on every line; scripts that run side by side add to it in turn. A line
begins with the time of day in UTC and the seconds since the script began, so that the log of a call that was cut off
tells where its time went.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {time.monotonic() - _BEGAN:7.1f} s  {text}", flush=True)


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def add_rows(path: Path, new: Iterable[Row], *, key: Sequence[str], replace: bool = True) -> None:
    """The new rows among the others; one with the same values under `key` is replaced, or kept. Complete or
    unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = [*read_rows(path), *new] if replace else [*new, *read_rows(path)]
        kept = {tuple(str(row.get(name)) for name in key): row for row in rows}
        lines = [json.dumps(kept[place]) for place in sorted(kept)]
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        os.close(folder)
