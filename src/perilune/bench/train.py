"""Whole training steps (forward and backward, no optimizer) of the recipe `base` with plain residuals, in bfloat16.

    model FLOPs utilisation = 6 x parameters without the embedding x tokens / (time x 790 TFLOP/s)

Cases: `parts` (each operator around the attention, against the bytes it must move), `step` (against a compiled
full-attention GPT of the same size), `first step` (a fresh process with empty compiler caches). Only when named:
`profile` (the kernels of our step by time) and `fla` (its KDA model, which autotunes for minutes).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from perilune.bench.gpt import GPT
from perilune.bench.peers import optional
from perilune.bench.session import Bench, BenchError
from perilune.kernels.cross_entropy import linear_cross_entropy_sum
from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.short_conv import short_conv
from perilune.kernels.swiglu import swiglu
from perilune.model import Decoder, ModelConfig
from perilune.optim import QKClip
from perilune.recipes import recipe

TAU = 100.0  # of the recipe's QK-Clip: attention logits need not be known exactly below it, as in a real run
PEAK_FLOPS = 790e12  # a large bfloat16 product on an H200
SHAPES = ((8, 4096), (1, 32768))
SMALL_SHAPES = ((2, 64),)
FIRST_STEP_SECONDS = 280
PROFILE_LINES = 25


def run(bench: Bench) -> None:
    for case, measure in (("parts", parts), ("accuracy", accuracy), ("first step", first_step)):
        if any(bench.wants(f"{case} {name}") for name in ("", *PARTS)) if case == "parts" else bench.wants(case):
            measure(bench)
    steps(bench)
    if bench.names("profile"):
        profile(bench)
    if bench.names("fla"):
        fla_steps(bench)


def base_config(bench: Bench) -> ModelConfig:
    """The measured model, or on CPU one of the same kind that runs in a second."""
    if bench.is_gpu:
        return replace(recipe("base").model, residual="plain", compute_dtype="bfloat16")
    return replace(recipe("nano").model, residual="plain")


def shapes(bench: Bench) -> tuple[tuple[int, int], ...]:
    return SHAPES if bench.is_gpu else SMALL_SHAPES


def random_batch(bench: Bench, vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, vocabulary, (batch, length), generator=generator) for _ in range(2))
    return tokens.to(bench.device), targets.to(bench.device)


def step_of(model: Decoder | GPT | FlaModel, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    """Forward and backward into fresh gradients, as after zero_grad(set_to_none=True)."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        (model.loss(tokens, targets) / targets.numel()).backward()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps


def steps(bench: Bench) -> None:
    wanted = [(batch, length) for batch, length in shapes(bench) if bench.wants(f"step B{batch} T{length}")]
    if not wanted:
        return
    config = base_config(bench)
    ours = timed_steps(bench, build_ours(bench, config), config, wanted)
    peer = timed_steps(bench, build_gpt(bench, config), config, wanted)
    add_rows(bench, config, wanted, ours, peer)


def add_rows(
    bench: Bench, config: ModelConfig, wanted: list[tuple[int, int]], ours: list[float], peer: list[float]
) -> None:
    """Rows from the milliseconds of our steps and the peer's."""
    parameters = num_parameters(config)
    for (batch, length), mine, theirs in zip(wanted, ours, peer, strict=True):
        case, tokens = f"step B{batch} T{length}", batch * length
        bench.add(case, "forward + backward", "ms", mine, peers={"compiled GPT": theirs})
        bench.add(
            case,
            "tokens/s",
            "1/s",
            tokens / mine * 1e3,
            peers={"compiled GPT": tokens / theirs * 1e3},
            lower_is_better=False,
        )
        if bench.is_gpu:
            utilisation = 6 * parameters * tokens / (mine * 1e-3) / PEAK_FLOPS
            bench.add(case, "model FLOPs utilisation", "", utilisation, lower_is_better=False)


