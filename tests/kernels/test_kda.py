"""The chunked path of KDA against the token recurrence, and what the operator promises about documents and states."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, chunked, kda, kda_step, l2norm

# Both paths do the same sums in another order: a few hundred float64 roundings (2e-16) stay far below 1e-10.
EXACT = 1e-10


@dataclass(frozen=True, kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in named.items() if x is not None}

    def with_grad(self) -> "Inputs":
        return Inputs(**{name: x.detach().clone().requires_grad_() for name, x in self.tensors().items()})


def random_inputs(
    batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, *, sequences: int | None = None,
    gates: str = "mixed", seed: int = 0, dtype: torch.dtype = torch.float64,
) -> Inputs:  # fmt: skip
    """beta covers [0, 2] with both ends; "mixed" gates span 0 to -1000 with weak ones right after strong ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    shape = (batch, tokens, heads, key_dim)
    beta = 2 * uniform(batch, tokens, heads)
    choice = uniform(batch, tokens, heads)
    beta = beta.masked_fill(choice < 0.15, 0.0).masked_fill(choice > 0.85, 2.0)
    g = {
        "mixed": lambda: -(10 ** (6 * uniform(*shape) - 3)),
        "weak": lambda: -0.05 * uniform(*shape),
        "none": lambda: -torch.zeros(*shape),
        "strongest": lambda: torch.full(shape, -1000.0),
        "raw": lambda: 3 * normal(*shape).double(),
    }[gates]()
    states = normal(batch if sequences is None else sequences, heads, key_dim, value_dim)
    return Inputs(q=normal(*shape), k=normal(*shape), v=normal(batch, tokens, heads, value_dim), g=g.to(dtype),
                  beta=beta.to(dtype), initial_state=states)  # fmt: skip


def run(inputs: Inputs, backend: str | None, *, borders: list[int] | None = None, gate: Gate | None = None,
        loss_tokens: slice = slice(None), use_final_state: bool = True) -> dict[str, Tensor]:  # fmt: skip
    """Output, final state and the gradients of every input, for a fixed random linear loss."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    output, state = kda(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state,
        output_final_state=True, cu_seqlens=cu_seqlens, gate=gate, qk_l2norm=True, backend=backend,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(99)
    d_state = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state.dtype)
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    loss = (output * d_output)[:, loss_tokens].sum()
    if use_final_state:
        loss = loss + (state * d_state).sum()
    names = list(inputs.tensors())
    gradients = torch.autograd.grad(loss, [inputs.tensors()[name] for name in names], materialize_grads=True)
    return {"output": output.detach(), "state": state.detach()} | {
        f"d_{name}": x for name, x in zip(names, gradients, strict=True)
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    if math.isnan(error):
        return math.inf
    return error / size if size > 0 else error


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), errors


def compare_with_reference(inputs: Inputs, *, borders: list[int] | None = None, gate_type: str | None = None) -> None:
    def results(backend: str) -> dict[str, Tensor]:
        own = inputs.with_grad()
        gate: Gate | None = None
        if gate_type == "softplus":
            gate = SoftplusGate(own.A_log, own.dt_bias)
        elif gate_type == "bounded":
            gate = BoundedGate(own.dt_bias, own.A_log)
        return run(own, backend, borders=borders, gate=gate)

    assert_close(results("chunked"), results("reference"), EXACT)


@pytest.fixture(params=[(16, 1), (64, 1 << 12), (8, 1 << 30)], ids=["C16-small", "C64-medium", "C8-whole"])
def chunking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunk size and segment size forced, so that short sequences reach several chunks, segments and groups."""
    chunk_size, segment_bytes = request.param
    monkeypatch.setattr(chunked, "CPU_CHUNK_SIZES", (chunk_size,))
    monkeypatch.setattr(chunked, "CPU_SEGMENT_BYTES", segment_bytes)
    return chunk_size


@pytest.mark.parametrize("gates", ["mixed", "weak", "none", "strongest"])
@pytest.mark.parametrize("shape", [(2, 70, 2, 8, 5), (1, 1, 2, 4, 8), (3, 32, 1, 5, 16)], ids=str)
def test_chunked_equals_reference_in_output_state_and_all_gradients(
    shape: tuple[int, int, int, int, int], gates: str, chunking: int
) -> None:
    compare_with_reference(random_inputs(*shape, gates=gates))


