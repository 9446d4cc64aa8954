"""Training `nano_text` on CPU: tokens per second, where the time goes, and transformers' Kimi-Linear beside it.

    python benchmarks/train_cpu.py            under half a minute on two cores

Steps are whole optimizer steps on packed rows of the standard library (forward, backward, clipping, optimizer), best of
several. The peer is transformers' kimi_linear with the same widths and layers (plain residuals: it has no others),
torch AdamW, the same rows unpacked to [8, 256]. Shares come from torch's profiler over one of our steps: every
operator's own time goes to the nearest enclosing part. Writes benchmarks/results/train_cpu.json.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from perilune import hub
from perilune.kernels.cpu_products import fast_products
from perilune.model import Decoder
from perilune.recipes import recipe
from perilune.train import RunConfig
from perilune.train.batches import MicroBatch, micro_batches, open_data
from perilune.train.environment import describe_environment
from perilune.train.optimizer import build_optimization
from perilune.train.trainer import forward_backward

# Nothing here looks at pictures, and a torchvision without its compiled operators would break the import.
sys.modules.setdefault("torchvision", None)  # pyrefly: ignore
import transformers  # noqa: E402

# Innermost first: an operator inside one of these counts for it.
PARTS = {
    "_ChunkedKDA": "KDA operator",
    "_ShiftedConv": "short convolution",
    "_TiledAttention": "softmax attention",
    "_Mix": "Attention Residuals",
    "_Merge": "Attention Residuals",
    "_LinearCrossEntropy": "head and loss",
    "Optimizer.step": "optimizer",
}
MATMULS = ("aten::mm", "aten::addmm")


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 12
    peer_steps: int = 3
    threads: int | None = None  # torch's default when not given
    results: Path = Path("benchmarks/results")


def our_step(config: RunConfig, model: Decoder, batches: list[MicroBatch]) -> Callable[[], None]:
    optimization = build_optimization(model, config.optimizer)
    optimization.set_lr(1.0)
    targets = sum(batch.num_targets for batch in batches)

    def step() -> None:
        forward_backward(model, batches, targets)
        optimization.clip_gradients(config.trainer.grad_clip)
        optimization.step()

    return step


def peer_step(config: RunConfig, batch: MicroBatch) -> Callable[[], None]:
    """transformers' model, through the folder format."""
    with tempfile.TemporaryDirectory() as folder:
        hub.save_pretrained(Decoder(replace(config.model, residual="plain"), seed=0), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = batch.tokens_BT.view(-1, config.data.seq_len)
    targets = batch.targets_BT.flatten()

    def step() -> None:
        logits = model(tokens).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def best_time(step: Callable[[], None], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


def shares(step: Callable[[], None]) -> dict[str, float]:
    """Fraction of one step's operator time by part."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    own_time: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        own_time[part_of(event)] += event.self_cpu_time_total
    total = sum(own_time.values())
    return {part: spent / total for part, spent in sorted(own_time.items(), key=lambda item: -item[1])}


def part_of(event: Any) -> str:
    name, parent = event.name, event.cpu_parent
    is_matmul = name in MATMULS
    while True:
        for marker, part in PARTS.items():
            if name.startswith((marker, f"autograd::engine::evaluate_function: {marker}")):
                return part
        if parent is None:
            return "projections (matmul)" if is_matmul else "norms, gates, elementwise"
        name, parent = parent.name, parent.cpu_parent


def main(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = recipe("nano_text")
    data = open_data(config.data, seed=config.seed)
    rows = config.trainer.global_batch_rows
    batches = list(micro_batches(data.train, first_row=0, rows=rows, micro_batch_rows=rows, device=torch.device("cpu")))
    tokens = rows * config.data.seq_len
    model = Decoder(config.model, seed=config.seed)
    step = our_step(config, model, batches)
    with fast_products("cpu"):  # as the trainer has them
        ours, parts = best_time(step, settings.steps), shares(step)
    seconds = {"perilune": ours, "transformers": best_time(peer_step(config, batches[0]), settings.peer_steps)}
    result = {
        "environment": describe_environment(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "parameters": model.num_parameters(),
        "tokens_per_step": tokens,
        "tokens_per_s": {name: tokens / spent for name, spent in seconds.items()},
        "ratio": seconds["transformers"] / seconds["perilune"],
        "share_of_step": parts,
    }
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / "train_cpu.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    table = Table("part of a step", "share")
    for part, share in parts.items():
        table.add_row(part, f"{100 * share:.1f} %")
    console.print(table)
    for name, spent in seconds.items():
        console.print(f"{name}: {tokens / spent:,.0f} tokens/s ({1000 * spent:.0f} ms a step of {tokens} tokens)")
    console.print(f"ratio: {result['ratio']:.1f}x; written to {path}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
