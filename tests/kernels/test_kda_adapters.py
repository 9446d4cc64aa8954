"""KDA through other libraries: the fused steps around them, what is handed over, what is refused, and on a GPU parity.

Without a GPU, cuDNN is stood in for by our own chunked path behind the library's signature: what is tested there is the
adapter, its layouts, states, scales and gradients.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, chunked, kda, l2norm
from perilune.kernels.kda import cudnn as cudnn_adapter
from perilune.kernels.kda import fla as fla_adapter
from perilune.kernels.kda.prepare import prepare, prepare_backward

# Sums of at most a few hundred float32 products of numbers near 1: rounding of 6e-8 each stays below 1e-5 of the norm.
FLOAT32 = 1e-5
# Relative RMS. Rounding to bfloat16 gives 2^-9 / sqrt(3) = 0.1% for each operand; o is a sum of products of three
# rounded factors (q, k, v) with rounded states, gradients go through one or two products more. fla's own tests take
# 0.5% for o, 0.8% for dq, dk, dv and 2% for dg and dbeta, which is taken for the gates' parameters too.
BFLOAT16 = {
    "o": 0.005, "state": 0.005, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dg": 0.02, "dbeta": 0.02, "d_state": 0.01,
    "dA_log": 0.02, "d_dt_bias": 0.02,
}  # fmt: skip


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def make_gate(kind: str, heads: int, key_dim: int, device: str = "cpu") -> Gate | None:
    generator = torch.Generator(device).manual_seed(7)
    rate = (0.5 * torch.randn(heads, device=device, generator=generator)).requires_grad_()
    bias = torch.randn(heads * key_dim, device=device, generator=generator).requires_grad_()
    return {
        "given": lambda: None,
        "softplus": lambda: SoftplusGate(rate, bias),
        "bounded": lambda: BoundedGate(bias.detach().view(heads, key_dim).requires_grad_(), rate),
        "bounded without rate": lambda: BoundedGate(bias),
    }[kind]()


def gate_leaves(gate: Gate | None) -> list[Tensor]:
    return [] if gate is None else [x for x in (gate.A_log, gate.dt_bias) if x is not None]


# The steps around a library -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["given", "softplus", "bounded", "bounded without rate"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 37, 3, 32), (1, 150, 1, 48)], ids=str)
@pytest.mark.parametrize("norm, factor", [(True, -0.3), (False, 1.0)])
def test_prepare_is_norm_and_gate_with_their_gradients(
    kind: str, shape: tuple[int, ...], norm: bool, factor: float
) -> None:
    gate = make_gate(kind, *shape[2:])
    q, k, g = (torch.randn(shape, requires_grad=True) for _ in range(3))
    ready = prepare(q, k, g, gate=gate, qk_l2norm=norm, query_factor=factor)
    reference = (
        factor * (l2norm(q.double()) if norm else q.double()),
        l2norm(k.double()) if norm else k.double(),
        g.double() if gate is None else gate.log_decay(g.double()),
    )
    for got, want in zip(ready[:3], reference):
        assert relative(got, want) < FLOAT32
    weights = [torch.randn(shape) for _ in range(3)]
    leaves = [q, k, g, *gate_leaves(gate)]
    got = torch.autograd.grad(sum((x * w).sum() for x, w in zip(ready[:3], weights)), leaves)
    want = torch.autograd.grad(sum((x * w.double()).sum() for x, w in zip(reference, weights)), leaves)
    by_hand = prepare_backward(ready, g, *weights, gate=gate, qk_l2norm=norm, query_factor=factor)
    for name, x, y, z in zip(("q", "k", "g", "rate", "bias"), got, want, [x for x in by_hand if x is not None]):
        # A gate's parameter sums terms of both signs: what is left may be small beside them.
        limit = FLOAT32 * (10 if name in ("rate", "bias") else 1)
        assert relative(x, y) < limit, name
        assert torch.equal(x, z), name


def test_prepare_takes_views_of_wider_tensors() -> None:
    wide = torch.randn(2, 9, 3, 4 * 16)
    gate = make_gate("bounded", 3, 16)
    parts = [wide[..., start : start + 16] for start in (0, 16, 32)]
    ready = prepare(*parts, gate=gate)
    packed = prepare(*(x.contiguous() for x in parts), gate=gate)
    transposed = prepare(*(x.mT.contiguous().mT for x in parts), gate=gate)
    for got, moved, want in zip(ready, transposed, packed):
        assert torch.equal(got, want) and torch.equal(moved, want)


def test_prepare_of_nothing_is_nothing() -> None:
    gate = make_gate("softplus", 2, 16)
    q, k, g = (torch.randn(1, 0, 2, 16, requires_grad=True) for _ in range(3))
    ready = prepare(q, k, g, gate=gate)
    assert ready.q.shape == ready.log_decay.shape == (1, 0, 2, 16)
    gradients = torch.autograd.grad(ready.q.sum() + ready.log_decay.sum(), [q, g, *gate_leaves(gate)])
    assert all(x.abs().sum() == 0 for x in gradients)


def test_prepare_keeps_small_and_large_gates() -> None:
    """softplus(-40) = 4e-18 and softplus(1000) = 1000: no digits lost at one end, no overflow at the other."""
    raw = torch.tensor([-100.0, -40.0, -20.0, -9.0, -5.0, 0.0, 5.0, 30.0, 1000.0, -1000.0] + [1.0] * 6)
    zeros = torch.zeros(1, 1, 1, 16)
    gate = SoftplusGate(torch.zeros(1), torch.zeros(16))
    got = prepare(zeros, zeros, raw.view(1, 1, 1, 16), gate=gate).log_decay.double().flatten()
    want = -torch.nn.functional.softplus(raw.double(), threshold=1e9)
    assert ((got - want).abs() <= 1e-6 * want.abs() + 1e-37).all()
    bounded = prepare(zeros, zeros, raw.view(1, 1, 1, 16), gate=BoundedGate(torch.zeros(16))).log_decay
    assert bounded.isfinite().all() and bounded.min() >= -5 and bounded.max() <= 0


@pytest.mark.parametrize("kind", ["given", "softplus"])
def test_prepare_is_a_well_formed_operator(kind: str) -> None:
    gate = make_gate(kind, 2, 16)
    q, k, g = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3))
    rate, bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias.detach().view(2, 16).requires_grad_())
    arguments = (q, k, g, rate, bias, 0 if gate is None else 1, 0.0, True, 1.0)
    torch.library.opcheck(torch.ops.perilune.kda_prepare.default, arguments)


# The adapter around a library that is stood in for --------------------------------------------------------------------


@dataclass
class Standin:
    """torch.ops.cudnn with two operators computed by the chunked path, and what it was called with."""

    scale: float

    def run(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float,
            initial_state: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert scale == self.scale
        assert cu.dtype == torch.int32 and g.dtype == beta.dtype == torch.float32
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, cu)) and q.dim() == 3
        state = None if initial_state is None else initial_state.transpose(-1, -2)
        o, final = chunked.chunked_kda(
            *(x.unsqueeze(0) for x in (q, k, v, g, beta)), scale=scale, initial_state_NHKV=state,
            cu_seqlens=cu.tolist(), gate=None, qk_l2norm=False, dtype=torch.float32,
        )  # fmt: skip
        return o.squeeze(0), final.transpose(-1, -2).contiguous()

    def kimi_delta_attention_fwd(
        self, *tensors: Any, initial_state: Tensor | None, output_final_state: bool, plan_name: str
    ) -> Any:
        assert output_final_state and plan_name == cudnn_adapter.PLAN
        return *self.run(*tensors, initial_state=initial_state), None

    def kimi_delta_attention_bwd(
        self, d_output: Tensor, *tensors: Any, initial_state: Tensor | None, d_final_state: Tensor | None,
        plan_name: str,
    ) -> Any:  # fmt: skip
        *operands, cu, scale = tensors
        leaves = [x.detach().requires_grad_() for x in operands]
        state = None if initial_state is None else initial_state.detach().requires_grad_()
        with torch.enable_grad():
            o, final = self.run(*leaves, cu, scale, initial_state=state)
        outputs, gradients = [o], [d_output]
        if d_final_state is not None:
            outputs, gradients = [o, final], [d_output, d_final_state]
        found = torch.autograd.grad(outputs, leaves if state is None else [*leaves, state], gradients)
        return *found[:5], found[5] if state is not None else o.new_empty(0), None, None


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    key_dim = 16
    monkeypatch.setattr(cudnn_adapter, "why_not_here", lambda *_: None)
    monkeypatch.setattr(cudnn_adapter, "DTYPE", torch.float32)
    monkeypatch.setattr(cudnn_adapter, "HEAD_DIM", key_dim)
    monkeypatch.setattr(cudnn_adapter, "SCALE", key_dim**-0.5)
    operators = Standin(scale=key_dim**-0.5)
    monkeypatch.setattr(torch.ops, "cudnn", SimpleNamespace(
        kimi_delta_attention_fwd=operators.kimi_delta_attention_fwd,
        kimi_delta_attention_bwd=operators.kimi_delta_attention_bwd,
    ), raising=False)  # fmt: skip


def operands(shape: tuple[int, int, int, int], kind: str = "bounded", device: str = "cpu",
             dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Gate | None]:  # fmt: skip
    generator = torch.Generator(device).manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    gate = make_gate(kind, shape[2], shape[3], device)
    g = normal(*shape) if gate is not None else -5 * torch.sigmoid(normal(*shape))
    raw = [normal(*shape), normal(*shape), normal(*shape), g, torch.sigmoid(normal(*shape[:3]))]
    # A pre-computed log decay stays in float32, as a layer would hand it over.
    kinds = [dtype, dtype, dtype, torch.float32 if gate is None else dtype, dtype]
    return [x.to(d).requires_grad_() for x, d in zip(raw, kinds)], gate


def both_ways(
    function: Any, inputs: list[Tensor], gate: Gate | None, state: Tensor | None, weights: tuple[Tensor, Tensor],
    **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    o, final = function(*inputs, gate=gate, **options)
    leaves = [*inputs, *([] if state is None else [state]), *gate_leaves(gate)]
    names = ["dq", "dk", "dv", "dg", "dbeta", *([] if state is None else ["d_state"])]
    names += ["dA_log", "d_dt_bias"][-len(gate_leaves(gate)) :] if gate is not None else []
    gradients = torch.autograd.grad((o.double() * weights[0]).sum() + (final.double() * weights[1]).sum(), leaves)
    return {"o": o, "state": final} | dict(zip(names, gradients))


def doubled(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


PACKED = [0, 5, 5, 21, 40]


@pytest.mark.parametrize("kind", ["given", "bounded", "bounded without rate"])
@pytest.mark.parametrize("borders", [None, PACKED], ids=["batch", "documents"])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_cudnn_adapter_hands_over_the_same_operator(
    standin: None, kind: str, borders: list[int] | None, with_state: bool
) -> None:
    shape = (2, 20, 2, 16) if borders is None else (1, 40, 2, 16)
    sequences = 2 if borders is None else len(borders) - 1
    inputs, gate = operands(shape, kind)
    state = torch.randn(sequences, 2, 16, 16, requires_grad=True) if with_state else None
    weights = torch.randn(shape).double(), torch.randn(sequences, 2, 16, 16).double()
    options = dict(scale=16**-0.5, qk_l2norm=True)
    got = both_ways(
        cudnn_adapter.cudnn_kda, inputs, gate, state, weights, initial_state_NHKV=state, cu_seqlens=borders,
        dtype=torch.float32, **options,
    )  # fmt: skip
    cu_seqlens = None if borders is None else torch.tensor(borders)
    want = both_ways(
        kda, inputs, gate, state, weights, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True,
        backend="reference", **options,
    )  # fmt: skip
    assert got.keys() == want.keys()
    for name in want:
        assert relative(got[name], want[name]) < 10 * FLOAT32, name

    found = cudnn_adapter.cudnn_backward(
        *inputs, weights[0].float(), weights[1].float(), initial_state_NHKV=state, cu_seqlens=borders, gate=gate,
        **options,
    )  # fmt: skip
    names = ["dq", "dk", "dv", "dg", "dbeta", "d_state", "dA_log", "d_dt_bias"]
    for name, x in zip(names, found):
        assert (x is None) == (name not in got), name
        assert x is None or relative(x, want[name]) < 10 * FLOAT32, name


@pytest.mark.usefixtures("standin")
class TestRefusals:
    def refuses(self, match: str, *, kind: str = "bounded", shape: tuple[int, int, int, int] = (1, 64, 2, 16),
                change: Any = None, **options: Any) -> None:  # fmt: skip
        inputs, gate = operands(shape, kind)
        if change is not None:
            inputs = change(inputs)
        settings = dict(scale=0.25, initial_state_NHKV=None, cu_seqlens=None, qk_l2norm=True, dtype=torch.float32)
        with pytest.raises(ValueError, match=f"backend='cudnn': .*{match}"):
            cudnn_adapter.cudnn_kda(*inputs, gate=gate, **(settings | options))

    def test_a_gate_without_a_bound(self) -> None:
        self.refuses("softplus gate has no lower bound", kind="softplus")

    def test_a_decay_below_the_floor(self) -> None:
        self.refuses("reach -5.5", kind="given", change=lambda x: [*x[:3], torch.full_like(x[3], -5.5), x[4]])

    def test_a_decay_that_is_not_a_number(self) -> None:
        self.refuses("reach nan", kind="given", change=lambda x: [*x[:3], x[3] * torch.nan, x[4]])

    def test_beta_above_one_in_a_sequence_that_is_cut(self) -> None:
        self.refuses("beta is up to 1.5", change=lambda x: [*x[:4], torch.full_like(x[4], 1.5)])

    def test_keys_that_are_not_normalised_in_a_sequence_that_is_cut(self) -> None:
        self.refuses("pass qk_l2norm=True", qk_l2norm=False)

    def test_other_dtypes(self) -> None:
        self.refuses("bfloat16 q, k and v, got float16", change=lambda x: [x[0].half(), *x[1:]])
        self.refuses("bfloat16 q, k and v, got float64", change=lambda x: [y.double() for y in x])

    def test_other_widths(self) -> None:
        self.refuses("K=32 and V=32", shape=(1, 64, 2, 32))

    def test_other_scales(self) -> None:
        self.refuses("one scale, .*got 0.3", scale=0.3)

    def test_no_tokens(self) -> None:
        self.refuses("no tokens", shape=(1, 0, 2, 16))


@pytest.mark.usefixtures("standin")
def test_beta_above_one_is_taken_where_no_sequence_is_cut() -> None:
    """One piece each from 133 sequences x heads on: nothing is assumed about what came before."""
    inputs, gate = operands((67, 3, 2, 16))
    inputs[4] = (2 * inputs[4]).detach()
    options = dict(scale=0.25, gate=gate, qk_l2norm=True)
    got, _ = cudnn_adapter.cudnn_kda(*inputs, initial_state_NHKV=None, cu_seqlens=None, dtype=torch.float32, **options)
    assert relative(got, kda(*inputs, backend="reference", **options)[0]) < 10 * FLOAT32


def test_values_are_not_read_when_the_caller_vouches_for_them(standin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_adapter, "_read", lambda _: pytest.fail("waited for the device"))
    for kind, promise in (("bounded", {}), ("given", {"decay_floor": -5.0})):
        inputs, gate = operands((1, 64, 2, 16), kind)
        cudnn_adapter.cudnn_kda(
            *inputs, scale=0.25, initial_state_NHKV=None, cu_seqlens=None, gate=gate, qk_l2norm=True,
            dtype=torch.float32, beta_bound=1.0, **promise,
        )  # fmt: skip


def test_a_machine_without_cuda_is_named() -> None:
    inputs, gate = operands((1, 64, 2, 16))
    options = dict(scale=0.25, initial_state_NHKV=None, cu_seqlens=None, gate=gate, qk_l2norm=True, dtype=torch.float32)
    reason = cudnn_adapter.why_not_cudnn(*inputs, **options)
    assert reason is not None and "runs on CUDA" in reason
    with pytest.raises(ValueError, match="backend='fla': .*CUDA"):
        fla_adapter.fla_kda(*inputs, **options)


# On a GPU, against the definition -------------------------------------------------------------------------------------

GPU_CASES = {
    "aligned": dict(shape=(1, 256, 2, 128), kind="bounded"),
    "batch, odd length": dict(shape=(2, 200, 3, 128), kind="bounded without rate"),
    "documents": dict(shape=(1, 500, 2, 128), kind="bounded", borders=[0, 65, 65, 66, 400, 500]),
    "given": dict(shape=(1, 320, 2, 128), kind="given"),
    "weak": dict(shape=(1, 700, 2, 128), kind="bounded", shift=-7.0),
}


def parity(function: Any, case: dict[str, Any], what: Any = None, **promises: Any) -> None:
    shape, kind, borders = case["shape"], case["kind"], case.get("borders")
    inputs, gate = operands(shape, kind, "cuda", torch.bfloat16)
    if shift := case.get("shift"):
        inputs[3] = (inputs[3].detach() + shift).requires_grad_()
    sequences = shape[0] if borders is None else len(borders) - 1
    state = torch.randn(sequences, shape[2], 128, 128, device="cuda", requires_grad=True)
    weights = torch.randn(shape, device="cuda").double(), torch.randn_like(state).double()
    weights = weights[0].bfloat16().double(), weights[1].detach()
    options = dict(scale=128**-0.5, qk_l2norm=True)
    reason = what(
        *inputs, initial_state_NHKV=state, cu_seqlens=borders, gate=gate, dtype=torch.float32, **options, **promises
    )
    if reason is not None:
        pytest.skip(reason)
    got = both_ways(
        function, inputs, gate, state, weights, initial_state_NHKV=state, cu_seqlens=borders, dtype=torch.float32,
        **options, **promises,
    )  # fmt: skip
    precise = doubled(inputs)
    cu_seqlens = None if borders is None else torch.tensor(borders, device="cuda")
    want = both_ways(
        kda, precise, gate, state, weights, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True,
        backend="chunked", **options,
    )  # fmt: skip
    errors = {name: relative(got[name], x) for name, x in want.items()}
    wrong = {name: error for name, error in errors.items() if not error < BFLOAT16[name]}
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_cudnn_equals_the_definition(case: str) -> None:
    parity(cudnn_adapter.cudnn_kda, GPU_CASES[case], cudnn_adapter.why_not_cudnn, decay_floor=-5.0, beta_bound=1.0)


@pytest.mark.gpu
def test_cudnn_backward_alone_is_that_of_the_pair() -> None:
    inputs, gate = operands((1, 256, 2, 128), "bounded", "cuda", torch.bfloat16)
    options = dict(scale=128**-0.5, initial_state_NHKV=None, cu_seqlens=None, gate=gate, qk_l2norm=True)
    if reason := cudnn_adapter.why_not_cudnn(*inputs, dtype=torch.float32, beta_bound=1.0, **options):
        pytest.skip(reason)
    o, _ = cudnn_adapter.cudnn_kda(*inputs, dtype=torch.float32, beta_bound=1.0, **options)
    d_output = torch.randn_like(o)
    pair = torch.autograd.grad(o, [*inputs, *gate_leaves(gate)], d_output)
    alone = cudnn_adapter.cudnn_backward(*inputs, d_output, None, **options)
    for x, y in zip(pair, [x for x in alone if x is not None]):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_cudnn_runs_in_a_compiled_graph() -> None:
    inputs, gate = operands((1, 256, 2, 128), "bounded", "cuda", torch.bfloat16)
    options = dict(scale=128**-0.5, initial_state_NHKV=None, cu_seqlens=None, gate=gate, qk_l2norm=True)
    if reason := cudnn_adapter.why_not_cudnn(*inputs, dtype=torch.float32, beta_bound=1.0, **options):
        pytest.skip(reason)

    def run(*tensors: Tensor) -> Tensor:
        return cudnn_adapter.cudnn_kda(*tensors, dtype=torch.float32, beta_bound=1.0, **options)[0]

    d_output = torch.randn_like(inputs[2])
    eager = torch.autograd.grad(run(*inputs), inputs, d_output)
    compiled = torch.autograd.grad(torch.compile(run, fullgraph=True)(*inputs), inputs, d_output)
    for x, y in zip(eager, compiled):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_cudnn_replays_in_a_cuda_graph() -> None:
    inputs, gate = operands((1, 256, 2, 128), "bounded", "cuda", torch.bfloat16)
    options = dict(scale=128**-0.5, initial_state_NHKV=None, cu_seqlens=None, gate=gate, qk_l2norm=True)
    if reason := cudnn_adapter.why_not_cudnn(*inputs, dtype=torch.float32, beta_bound=1.0, **options):
        pytest.skip(reason)
    d_output = torch.randn_like(inputs[2])

    def run() -> list[Tensor]:
        with torch.no_grad():
            o, state = cudnn_adapter.cudnn_kda(*inputs, dtype=torch.float32, beta_bound=1.0, **options)
        gradients = cudnn_adapter.cudnn_backward(*inputs, d_output, None, **options)
        return [o, state, *(x for x in gradients if x is not None)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in inputs[:4]:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for x, y in zip(captured, run()):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
def test_prepare_in_bfloat16_is_rounding_away_from_exact(kind: str) -> None:
    """Outputs are rounded once (0.11% RMS); gradients start from rounded rows and are rounded once more."""
    gate = make_gate(kind, 3, 128, "cuda")
    q, k, g = (torch.randn(2, 333, 3, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    ready = prepare(q, k, g, gate=gate)
    precise = doubled([q, k, g])
    assert gate is not None
    want = (l2norm(precise[0]), l2norm(precise[1]), gate.log_decay(precise[2]))
    assert relative(ready.q, want[0]) < 2e-3 and relative(ready.k, want[1]) < 2e-3
    assert relative(ready.log_decay, want[2]) < FLOAT32
    weights = [torch.randn_like(x) for x in ready[:3]]
    leaves = gate_leaves(gate)
    got = torch.autograd.grad(ready[:3], [q, k, g, *leaves], weights)
    again = torch.autograd.grad(prepare(q, k, g, gate=gate)[:3], [q, k, g, *leaves], weights)
    expected = torch.autograd.grad(want, [*precise, *leaves], [w.double() for w in weights])
    for x, y, z in zip(got, expected, again):
        assert relative(x, y) < 4e-3
        assert torch.equal(x, z)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["aligned", "documents"])
def test_fla_equals_the_definition(case: str) -> None:  # last: fla tunes for minutes
    parity(fla_adapter.fla_kda, GPU_CASES[case], fla_adapter.why_not_fla)
