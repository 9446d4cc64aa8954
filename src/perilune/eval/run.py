"""All checks of one run, as one plain dict: what `perilune eval` prints."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.data import CorpusConfig, Progress, ValidationSet
from perilune.data.probes import ProbeRows
from perilune.data.probes.needle import needle_row
from perilune.eval.held_out import held_out
from perilune.eval.needle import needle_accuracy
from perilune.eval.positions import loss_by_position
from perilune.train import RunConfig, load_run
from perilune.train.copying import copy_accuracy
from perilune.train.evaluate import answer_accuracy, validate


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    corpus: CorpusConfig | None = None
    """Whose held-out documents to read; None: the run's own."""
    domains: bool = True
    rows: int = 64
    """Rows of the run's length for each domain, or of a probe."""
    copy_lengths: tuple[int, ...] = (16, 64)
    copy_rows: int = 8
    positions: int = 0
    """Length of the rows for loss by position; 0: none."""
    position_rows: int = 8
    needle_lengths: tuple[int, ...] = ()
    needles: int = 8
    needle_rows: int = 8
    probe_lengths: tuple[int, ...] = ()
    """Of a run on a probe: lengths to ask at, beside its own."""

    def __post_init__(self) -> None:
        for name in ("rows", "copy_rows", "position_rows", "needles", "needle_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected 1 or more")
        if self.positions < 0:
            raise ValueError(f"positions is {self.positions!r}, expected 0 or more")


def evaluate_run(
    folder: str | Path, config: EvalConfig, *, device: torch.device, progress: Progress | None = None
) -> dict[str, Any]:
    """Every check that the config asks for; lengths that the held-out text cannot fill are an error before any runs."""
    model, tokenizer, run = load_run(folder, device=device)
    began = time.monotonic()
    found: dict[str, Any] = {"run": run.name, "parameters": model.num_parameters(), "trained_length": run.data.seq_len}
    if run.data.probe is not None:
        found["probe"] = _probe(model, run, config, device)
        return {**found, "seconds": round(time.monotonic() - began, 2)}

    def tell(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total)

    text = held_out(config.corpus or run.data.corpus, tokenizer, progress=progress)
    for length in config.needle_lengths:  # what cannot be asked is refused before the work begins
        needle_row(text.text, tokenizer, length=length, needles=config.needles, number=0)
    if config.domains:
        found["domains"] = {}
        for number, (domain, store) in enumerate(text.stores.items()):
            tell("domains", number, len(text.stores))
            rows = ValidationSet(store, run.data.seq_len)
            size = {"rows": config.rows, "micro_batch_rows": min(config.rows, run.trainer.micro_batch_rows)}
            found["domains"][domain] = {
                **validate(model, rows, **size, device=device),
                "documents": store.num_documents,
                "bytes": store.num_bytes,
                "whole": rows.num_rows <= config.rows,
            }
    if config.copy_lengths:
        found["copy"] = [
            copy_accuracy(model, tokenizer, length=length, rows=config.copy_rows, device=device)
            for length in config.copy_lengths
        ]
    if config.positions:
        found["positions"] = loss_by_position(
            model, text, length=config.positions, rows=config.position_rows, device=device
        )
    found["needle"] = []
    for number, length in enumerate(config.needle_lengths):
        tell("needles", number, len(config.needle_lengths))
        found["needle"].append(
            needle_accuracy(
                model, tokenizer, text, length=length, needles=config.needles, rows=config.needle_rows, device=device
            )
        )
    return {**found, "seconds": round(time.monotonic() - began, 2)}


def _probe(model: Any, run: RunConfig, config: EvalConfig, device: torch.device) -> list[dict[str, Any]]:
    assert run.data.probe is not None
    found = []
    for length in dict.fromkeys((run.data.seq_len, *config.probe_lengths)):
        rows = ProbeRows(run.data.probe, seq_len=length, vocab_size=run.data.vocab_size, seed=run.seed, held_out=True)
        batch = max(1, run.trainer.micro_batch_rows * run.data.seq_len // length)
        size = {"rows": config.rows, "micro_batch_rows": batch, "device": device}
        found.append({"length": length, **validate(model, rows, **size), **answer_accuracy(model, rows, **size)})
    return found
