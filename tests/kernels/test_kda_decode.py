"""The fused decoding step of a KDA layer: its paths against each other, against whole sequences and the layer."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, kda
from perilune.kernels.kda.decode import kda_decode
from perilune.kernels.short_conv import short_conv
from perilune.kernels.triton_support import INTERPRETED
from perilune.model.cache import KDACache
from perilune.model.documents import Packing
from perilune.model.kda import KDAConfig, KimiDeltaAttention

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (set where no GPU is)")

# Sums over at most 64 channels and three square roots: tens of float32 roundings of 6e-8.
FLOAT32 = 1e-5
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Everything of a layer that is not a token: sizes, weights, gate."""

    heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    norm_weight: Tensor
    gate: Gate

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.key_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    qkv: Tensor
    gate_input: Tensor
    beta_logits: Tensor
    output_gate: Tensor

    def __getitem__(self, index) -> "Tokens":
        return Tokens(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def to(self, *args) -> "Tokens":
        return Tokens(**{field.name: getattr(self, field.name).to(*args) for field in fields(self)})


def random_layer(
    heads=2, key_dim=16, value_dim=16, width=4, gate="softplus", dtype=torch.float32, device="cpu"
) -> Layer:
    channels = heads * (2 * key_dim + value_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device, dtype)

    gates = {
        "softplus": lambda: SoftplusGate(normal(heads), normal(heads * key_dim)),
        "bounded": lambda: BoundedGate(normal(heads, key_dim), normal(heads), lower_bound=-3.0),
        "bounded without rate": lambda: BoundedGate(normal(heads, key_dim)),
    }
    return Layer(
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_weight=normal(channels, width) * width**-0.5,
        norm_weight=1 + 0.3 * normal(value_dim),
        gate=gates[gate](),
    )


def random_tokens(layer: Layer, *batch: int, dtype=torch.float32, device="cpu", scale: float = 1.0) -> Tokens:
    def normal(width: int) -> Tensor:
        return (scale * torch.randn(*batch, width, dtype=torch.float64)).to(device, dtype)

    return Tokens(
        qkv=normal(layer.channels),
        gate_input=normal(layer.heads * layer.key_dim),
        beta_logits=normal(layer.heads),
        output_gate=normal(layer.heads * layer.value_dim),
    )


def random_pools(layer: Layer, num_slots: int, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    width = layer.conv_weight.shape[1]
    conv = torch.randn(num_slots, layer.channels, width - 1, dtype=torch.float64)
    state = torch.randn(num_slots, layer.heads, layer.key_dim, layer.value_dim, dtype=torch.float64)
    return conv.to(device, dtype), state.to(device, dtype)


def step(layer: Layer, tokens: Tokens, pools: tuple[Tensor, Tensor], slots: Tensor, **options) -> Tensor:
    return kda_decode(
        tokens.qkv, tokens.gate_input, tokens.beta_logits, tokens.output_gate, *pools, slots,
        conv_weight=layer.conv_weight, norm_weight=layer.norm_weight, gate=layer.gate, norm_eps=NORM_EPS, **options,
    )  # fmt: skip


def results(layer: Layer, tokens: Tokens, pools: tuple[Tensor, Tensor], slots: Tensor, **options) -> list[Tensor]:
    own = (pools[0].clone(), pools[1].clone())
    return [step(layer, tokens, own, slots, **options), *own]


def assert_close(ours: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for mine, expected in zip(ours, right, strict=True):
        error, size = (mine.double() - expected.double()).norm(), expected.double().norm()
        assert mine.shape == expected.shape and error <= tolerance * size, (error, size)


@needs_interpreter
@pytest.mark.parametrize(
    "heads, key_dim, value_dim, width, gate",
    [
        (2, 16, 16, 4, "softplus"),
        (2, 16, 16, 4, "bounded"),
        (3, 8, 32, 4, "bounded without rate"),
        (1, 20, 40, 3, "softplus"),
        (2, 16, 8, 1, "bounded"),
        (1, 256, 160, 2, "softplus"),
    ],
)
def test_kernel_equals_the_torch_path(heads: int, key_dim: int, value_dim: int, width: int, gate: str) -> None:
    layer = random_layer(heads, key_dim, value_dim, width, gate)
    tokens, pools = random_tokens(layer, 4), random_pools(layer, 7)
    for slots in (torch.tensor([5, 0, -1, 2]), torch.tensor([6, 1, 3, -7], dtype=torch.int32)):
        for options in ({}, {"scale": 0.7, "beta_scale": 2.0}):
            ours = results(layer, tokens, pools, slots, backend="triton", **options)
            assert_close(ours, results(layer, tokens, pools, slots, backend="torch", **options), FLOAT32)


def whole_sequence(layer: Layer, tokens: Tokens, beta_scale: float) -> Tensor:
    """The layer between its projections, over [B, T, ...] at once."""
    qkv, _ = short_conv(tokens.qkv, layer.conv_weight)
    dims = (layer.key_dim, layer.key_dim, layer.value_dim)
    parts = qkv.split([layer.heads * dim for dim in dims], dim=-1)
    q, k, v = (part.unflatten(-1, (layer.heads, dim)) for part, dim in zip(parts, dims))
    raw = tokens.gate_input.unflatten(-1, (layer.heads, layer.key_dim))
    o, _ = kda(q, k, v, raw, beta_scale * torch.sigmoid(tokens.beta_logits), gate=layer.gate, qk_l2norm=True)
    gate = torch.sigmoid(tokens.output_gate).unflatten(-1, (layer.heads, layer.value_dim))
    return (F.rms_norm(o, (layer.value_dim,), layer.norm_weight, NORM_EPS) * gate).flatten(-2)


@pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [
        ("torch", torch.float64, 1e-10),
        # One more factor of the number of steps than for a single one.
        pytest.param("triton", torch.float32, 12 * FLOAT32, marks=needs_interpreter),
    ],
)
@pytest.mark.parametrize("gate, beta_scale", [("softplus", 1.0), ("bounded", 2.0)])
def test_steps_equal_the_whole_sequence(backend, dtype, tolerance, gate, beta_scale) -> None:
    layer = random_layer(gate=gate, dtype=dtype)
    tokens = random_tokens(layer, 2, 12, dtype=dtype)
    pools = tuple(torch.zeros_like(pool) for pool in random_pools(layer, 9, dtype=dtype))
    slots = torch.tensor([8, 2])
    outputs = [
        step(layer, tokens[:, t], pools, slots, beta_scale=beta_scale, backend=backend) for t in range(12)
    ]  # fmt: skip
    assert_close([torch.stack(outputs, dim=1)], [whole_sequence(layer, tokens, beta_scale)], tolerance)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_is_what_the_layer_computes_in_decoding(lower_bound: float | None, dtype: torch.dtype) -> None:
    config = KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=lower_bound, allow_neg_eigval=True)
    layer = KimiDeltaAttention(24, config, norm_eps=NORM_EPS)
    torch.nn.init.normal_(layer.o_norm.weight, 1.0, 0.3)
    x = torch.randn(3, 5, 24).to(dtype)
    cache = KDACache()
    with torch.no_grad():
        layer(x[:, :4], Packing(cu_seqlens=None, positions=None), cache)
        assert cache.conv is not None and cache.state is not None
        pools = (cache.conv.clone(), cache.state.clone())
        right = layer(x[:, 4:], Packing(cu_seqlens=None, positions=None), cache)[:, 0]
        token = x[:, 4]
        ours = kda_decode(
            torch.cat([layer.q_proj(token), layer.k_proj(token), layer.v_proj(token)], dim=-1),
            layer.f_b_proj(layer.f_a_proj(token)),
            layer.b_proj(token),
            layer.g_b_proj(layer.g_a_proj(token)),
            *pools,
            torch.arange(3),
            conv_weight=layer.conv_weight,
            norm_weight=layer.o_norm.weight,
            gate=layer.gate(),
            norm_eps=NORM_EPS,
            beta_scale=2.0,
            backend="torch",
        )
        assert torch.equal(layer.o_proj(ours), right)
        assert torch.equal(pools[0], cache.conv) and torch.equal(pools[1], cache.state)


def backends() -> list:
    return ["torch", pytest.param("triton", marks=needs_interpreter)]


@pytest.mark.parametrize("backend", backends())
@settings(max_examples=4)
@given(data=st.data())
def test_a_step_touches_its_own_slots_only(backend: str, data: st.DataObject) -> None:
    layer = random_layer()
    slots = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=5)) + [-1] * data.draw(st.integers(0, 2))
    slots = torch.tensor(data.draw(st.permutations(slots)), dtype=torch.int64)
    tokens, pools = random_tokens(layer, len(slots)), random_pools(layer, 6)
    out, conv, state = results(layer, tokens, pools, slots, backend=backend)
    untouched = [slot for slot in range(6) if slot not in slots]
    assert torch.equal(conv[untouched], pools[0][untouched]) and torch.equal(state[untouched], pools[1][untouched])
    assert not out[slots < 0].any()
    if len(slots):
        alone = results(layer, tokens[:1], pools, slots[:1], backend=backend)
        torch.testing.assert_close(alone[0], out[:1])


