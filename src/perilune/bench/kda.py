"""Kimi Delta Attention over whole sequences: time, memory and accuracy, beside cuDNN and fla.

Gates: "strong" is -5 sigmoid(N(0, 1)), "weak" about -0.003 (both of the bounded family), "softplus" as Kimi-Linear
initialises it: -0.2 on average, unbounded. All take raw gate inputs, beta before its sigmoid, q and k before their
norm, and return the gradients of these. cuDNN is timed as the bare operator on prepared inputs too ("cudnn"); "cudnn +
prepare" is backend="cudnn". "own kernel" is backend="triton", "chosen" is what `kda` picks by itself. Every time is
taken of single calls, where short ones wait for the host, and in a CUDA graph, where they do not.

Floors are bytes over measured copy bandwidth: q, k, v, g, beta and o once forward (1,282 bytes a token and head at
128 wide, bfloat16), those and five gradients backward.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perilune.bench import peers
from perilune.bench.session import Bench
from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, kda
from perilune.kernels.kda.cudnn import PLAN, SCALE, cudnn_kda, why_not_cudnn
from perilune.kernels.kda.fla import fla_kda, why_not_fla

FLA_CASES = ("T32768 H32 strong", "T32768 H32 softplus")  # it tunes for minutes on other shapes; --filter asks for them
DOCUMENTS = (1300, 547, 2048, 963, 271, 3063)
# Relative RMS error at which a bfloat16 result is wrong rather than rounded: rounding of inputs and outputs alone gives
# 0.2% to 0.4%, sums of products of rounded factors twice that. Gradients pass through about two such products more.
LIMITS = {"o": 1e-2, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2, "dg": 3e-2, "dbeta": 3e-2}
FLOAT32_LIMIT = 1e-4
IN_A_GRAPH = ", in a CUDA graph"
HAS_OWN_KERNEL = importlib.util.find_spec("perilune.kernels.kda.triton") is not None


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    num_heads: int
    gate: str
    head_dim: int = 128
    documents: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        shape = f"T{self.num_tokens} H{self.num_heads}"
        return f"{shape} {self.gate}" + (f" {len(self.documents)} documents" if self.documents else "")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # raw gate input
    beta: Tensor  # before its sigmoid
    gate: Gate
    cu_seqlens: Tensor | None
    d_output: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        parameters = [x for x in (self.gate.A_log, self.gate.dt_bias) if x is not None]
        return [self.q, self.k, self.v, self.g, self.beta, *parameters]


def run(bench: Bench) -> None:
    if not bench.is_gpu:
        _run_on_cpu(bench)
        return
    shapes = [(8192, 32), (32768, 32), (131072, 32), (32768, 8)]
    cases = [Case(num_tokens=t, num_heads=h, gate=gate) for t, h in shapes for gate in ("strong", "weak", "softplus")]
    cases.append(Case(num_tokens=sum(DOCUMENTS), num_heads=32, gate="strong", documents=DOCUMENTS))
    for gate in ("strong", "weak", "softplus"):
        _accuracy(bench, Case(num_tokens=2048, num_heads=2, gate=gate))
    own: dict[str, float] = {}
    for case in cases:
        if bench.wants(case.name):
            own |= _speed(bench, case)
            torch.cuda.empty_cache()
    for tokens, heads in shapes:
        pair = [own.get(Case(num_tokens=tokens, num_heads=heads, gate=gate).name) for gate in ("softplus", "strong")]
        if pair[0] is not None and pair[1] is not None:
            bench.add(f"T{tokens} H{heads}", "softplus over bounded gate", "x", pair[0] / pair[1])


def _run_on_cpu(bench: Bench) -> None:
    for gate in ("strong", "weak", "softplus"):
        case = Case(num_tokens=512, num_heads=2, gate=gate, head_dim=32)
        if bench.wants(case.name):
            inputs = make_inputs(case, bench.device, torch.float32)
            _check(bench, case.name, inputs, {None: _ours(None)}, limits=dict.fromkeys(LIMITS, FLOAT32_LIMIT))
            _time(bench, case, inputs, {"chosen": _ours(None)}, theirs={})


# What is measured ----------------------------------------------------------------------------------------------------


def _accuracy(bench: Bench, case: Case) -> None:
    """Outputs and gradients against the recurrence in float64."""
    name = f"accuracy {case.name}"
    if not bench.wants(name):
        return
    inputs = make_inputs(case, bench.device, torch.bfloat16)
    ours: dict[str | None, Callable[[Inputs], Tensor]] = {None: _ours(None)}
    if HAS_OWN_KERNEL:
        ours["triton"] = _ours("triton")
    theirs: dict[str, Callable[[Inputs], Tensor]] = {}
    if why_not_cudnn(*_operands(inputs), **_options(inputs), beta_bound=1.0) is None:
        theirs["cudnn + prepare"] = _with_cudnn
    if bench.is_filtered and why_not_fla(*_operands(inputs), **_options(inputs)) is None:
        theirs["fla"] = _with_fla
    _check(bench, name, inputs, ours, theirs, LIMITS)


def _check(
    bench: Bench,
    name: str,
    inputs: Inputs,
    ours: dict[str | None, Callable[[Inputs], Tensor]],
    theirs: dict[str, Callable[[Inputs], Tensor]] | None = None,
    limits: dict[str, float] | None = None,
) -> None:
    precise = _precise(inputs)
    want = _results(_ours("reference"), precise)
    with peers.parallel_tuning():
        found = {
            peer: peers.attempt(bench, peer, lambda f=f: _results(f, inputs)) for peer, f in (theirs or {}).items()
        }
    for backend, function in ours.items():
        got = _results(function, inputs)
        label = f"{name}, chosen" if backend is None else f"{name}, own kernel"
        for what, limit in (limits or LIMITS).items():
            others = {peer: results[what] for peer, results in found.items() if results is not None}
            bench.check(label, got[what], want[what], limit, what, peers=others)


def _results(function: Callable[[Inputs], Tensor], inputs: Inputs) -> dict[str, Tensor]:
    o = function(inputs)
    leaves = inputs.leaves[:5]
    gradients = torch.autograd.grad(o, leaves, inputs.d_output.to(o.dtype))
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv", "dg", "dbeta"), gradients))


def _speed(bench: Bench, case: Case) -> dict[str, float]:
    inputs = make_inputs(case, bench.device, torch.bfloat16)
    ours = {"chosen": _ours(None)}
    if HAS_OWN_KERNEL:
        ours = {"own kernel": _ours("triton"), **ours}
    elif case.num_tokens > 8192:
        bench.note(f"{case.name}: left out, the plain torch path is no match for this length")
        return {}
    theirs = _timed_peers(bench, case, inputs)
    return _time(bench, case, inputs, ours, theirs)


def _timed_peers(bench: Bench, case: Case, inputs: Inputs) -> dict[str, tuple[Callable[..., Tensor], Any]]:
    """Name -> function and what it is called with."""
    found: dict[str, tuple[Callable[..., Tensor], Any]] = {}
    reason = why_not_cudnn(*_operands(inputs), **_options(inputs), beta_bound=1.0)
    if reason is None:
        found["cudnn"] = (_bare_cudnn, _prepared(inputs))
        found["cudnn + prepare"] = (_with_cudnn, inputs)
        bench.versions["cudnn"] = peers.version_of("cudnn") or ""
    else:
        bench.note(f"cudnn, {case.gate} gate: {reason}")
    reason = why_not_fla(*_operands(inputs), **_options(inputs))
    if reason is not None:
        bench.note(f"fla: {reason}")
    elif case.name in FLA_CASES or bench.is_filtered:
        found["fla"] = (_with_fla, inputs)
        bench.versions["fla"] = peers.version_of("fla") or ""
    return found


def _time(
    bench: Bench,
    case: Case,
    inputs: Inputs,
    ours: dict[str, Callable[[Inputs], Tensor]],
    theirs: dict[str, tuple[Callable[..., Tensor], Any]],
) -> dict[str, float]:
    """Forward, forward + backward and memory of all; the time of both of our own kernel (or of the chosen path)."""
    rows = case.num_tokens * case.num_heads
    size = inputs.q.element_size()
    forward_bytes = rows * (5 * case.head_dim * size + size)
    backward_bytes = rows * (9 * case.head_dim * size + 2 * size)
    floors = {
        "forward": forward_bytes / bench.copy_bandwidth * 1e3,
        "forward + backward": (forward_bytes + backward_bytes) / bench.copy_bandwidth * 1e3,
    }
    measured = {}
    for peer, (function, data) in theirs.items():
        with peers.parallel_tuning():
            warm = peers.attempt(bench, f"{peer}, {case.name}", lambda f=function, d=data: _both(f, d))
        if warm is not None:
            measured[peer] = _measure(bench, f"{case.name}, {peer}", function, data)
        del warm
    times = {}
    for label, function in ours.items():
        name = f"{case.name}, {label}"
        for metric, value in _measure(bench, name, function, inputs).items():
            unit, scale = ("KB/token/head", 1 / (1024 * rows)) if metric == "extra memory" else ("ms", 1.0)
            others = {peer: found[metric] * scale for peer, found in measured.items() if metric in found}
            bench.add(name, metric, unit, value * scale, others, floors.get(metric.removesuffix(IN_A_GRAPH)))
            if metric == "forward + backward":
                times.setdefault(case.name, value)
    return times


def _measure(bench: Bench, name: str, function: Callable[..., Tensor], data: Any) -> dict[str, float]:
    """As single calls, where the host may be the slower side; in a CUDA graph, where only the GPU takes time."""

    def forward() -> None:
        with torch.no_grad():
            function(data)

    def both() -> None:
        _both(function, data)

    found = {"forward": bench.time(forward), "forward + backward": bench.time(both)}
    memory = bench.peak_memory(both)
    if bench.is_gpu:
        try:
            for metric, timed in zip(list(found), (forward, both)):
                found[metric + IN_A_GRAPH] = bench.time_graph(timed)
        except RuntimeError as error:
            bench.note(f"{name}: not captured in a CUDA graph ({str(error).partition(chr(10))[0]})")
    return found | {"extra memory": memory}


def _both(function: Callable[..., Tensor], data: Any) -> tuple[Tensor, ...]:
    o = function(data)
    return torch.autograd.grad(o, data.leaves, data.d_output)


# Who is measured -----------------------------------------------------------------------------------------------------


def _ours(backend: str | None) -> Callable[[Inputs], Tensor]:
    return lambda x: kda(*_operands(x), **_keywords(x), beta_max=1.0, backend=backend)[0]


def _with_cudnn(x: Inputs) -> Tensor:
    return cudnn_kda(x.q, x.k, x.v, x.g, torch.sigmoid(x.beta.float()), **_options(x), beta_bound=1.0)[0]


def _with_fla(x: Inputs) -> Tensor:
    return fla_kda(x.q, x.k, x.v, x.g, torch.sigmoid(x.beta), **_options(x))[0]


@dataclass(frozen=True, kw_only=True)
class PreparedInputs:
    """What the bare cuDNN operator takes: [T, H, K], normalised, log decays in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    d_output: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.log_decay, self.beta]


