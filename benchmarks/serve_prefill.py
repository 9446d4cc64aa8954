"""Prefill of long prompts: that KDA layers are linear in the length, and what this does for a whole model.

    python benchmarks/serve_prefill.py --seconds 80               on a GPU
    python benchmarks/serve_prefill.py --tiny                     the same code on a CPU, in seconds

Two parts:
  kda     the operator in one call, and the layer as the engine runs it (chunks, its state in a slot), 16K to 1M tokens:
          the slope of log(time) over log(tokens).
  model   the 3:1 hybrid and the same model all-MLA (the shapes of serve_decode.py, with `--layers` of its 24 layers)
          through serve/runner.py: chunks of `--chunk` tokens over paged latents.

How a model's prefill is timed: the time of one chunk depends on how much lies before it. It is measured at some
prefixes up to 1M, which hold random numbers, and a prefill of T tokens is the sum over its chunks, interpolated between
the prefixes. Whole prefills, chunk after chunk from nothing, are run as far as `--seconds` allows, each beside its sum:
the ratio says how far they are apart. The fit is a T + b T^2, least squares of the relative errors.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from parts import Session, pick_device, results_file, wait
from serve_decode import PAGE, Shape, model_config

from perilune.kernels.kda import SoftplusGate, kda
from perilune.model import Decoder
from perilune.model.paged import LatentPool, PagedCache, new_paged_cache
from perilune.model.paged_batch import mixed_batch
from perilune.model.side_by_side import lay_side_by_side, round_matrices
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner

KINDS = ("3to1", "mla")
MILLION = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    parts: tuple[Literal["kda", "model"], ...] = ("kda", "model")
    seconds: float = 80.0
    """For all of it; whole prefills that would not end in time are left out."""
    layers: int = 12
    """Of the models, a multiple of 4."""
    chunk: int = 8192
    """Tokens of a step: the engine's token_budget."""
    longest: int = MILLION
    op_heads: int = 8
    """Of the operator: inputs and workspace of 32 heads of 1M tokens would not fit into one GPU at once."""
    tiny: bool = False
    commit: str = ""
    results: Path | None = None
    """File of the rows; benchmarks/results/serve_prefill.json when not given, and never that of a miniature."""