@needs_interpreter
def test_rows_may_be_views_of_one_projection_and_slots_of_a_larger_pool() -> None:
    layer = random_layer()
    tokens, pools, slots = random_tokens(layer, 3), random_pools(layer, 4), torch.tensor([1, 3, 0])
    right = results(layer, tokens, pools, slots, backend="torch")
    together = torch.cat([getattr(tokens, field.name) for field in fields(tokens)], dim=-1)
    widths = [getattr(tokens, field.name).shape[-1] for field in fields(tokens)]
    views = Tokens(**dict(zip((field.name for field in fields(tokens)), together.split(widths, dim=-1))))
    wide_pools = tuple(torch.stack([torch.full_like(pool, float("nan")), pool], dim=1)[:, 1] for pool in pools)
    out = step(layer, views, wide_pools, slots, backend="triton")
    assert_close([out, *wide_pools], right, FLOAT32)
    column = torch.stack([slots, torch.full_like(slots, 2)], dim=1)[:, 0]
    assert_close(results(layer, tokens, pools, column, backend="triton"), right, FLOAT32)


@needs_interpreter
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_extreme_inputs_stay_finite(gate: str) -> None:
    layer, slots = random_layer(gate=gate), torch.tensor([0, 1])
    pools = random_pools(layer, 2)
    for scale in (0.0, 1e4):
        tokens = random_tokens(layer, 2, scale=scale)
        ours = results(layer, tokens, pools, slots, backend="triton")
        assert all(x.isfinite().all() for x in ours)
        assert_close(ours, results(layer, tokens, pools, slots, backend="torch"), FLOAT32)


