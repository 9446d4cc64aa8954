"""What MuonClip does to which parameters, as rows and as a plain text table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from perilune.optim.matrices import Adam, Layout


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """Parameters of one group that share a kind of layout."""

    group: str
    layout: str
    num_tensors: int
    num_elements: int
    shapes: tuple[tuple[tuple[int, ...], int], ...]  # (shape, how many), most frequent first
    lr: float
    weight_decay: float


def group_rows(param_groups: Sequence[Mapping[str, Any]], layouts: Mapping[nn.Parameter, Layout]) -> list[GroupRow]:
    rows = []
    for group in param_groups:
        kinds: dict[str, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            layout = layouts[parameter]
            kinds.setdefault("" if isinstance(layout, Adam) else type(layout).__name__, []).append(parameter)
        for kind, parameters in kinds.items():
            shapes = Counter(tuple(parameter.shape) for parameter in parameters)
            rows.append(
                GroupRow(
                    group=group["name"],
                    layout=kind,
                    num_tensors=len(parameters),
                    num_elements=sum(parameter.numel() for parameter in parameters),
                    shapes=tuple(shapes.most_common()),
                    lr=float(group["lr"]),
                    weight_decay=group["weight_decay"],
                )
            )
    return rows


def format_rows(rows: Sequence[GroupRow], *, max_shapes: int = 2) -> str:
    """Aligned columns; at most `max_shapes` shapes a row, so that it fits a terminal."""
    lines = [("group", "layout", "tensors", "elements", "lr", "decay", "shapes")]
    for row in rows:
        shown = [f"{count} x {'x'.join(map(str, shape)) or 'scalar'}" for shape, count in row.shapes[:max_shapes]]
        more = [f"+{len(row.shapes) - max_shapes} more"] if len(row.shapes) > max_shapes else []
        sizes = (str(row.num_tensors), f"{row.num_elements:,}")
        lines.append(
            (row.group, row.layout or "-", *sizes, f"{row.lr:g}", f"{row.weight_decay:g}", ", ".join(shown + more))
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    numeric = (2, 3, 4, 5)
    aligned = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([aligned[0], "-" * max(map(len, aligned)), *aligned[1:]])