@pytest.mark.parametrize("borders", [[0, 0, 3, 3, 40, 41, 70, 70], [0, 70], list(range(71)), [0, 0, 0, 70]], ids=str)
def test_chunked_equals_reference_over_packed_documents(borders: list[int], chunking: int) -> None:
    compare_with_reference(random_inputs(1, 70, 2, 6, 4, sequences=len(borders) - 1), borders=borders)


@pytest.mark.parametrize("gate_type", ["softplus", "bounded", "bounded without rate"])
@pytest.mark.parametrize("borders", [None, [0, 5, 5, 37, 50]], ids=["one", "packed"])
@pytest.mark.parametrize("flat_bias", [False, True])
def test_gate_gradients_equal_reference(gate_type: str, borders: list[int] | None, flat_bias: bool) -> None:
    heads, key_dim = 3, 4
    inputs = random_inputs(1, 50, heads, key_dim, 5, sequences=None if borders is None else 4, gates="raw")
    dt_bias = torch.randn(heads * key_dim if flat_bias else (heads, key_dim), dtype=torch.float64)
    A_log = None if gate_type == "bounded without rate" else torch.randn(heads, dtype=torch.float64)
    inputs = replace(inputs, A_log=A_log, dt_bias=dt_bias.view(-1) if flat_bias else dt_bias)
    compare_with_reference(inputs, borders=borders, gate_type=gate_type.split()[0])


@settings(max_examples=30)
@given(
    # A key of one channel is +-1 after the norm: its gradient is 1e-6 of its terms, too little left to compare.
    shape=st.tuples(st.integers(1, 3), st.integers(1, 45), st.integers(1, 3), st.integers(2, 9), st.integers(1, 9)),
    gates=st.sampled_from(["mixed", "weak", "none", "strongest"]),
    seed=st.integers(0, 1000),
)
def test_chunked_equals_reference_for_any_shape(shape: tuple[int, int, int, int, int], gates: str, seed: int) -> None:
    compare_with_reference(random_inputs(*shape, gates=gates, seed=seed))


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_packed_documents_equal_separate_documents(lengths: list[int], seed: int) -> None:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs = random_inputs(1, borders[-1], 2, 4, 3, sequences=len(lengths), seed=seed)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    packed, states = kda(*arguments, initial_state=inputs.initial_state, cu_seqlens=cu_seqlens, output_final_state=True,
                         qk_l2norm=True)  # fmt: skip
    for n, (start, stop) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
        alone, state = kda(*(x[:, start:stop] for x in arguments), initial_state=inputs.initial_state[n : n + 1],
                           output_final_state=True, qk_l2norm=True)  # fmt: skip
        assert relative_error(packed[:, start:stop], alone) <= EXACT
        assert relative_error(states[n : n + 1], state) <= EXACT


def test_document_with_non_finite_values_leaves_other_documents_alone() -> None:
    inputs = random_inputs(1, 50, 2, 4, 3, sequences=3)
    borders = [0, 20, 31, 50]
    clean = run(inputs.with_grad(), "chunked", borders=borders)
    v = inputs.v.clone()
    v[:, 20:31] = math.nan
    dirty = run(replace(inputs, v=v).with_grad(), "chunked", borders=borders)
    for name in ("output", "d_q", "d_k", "d_v", "d_g", "d_beta"):
        assert torch.equal(dirty[name][:, :20], clean[name][:, :20])
        assert torch.equal(dirty[name][:, 31:], clean[name][:, 31:])


def test_empty_documents_pass_state_and_gradient_through() -> None:
    inputs = random_inputs(1, 9, 2, 4, 3, sequences=3)
    result = run(inputs.with_grad(), "chunked", borders=[0, 0, 9, 9])
    no_tokens = run(random_inputs(1, 0, 2, 4, 3, sequences=3).with_grad(), "chunked", borders=[0, 0, 0, 0])
    for n in (0, 2):
        assert torch.equal(result["state"][n], inputs.initial_state[n])
        assert torch.equal(result["d_initial_state"][n], no_tokens["d_initial_state"][n])
        assert result["d_initial_state"][n].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prefix", [1, 7, 16, 37, 64])
