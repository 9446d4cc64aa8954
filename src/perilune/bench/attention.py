"""Causal softmax attention with the maximum logit of every head, at the widths of MLA (192 for q and k, 128 for v).

What QK-Clip costs is the ratio to the same kernel without maxima ("same kernel without max"), forward and backward, in
a CUDA graph. Three kinds of heads: none above the threshold (the log-sum-exp answers); all above it and flat, where no
tile can be pruned (the worst case); all above it and peaked, as heads are when QK-Clip has work to do. Then the plain
speed beside torch's own paths, and packed documents.

Floors are the products of the allowed pairs over measured matmul rate: 2 (D + Dv) FLOP a pair and head forward,
2 (3 D + 2 Dv) more backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.bench import peers
from perilune.bench.session import Bench
from perilune.kernels.attention import attention, flex

# Relative RMS error at which a bfloat16 result is wrong rather than rounded: weights and their gradients have 8 bits.
LIMITS = {"o": 1e-2, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "max logit": 1e-4}
FLOAT32_LIMIT = 1e-4
TAU = 100.0
PEAKED = 40.0  # factor on q: the largest logits are then about twice TAU


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    num_heads: int = 16
    num_kv_heads: int = 16
    width: int = 192
    value_width: int = 128
    batch: int = 1
    num_documents: int = 1

    @property
    def name(self) -> str:
        kind = "MLA" if self.width != self.value_width else "MHA" if self.num_heads == self.num_kv_heads else "GQA"
        shape = f"{kind} B{self.batch} T{self.num_tokens} H{self.num_heads} {self.width}/{self.value_width}"
        return f"{shape} {self.num_documents} documents" if self.num_documents > 1 else shape


@dataclass(frozen=True, kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_o: Tensor
    cu_seqlens: Tensor | None
    longest: int  # document, in tokens

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def run(bench: Bench) -> None:
    if not bench.is_gpu:
        small = Case(num_tokens=300, num_heads=2, num_kv_heads=2, width=48, value_width=32)
        _accuracy(bench, small, dict.fromkeys(LIMITS, FLOAT32_LIMIT))
        if bench.wants(small.name):
            inputs = make_inputs(small, bench.device)
            bench.add(small.name, "forward + backward", "ms", bench.time(lambda: _both(_ours, inputs)))
        return
    for case in (
        Case(num_tokens=2048, num_heads=2, num_kv_heads=2),
        Case(num_tokens=2048, num_documents=5, num_heads=2, num_kv_heads=2),
    ):
        _accuracy(bench, case, LIMITS)
    for case in (Case(num_tokens=4096), Case(num_tokens=32768)):
        if bench.wants(f"max logit {case.name}"):
            _cost_of_maxima(bench, case)
    grouped = Case(num_tokens=4096, num_kv_heads=4, width=128, batch=8)
    packed = [Case(num_tokens=tokens, num_documents=count) for tokens, count in ((4096, 6), (32768, 16), (32768, 128))]
    for case in (Case(num_tokens=4096), Case(num_tokens=32768), grouped, *packed):
        if bench.wants(case.name):
            _speed(bench, case)
            torch.cuda.empty_cache()


# What is measured ----------------------------------------------------------------------------------------------------


def _accuracy(bench: Bench, case: Case, limits: dict[str, float]) -> None:
    """Output, gradients and exact maxima against the definition in float64."""
    name = f"accuracy {case.name}"
    if not bench.wants(name):
        return
    inputs = make_inputs(case, bench.device)
    precise = make_inputs(case, bench.device, dtype=torch.float64, like=inputs)
    want, got = _results(precise, "reference"), _results(inputs, None)
    for what, limit in limits.items():
        bench.check(name, got[what], want[what], limit, what)


def _results(inputs: Inputs, backend: str | None) -> dict[str, Tensor]:
    o, max_logit, is_bound = attention(*inputs.leaves, cu_seqlens=inputs.cu_seqlens, backend=backend)
    assert not is_bound.any(), "without a threshold every maximum is exact"
    gradients = torch.autograd.grad(o, inputs.leaves, inputs.grad_o)
    return {"o": o.detach(), "max logit": max_logit} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _cost_of_maxima(bench: Bench, case: Case) -> None:
    """The same attention with and without maxima, in a CUDA graph, both directions."""
    name = f"max logit {case.name}"
    flat, peaked = make_inputs(case, bench.device), make_inputs(case, bench.device, gain=PEAKED)
    for what, inputs, threshold in (
        ("no head above tau", flat, TAU),
        ("every head above tau, none pruned", flat, 0.0),
        ("every head above tau, peaked", peaked, TAU),
    ):
        # A live autograd graph would tie the leaves to this stream, and no other could be captured.
        with torch.no_grad():
            _, max_logit, is_bound = attention(*inputs.leaves, clip_threshold=threshold)
        expected = what == "no head above tau"
        assert bool((is_bound == expected).all()) and bool((max_logit > threshold).all()) != expected, f"{name}: {what}"

        def timed(tau: float | None, inputs: Inputs = inputs) -> float:
            return bench.time_graph(lambda: _both(_ours, inputs, clip_threshold=tau))

        # Between two measurements of the other: a long run heats the chip and slows its clock.
        before, with_maxima, after = timed(None), timed(threshold), timed(None)
        bench.add(
            name,
            f"forward + backward, {what}",
            "ms",
            with_maxima,
            peers={"same kernel without max": (before + after) / 2},
            floor=_floor_ms(bench, case, backward=True),
        )


def _speed(bench: Bench, case: Case, *, with_flex: bool = True) -> None:
    """Forward, both directions and memory, beside what torch offers for the same inputs."""
    inputs = make_inputs(case, bench.device)
    theirs: dict[str, Callable[..., Tensor]] = {"FlexAttention with max": _flex_with_max} if with_flex else {}
    if case.num_documents == 1:
        theirs |= {"SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION), "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION)}
    else:
        theirs["flash varlen"] = _flash_varlen
    options = {"clip_threshold": TAU}
    for metric, call in (("forward", _forward), ("forward + backward", _both)):
        ours = bench.time(lambda call=call: call(_ours, inputs, **options))
        found = {
            peer: peers.attempt(bench, peer, lambda call=call, f=f: bench.time(lambda: call(f, inputs)))
            for peer, f in theirs.items()
        }
        floor = _floor_ms(bench, case, backward=call is _both)
        bench.add(case.name, metric, "ms", ours, peers=found, floor=floor)
    ours = bench.peak_memory(lambda: _both(_ours, inputs, **options)) / 2**20
    found = {
        peer: peers.attempt(bench, peer, lambda f=f: bench.peak_memory(lambda: _both(f, inputs)) / 2**20)
        for peer, f in theirs.items()
    }
    bench.add(case.name, "extra memory, forward + backward", "MiB", ours, peers=found)


def _forward(function: Callable[..., Tensor], inputs: Inputs, **options: float | None) -> Tensor:
    with torch.no_grad():
        return function(inputs, **options)


def _both(function: Callable[..., Tensor], inputs: Inputs, **options: float | None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(inputs, **options), inputs.leaves, inputs.grad_o)


# Who is measured -----------------------------------------------------------------------------------------------------


def _ours(inputs: Inputs, clip_threshold: float | None = TAU) -> Tensor:
    return attention(*inputs.leaves, cu_seqlens=inputs.cu_seqlens, clip_threshold=clip_threshold)[0]


def _sdpa(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
    """torch's attention by one backend; a width of v that it does not take is padded."""

    def attend(inputs: Inputs) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs.leaves)
        width = v.shape[3]
        if backend == SDPBackend.FLASH_ATTENTION and width != q.shape[3]:
            v = F.pad(v, (0, q.shape[3] - width))
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return o[..., :width].transpose(1, 2)

    return attend