def doubling(first: int, last: int) -> list[int]:
    return [first << power for power in range((last // first).bit_length()) if first << power <= last]


def slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Of log(time) over log(tokens), least squares."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) of a T + b T^2; neither below 0."""
    tokens, times = np.array(lengths, float), np.array(seconds)
    columns = np.stack([tokens / times, tokens**2 / times], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(tokens)), rcond=None)
    if a < 0 or b < 0:  # one term alone, that which misses less
        alone = [float(column @ np.ones(len(tokens)) / (column @ column)) for column in columns.T]
        misses = [float(np.abs(alone[i] * columns[:, i] - 1).max()) for i in range(2)]
        return (alone[0], 0.0) if misses[0] < misses[1] else (0.0, alone[1])
    return float(a), float(b)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The best of some; what is called has run before."""
    best = math.inf
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


# --- KDA --------------------------------------------------------------------------------------------------------------


def kda_part(session: Session, settings: Settings, shape: Shape) -> None:
    lengths = doubling(2 * settings.chunk, settings.longest)
    for name, measure in (
        (f"operator, {settings.op_heads} heads, one call", partial(time_operator, settings, shape)),
        (f"layer, {shape.heads} heads, chunks of {settings.chunk}", partial(time_layer, settings, shape)),
    ):
        measured: dict[int, float] = {}
        for length in lengths:
            try:
                measured[length] = measure(length, session.device)
            except torch.cuda.OutOfMemoryError:
                session.note(f"KDA {name}: {length:,} tokens do not fit into memory")
                break
            session.bench.add(f"KDA {name}, {length:,} tokens", "prefill", "ms", 1e3 * measured[length])
        if len(measured) > 2:
            found = slope(list(measured), list(measured.values()))
            session.bench.add(f"KDA {name}, to {max(measured):,} tokens", "slope, at most 1.05", "", found)


@torch.inference_mode()
def time_operator(settings: Settings, shape: Shape, length: int, device: torch.device) -> float:
    heads, dim = settings.op_heads, shape.head_dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, g = (torch.randn(1, length, heads, dim, device=device, dtype=dtype) for _ in range(4))
    beta = torch.randn(1, length, heads, device=device, dtype=dtype)
    gate = SoftplusGate(A_log=torch.zeros(heads, device=device), dt_bias=torch.full((heads, dim), -4.0, device=device))
    call = partial(
        kda, q, k, v, g, beta, output_final_state=True, gate=gate, qk_l2norm=True, beta_max=1.0
    )  # fmt: skip
    call()
    return seconds_of(call, device, 3)


def time_layer(settings: Settings, shape: Shape, length: int, device: torch.device) -> float:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = replace(model_config("3to1", replace(shape, layers=1), dtype), layer_types=("kda",))
    with device:
        layer = Decoder(config).layers[0].self_attn.eval()
    round_matrices(layer, config.dtype())  # as the runner does
    lay_side_by_side(layer)
    cache = new_paged_cache(config, num_pages=1, page_size=PAGE, num_slots=1, device=device)
    tokens = tuple(range(settings.chunk))
    x = torch.randn(1, settings.chunk, shape.hidden, device=device).to(config.dtype())

    @torch.inference_mode()
    def prefill(chunks: int) -> None:
        cache.clear_state(0)
        for number in range(chunks):
            run = Share(
                request_id="0", start=number * settings.chunk, tokens=tokens, pages=(), slot=0, want="none",
                samples=False,
            )  # fmt: skip
            batch = mixed_batch([], [run], page_size=PAGE, scratch_row=cache.scratch_row, device=device)
            layer(x, batch, cache.layers[0])

    prefill(2)
    return seconds_of(partial(prefill, length // settings.chunk), device, 2)


# --- whole models -----------------------------------------------------------------------------------------------------


class Prefill:
    """One model with room for one sequence of the longest length, whose pages hold random numbers."""

    def __init__(self, kind: str, shape: Shape, settings: Settings, device: torch.device) -> None:
        self.chunk, self.device = settings.chunk, device
        config = model_config(kind, shape, "bfloat16" if device.type == "cuda" else "float32")
        with device:  # made where it runs: on the host the random numbers would take longer than the measurement
            model = Decoder(config)
        pages = -(-settings.longest // PAGE)
        self.runner = Runner(model, num_pages=pages, page_size=PAGE, num_slots=1, max_sequences=1, device=device)
        self.pages = tuple(range(pages))
        _randomize(self.runner.cache)
        generator = torch.Generator().manual_seed(0)
        self.tokens = tuple(torch.randint(shape.vocabulary, (self.chunk,), generator=generator).tolist())
        self.step(0)  # compiles

    def step(self, start: int) -> None:
        share = Share(
            request_id="0", start=start, tokens=self.tokens, pages=self.pages, slot=0, want="last", samples=True
        )  # fmt: skip
        self.runner.run(StepPlan(shares=(share,)))

    def chunk_seconds(self, start: int, repeats: int) -> tuple[float, int]:
        """Seconds of a chunk after `start` tokens, and the bytes it needs on a GPU beside weights and cache."""
        if self.device.type != "cuda":
            return seconds_of(partial(self.step, start), self.device, repeats), 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        seconds = seconds_of(partial(self.step, start), self.device, repeats)
        return seconds, torch.cuda.max_memory_allocated(self.device) - before

    def whole(self, length: int) -> float:
        """A prefill of `length` tokens, chunk after chunk."""

        def prefill() -> None:
            self.runner.clear_state(0)
            for start in range(0, length, self.chunk):
                self.step(start)

        return seconds_of(prefill, self.device, 1)


@torch.no_grad()
def _randomize(cache: PagedCache) -> None:
    """Zeros would make the arithmetic draw less power, and run faster, than any real prompt."""
    for pool in cache.layers:
        if isinstance(pool, LatentPool):
            pool.pages.normal_()


def summed(prefixes: Sequence[int], chunk_seconds: Sequence[float], chunk: int, length: int) -> float:
    """Seconds of all chunks of a prompt of `length` tokens, interpolated between measured ones."""
    return float(np.interp(np.arange(0, length, chunk), prefixes, chunk_seconds).sum())


def model_part(session: Session, settings: Settings, shape: Shape) -> None:
    chunk, longest = settings.chunk, settings.longest
    lengths = doubling(max(longest >> 5, chunk), longest)
    # Close together at the beginning, where fixed costs end, then over the whole range.
    prefixes = sorted({0, chunk, *(length - chunk for length in lengths), 3 * longest // 4 // chunk * chunk})
    sums = {}
    for kind in KINDS:
        # The hybrid takes about a quarter of the time of the other.
        until = time.monotonic() + (0.25 if kind == "3to1" else 1.0) * session.left()
        sums[kind] = prefill_of(session, settings, shape, kind, prefixes, lengths, until)
    for number, length in enumerate(lengths):
        goal = ", at least 3x" if length == MILLION else ""
        session.bench.add(
            f"prefill 3to1, {shape.layers} layers, {length:,} tokens", f"sum of chunks{goal}", "s",
            sums["3to1"][number], peers={"all-MLA": sums["mla"][number]},
        )  # fmt: skip


def prefill_of(
    session: Session, settings: Settings, shape: Shape, kind: str, prefixes: Sequence[int], lengths: Sequence[int],
    until: float,
) -> list[float]:  # fmt: skip
    """Seconds for each length, summed from chunks; rows of the fit and of whole runs."""
    case = f"prefill {kind}, {shape.layers} layers"
    model = Prefill(kind, shape, settings, session.device)
    times: list[float] = []
    memory = 0
    for prefix in prefixes:
        is_short = prefix <= settings.longest // 4
        if is_short:  # may be the first of its shapes; the long ones have been seen in pieces
            model.step(prefix)
        seconds, memory = model.chunk_seconds(prefix, 2 if is_short else 1)
        times.append(seconds)
        print(f"    {case}: chunk after {prefix:>9,} tokens {1e3 * seconds:9.1f} ms, {memory / 1e9:.2f} GB", flush=True)
    if session.device.type == "cuda":
        session.bench.add(
            f"{case}, chunk after {prefixes[-1]:,} tokens", "memory beside weights and cache", "GB", memory / 1e9
        )  # fmt: skip
    sums = [summed(prefixes, times, settings.chunk, length) for length in lengths]
    a, b = fit(lengths, sums)
    missed = max(abs(a * length + b * length**2 - total) / total for length, total in zip(lengths, sums))
    session.bench.add(case, "fit, a", "us/token", 1e6 * a)
    session.bench.add(case, "fit, b", "us/(1000 tokens)^2", 1e12 * b)
    session.bench.add(case, "fit, largest error", "%", 100 * missed)
    for length, total in zip(lengths, sums):
        if time.monotonic() + 1.1 * total > until:
            session.note(f"{case}: {length:,} tokens take {total:.0f} s; not run as a whole, nor longer ones")
            break
        session.bench.add(
            f"{case}, {length:,} tokens", "whole run", "s", model.whole(length), peers={"sum of chunks": total}
        )  # fmt: skip
    del model
    session.free()
    return sums


def main(settings: Settings) -> int:
    shape = Shape(layers=settings.layers)
    if settings.tiny:
        shape = Shape(hidden=64, layers=4, heads=4, head_dim=16, kv_heads=2, intermediate=128, vocabulary=320)
        settings = replace(settings, layers=4, chunk=128, longest=4096, op_heads=2)
    if shape.layers % 4 or settings.chunk % PAGE or settings.longest % settings.chunk:
        raise SystemExit(
            f"--layers {shape.layers} --chunk {settings.chunk} --longest {settings.longest}: expected a multiple of 4, "
            f"a multiple of {PAGE}, and a multiple of the chunk"
        )
    device = pick_device(tiny=settings.tiny)
    session = Session(
        settings.seconds, results_file("serve_prefill", settings.results, tiny=settings.tiny), settings.commit, device
    )  # fmt: skip
    for name, part in (("kda", kda_part), ("model", model_part)):
        if name in settings.parts:
            session.run(name, partial(part, session, settings, shape))
    return session.close()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
