"""Training steps of small models as CUDA graphs against the same steps launched one by one, on one GPU.

    python benchmarks/train_graphs.py                       a minute: widths 128 and 256 of the ladders, MLA and 3:1
    python benchmarks/train_graphs.py --device cpu          the same code in seconds; nothing is recorded there

Steps are those of the training loop (forward, backward, clipping, MuonClip with QK-Clip) on random tokens in documents
with other borders every time. Both variants start from the same weights and see the same rows: their losses are
compared bit by bit. GPU busy: sum of the kernels' times in two further steps.
"""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from perilune.ladder import dial
from perilune.recipes.ladders import ALL_MLA, THREE_TO_ONE
from perilune.train import RunConfig
from perilune.train.batches import MicroBatch
from perilune.train.environment import describe_environment
from perilune.train.graphed import GraphedBackward, cuda_recorder
from perilune.train.optimizer import build_optimization
from perilune.train.run_folder import build_model
from perilune.train.step import forward_backward, totals
from perilune.train.trainer import pick_device

PATTERNS = {"mla": ALL_MLA, "3to1": THREE_TO_ONE}
WARM_UPS, BATCHES = 8, 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    widths: tuple[int, ...] = (128, 256)
    steps: int = 20
    device: str = "auto"
    commit: str = ""
    """The commit to name in the results, where there is no git."""
    results: Path = Path("benchmarks/results/train_graphs.json")


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    width: int
    tokens: int
    """Of a step."""
    eager_ms: float
    graph_ms: float
    busy_ms: float | None
    """Of the GPU, with graphs."""
    losses_are_equal: bool
    eager_gib: float
    graph_gib: float
    """Reserved at most."""

    @property
    def ratio(self) -> float:
        return self.eager_ms / self.graph_ms


def random_batch(config: RunConfig, rows: int, seed: int, device: torch.device) -> MicroBatch:
    """Every row begins a document, and some more begin anywhere."""
    generator = torch.Generator().manual_seed(seed)
    length = rows * config.data.seq_len
    tokens = torch.randint(config.model.vocab_size, (1, length + 1), generator=generator)
    within = torch.randint(1, length, (rows + seed % 7,), generator=generator)
    borders = torch.cat([torch.arange(0, length + 1, config.data.seq_len), within]).unique()
    return MicroBatch(
        tokens_BT=tokens[:, :-1].contiguous().to(device),
        targets_BT=tokens[:, 1:].contiguous().to(device),
        cu_seqlens=borders.int().to(device),
        num_targets=length,
        num_bytes=length,
    )


class Loop:
    def __init__(self, config: RunConfig, rows: int, device: torch.device, *, with_graphs: bool) -> None:
        self.model = build_model(config, device).train()
        self.optimization = build_optimization(self.model, config.optimizer)
        record = cuda_recorder(device) if device.type == "cuda" else (lambda compute: compute)
        self.graphs = GraphedBackward(self.model, record=record) if with_graphs else None
        self.batches = [random_batch(config, rows, seed, device) for seed in range(BATCHES)]
        self.device = device
        self.losses: list[float] = []

    def step(self) -> float:
        """Seconds, the wait for the device included."""
        number = len(self.losses)
        self.optimization.set_lr(min(1.0, (number + 1) / 10))
        batches = [self.batches[number % BATCHES]]
        began = time.perf_counter()
        count = totals(batches, self.device)
        sums = forward_backward(self.model, batches, count.targets, graphed=self.graphs)
        norm = self.optimization.clip_gradients(1.0)
        nats, _, size = torch.cat([sums, norm.double()[None]]).tolist()
        assert math.isfinite(nats + size)
        self.optimization.step(gradients_stay=self.graphs is not None and self.graphs.gradients_stay)
        self.model.after_optimizer_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.losses.append(nats / count.targets)
        return time.perf_counter() - began

    def busy_ms(self) -> float | None:
        if self.device.type != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(2):
                self.step()
        return sum(event.self_device_time_total for event in seen.key_averages()) / 2e3


def measured(width: int, name: str, device: torch.device, steps: int) -> Row:
    config = dial.run_at(width, source="unused")
    config = replace(config, model=replace(config.model, layer_types=PATTERNS[name]))
    rows = config.trainer.global_batch_rows if device.type == "cuda" else 1
    times, losses, memory, busy = {}, {}, {}, None
    for with_graphs in (False, True):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loop = Loop(config, rows, device, with_graphs=with_graphs)
        for _ in range(WARM_UPS):
            loop.step()
        times[with_graphs] = 1e3 * statistics.median(loop.step() for _ in range(steps))
        losses[with_graphs] = list(loop.losses)
        memory[with_graphs] = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
        busy = loop.busy_ms()
    return Row(
        model=name,
        width=width,
        tokens=rows * config.data.seq_len,
        eager_ms=times[False],
        graph_ms=times[True],
        busy_ms=busy,
        losses_are_equal=losses[False] == losses[True],
        eager_gib=memory[False],
        graph_gib=memory[True],
    )


def main(settings: Settings) -> None:
    device = pick_device(settings.device)
    rows = []
    for width in settings.widths:
        for name in PATTERNS:
            row = measured(width, name, device, settings.steps)
            rows.append(row)
            print(
                f"{name:5} width {width}: {row.eager_ms:.1f} -> {row.graph_ms:.1f} ms a step of {row.tokens:,} tokens, "
                f"{row.ratio:.1f}x; losses {'equal in all bits' if row.losses_are_equal else 'differ'}",
                flush=True,
            )
    environment = describe_environment(device) | ({"commit": settings.commit} if settings.commit else {})
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "rows": [asdict(row) for row in rows]}
    settings.results.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {settings.results}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