def _prepared(x: Inputs) -> PreparedInputs:
    from perilune.kernels.kda.prepare import prepare

    with torch.no_grad():
        ready = prepare(x.q, x.k, x.g, gate=x.gate)
    num_tokens = x.q.shape[1]
    borders = x.cu_seqlens if x.cu_seqlens is not None else torch.tensor([0, num_tokens], device=x.q.device)
    q, k, v, decay, beta = (
        t.detach().squeeze(0).requires_grad_()
        for t in (ready.q, ready.k, x.v, ready.log_decay, torch.sigmoid(x.beta.float()))
    )
    return PreparedInputs(
        q=q, k=k, v=v, log_decay=decay, beta=beta, cu_seqlens=borders.to(torch.int32), d_output=x.d_output.squeeze(0)
    )


def _bare_cudnn(x: PreparedInputs) -> Tensor:
    return torch.ops.cudnn.kimi_delta_attention_fwd(
        x.q, x.k, x.v, x.log_decay, x.beta, x.cu_seqlens, SCALE, plan_name=PLAN
    )[0]


def _operands(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return x.q, x.k, x.v, x.g, x.beta


def _keywords(x: Inputs) -> dict[str, Any]:
    return {"gate": x.gate, "qk_l2norm": True, "cu_seqlens": x.cu_seqlens}


def _options(x: Inputs) -> dict[str, Any]:
    """The keywords of a backend."""
    return {
        **_keywords(x), "scale": x.q.shape[-1] ** -0.5, "initial_state_NHKV": None, "dtype": torch.float32,
    }  # fmt: skip


# Inputs --------------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, case.num_tokens, case.num_heads, case.head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.float32, generator=generator)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, device=device, dtype=torch.float32, generator=generator)

    heads = (case.num_heads, case.head_dim)
    if case.gate == "softplus":
        step = torch.exp(uniform(*heads) * math.log(100) + math.log(1e-3))
        rate = torch.log(1 + 15 * uniform(case.num_heads)).requires_grad_()
        gate: Gate = SoftplusGate(rate, (step + torch.log(-torch.expm1(-step))).requires_grad_())
        raw = normal(*shape)
    else:
        gate = BoundedGate(torch.zeros(heads, device=device, requires_grad=True))
        raw = normal(*shape) if case.gate == "strong" else torch.logit(0.0006 * (0.5 + uniform(*shape)))
    cu_seqlens = None
    if case.documents:
        lengths = torch.tensor((0, *case.documents), device=device)
        cu_seqlens = lengths.cumsum(0).to(torch.int32)
    q, k, v = (normal(*shape).to(dtype).requires_grad_() for _ in range(3))
    return Inputs(
        q=q,
        k=k,
        v=v,
        g=raw.to(dtype).requires_grad_(),
        beta=normal(*shape[:3]).to(dtype).requires_grad_(),
        gate=gate,
        cu_seqlens=cu_seqlens,
        d_output=normal(*shape).to(dtype),
    )


def _precise(inputs: Inputs) -> Inputs:
    """The same numbers in float64."""

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    gate = inputs.gate
    rate = None if gate.A_log is None else double(gate.A_log)
    bias = double(gate.dt_bias)
    precise = SoftplusGate(rate, bias) if rate is not None and isinstance(gate, SoftplusGate) else None
    q, k, v, g, beta = (double(x) for x in _operands(inputs))
    return replace(
        inputs,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        gate=precise or BoundedGate(bias, rate),
        d_output=inputs.d_output.double(),
    )
