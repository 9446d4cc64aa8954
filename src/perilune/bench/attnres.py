"""Attention Residuals: the mix beside fla's, and what blocks of them cost in a training step.

"mix": n sources of 16,384 x 2,048 in bfloat16, forward and backward, gradients of sources, query and gain, as single
calls and in a CUDA graph. The floor is bytes over measured copy bandwidth: sources and mix once forward; sources,
gradient of the mix and gradients of the sources once backward.

"blocks": a chain of sublayers tanh(x W) around block Attention Residuals against the definition in float64, in output
and gradients, beside the same chain of plain torch operators in bfloat16.

"train step": a decoder of 24 layers (causal attention by torch's fused kernel, heads of 128; SwiGLU of 2.75 widths;
vocabulary 32,768), forward, backward and fused AdamW, as one CUDA graph, so that no launch costs host time. Weights are
float32, activations bfloat16. The peer is the same decoder with the plain residual path: one fused add + RMSNorm for
each sublayer. All elementwise work is in fused kernels already (SwiGLU, norms, residuals, loss), in both alike, so
nothing is left for a compiler. Steps of both take turns; overhead is (block AttnRes - plain) / plain. Peak memory is
that of one step beyond weights and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.bench import peers
from perilune.bench.session import Bench, relative_error
from perilune.kernels.attnres import mix
from perilune.kernels.cross_entropy import linear_cross_entropy_sum
from perilune.model.linear import Linear, RMSNorm, SwiGLU
from perilune.model.residual import AttentionResidual, attnres_stream, plain_stream

EPS = 1e-6
STEPS_MS = 1500
NUM_LAYERS, NUM_BLOCKS, HEAD_DIM, VOCABULARY = 24, 8, 128, 32768
# Inputs rounded to bfloat16 are shared with the reference; what differs is one rounding of each result, 2^-9 at most,
# and in gradients of parameters the order of sums.
LIMIT = 5e-3


def run(bench: Bench) -> None:
    case = "blocks 48 sublayers in 8"
    if bench.wants(case):
        _check_blocks(bench, case)
    steps = [(1024, 8, 2048), (2048, 8, 2048), (1024, 1, 2048), (2048, 1, 2048)] if bench.is_gpu else [(64, 1, 32)]
    for width, batch, length in steps:
        case = f"train step d{width} B{batch} T{length}"
        if bench.wants(case):
            _train_step(bench, case, width, batch, length)
    tokens, width = (16384, 2048) if bench.is_gpu else (256, 64)
    for num_sources in (2, 5, 9):
        case = f"mix {num_sources} sources {tokens}x{width}"
        if bench.wants(case):
            _mix(bench, case, num_sources, tokens, width)


# The mix --------------------------------------------------------------------------------------------------------------


def _mix(bench: Bench, case: str, num_sources: int, tokens: int, width: int) -> None:
    dtype, backend = (torch.bfloat16, "triton") if bench.is_gpu else (torch.float32, None)
    generator = torch.Generator(bench.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=bench.device)

    sources = [normal(tokens, width).to(dtype).requires_grad_() for _ in range(num_sources)]
    query = (normal(width) * width**-0.5).requires_grad_()
    gain = (1 + 0.1 * normal(width)).requires_grad_()
    d_mix = normal(tokens, width).to(dtype)
    _check_mix(bench, case, sources, query, gain, d_mix, backend)

    def ours_timed() -> dict[str, float]:
        leaves = [*sources, query, gain]
        return _timed(bench, case, lambda: mix(sources, query, gain=gain, eps=EPS, backend=backend), d_mix, leaves)

    ours, theirs = ours_timed(), None
    fla = peers.optional("fla.ops.attnres", bench) if bench.is_gpu else None
    if fla is not None:
        rounded = [query.detach().to(dtype).requires_grad_(), gain.detach().to(dtype).requires_grad_()]

        fused = fla.fused_attnres

        def theirs_timed() -> dict[str, float]:
            forward = lambda: fused(rounded[0], sources, rounded[1], rms_eps=EPS)  # noqa: E731
            return _timed(bench, f"{case}, fla", forward, d_mix, [*sources, *rounded])

        # Ours, theirs, theirs, ours: a clock that falls under load must not favour either.
        with peers.parallel_tuning():
            theirs = _better(theirs_timed(), theirs_timed())
        ours = _better(ours, ours_timed())
    row_bytes = tokens * width * d_mix.element_size()
    for metric, mine in ours.items():
        rows = num_sources + 1 if "backward" not in metric else 3 * num_sources + 2
        floor = rows * row_bytes / bench.copy_bandwidth * 1e3
        bench.add(case, metric, "ms", mine, {"fla": None if theirs is None else theirs.get(metric)}, floor=floor)


def _better(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {metric: min(value, second.get(metric, value)) for metric, value in first.items()}


def _check_mix(
    bench: Bench, case: str, sources: list[Tensor], query: Tensor, gain: Tensor, d_mix: Tensor, backend: str | None
) -> None:
    rows = 512
    few = [source.detach()[:rows].requires_grad_() for source in sources]
    exact = [x.detach().double().requires_grad_() for x in (*few, query, gain)]
    h = mix(few, query, gain=gain, eps=EPS, backend=backend)
    right = mix(exact[:-2], exact[-2], gain=exact[-1], eps=EPS, backend="reference")
    grads = torch.autograd.grad(h, [*few, query, gain], d_mix[:rows])
    right_grads = torch.autograd.grad(right, exact, d_mix[:rows].double())
    bench.check(case, h, right, LIMIT)
    bench.check(case, torch.stack(grads[:-2]), torch.stack(right_grads[:-2]), LIMIT, "dsources")
    bench.check(case, grads[-2], right_grads[-2], LIMIT, "dquery")
    bench.check(case, grads[-1], right_grads[-1], LIMIT, "dgain")


def _timed(
    bench: Bench, case: str, forward: Callable[[], Tensor], d_output: Tensor, leaves: list[Tensor]
) -> dict[str, float]:
    """As single calls, where the host may be the slower side, and in a CUDA graph, where only the GPU takes time."""

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, d_output)

    times = {"forward": bench.time(forward), "forward + backward": bench.time(both)}
    if bench.is_gpu:
        try:
            for metric, function in zip(list(times), (forward, both)):
                times[f"{metric}, in a CUDA graph"] = bench.time_graph(function)
        except RuntimeError as error:
            bench.note(f"{case}: not captured in a CUDA graph ({str(error).partition(chr(10))[0]})")
    return times


# Whole blocks ---------------------------------------------------------------------------------------------------------


def _check_blocks(bench: Bench, case: str) -> None:
    tokens, width = (300, 1024) if bench.is_gpu else (7, 16)
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    generator = torch.Generator().manual_seed(1)
    embedding, d_output = (torch.randn(tokens, width, generator=generator).bfloat16() for _ in range(2))

    def results(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
        chain = _Chain(bench.device, width, dtype)
        x = embedding.to(bench.device, dtype).requires_grad_()
        output = chain(x) if backend is None else chain.by_definition(x, backend)
        leaves = [x, *(site.query for site in chain.sites), *(norm.weight for norm in chain.norms)]
        d_x, *rest = torch.autograd.grad(output, leaves, d_output.to(output))
        d_queries, d_weights = torch.stack(rest[: len(chain.sites)]), torch.stack(rest[len(chain.sites) :])
        return {"o": output, "dembedding": d_x, "dquery": d_queries, "dweight of norms": d_weights}

    ours, theirs, right = results(dtype, None), results(dtype, "dense"), results(torch.float64, "reference")
    for what, expected in right.items():
        # The same roundings to bfloat16, or fewer, of the same numbers: errors agree up to luck.
        limit = 1.5 * relative_error(theirs[what], expected)
        bench.check(case, ours[what], expected, limit, what, peers={"torch operators": theirs[what]})


class _Chain(nn.Module):
    def __init__(self, device: torch.device, width: int, dtype: torch.dtype, *, sublayers: int = 48) -> None:
        super().__init__()
        self.dtype = dtype
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        self.matrices = [(normal(width, width) * width**-0.5).bfloat16().to(device, dtype) for _ in range(sublayers)]
        self.norms = [RMSNorm(width, eps=EPS) for _ in range(sublayers + 1)]
        self.sites = [AttentionResidual(width, eps=EPS) for _ in range(sublayers + 1)]
        for site in self.sites:
            site.query.data.copy_(normal(width) * width**-0.5)
        for module in (*self.norms, *self.sites):
            module.to(device, torch.float64 if dtype == torch.float64 else torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        stream = attnres_stream(x, self.sites, block_sublayers=len(self.matrices) // NUM_BLOCKS, fused=True)
        for matrix, norm in zip(self.matrices, self.norms):
            h, stream = stream.read(norm)
            stream = stream.write(torch.tanh(h @ matrix))
        return stream.read(self.norms[-1])[0]

    def by_definition(self, x: Tensor, backend: str) -> Tensor:
        size = len(self.matrices) // NUM_BLOCKS
        outputs: list[Tensor] = []
        for index, (site, norm) in enumerate(zip(self.sites, self.norms)):
            parts = [outputs[start : min(start + size, index)] for start in range(0, index, size)]
            sources = [x, *(reduce(torch.add, part) for part in parts)]
            h = norm(mix(sources, site.query, gain=site.gain, eps=EPS, backend=backend))
            if index == len(self.matrices):
                break
            outputs.append(torch.tanh(h @ self.matrices[index]))
        return h


# A training step ------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv_proj = Linear(width, 3 * width)
        self.o_proj = Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv_proj(x_BTD).chunk(3, dim=-1)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class _Decoder(nn.Module):
    """Attention and SwiGLU around a residual path; `blocks` of Attention Residuals, or None for the plain path."""

    def __init__(self, width: int, *, layers: int, blocks: int | None, head_dim: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.sublayers = nn.ModuleList(
            _Attention(width, head_dim) if index % 2 == 0 else SwiGLU(width, width * 11 // 4)
            for index in range(2 * layers)
        )
        self.norms = [RMSNorm(width, eps=EPS) for _ in range(2 * layers + 1)]
        self.sites = [AttentionResidual(width, eps=EPS) for _ in range(2 * layers + 1) if blocks]
        self.owned = nn.ModuleList([*self.norms, *self.sites])
        self.block_sublayers = -(-2 * layers // blocks) if blocks else 0
        self.head = Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        embedded = self.embedding(tokens).to(dtype)
        if self.block_sublayers:
            stream = attnres_stream(embedded, self.sites, block_sublayers=self.block_sublayers, fused=True)
        else:
            stream = plain_stream(embedded)
        for sublayer, norm in zip(self.sublayers, self.norms):
            h, stream = stream.read(norm)
            stream = stream.write(sublayer(h))
        h, _ = stream.read(self.norms[-1])
        return linear_cross_entropy_sum(h.flatten(0, 1), self.head.weight, targets.flatten())


def _train_step(bench: Bench, case: str, width: int, batch: int, length: int) -> None:
    names = {"plain residual": None, "block AttnRes": NUM_BLOCKS if bench.is_gpu else 2}
    peaks, calls = [], []
    for blocks in names.values():
        step = _step_of(bench, width, batch, length, blocks)
        step()
        peaks.append(bench.peak_memory(step))
        if bench.is_gpu:
            torch.cuda.empty_cache()
        calls.append(_as_graph(bench, case, step))
    plain_ms, ms = _alternating_ms(calls) if bench.is_gpu else [bench.time(call) for call in calls]
    bench.add(case, "step, forward + backward + AdamW", "ms", ms, {"plain residual": plain_ms})
    bench.add(case, "overhead of block AttnRes", "%", 100 * (ms - plain_ms) / plain_ms)
    bench.add(case, "peak memory of a step", "MiB", peaks[1] / 2**20, {"plain residual": peaks[0] / 2**20})
    calls.clear()
    if bench.is_gpu:
        torch.cuda.empty_cache()


def _as_graph(bench: Bench, case: str, step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph; the step itself where there is none."""
    if not bench.is_gpu:
        return step
    stream = torch.cuda.Stream(bench.device)
    stream.wait_stream(torch.cuda.current_stream(bench.device))
    try:
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize(bench.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        bench.note(f"{case}: timed launch by launch, as a CUDA graph did not take the step ({first_line})")
        return step
    # What the graph uses must live as long as it does.
    return lambda kept=step: graph.replay()


def _alternating_ms(calls: list[Callable[[], None]]) -> list[float]:
    """Median time of each. They take turns without a pause, and the first of a turn changes: the clock of the GPU falls
    under load and recovers in a pause, which must not favour either."""
    repeats = 2
    for attempt in range(2):  # the first to warm up, and for the number of repeats
        turns = [[*enumerate(calls)][:: 1 if turn % 2 == 0 else -1] for turn in range(repeats)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(calls) + 1)]
        marks[0].record()
        order = [index_and_call for turn in turns for index_and_call in turn]
        for (_, call), mark in zip(order, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        times: list[list[float]] = [[] for _ in calls]
        for (index, _), (begin, end) in zip(order, pairwise(marks), strict=True):
            times[index].append(begin.elapsed_time(end))
        if attempt == 0:
            repeats = max(6, min(30, int(STEPS_MS / sum(map(min, times)))))
    return [median(each) for each in times]


def _step_of(bench: Bench, width: int, batch: int, length: int, blocks: int | None) -> Callable[[], None]:
    torch.manual_seed(0)
    layers, head_dim, vocabulary = (NUM_LAYERS, HEAD_DIM, VOCABULARY) if bench.is_gpu else (2, 16, 256)
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    with bench.device:
        model = _Decoder(width, layers=layers, blocks=blocks, head_dim=head_dim, vocabulary=vocabulary)
        tokens = torch.randint(vocabulary, (batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.is_gpu, capturable=bench.is_gpu)

    def step() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:], dtype).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
