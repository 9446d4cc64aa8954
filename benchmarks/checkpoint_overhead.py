"""What a run pays for being safe and for being spread: checkpoints, activation checkpointing, one rank of many.

    python benchmarks/checkpoint_overhead.py                                      a minute on two cores
    python benchmarks/checkpoint_overhead.py --device cuda --recipe small --precision bf16 --seq-len 4096
    torchrun --nproc-per-node 1 benchmarks/checkpoint_overhead.py --parts fsdp    the world that torchrun makes

Steps are those of the training loop on random tokens: forward, backward, clipping, MuonClip with QK-Clip, routers.

    saves       how long the loop waits for a save that it makes itself, and for one that a thread makes from a copy;
                how long that thread writes, and how much slower steps are meanwhile
    recompute   activation checkpointing: none, selective, full; time of a step and what the backward pass keeps
    fsdp        the loop under torch.distributed with one rank against the plain loop: Distributed MuonClip; a rank that
                shares with nobody keeps its parameters as they are, without FSDP2

Variants take turns, so that a machine that slows down slows all of them; times are medians. Writes one JSON file, which
also has the load of the machine: beside other work the small differences mean nothing.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from perilune.model import Decoder
from perilune.recipes import recipe
from perilune.train import RunConfig, checkpoint, random_state, ranks
from perilune.train.background_save import Saves, staged
from perilune.train.batches import MicroBatch
from perilune.train.environment import describe_environment
from perilune.train.optimizer import build_optimization
from perilune.train.parallel import ParallelConfig, parallelize
from perilune.train.parallel_tensor import decoder_layers
from perilune.train.recompute import Recompute, recompute_layers
from perilune.train.run_folder import build_model
from perilune.train.step import forward_backward, totals
from perilune.train.trainer import pick_device

Part = Literal["saves", "recompute", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    parts: tuple[Part, ...] = ("saves", "recompute", "fsdp")
    recipe: str = "nano_text"
    """Whose model and optimizer; sizes below override it."""
    hidden_layers: int | None = None
    seq_len: int | None = None
    rows: int | None = None
    """Rows of a step, in one micro-batch."""
    device: str = "auto"
    precision: Literal["float32", "bf16"] = "float32"
    steps: int = 8
    """Timed steps of every variant in every round."""
    rounds: int = 3
    folder: Path | None = None
    """Where checkpoints are written, and removed again; None: the system's folder for temporary files."""
    threads: int | None = None
    results: Path = Path("benchmarks/results/checkpoint_overhead.json")


