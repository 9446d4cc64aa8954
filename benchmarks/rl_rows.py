"""Rows of results in one file: a JSON list, a row on every line. Scripts that run side by side add to it in turn."""

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def add_rows(path: Path, new: Iterable[Row], *, key: Sequence[str]) -> None:
    """The new rows among the others; one with the same values under `key` is replaced. Complete or unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = {tuple(str(row.get(name)) for name in key): row for row in [*read_rows(path), *new]}
        lines = [json.dumps(kept[place]) for place in sorted(kept)]
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        os.close(folder)
