"""`perilune bench`: every operator checked against its definition, then timed beside every peer on the machine.

One module per area with `run(bench)`; session.py is all a module sees of the framework. A result is a list of rows
(rows.py), the same form for every benchmark of the project.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from perilune.bench.rows import Row, read_rows, write_rows
from perilune.bench.session import Bench, BenchError, NotApplicable

__all__ = ["AREAS", "Bench", "BenchError", "NotApplicable", "Row", "read_rows", "run_area", "write_rows"]

AREAS = {
    "kda": "Kimi Delta Attention, whole sequences",
    "attnres": "Attention Residuals",
    "muon": "Newton-Schulz and the Muon step",
    "attention": "softmax attention with maximal logits",
    "decode": "one token: KDA step, MLA decode",
    "train": "whole training steps",
}


def run_area(area: str, bench: Bench) -> str | None:
    """Runs one area; returns the reason in one line when it cannot run here."""
    name = f"perilune.bench.{area}"
    if importlib.util.find_spec(name) is None:
        return f"{area}: there is no benchmark of this area yet"
    try:
        importlib.import_module(name).run(bench)
    except NotApplicable as reason:
        return f"{area}: {reason}"
    except ModuleNotFoundError as error:
        return f"{area}: needs {error.name!r}, which is not installed"
    finally:
        if bench.is_gpu:
            torch.cuda.empty_cache()
    return None