class Loop:
    """A model with its optimizer, and one step of training."""

    def __init__(self, settings: Settings, *, recompute: Recompute = "none") -> None:
        config = configured(settings)
        self.device = pick_device(settings.device)
        self.model: Decoder = build_model(config, self.device)
        self.parallel = None
        if ranks.distributed():
            how = ParallelConfig(recompute=recompute)
            self.parallel = parallelize(self.model, how, device_type=self.device.type, world_size=1)
        else:
            recompute_layers(decoder_layers(self.model), recompute)
        self.optimization = build_optimization(self.model, config.optimizer, self.parallel)
        self.optimization.set_lr(0.1)
        self.batches = [random_batch(config, self.device)]
        self.grad_clip = config.trainer.grad_clip
        self.model.train()

    def step(self, on_part: Callable[[str], None] = lambda part: None) -> float:
        """Seconds of one step, the wait for the device included. `on_part` is called where a part of it ends."""
        began = time.perf_counter()
        count = totals(self.batches, self.device, self.parallel)
        losses = forward_backward(self.model, self.batches, count.targets, parallel=self.parallel)
        on_part("forward_backward")
        norm = self.optimization.clip_gradients(self.grad_clip)
        torch.cat([losses, norm.double()[None]]).tolist()
        on_part("clip")
        self.optimization.step()
        self.model.after_optimizer_step()
        on_part("optimizer")
        self.wait()
        return time.perf_counter() - began

    def parts(self) -> dict[str, float]:
        """Seconds of the parts of one step, with a wait for the device after each."""
        found: dict[str, float] = {}
        began = [time.perf_counter()]

        def on_part(part: str) -> None:
            self.wait()
            began.append(time.perf_counter())
            found[part] = began[-1] - began[-2]

        self.step(on_part)
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the loop puts into a checkpoint."""
        return {
            **checkpoint.model_tensors(self.model),
            **checkpoint.optimizer_tensors(self.model, self.optimization.optimizer),
            **self.optimization.clip_tensors(),
            **random_state.tensors(),
        }


def configured(settings: Settings) -> RunConfig:
    config = recipe(settings.recipe)
    model = config.model
    if settings.hidden_layers is not None:
        model = replace(model, num_hidden_layers=settings.hidden_layers, layer_types=None)
    trainer = replace(config.trainer, precision=settings.precision)
    if settings.rows is not None:
        trainer = replace(trainer, global_batch_rows=settings.rows)
    data = config.data if settings.seq_len is None else replace(config.data, seq_len=settings.seq_len)
    return replace(config, model=model, trainer=trainer, data=data)


def random_batch(config: RunConfig, device: torch.device) -> MicroBatch:
    rows, length = config.trainer.global_batch_rows, config.data.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (1, rows * length + 1), generator=generator).to(device)
    return MicroBatch(
        tokens_BT=tokens[:, :-1].contiguous(),
        targets_BT=tokens[:, 1:].contiguous(),
        cu_seqlens=torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device),
        num_targets=rows * length,
        num_bytes=rows * length,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The three parts


def measure_saves(settings: Settings) -> dict[str, Any]:
    loop = Loop(settings)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in loop.tensors().values())
    for _ in range(2):
        loop.step()
    found: dict[str, list[float]] = {
        name: [] for name in ("step", "waits_for_disk", "waits_for_copy", "copy", "write", "step_during_write")
    }
    number = 0
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        for _ in range(settings.rounds):
            found["step"] += [loop.step() for _ in range(settings.steps)]
            for name, in_background in (("waits_for_disk", False), ("waits_for_copy", True)):
                number += 1
                saves = Saves(in_background=in_background)
                began = time.perf_counter()
                ended = [0.0]
                how = {"step": number, "state": {"step": number}, "keep_last": 1, "on_phase": clock(ended)}
                saves.begin(Path(folder), tensors=loop.tensors(), **how)
                found[name].append(time.perf_counter() - began)
                while in_background and saves.under_way():
                    found["step_during_write"].append(loop.step())
                saves.wait()
                if in_background:
                    found["write"].append(ended[0] - began - found[name][-1])
            began = time.perf_counter()
            staged(loop.tensors())
            found["copy"].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) if times else None for name, times in found.items()}
    slower = 0.0
    if medians["step_during_write"] is not None:
        steps = len(found["step_during_write"]) / settings.rounds
        slower = max(0.0, steps * (medians["step_during_write"] - medians["step"]))
    return {
        "parameters": loop.model.num_parameters(),
        "checkpoint_bytes": num_bytes,
        "seconds": medians,
        "lost_per_save": {
            "waiting_for_disk": medians["waits_for_disk"],
            "in_background": medians["waits_for_copy"] + slower,
        },
    }


def clock(reached: list[float]) -> Callable[[str], None]:
    """Keeps the time of the last phase."""

    def on_phase(phase: str) -> None:
        reached[0] = time.perf_counter()

    return on_phase


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward pass, every storage once."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    def num_bytes(self, model: Decoder) -> int:
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        return sum(each.nbytes() for number, each in self.storages.items() if number not in weights)


def measure_recompute(settings: Settings) -> dict[str, Any]:
    loops = {how: Loop(settings, recompute=how) for how in ("none", "selective", "full")}
    kept = {how: kept_bytes(loop) for how, loop in loops.items()}
    seconds = taking_turns({how: loop.step for how, loop in loops.items()}, settings)
    return {
        how: {"step_s": seconds[how], "kept_bytes": kept[how], "slower_by": seconds[how] / seconds["none"] - 1}
        for how in loops
    }


def kept_bytes(loop: Loop) -> int:
    """On a GPU the memory that a forward and backward pass adds at most; else what autograd keeps after a forward."""
    if loop.device.type == "cuda":
        loop.step()
        torch.cuda.reset_peak_memory_stats(loop.device)
        before = torch.cuda.memory_allocated(loop.device)
        loop.step()
        return torch.cuda.max_memory_allocated(loop.device) - before
    (batch,) = loop.batches
    kept = Kept()
    with kept:
        loss = loop.model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens)
    num_bytes = kept.num_bytes(loop.model)
    loss.backward()
    loop.optimization.skip()
    loop.model.discard_step_statistics()
    return num_bytes


def measure_fsdp(settings: Settings) -> dict[str, Any]:
    """Plain and spread over one rank in turns, each built anew: the plain loop has no process group around it."""
    times: dict[str, list[float]] = {"plain": [], "fsdp": []}
    parts: dict[str, list[dict[str, float]]] = {"plain": [], "fsdp": []}
    for _ in range(settings.rounds):
        for name, steps in times.items():
            with world_of_one(settings.device) if name == "fsdp" else plainly():
                loop = Loop(settings)
                for _ in range(2):
                    loop.step()
                steps += [loop.step() for _ in range(settings.steps)]
                parts[name] += [loop.parts() for _ in range(2)]
                del loop
    medians = {name: statistics.median(steps) for name, steps in times.items()}
    return {
        "launched_by_torchrun": ranks.launched(),
        "plain_step_s": medians["plain"],
        "fsdp_step_s": medians["fsdp"],
        "slower_by": medians["fsdp"] / medians["plain"] - 1,
        "parts_s": {
            name: {part: statistics.median(one[part] for one in each) for part in each[0]}
            for name, each in parts.items()
        },
    }


@contextmanager
def world_of_one(device: str) -> Iterator[None]:
    if ranks.launched():
        with ranks.joined(device):
            if ranks.world_size() != 1:
                raise SystemExit(f"started with {ranks.world_size()} ranks, expected one: --nproc-per-node 1")
            yield
        return
    backend = "cuda:nccl,cpu:gloo" if pick_device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def plainly() -> Iterator[None]:
    yield


def taking_turns(steps: dict[str, Callable[[], float]], settings: Settings) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(settings.rounds):
        for name, step in steps.items():
            times[name] += [step() for _ in range(settings.steps)]
    return {name: statistics.median(each) for name, each in times.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def rows_of(result: dict[str, Any]) -> Sequence[tuple[str, str]]:
    rows = []
    if (saves := result.get("saves")) is not None:
        seconds = saves["seconds"]
        rows += [
            ("checkpoint", f"{saves['checkpoint_bytes'] / 1e6:,.1f} MB of {saves['parameters']:,} parameters"),
            ("a step", _milliseconds(seconds["step"])),
            ("loop waits, save by itself", _milliseconds(seconds["waits_for_disk"])),
            ("loop waits, save in background", _milliseconds(seconds["waits_for_copy"])),
            ("background write takes", _milliseconds(seconds["write"])),
            ("a step during the write", _milliseconds(seconds["step_during_write"])),
        ]
        lost = saves["lost_per_save"]
        rows.append(
            ("lost by a save", f"{_milliseconds(lost['waiting_for_disk'])} -> {_milliseconds(lost['in_background'])}")
        )
    for how, cost in result.get("recompute", {}).items():
        kept = f"{cost['kept_bytes'] / 1e6:,.1f} MB kept"
        rows.append((f"recompute {how}", f"{_milliseconds(cost['step_s'])} ({cost['slower_by']:+.1%}), {kept}"))
    if (fsdp := result.get("fsdp")) is not None:
        rows.append(("plain loop", _milliseconds(fsdp["plain_step_s"])))
        rows.append(("spread over one rank", f"{_milliseconds(fsdp['fsdp_step_s'])} ({fsdp['slower_by']:+.1%})"))
        for part, seconds in fsdp["parts_s"]["fsdp"].items():
            plain = fsdp["parts_s"]["plain"][part]
            rows.append((f"  {part}, alone", f"{_milliseconds(plain)} -> {_milliseconds(seconds)}"))
    return rows


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


MEASURED: dict[Part, Callable[[Settings], dict[str, Any]]] = {
    "saves": measure_saves,
    "recompute": measure_recompute,
    "fsdp": measure_fsdp,
}


def main(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device, config = pick_device(settings.device), configured(settings)
    result: dict[str, Any] = {
        "environment": describe_environment(device),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "recipe": settings.recipe,
        "layers": config.model.num_hidden_layers,
        "precision": settings.precision,
        "tokens_per_step": config.trainer.global_batch_rows * config.data.seq_len,
    }
    for part in settings.parts:
        result[part] = MEASURED[part](settings)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    settings.results.write_text(json.dumps(result, indent=2) + "\n")
    console, table = Console(), Table("what", "cost")
    for row in rows_of(result):
        table.add_row(*row)
    console.print(table)
    console.print(f"written to {settings.results}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