def build_ours(bench: Bench, config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    with bench.device:  # a generator of the device fills the weights in no time
        model = Decoder(config)
    QKClip(model, TAU)
    return model


def num_parameters(config: ModelConfig) -> int:
    """All but the embedding."""
    with torch.device("meta"):
        return Decoder(config).num_parameters(embedding=False)


def build_gpt(bench: Bench, config: ModelConfig) -> GPT:
    """As many parameters as ours, by the width of the MLP (in steps of 64)."""
    heads = config.kda.num_heads
    target = num_parameters(config)
    fixed = config.vocab_size * config.hidden_size + config.num_hidden_layers * 4 * config.hidden_size**2
    intermediate = (target - fixed) / (3 * config.hidden_size * config.num_hidden_layers)
    torch.manual_seed(0)
    with bench.device:
        model = GPT(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=heads,
            intermediate=max(64, round(intermediate / 64) * 64),
        )
    if abs(model.num_parameters() / target - 1) > 0.02 and bench.is_gpu:
        raise BenchError(f"the GPT has {model.num_parameters():,} parameters and ours {target:,}: not the same size")
    if bench.is_gpu:
        model.compile_layers()
    return model


def timed_steps(bench: Bench, model: Decoder | GPT, config: ModelConfig, wanted: list[tuple[int, int]]) -> list[float]:
    """Milliseconds of a step of every shape."""
    return [bench.time(step_of(model, *random_batch(bench, config.vocab_size, *shape))) for shape in wanted]


def accuracy(bench: Bench) -> None:
    """One period of layers in the measured precision against float64, in hidden states and gradients."""
    config = replace(base_config(bench), num_hidden_layers=4)
    tokens, targets = random_batch(bench, config.vocab_size, 1, 512 if bench.is_gpu else 64)
    ours = build_ours(bench, config)
    exact = Decoder(replace(config, compute_dtype="float64")).to(bench.device)
    exact.load_state_dict(ours.state_dict())
    # bfloat16 rounds to 2^-9 of a value; about ten times in a row through 8 sublayers.
    limit = 0.03 if config.compute_dtype == "bfloat16" else 1e-3
    bench.check("accuracy", ours.hidden(tokens), exact.hidden(tokens), limit, "hidden")
    for model in (ours, exact):
        model.loss(tokens, targets).backward()
    for name in ("lm_head.weight", "layers.0.self_attn.q_proj.weight", "layers.2.mlp.up_proj.weight"):
        mine, right = (model.get_parameter(name).grad for model in (ours, exact))
        assert mine is not None and right is not None
        bench.check("accuracy", mine, right, 3 * limit, f"gradient of {name}")


# ---------------------------------------------------------------------------------------------------------------------
# First step and profile


def first_step(bench: Bench) -> None:
    """Seconds from the start of a process to the end of its first step, with nothing compiled before."""
    if not bench.is_gpu:
        bench.note("first step: measured on a GPU only, where kernels are compiled")
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        began = time.perf_counter()
        answer = subprocess.run(
            [sys.executable, "-m", "perilune.bench.train"],
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            timeout=FIRST_STEP_SECONDS,
            check=False,
        )
        whole = time.perf_counter() - began
    if answer.returncode:
        raise BenchError(f"first step: the process failed: {answer.stderr.strip().splitlines()[-1:]}")
    bench.add("first step", "first step", "s", float(answer.stdout.split()[-1]))
    bench.add("first step", "first step with imports and start of the process", "s", whole)


def take_first_step() -> None:
    """What the fresh process does: builds the model, takes one step, prints its seconds."""
    bench = Bench(torch.device("cuda"), emit=lambda line: None)
    config = base_config(bench)
    print(seconds_of_first_step(bench, build_ours(bench, config), config))


def seconds_of_first_step(bench: Bench, model: Decoder, config: ModelConfig) -> float:
    step = step_of(model, *random_batch(bench, config.vocab_size, *SHAPES[0]))
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profile(bench: Bench) -> None:
    """Prints the kernels of one step by the time they take."""
    config = base_config(bench)
    profile_steps(bench, build_ours(bench, config), config)


def profile_steps(bench: Bench, model: Decoder, config: ModelConfig) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    for batch, length in shapes(bench):
        step = step_of(model, *random_batch(bench, config.vocab_size, batch, length))
        for _ in range(2):
            step()
        with profile(activities=activities) as recorded:
            step()
            if bench.is_gpu:
                torch.cuda.synchronize()
        times: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in recorded.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA or not bench.is_gpu:
                times[event.name] += event.device_time if bench.is_gpu else event.self_cpu_time_total
                calls[event.name] += 1
        print(f"B{batch} T{length}: {sum(times.values()) / 1e3:.1f} ms in {sum(calls.values())} kernels")
        for name, microseconds in times.most_common(PROFILE_LINES):
            print(f"{microseconds / 1e3:9.2f} ms {calls[name]:5d} x  {name[:100]}")


# ---------------------------------------------------------------------------------------------------------------------
# The operators of a step


def part(bench: Bench, name: str, function: Callable[..., Tensor], inputs: list[Tensor], passes: float) -> None:
    """Checks and times one operator; `passes` is the bytes its forward and backward must move."""
    case = f"parts {name}"
    if not bench.wants(case):
        return
    wide = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    y, right = function(*inputs), function(*wide)
    dy = torch.randn_like(y)
    limit = 2**-8 if y.dtype == torch.bfloat16 else 1e-5
    bench.check(case, y, right, limit, "y")
    for index, (mine, exact) in enumerate(
        zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(right, wide, dy.double()), strict=True)
    ):
        bench.check(case, mine, exact, limit, f"gradient {index}")
    del right, wide
    forward = bench.time(lambda: function(*inputs))
    both = bench.time(lambda: torch.autograd.grad(function(*inputs), inputs, dy))
    floor = passes / bench.copy_bandwidth * 1e3
    bench.add(case, "forward", "ms", forward)
    bench.add(case, "forward + backward", "ms", both, floor=floor)