def _flex_with_max(inputs: Inputs) -> Tensor:
    scale = inputs.q.shape[3] ** -0.5
    return flex.flex_attention_with_max(*inputs.leaves, scale=scale, cu_seqlens=inputs.cu_seqlens)[0]


def _flash_varlen(inputs: Inputs) -> Tensor:
    """torch's flash attention over documents. It is told how long the longest is, which ours need not know: told the
    length of the row, it would launch that many tiles for every document."""
    assert inputs.cu_seqlens is not None
    q, k, v = (x[0] for x in inputs.leaves)
    borders, length = inputs.cu_seqlens, inputs.longest
    padded = F.pad(v, (0, q.shape[2] - v.shape[2]))
    o, *_ = torch.ops.aten._flash_attention_forward(
        q, k, padded, borders, borders, length, length, 0.0, True, False, scale=q.shape[2] ** -0.5
    )
    return o[None, ..., : v.shape[2]]


# Inputs --------------------------------------------------------------------------------------------------------------


def make_inputs(
    case: Case,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    gain: float = 1.0,
    like: Inputs | None = None,
) -> Inputs:
    """Random inputs, of `like` in another dtype if given. v is a part of a wider tensor, as the up-projection of an MLA
    layer that rotates leaves it."""
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if like is not None:
        tensors = (like.q, like.k, like.v, like.grad_o)
        q, k, v, grad_o = (x.detach().to(dtype) for x in tensors)
        cu_seqlens = like.cu_seqlens
    else:
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, width: int) -> Tensor:
            shape = (case.batch, case.num_tokens, heads, width)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        q = normal(case.num_heads, case.width) * gain
        k = normal(case.num_kv_heads, case.width)
        v = normal(case.num_kv_heads, 2 * case.value_width)[..., case.value_width :]
        grad_o = normal(case.num_heads, case.value_width)
        cu_seqlens = _borders(case).to(device) if case.num_documents > 1 else None
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return Inputs(q=q, k=k, v=v, grad_o=grad_o, cu_seqlens=cu_seqlens, longest=int(_borders(case).diff().max()))


def _borders(case: Case) -> Tensor:
    """Documents of random lengths, the same in every run; in 32 bits, as flash attention wants them."""
    cuts = torch.randperm(case.num_tokens - 1, generator=torch.Generator().manual_seed(1))[: case.num_documents - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([case.num_tokens])]).int()


def _floor_ms(bench: Bench, case: Case, *, backward: bool) -> float:
    lengths = _borders(case).diff().double() if case.num_documents > 1 else torch.tensor([float(case.num_tokens)])
    pairs = case.batch * case.num_heads * float((lengths * (lengths + 1) / 2).sum())
    products = case.width + case.value_width
    if backward:
        products += 3 * case.width + 2 * case.value_width
    return 2 * pairs * products / bench.matmul_rate * 1e3
