"""Float32 products on this CPU as torch does them, and by oneDNN as `fast_products` does: speed, and rounding.

    python benchmarks/cpu_products.py            a minute on one core

Every line is both ways in turn, best of several: products of a training step, forward and backward; a training step of
`nano_text`; prompts read by the released model. Errors are against float64, as a share of the norm. Where the processor
is none for oneDNN the script says so and measures all the same, with the switch on by hand.
Writes benchmarks/results/cpu_products.json.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from train_cpu import our_step

from perilune.hub.opened import open_folder
from perilune.kernels.cpu_products import by_onednn, onednn_is_ahead
from perilune.model import Decoder
from perilune.recipes import recipe
from perilune.released import released_model
from perilune.train.batches import micro_batches, open_data
from perilune.train.environment import describe_environment

SHAPES = ((1024, 256, 256), (1024, 256, 704), (1024, 704, 256), (4096, 256, 704), (1024, 256, 8192), (48, 256, 704))
"""Rows, what is summed, columns."""
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"torch": nullcontext, "oneDNN": by_onednn}


@dataclass(frozen=True, kw_only=True)
class Settings:
    threads: int = 1
    repeats: int = 20
    steps: int = 5
    prompts: int = 4
    prompt_tokens: int = 512
    results: Path = Path("benchmarks/results")


def best_times(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds of each way, in turn: what else the machine does meets both."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(repeats + 1):
        for name, way in WAYS.items():
            with way():
                began = time.perf_counter()
                work()
                if turn:
                    times[name].append(time.perf_counter() - began)
    return {name: min(spent) for name, spent in times.items()}


def product_row(rows: int, summed: int, columns: int, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, summed, generator=generator)
    weight = torch.randn(columns, summed, generator=generator)
    gradient = torch.randn(rows, columns, generator=generator)

    def work() -> tuple[torch.Tensor, ...]:
        return x @ weight.T, gradient @ weight, gradient.T @ x

    exact = (x.double() @ weight.double().T, gradient.double() @ weight.double(), gradient.double().T @ x.double())
    seconds = best_times(work, repeats)
    errors = {}
    for name, way in WAYS.items():
        with way():
            errors[name] = max(
                float((found.double() - wanted).norm() / wanted.norm())
                for found, wanted in zip(work(), exact, strict=True)
            )
    operations = 3 * 2 * rows * summed * columns
    return {
        "what": f"{rows} x {summed} x {columns}",
        "gflops": {name: round(operations / spent / 1e9, 1) for name, spent in seconds.items()},
        "error": errors,
        "ratio": round(seconds["torch"] / seconds["oneDNN"], 2),
    }


def training_row(steps: int) -> dict[str, Any]:
    config = recipe("nano_text")
    data = open_data(config.data, seed=config.seed)
    rows = config.trainer.global_batch_rows
    batches = list(micro_batches(data.train, first_row=0, rows=rows, micro_batch_rows=rows, device=torch.device("cpu")))
    seconds = best_times(our_step(config, Decoder(config.model, seed=config.seed), batches), steps)
    return tokens_row("a training step of nano_text", rows * config.data.seq_len, seconds)


def prompts_row(settings: Settings) -> dict[str, Any] | None:
    folder = released_model()
    if folder is None:
        return None
    model = open_folder(folder).model
    length, total = settings.prompt_tokens, settings.prompts * settings.prompt_tokens
    ids = torch.arange(total).remainder(model.config.vocab_size)[None]
    borders = torch.arange(0, total + 1, length, dtype=torch.int32)

    def work() -> None:
        with torch.inference_mode():
            model.hidden(ids, cu_seqlens=borders)

    return tokens_row("prompts of perilune-nano", total, best_times(work, settings.steps))


def tokens_row(what: str, tokens: int, seconds: dict[str, float]) -> dict[str, Any]:
    speeds = {name: round(tokens / spent) for name, spent in seconds.items()}
    return {"what": what, "tokens_per_s": speeds, "ratio": round(seconds["torch"] / seconds["oneDNN"], 2)}


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    console = Console()
    if not onednn_is_ahead():
        console.print("fast_products leaves this processor to torch; measured by hand:")
    found = [product_row(*shape, settings.repeats) for shape in SHAPES]
    found.append(training_row(settings.steps))
    if (prompts := prompts_row(settings)) is not None:
        found.append(prompts)
    table = Table("what", "torch", "oneDNN", "ratio", "error of torch", "of oneDNN")
    for row in found:
        speeds, unit = (row["gflops"], "GFLOP/s") if "gflops" in row else (row["tokens_per_s"], "tokens/s")
        errors = [f"{row['error'][name]:.1e}" if "error" in row else "" for name in WAYS]
        table.add_row(row["what"], *(f"{speeds[name]:,} {unit}" for name in WAYS), f"{row['ratio']}x", *errors)
    console.print(table)
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / "cpu_products.json"
    about = {"environment": describe_environment(torch.device("cpu")), "threads": settings.threads}
    path.write_text(json.dumps({**about, "used": onednn_is_ahead(), "rows": found}, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