@needs_interpreter
def test_half_precision_pools_hold_the_rounded_state() -> None:
    layer = random_layer()
    tokens, slots = random_tokens(layer, 2), torch.tensor([1, 0])
    pools = tuple(pool.half() for pool in random_pools(layer, 2))
    ours = results(layer, tokens, pools, slots, backend="triton")
    assert [x.dtype for x in ours] == [torch.float32, torch.float16, torch.float16]
    # float16 rounds a float32 that differs in its last bits to a neighbour at worst.
    assert_close(ours, results(layer, tokens, pools, slots, backend="torch"), 2.0**-11)


@needs_interpreter
def test_operator_registration_is_sound() -> None:
    from perilune.kernels.kda.decode_triton import kda_decode_op

    layer = random_layer()
    tokens, pools = random_tokens(layer, 2), random_pools(layer, 3)
    rows = [getattr(tokens, field.name) for field in fields(tokens)]
    assert isinstance(layer.gate, SoftplusGate)
    weights = (layer.conv_weight, layer.gate.A_log, layer.gate.dt_bias, layer.norm_weight)
    torch.library.opcheck(kda_decode_op, (*rows, *weights, *pools, torch.tensor([2, -1]), 0.25, None, 1.0, 1e-5))


@pytest.mark.parametrize("backend", backends())
def test_trainable_weights_leave_no_graph_in_the_pools(backend: str) -> None:
    layer = random_layer()
    layer.conv_weight.requires_grad_()
    out, *pools = results(layer, random_tokens(layer, 2), random_pools(layer, 2), torch.tensor([0, 1]), backend=backend)
    assert not any(x.requires_grad for x in (out, *pools))


def test_no_sequences_give_no_rows() -> None:
    layer = random_layer()
    tokens, pools = random_tokens(layer, 0), random_pools(layer, 2)
    for backend in ("torch", "triton") if INTERPRETED else ("torch",):
        assert step(layer, tokens, pools, torch.empty(0, dtype=torch.int64), backend=backend).shape == (0, 32)


def test_wrong_arguments_are_refused_with_name_value_and_expectation() -> None:
    layer = random_layer()
    tokens, pools, slots = random_tokens(layer, 2), random_pools(layer, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 95\), expected \[B, H \* \(2 K \+ V\)\] = \(2, 96\)"):
        step(layer, replace(tokens, qkv=tokens.qkv[:, :-1]), pools, slots)
    with pytest.raises(ValueError, match=r"conv_pool has shape \(3, 96, 2\)"):
        step(layer, tokens, (pools[0][..., :2], pools[1]), slots)
    with pytest.raises(ValueError, match=r"slots is torch.float32 of shape \(2,\), expected int32 or int64"):
        step(layer, tokens, pools, slots.float())
    with pytest.raises(TypeError, match="beta_logits has dtype torch.int64"):
        step(layer, replace(tokens, beta_logits=tokens.beta_logits.long()), pools, slots)
    with pytest.raises(ValueError, match="backend='fast' is not a path"):
        step(layer, tokens, pools, slots, backend="fast")
    with pytest.raises(ValueError, match="qkv has dtype torch.float64|Triton kernels run on CUDA"):
        step(random_layer(dtype=torch.float64), tokens.to(torch.float64), pools, slots, backend="triton")


