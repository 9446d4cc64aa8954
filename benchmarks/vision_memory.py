"""Peak memory of one step with pictures: the decoupled encoder step against the plain one, end to end.

    python benchmarks/vision_memory.py              needs a GPU
    python benchmarks/vision_memory.py --check      also the gradients of both in float32, on the smallest case
    python benchmarks/vision_memory.py --tiny       a miniature for a CPU: gradients and times, no memory

A step is the forward and backward pass of several micro-batches of one rank, without the optimizer; bytes are what the
step allocates at its peak beyond weights and their gradients. The end-to-end step keeps the activations of the tower
for all pictures of a micro-batch until the language model is done; the decoupled one keeps a group's of
`--patches-per-group` patches, with the language model's gone, and pays with a second forward pass, which the times
show. Writes benchmarks/results/vision_memory.json.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from perilune.bench.session import Bench
from perilune.model import Decoder, KDAConfig, MediaInput, MLAConfig, ModelConfig
from perilune.model.vision import SIZES
from perilune.model.vision_grids import Grid, tokens_of
from perilune.train.batches import MicroBatch
from perilune.train.decoupled import decoupled_backward

VOCABULARY = 4096
TEXT = 512
"""Tokens of text in every micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    check: bool = False
    tiny: bool = False
    """Two small pictures on the CPU, to see that it works."""
    patches_per_group: int = 4096
    commit: str = ""
    results: Path = Path("benchmarks/results")


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    tower: str
    batches: tuple[tuple[Grid, ...], ...]


CASES = (
    Case(name="small tower, even pictures", tower="small", batches=(((1, 16, 16),) * 32,) * 4),
    Case(
        name="large tower, uneven pictures",
        tower="large",
        batches=(((1, 32, 32),) * 24, ((1, 16, 16),) * 4, (), ((1, 64, 48),) * 2 + ((4, 16, 16),) * 4),
    ),
    Case(name="k25 tower, even pictures", tower="k25", batches=(((1, 32, 32),) * 12,) * 3),
)
TINY = Case(name="small tower, two pictures", tower="small", batches=(((1, 4, 4),), ((2, 4, 2), (1, 2, 2))))


def model_of(case: Case, dtype: str, device: torch.device) -> Decoder:
    """About 30M parameters besides the tower; of the miniature one layer."""
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=1 if case is TINY else 8,
        kda=KDAConfig(num_heads=4, head_dim=128),
        mla=MLAConfig(num_attention_heads=8),
        intermediate_size=1408,
        vision=SIZES[case.tower],
        compute_dtype=dtype,  # type: ignore[arg-type]
    )
    return Decoder(config, seed=0).to(device)


def micro_batch(grids: Sequence[Grid], seed: int, device: torch.device) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(map(tokens_of, grids))
    length = TEXT + num_tokens
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
    media = None
    if grids:
        patches = sum(frames * height * width for frames, height, width in grids)
        pixels = torch.randint(256, (patches, 3, 14, 14), generator=generator, dtype=torch.uint8)
        media = MediaInput(positions=torch.arange(num_tokens), pixels=pixels, grids=tuple(grids)).to(device)
    return MicroBatch(
        tokens_BT=tokens.to(device),
        targets_BT=tokens.roll(-1).to(device),
        cu_seqlens=torch.tensor([0, length], device=device),
        num_targets=length,
        num_bytes=length,
        media=media,
    )


def end_to_end(model: Decoder, batches: Sequence[MicroBatch], num_targets: int) -> None:
    for batch in batches:
        loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=batch.media)
        (loss / num_targets).backward()


def steps_of(
    model: Decoder, batches: Sequence[MicroBatch], patches_per_group: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    num_targets = sum(batch.num_targets for batch in batches)
    return (
        lambda: decoupled_backward(model, batches, num_targets, patches_per_group=patches_per_group),
        lambda: end_to_end(model, batches, num_targets),
    )


def measure(bench: Bench, case: Case, patches_per_group: int) -> None:
    model = model_of(case, "bfloat16" if bench.is_gpu else "float32", bench.device)
    batches = [micro_batch(grids, seed, bench.device) for seed, grids in enumerate(case.batches)]
    decoupled, plain = steps_of(model, batches, patches_per_group)
    for step in (decoupled, plain):
        step()  # gradients are allocated and kernels compiled before anything is measured
    if bench.is_gpu:
        peaks = [bench.peak_memory(step) / 2**20 for step in (decoupled, plain)]
        bench.add(case.name, "peak memory", "MiB", peaks[0], peers={"end to end": peaks[1]})
    times = [bench.time(step) for step in (decoupled, plain)]
    bench.add(case.name, "time of a step", "ms", times[0], peers={"end to end": times[1]})


def check(bench: Bench, case: Case, patches_per_group: int) -> None:
    """Both steps in float32: gradients of tower, projector and language model."""
    model = model_of(case, "float32", bench.device)
    batches = [micro_batch(grids, seed, bench.device) for seed, grids in enumerate(case.batches)]
    found = []
    for step in steps_of(model, batches, patches_per_group):
        model.zero_grad(set_to_none=True)
        step()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    ours, theirs = found
    for part in ("vision_tower.", "mm_projector.", "layers."):
        sides: list[list[Tensor]] = [
            [gradient.flatten() for name, gradient in side.items() if name.startswith(part) and gradient is not None]
            for side in (ours, theirs)
        ]
        bench.check(case.name, torch.cat(sides[0]), torch.cat(sides[1]), 1e-5, f"gradients of {part}*")


def main(settings: Settings) -> None:
    if not settings.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/vision_memory.py measures the memory of a GPU, and there is none here; "
            "--tiny runs a miniature without memory"
        )
    path = settings.results / f"vision_memory{'_tiny' if settings.tiny else ''}.json"
    bench = Bench("cpu" if settings.tiny else "cuda", path=path, commit=settings.commit)
    cases = (TINY,) if settings.tiny else CASES
    for case in cases:
        measure(bench, case, settings.patches_per_group)
        gc.collect()
        if bench.is_gpu:
            torch.cuda.empty_cache()
    # Last: gradients that differ end the script, and what was measured should stay.
    if settings.check or settings.tiny:
        check(bench, cases[0], settings.patches_per_group)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
