"""The row format of every benchmark: what was measured, for us and for one peer, on what, and when.

`ratio` > 1 means that we are better, whichever direction is better for the metric. `floor` is what the hardware allows
at best, in the unit of `ours`. A file is a JSON list of rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    metric: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str | None
    ratio: float | None
    floor: float | None
    device: str
    versions: dict[str, str]
    commit: str
    date: str


def ratio_of(ours: float, peer: float | None, *, lower_is_better: bool) -> float | None:
    """How many times better we are than the peer; None without a peer, or where a zero leaves no ratio."""
    if peer is None:
        return None
    better, worse = (peer, ours) if lower_is_better else (ours, peer)
    return better / worse if worse else None


def write_rows(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(rows_as_json(rows), encoding="utf-8")
    unfinished.replace(path)


def rows_as_json(rows: Iterable[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in fields(Row)}
    if not isinstance(found, list) or any(not isinstance(row, dict) or set(row) != names for row in found):
        raise ValueError(f"{path} is not a list of benchmark rows with the fields {', '.join(sorted(names))}")
    return [Row(**row) for row in found]


def shown(value: float | None) -> str:
    """Four digits of any size: 0.00371, 15.42, 1.202e+09."""
    if value is None:
        return "-"
    if value == 0 or (1e-3 <= abs(value) < 1e5 and math.isfinite(value)):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.3g}"


def line_of(row: Row) -> str:
    """One row for a log."""
    text = f"{row.case:<44} {row.metric:<22} {shown(row.ours):>9} {row.unit}"
    if row.peer_name is not None:
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f}x)"
        text += f"   {row.peer_name} {shown(row.peer)}{ratio}"
    if row.floor:
        text += f"   {row.ours / row.floor:.2f}x of floor {shown(row.floor)}"
    return text


def print_table(rows: list[Row], console: Any) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(box=box.SIMPLE, title=rows[0].device, title_justify="left")
    for column in ("case", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("ours", "peer", "ratio", "floor", "ours / floor"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.metric}, {row.unit}" if row.unit else row.metric,
            shown(row.ours),
            "-" if row.peer_name is None else f"{shown(row.peer)} {row.peer_name}",
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            shown(row.floor),
            f"{row.ours / row.floor:.2f}x" if row.floor else "-",
        )
    console.print(table)