@pytest.mark.parametrize("gates", ["weak", "mixed"])
def test_later_tokens_leave_earlier_outputs_and_gradients_bitwise_unchanged(
    prefix: int, gates: str, dtype: torch.dtype, chunking: int
) -> None:
    first = random_inputs(1, 80, 2, 16, 8, gates=gates, dtype=dtype)
    other = random_inputs(1, 80, 2, 16, 8, gates=gates, dtype=dtype, seed=1)
    second = Inputs(
        **{
            name: torch.cat((x[:, :prefix], other.tensors()[name][:, prefix:]), dim=1) if name != "initial_state" else x
            for name, x in first.tensors().items()
        }
    )
    a, b = (run(x.with_grad(), "chunked", loss_tokens=slice(0, prefix), use_final_state=False) for x in (first, second))
    for name in ("output", "d_q", "d_k", "d_v", "d_g", "d_beta"):
        assert torch.equal(a[name][:, :prefix], b[name][:, :prefix]), name
    assert torch.equal(a["d_initial_state"], b["d_initial_state"])


def test_step_loop_equals_full_sequence() -> None:
    inputs = random_inputs(2, 40, 2, 6, 5, gates="raw")
    gate = SoftplusGate(torch.randn(2, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64))
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    expected, expected_state = kda(*arguments, initial_state=inputs.initial_state, output_final_state=True, gate=gate,
                                   qk_l2norm=True)  # fmt: skip
    state, outputs = inputs.initial_state, []
    for t in range(40):
        output, state = kda_step(*(x[:, t] for x in arguments), state, gate=gate, qk_l2norm=True)
        outputs.append(output)
    assert relative_error(torch.stack(outputs, 1), expected) <= EXACT
    assert relative_error(state, expected_state) <= EXACT


@settings(max_examples=15)
@given(cut=st.integers(0, 50))
def test_prefill_then_continue_equals_full_sequence(cut: int) -> None:
    inputs = random_inputs(2, 50, 2, 6, 5)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    expected, expected_state = kda(*arguments, output_final_state=True, qk_l2norm=True)
    head, state = kda(*(x[:, :cut] for x in arguments), output_final_state=True, qk_l2norm=True)
    tail, state = kda(*(x[:, cut:] for x in arguments), initial_state=state, output_final_state=True, qk_l2norm=True)
    assert relative_error(torch.cat((head, tail), 1), expected) <= EXACT
    assert relative_error(state, expected_state) <= EXACT


def test_gradcheck() -> None:
    inputs = random_inputs(1, 6, 1, 2, 2, gates="weak").with_grad()

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *arguments, state = tensors
        return kda(*arguments, initial_state=state, output_final_state=True)

    # Unnormalised keys make the recurrence expand; half-size ones keep finite differences accurate.
    tensors = tuple((x.detach() * 0.5).requires_grad_() for x in inputs.tensors().values())
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("gates", ["mixed", "weak", "none", "strongest"])
def test_float32_error_is_a_few_roundings_for_any_gate(gates: str) -> None:
    """A decay is a product of factors, never a difference of sums, so even gates spanning six decades lose no digits.

    Each result sums about T = 100 terms that went through log2(C) products: 100 * 6e-8 bounds the relative error.
    """
    inputs = random_inputs(1, 100, 2, 16, 16, gates=gates, dtype=torch.float32)
    inputs = replace(inputs, beta=inputs.beta.clamp(max=1))
    exact = run(Inputs(**{name: x.double() for name, x in inputs.tensors().items()}).with_grad(), "reference")
    actual = run(inputs.with_grad(), "chunked")
    if gates == "strongest":  # exp(-1000) underflows float32; its gradient is below 1e-300 in float64
        assert not actual["d_g"].any()
        del exact["d_g"], exact["d_initial_state"]
    assert all(x.isfinite().all() for x in actual.values())
    assert_close(actual, exact, 6e-6)