def parts(bench: Bench) -> None:
    config = base_config(bench)
    tokens = 32768 if bench.is_gpu else 128
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    heads, dim = config.kda.num_heads, config.kda.head_dim

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=bench.device, dtype=dtype)

    wide = tokens * heads * dim * dtype.itemsize  # bytes of one [tokens, H * D]
    part(
        bench,
        "short_conv",
        lambda x, weight: short_conv(x, weight)[0],
        [random(1, tokens, 3 * heads * dim), random(3 * heads * dim, 4, dtype=torch.float32)],
        15 * wide,
    )
    part(
        bench,
        "gated_norm",
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, 1e-5),
        [random(tokens, heads, dim), random(tokens, heads, dim), random(dim, dtype=torch.float32)],
        8 * wide,
    )
    part(
        bench,
        "swiglu",
        swiglu,
        [random(tokens, 2 * config.intermediate_size)],
        8 * tokens * config.intermediate_size * dtype.itemsize,
    )
    if bench.wants("parts cross_entropy"):
        _cross_entropy_part(bench, config, random(tokens, config.hidden_size))


PARTS = ("short_conv", "gated_norm", "swiglu", "cross_entropy")


def _cross_entropy_part(bench: Bench, config: ModelConfig, hidden: Tensor) -> None:
    case = "parts cross_entropy"
    weight = (torch.randn(config.vocab_size, config.hidden_size, device=bench.device) * 0.02).requires_grad_()
    targets = torch.randint(0, config.vocab_size, hidden.shape[:1], device=bench.device)
    few = slice(0, 256)
    exact = torch.nn.functional.cross_entropy(hidden[few].double() @ weight.double().T, targets[few], reduction="sum")
    bench.check(case, linear_cross_entropy_sum(hidden[few], weight, targets[few]), exact, 1e-3, "loss")
    hidden.requires_grad_()
    sources = [hidden, weight]
    both = bench.time(lambda: torch.autograd.grad(linear_cross_entropy_sum(hidden, weight, targets), sources))
    flops = 6 * weight.numel() * hidden.shape[0]
    bench.add(case, "forward + backward", "ms", both, floor=flops / bench.matmul_rate * 1e3)


# ---------------------------------------------------------------------------------------------------------------------
# fla's model


class FlaModel(torch.nn.Module):
    """Layers of flash-linear-attention, all of them KDA, put together as in its own KDA model, bfloat16 throughout."""

    def __init__(self, config: ModelConfig, layers: ModuleType, modules: ModuleType) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding = torch.nn.Embedding(config.vocab_size, width)
        self.blocks = torch.nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            attention = layers.KimiDeltaAttention(
                hidden_size=width, num_heads=config.kda.num_heads, head_dim=config.kda.head_dim
            )
            mlp = modules.GatedMLP(hidden_size=width, intermediate_size=config.intermediate_size)
            norms = [modules.RMSNorm(width) for _ in range(2)]
            self.blocks.append(torch.nn.ModuleList([norms[0], attention, norms[1], mlp]))
        self.norm = modules.RMSNorm(width)
        self.head = torch.nn.Linear(width, config.vocab_size, bias=False)
        self.criterion = modules.FusedLinearCrossEntropyLoss()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for first, attention, second, mlp in self.blocks:  # pyrefly: ignore[not-iterable]
            x = x + attention(first(x))[0]
            x = x + mlp(second(x))
        return self.criterion(self.norm(x), targets, self.head.weight)


def fla_steps(bench: Bench) -> None:
    layers = optional("fla.layers.kda", bench) if bench.is_gpu else None
    modules = optional("fla.modules", bench)
    if layers is None or modules is None:
        return
    config = base_config(bench)
    theirs = FlaModel(config, layers, modules).to(bench.device, torch.bfloat16)
    ours = build_ours(bench, config)
    for batch, length in SHAPES:
        tokens, targets = random_batch(bench, config.vocab_size, batch, length)
        peer = bench.time(step_of(theirs, tokens, targets))
        mine = bench.time(step_of(ours, tokens, targets))
        bench.add(f"fla step B{batch} T{length}", "forward + backward", "ms", mine, peers={"fla": peer})


if __name__ == "__main__":
    take_first_step()
