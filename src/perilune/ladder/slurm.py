"""A ladder as a SLURM array: one task for each cell that is not finished, each started as `ladder run --cell`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from perilune.ladder.design import Cell

MARGIN = 1.5  # on the time asked for


def array_script(
    name: str, cells: Sequence[Cell], *, command: Sequence[str], logs: str, seconds: float | None, gpus: int = 1
) -> str:
    """A script for sbatch. `command` starts a cell when `--cell NAME` is put after it; seconds: of the longest cell."""
    if not cells:
        raise ValueError(f"ladder {name!r} is finished: there is no cell left for an array")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=ladder-{name}",
        f"#SBATCH --array=0-{len(cells) - 1}",
        f"#SBATCH --output={logs}/slurm-%A_%a.txt",
        "#SBATCH --ntasks=1",
    ]
    if gpus:
        lines.append(f"#SBATCH --gpus-per-task={gpus}")
    if seconds is not None:
        lines.append(f"#SBATCH --time={max(5, round(MARGIN * seconds / 60) + 5)}")
    lines += [
        "# A task that was stopped goes on from its last checkpoint when the array is submitted again; finished cells",
        "# end at once. SLURM needs the folder of the logs before the job starts:",
        f"#   mkdir -p {shlex.quote(logs)} && sbatch SCRIPT",
        "set -euo pipefail",
        "cells=(",
        *(f"  {shlex.quote(cell.name)}" for cell in cells),
        ")",
        f'exec {shlex.join(command)} --cell "${{cells[$SLURM_ARRAY_TASK_ID]}}"',
    ]
    return "\n".join(lines) + "\n"