def test_decay_of_minus_infinity_resets_the_state() -> None:
    inputs = random_inputs(1, 40, 2, 4, 4, gates="weak")
    g = inputs.g.clone()
    g[:, 25] = -math.inf
    result = run(replace(inputs, g=g).with_grad(), "chunked")
    tail = (x[:, 25:] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    expected, _ = kda(*tail, qk_l2norm=True)
    assert relative_error(result["output"][:, 25:], expected) <= EXACT
    assert all(x.isfinite().all() for x in result.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype: torch.dtype) -> None:
    inputs = random_inputs(1, 40, 2, 8, 8, gates="weak", dtype=dtype)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    output, state = kda(*arguments, output_final_state=True, qk_l2norm=True)
    exact, exact_state = kda(*(x.double() for x in arguments), output_final_state=True, qk_l2norm=True)
    assert output.dtype == dtype and state.dtype == torch.float32
    assert relative_error(state, exact_state) <= 1e-5  # float32 sums of 40 terms
    assert relative_error(output, exact) <= torch.finfo(dtype).eps  # rounded once, at the end
    gradients = run(inputs.with_grad(), "chunked")
    assert all(gradients[f"d_{name}"].dtype == dtype for name in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e22, 0.0])
def test_gradients_follow_a_scale_of_any_size(scale: float) -> None:
    inputs = random_inputs(1, 20, 2, 8, 8, gates="weak", dtype=torch.float32)

    def gradient(factor: float, backend: str, weight: float) -> Tensor:
        q = inputs.q.clone().requires_grad_()
        output, _ = kda(q, inputs.k, inputs.v, inputs.g, inputs.beta, scale=factor, qk_l2norm=True, backend=backend)
        return torch.autograd.grad((output * weight).sum(), q)[0]

    # The weight undoes the scale, so that the gradient itself stays in the number range; 20 float32 sums of 8.
    weight = 1 / scale if scale else 1.0
    assert relative_error(gradient(scale, "chunked", weight), gradient(scale, "reference", weight)) <= 1e-5


def test_backward_can_run_twice_and_inputs_are_not_written() -> None:
    inputs = random_inputs(2, 48, 2, 8, 8)
    own = inputs.with_grad()
    output, state = kda(own.q, own.k, own.v, own.g, own.beta, initial_state=own.initial_state, output_final_state=True)
    tensors = list(own.tensors().values())
    loss = output.square().sum() + state.sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(x, own.tensors()[name]) for name, x in inputs.tensors().items())


def test_strided_inputs_and_expanded_gradients_are_accepted() -> None:
    inputs = random_inputs(2, 48, 2, 8, 8)
    packed = torch.cat((inputs.q, inputs.k, inputs.v), dim=-1).requires_grad_()
    q, k, v = packed.split(8, dim=-1)
    output, _ = kda(q, k, v, inputs.g, inputs.beta, qk_l2norm=True)
    expected, _ = kda(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, qk_l2norm=True)
    assert torch.equal(output, expected)
    (gradient,) = torch.autograd.grad(output.sum(), packed)
    assert gradient.isfinite().all()


def test_scale_and_norm_are_part_of_the_operator() -> None:
    inputs = random_inputs(1, 20, 2, 8, 4)
    output, _ = kda(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, qk_l2norm=True, scale=0.3)
    expected, _ = kda(0.3 * l2norm(inputs.q), l2norm(inputs.k), inputs.v, inputs.g, inputs.beta, scale=1.0)
    assert relative_error(output, expected) <= EXACT
    x = torch.tensor([3e-3, 4e-3], dtype=torch.float64)  # small enough that eps = 1e-6 inside the root shows
    assert torch.allclose(l2norm(x), x / math.sqrt(25e-6 + 1e-6), rtol=1e-12)