# On the GPU -----------------------------------------------------------------------------------------------------------


def gpu_case(batch: int = 5, dtype=torch.bfloat16, state_dtype=torch.float32, gate: str = "softplus"):
    layer = random_layer(heads=4, key_dim=128, value_dim=128, gate=gate, device="cuda")
    tokens = random_tokens(layer, batch, dtype=dtype, device="cuda")
    conv, state = random_pools(layer, batch + 3, device="cuda")
    slots = torch.randperm(batch + 3, device="cuda")[:batch]
    slots[1] = -1
    return layer, tokens, (conv.to(dtype), state.to(state_dtype)), slots


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("batch", [2, 150])
def test_on_cuda_bfloat16_is_close_to_float64(gate: str, batch: int) -> None:
    layer, tokens, pools, slots = gpu_case(batch, gate=gate)
    ours = results(layer, tokens, pools, slots)
    exact_layer = replace(
        layer,
        conv_weight=layer.conv_weight.double(),
        norm_weight=layer.norm_weight.double(),
        gate=replace(layer.gate, A_log=layer.gate.A_log.double(), dt_bias=layer.gate.dt_bias.double()),
    )
    exact = results(
        exact_layer, tokens.to(torch.float64), tuple(pool.double() for pool in pools), slots, backend="torch"
    )
    assert not ours[0][1].any()
    # Convolution, read and output are rounded to 8 bits each (2^-9 at worst, 1.1e-3 root mean square).
    assert_close(ours, exact, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, key_dim, value_dim", [(3, 64, 64), (2, 256, 256), (2, 96, 160), (1, 16, 128)])
def test_on_cuda_float32_equals_the_torch_path(heads: int, key_dim: int, value_dim: int) -> None:
    layer = random_layer(heads, key_dim, value_dim, device="cuda")
    tokens, pools = random_tokens(layer, 6, device="cuda"), random_pools(layer, 8, device="cuda")
    slots = torch.tensor([7, 3, -1, 0, 1, 5], device="cuda", dtype=torch.int32)
    assert_close(
        results(layer, tokens, pools, slots, backend="triton"),
        results(layer, tokens, pools, slots, backend="torch"),
        4 * FLOAT32,  # the GPU's exp is good to two roundings, and more channels are summed
    )


@pytest.mark.gpu
def test_on_cuda_repeats_are_bitwise_equal() -> None:
    layer, tokens, pools, slots = gpu_case(64)
    first = results(layer, tokens, pools, slots)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(results(layer, tokens, pools, slots), first))


@pytest.mark.gpu
def test_on_cuda_graph_replay_and_compiled_call_equal_eager() -> None:
    layer, tokens, pools, slots = gpu_case(8)
    eager_pools = tuple(pool.clone() for pool in pools)
    steps = 3
    eager = [step(layer, tokens, eager_pools, slots) for _ in range(steps)]

    compiled_pools = tuple(pool.clone() for pool in pools)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for t in range(steps):
        assert torch.equal(compiled(layer, tokens, compiled_pools, slots), eager[t])

    graph_pools = tuple(pool.clone() for pool in pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(layer, tokens, graph_pools, slots)
    for t in range(steps):
        graph.replay()
        assert torch.equal(out, eager[t])
    for other in (compiled_pools, graph_pools):
        assert all(torch.equal(a, b) for a, b in zip(other, eager_pools))
    # The graph reads the slots anew at every replay.
    slots.fill_(-1)
    graph.replay()
    assert not out.any() and torch.equal(graph_pools[1], eager_pools[1])


@pytest.mark.gpu
def test_on_cuda_steps_in_a_row_see_the_states_of_the_step_before() -> None:
    # A launch may overlap with the end of the one before it; waiting in between must not change anything.
    layer, tokens, pools, slots = gpu_case(64)
    waiting_pools, graph_pools = (tuple(pool.clone() for pool in pools) for _ in range(2))
    waiting = []
    for _ in range(40):
        waiting.append(step(layer, tokens, waiting_pools, slots))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [step(layer, tokens, graph_pools, slots) for _ in waiting]
    graph.replay()
    in_a_row = [step(layer, tokens, pools, slots) for _ in waiting]
    for others, other_pools in ((outputs, graph_pools), (in_a_row, pools)):
        assert all(torch.equal(a, b) for a, b in zip(others, waiting))
        assert all(torch.equal(a, b) for a, b in zip(other_pools, waiting_pools))