def test_gates_state_their_formula() -> None:
    x = torch.linspace(-40, 40, 12, dtype=torch.float64).view(1, 1, 2, 6)
    A_log, dt_bias = torch.tensor([0.3, -0.7]).double(), torch.linspace(-1, 1, 12).double().view(2, 6)
    rate = A_log.exp().view(2, 1)
    softplus = SoftplusGate(A_log, dt_bias).log_decay(x)
    assert torch.allclose(softplus, -rate * torch.log1p((x + dt_bias).exp()), rtol=1e-8)
    bounded = BoundedGate(dt_bias, A_log, lower_bound=-4.0).log_decay(x)
    assert torch.allclose(bounded, -4.0 / (1 + (-rate * (x + dt_bias)).exp()), rtol=1e-12)
    assert softplus.max() <= 0 and bounded.min() >= -4.0
    assert SoftplusGate(A_log, dt_bias).log_decay(x.half()).dtype == torch.float32


def test_wrong_arguments_are_named() -> None:
    inputs = random_inputs(2, 5, 2, 4, 3)
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    with pytest.raises(ValueError, match=r"backend='fast' is not a path of kda; expected None or one of"):
        kda(q, k, v, g, beta, backend="fast")
    with pytest.raises(ValueError, match=r"k has shape \(2, 5, 2, 3\)"):
        kda(q, k[..., :3], v, g, beta)
    with pytest.raises(ValueError, match=r"q has shape \(2, 5, 2, 0\): K = 0"):
        kda(q[..., :0], k[..., :0], v, g[..., :0], beta)
    with pytest.raises(ValueError, match=r"beta has shape \(2, 5, 2, 1\)"):
        kda(q, k, v, g, beta.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"cu_seqlens needs one packed row"):
        kda(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"initial_state has shape \(1, 2, 4, 3\)"):
        kda(q, k, v, g, beta, initial_state=inputs.initial_state[:1])
    with pytest.raises(ValueError, match=r"gate.A_log has shape \(3,\)"):
        kda(q, k, v, g, beta, gate=SoftplusGate(torch.zeros(3), torch.zeros(2, 4)))
    with pytest.raises(ValueError, match=r"gate.dt_bias has shape \(4,\)"):
        kda(q, k, v, g, beta, gate=BoundedGate(torch.zeros(4)))
    with pytest.raises(ValueError, match=r"lower_bound=1.0 must be negative"):
        BoundedGate(torch.zeros(2, 4), lower_bound=1.0)
    with pytest.raises(TypeError, match=r"gate='softplus' is not"):
        kda(q, k, v, g, beta, gate="softplus")
    row = [x[:1] for x in (q, k, v, g, beta)]
    with pytest.raises(ValueError, match=r"must rise from 0 to T=5"):
        kda(*row, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"without decreasing"):
        kda(*row, cu_seqlens=torch.tensor([0, 4, 3, 5]))
    with pytest.raises(ValueError, match=r"expected \[B, H, K\]"):
        kda_step(q, k, v, g, beta, inputs.initial_state)


@pytest.mark.gpu
def test_chunked_runs_on_cuda_like_on_cpu() -> None:
    inputs = random_inputs(1, 300, 2, 16, 8, sequences=4)
    borders = [0, 70, 70, 200, 300]
    expected = run(inputs.with_grad(), "reference", borders=borders)
    on_device = Inputs(**{name: x.cuda() for name, x in inputs.tensors().items()}).with_grad()
    arguments = (on_device.q, on_device.k, on_device.v, on_device.g, on_device.beta)
    output, state = kda(*arguments, initial_state=on_device.initial_state, output_final_state=True,
                        cu_seqlens=torch.tensor(borders).cuda(), qk_l2norm=True)  # fmt: skip
    assert relative_error(output.cpu(), expected["output"]) <= EXACT
    assert relative_error(state.cpu(), expected["state"]) <= EXACT
    generator = torch.Generator().manual_seed(99)
    d_state = torch.randn(state.shape, generator=generator, dtype=torch.float64).cuda()
    d_output = torch.randn(output.shape, generator=generator, dtype=torch.float64).cuda()
    gradients = torch.autograd.grad(
        (output * d_output).sum() + (state * d_state).sum(), list(on_device.tensors().values())
    )
    for name, gradient in zip(on_device.tensors(), gradients, strict=True):
        assert relative_error(gradient.cpu(), expected[f"d_{name}"]) <= EXACT
