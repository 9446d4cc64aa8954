"""The Triton kernels of KDA against the recurrence in float64, on CPU in Triton's interpreter, in float32.

Tolerance: float32 rounding (6e-8) times the length of the sums, a few hundred terms, leaves 1e-5; gradients of the
gates are sums of cancelling terms over a chunk, ten times that. Gates below -12 are clamped between tokens of the same
eight (e^-12 = 6e-6 of a neighbour's contribution).
"""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from perilune.kernels.kda import BoundedGate, SoftplusGate, kda
from perilune.kernels.kda import triton as triton_path
from perilune.kernels.kda import triton_tables as tables_module
from perilune.kernels.kda.triton_tables import tables_for

NAMES = ("o", "state", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial")
LIMITS = dict.fromkeys(NAMES, 2e-5) | dict.fromkeys(("g", "A_log", "dt_bias", "beta"), 2e-4)


def problem(
    B=1,
    T=80,
    H=2,
    K=16,
    V=16,
    *,
    gate="softplus",
    l2norm=True,
    initial=False,
    cu=None,
    spread=1.0,
    beta_max=None,
):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_sequences = B if cu is None else len(cu) - 1
    width = 1.0 if l2norm else K**-0.5
    tensors = {
        "q": normal(B, T, H, K) * width,
        "k": normal(B, T, H, K) * width,
        "v": normal(B, T, H, V),
        "g": normal(B, T, H, K) * spread,
        "beta": normal(B, T, H) if beta_max else torch.sigmoid(normal(B, T, H)),
    }
    if gate is None:
        tensors["g"] = -tensors["g"].abs()
    else:
        tensors |= {"A_log": normal(H) * 0.5, "dt_bias": normal(H, K)}
    if initial:
        tensors["initial"] = normal(num_sequences, H, K, V)
    options = {"gate": gate, "l2norm": l2norm, "cu": cu, "beta_max": beta_max}
    return tensors, options, normal(B, T, H, V), normal(num_sequences, H, K, V)


def run(tensors, options, d_o, d_state, *, backend, dtype=torch.float32, device="cpu"):
    leaves = {name: x.detach().clone().to(device, dtype).requires_grad_() for name, x in tensors.items()}
    gate = None
    if options["gate"] == "softplus":
        gate = SoftplusGate(leaves["A_log"], leaves["dt_bias"])
    elif options["gate"] is not None:
        gate = BoundedGate(leaves["dt_bias"], leaves["A_log"], lower_bound=options["gate"])
    o, state = kda(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial"),
        output_final_state=True,
        cu_seqlens=None if options["cu"] is None else torch.tensor(options["cu"], device=device),
        gate=gate,
        qk_l2norm=options["l2norm"],
        beta_max=options["beta_max"],
        backend=backend,
    )
    ((o * d_o.to(o)).sum() + (state * d_state.to(state)).sum()).backward()
    return {"o": o.detach(), "state": state.detach()} | {name: x.grad for name, x in leaves.items()}


def assert_close(got, want, *, factor=1.0):
    for name, value in want.items():
        # A gradient may be zero in truth, where only cancelling terms of order one are left.
        error = (got[name].double() - value).norm() / value.norm().clamp(min=1e-2 * value.numel() ** 0.5)
        assert error < LIMITS[name] * factor, f"{name}: relative error {error:.1e}"


def check(tensors, options, d_o, d_state, *, factor=1.0):
    want = run(tensors, options, d_o, d_state, backend="chunked", dtype=torch.float64)
    assert_close(run(tensors, options, d_o, d_state, backend="triton"), want, factor=factor)


@pytest.mark.parametrize("T", [1, 64, 150])
@pytest.mark.parametrize("gate", [None, "softplus", -5.0])
def test_outputs_and_gradients_equal_the_recurrence(T: int, gate):
    check(*problem(T=T, gate=gate))


@pytest.mark.parametrize("K, V", [(64, 16), (16, 64), (32, 128), (128, 32), (256, 16)])
def test_key_and_value_widths_may_differ(K: int, V: int):
    check(*problem(T=70, H=1, K=K, V=V))


def test_several_sequences_start_from_their_own_states():
    check(*problem(B=3, T=70, initial=True))


def test_without_normalisation_scale_and_strength_are_applied_as_given():
    check(*problem(T=90, l2norm=False, gate=None, beta_max=2.0))


@pytest.mark.parametrize(
    "cu", [[0, 0, 1, 1, 70, 150, 150], [0, 64, 128, 150], [0, 150], [0, 1, 2, 3, 150]], ids=lambda cu: str(len(cu) - 1)
)
def test_packed_documents_equal_separate_documents(cu):
    tensors, options, d_o, d_state = problem(T=150, cu=cu, initial=True)
    check(tensors, options, d_o, d_state)
    packed = run(tensors, options, d_o, d_state, backend="triton")
    for n, (start, stop) in enumerate(zip(cu, cu[1:])):
        if start == stop:
            assert torch.equal(packed["state"][n], tensors["initial"][n])
            continue
        alone = {name: x[:, start:stop] for name, x in tensors.items() if x.dim() >= 3 and x.shape[1] == 150}
        alone |= {name: tensors[name] for name in ("A_log", "dt_bias")} | {"initial": tensors["initial"][n : n + 1]}
        got = run(alone, options | {"cu": None}, d_o[:, start:stop], d_state[n : n + 1], backend="triton")
        assert torch.equal(got["o"], packed["o"][:, start:stop])
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(got[name], packed[name][:, start:stop])


@pytest.mark.parametrize("spread", [1e-4, 0.01, 5.0, 50.0, 1000.0])
def test_any_gate_strength(spread: float):
    tensors, options, d_o, d_state = problem(T=130, K=32, gate=None, spread=spread)
    got = run(tensors, options, d_o, d_state, backend="triton")
    assert all(torch.isfinite(x).all() for x in got.values())
    # The clamp moves a neighbour's share by up to 6e-6, and by as much of it the little that is left of the gradients.
    check(tensors, options, d_o, d_state, factor=1.0 if spread < 5 else 5.0)


def test_beta_of_zero_and_two_have_gradients():
    tensors, options, d_o, d_state = problem(T=70, gate=-5.0)
    tensors["beta"][:, ::2] = 0.0
    tensors["beta"][:, 1::4] = 2.0
    check(tensors, options, d_o, d_state)


def test_equal_keys_without_decay_keep_the_inverse_exact():
    """The series of powers of L would lose everything here: C(63, 31) = 1e18."""
    tensors, options, d_o, d_state = problem(T=128, gate=None, spread=0.0)
    tensors["k"][:] = tensors["k"][:, :1]
    tensors["beta"][:] = 1.0
    got = run(tensors, options, d_o, d_state, backend="triton")
    want = run(tensors, options, d_o, d_state, backend="reference", dtype=torch.float64)
    assert_close({name: got[name] for name in ("o", "state", "v")}, {name: want[name] for name in ("o", "state", "v")})


def test_the_past_does_not_depend_on_the_future():
    tensors, options, d_o, d_state = problem(T=150, gate=None)
    first = run(tensors, options, d_o, d_state, backend="triton")["o"]
    for x in tensors.values():
        x[:, 97:] = torch.randn_like(x[:, 97:])
    tensors["g"][:, 97:] = -100.0
    second = run(tensors, options, d_o, d_state, backend="triton")["o"]
    assert torch.equal(first[:, :97], second[:, :97])


def test_long_sequences_of_few_heads_are_split_exactly(monkeypatch):
    tensors, options, d_o, d_state = problem(B=2, T=64 * 9 + 5, H=1, initial=True)
    whole = run(tensors, options, d_o, d_state, backend="triton")
    monkeypatch.setattr(triton_path._Call, "piece", lambda call: 2)
    monkeypatch.setattr(triton_path, "CHECKPOINT_EVERY", 2)
    assert_close(run(tensors, options, d_o, d_state, backend="triton"), {name: x.double() for name, x in whole.items()})


def test_split_of_packed_documents(monkeypatch):
    monkeypatch.setattr(triton_path._Call, "piece", lambda call: 2)
    monkeypatch.setattr(triton_path, "CHECKPOINT_EVERY", 2)
    check(*problem(T=500, H=1, cu=[0, 0, 3, 330, 500, 500], initial=True))


def test_strided_views_need_no_copy():
    tensors, options, d_o, d_state = problem(T=70)
    fused = torch.cat([tensors[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    views = dict(zip(("q", "k", "v"), (part.unflatten(-1, (2, 16)) for part in fused.chunk(3, dim=-1))))
    got = run(tensors | views, options, d_o, d_state, backend="triton")
    want = run(tensors, options, d_o, d_state, backend="triton")
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_without_gradients_nothing_is_kept():
    tensors, _, _, _ = problem(T=70, gate=None)
    q, k, v, g, beta = (tensors[name] for name in ("q", "k", "v", "g", "beta"))
    with torch.no_grad():
        outputs = torch.ops.perilune.kda_forward(
            q, k, v, g, beta, None, None, None, None, 0.25, 0, 0.0, True, 0.0, False
        )
    assert [x.numel() for x in outputs[2:]] == [0, 0, 0, 0]


@hypothesis.given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(1, 3))
@hypothesis.settings(max_examples=60)
def test_tables_cover_every_token_once(lengths: list[int], every: int):
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tables = tables_for(torch.tensor(borders), 1, borders[-1], torch.device("cpu"), every, 2 * every)
    covered = [
        token
        for start, length in zip(tables.chunk_start.tolist(), tables.chunk_length.tolist())
        for token in range(start, start + length)
    ]
    assert sorted(covered) == list(range(borders[-1]))
    assert tables.pieces is not None
    for runs in (tables.sequences, tables.checkpoints, tables.pieces):
        for n, length in enumerate(lengths):
            pieces = range(runs.of_sequence[n], runs.of_sequence[n + 1])
            assert sum(int(runs.num_chunks[run]) for run in pieces) == -(-length // 64)
    used = tables.checkpoints.num_chunks > 0
    assert tables.checkpoints.first_checkpoint[used].tolist() == list(range(int(used.sum())))


@pytest.mark.parametrize("grad", [True, False])
def test_operator_contract(grad: bool):
    tensors, _, _, _ = problem(T=20, H=1, gate=None)
    arguments = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    rest = (None, None, None, None, 0.25, 0, 0.0, True, 0.0, grad)
    torch.library.opcheck(
        torch.ops.perilune.kda_forward.default,
        (*arguments, *rest),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_who_watches_operators_sees_one_of_ours_and_not_what_it_is_made_of():
    """Plain functions would show them allocations that nothing they know of ever fills."""
    tensors, _, d_o, _ = problem(T=20, H=1, gate=None)
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        o, _ = kda(*leaves, qk_l2norm=True, backend="triton")
        return o.detach(), *torch.autograd.grad(o, leaves, d_o.to(o.device))

    graph = make_fx(gradients)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(graph(*inputs), gradients(*inputs), strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes = [x.shape for x in gradients(*(mode.from_tensor(x) for x in inputs))]
    assert shapes == [x.shape for x in (d_o, *inputs)]


def test_compiles_as_one_graph():
    tensors, _, _, _ = problem(T=70, H=1, gate=None)
    inputs = [tensors[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def loss(q, k, v, g, beta):
        return kda(q, k, v, g, beta, qk_l2norm=True, backend="triton")[0].square().sum()

    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))


def test_refusals_give_the_reason():
    tensors, options, d_o, d_state = problem(T=5)
    with pytest.raises(ValueError, match="float64"):
        run(tensors, options, d_o, d_state, backend="triton", dtype=torch.float64)
    tensors, options, d_o, d_state = problem(T=5, K=24)
    with pytest.raises(ValueError, match="need K in 16, 32"):
        run(tensors, options, d_o, d_state, backend="triton")
    with pytest.raises(ValueError, match="beta_max"):
        run(tensors, options | {"beta_max": -1.0}, d_o, d_state, backend="triton")
    tensors, options, d_o, d_state = problem(T=5)
    with pytest.raises(ValueError, match="cu_seqlens has no documents"):
        run(tensors, options | {"cu": [0]}, d_o, d_state, backend="triton")
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    elsewhere = torch.zeros(1, 2, 16, 16, device="meta")
    with pytest.raises(ValueError, match="initial_state is on .*meta"):
        kda(*inputs, initial_state=elsewhere, backend="triton")
    with pytest.raises(ValueError, match="gate.A_log is on .*meta"):
        kda(*inputs, gate=SoftplusGate(elsewhere[0, :, 0, 0], tensors["dt_bias"]), backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens is on .*meta"):
        kda(*inputs, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"), backend="triton")


def test_one_token_of_a_layout_with_tokens_first():
    """Such a tensor counts as contiguous, although the stride of its one token says nothing."""
    tensors, options, d_o, d_state = problem(B=3, T=1)
    want = run(tensors, options, d_o, d_state, backend="triton")
    views = {name: x.squeeze(1)[None].transpose(0, 1) for name, x in tensors.items() if x.dim() >= 3}
    assert views["q"].is_contiguous() and views["q"].stride(1) == 3 * 2 * 16
    got = kda(
        *(views[name] for name in ("q", "k", "v", "g", "beta")),
        gate=SoftplusGate(tensors["A_log"], tensors["dt_bias"]), qk_l2norm=True, backend="triton",
    )  # fmt: skip
    assert torch.equal(got[0], want["o"])


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.transpose(0, -1).contiguous().transpose(0, -1), lambda x: x[:1].expand_as(x)],
    ids=("columns", "one"),
)
def test_parameters_of_the_gate_may_be_strided(layout):
    tensors, _, d_o, _ = problem(T=20)
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    found = []
    for backend, dtype in (("chunked", torch.float64), ("triton", torch.float32)):
        A_log, dt_bias = (tensors[name].to(dtype).requires_grad_() for name in ("A_log", "dt_bias"))
        gate = SoftplusGate(layout(A_log), layout(dt_bias))
        o, _ = kda(*(x.to(dtype) for x in inputs), gate=gate, qk_l2norm=True, backend=backend)
        gradients = torch.autograd.grad(o, (A_log, dt_bias), d_o.to(dtype))
        found.append(dict(zip(("o", "A_log", "dt_bias"), (o.detach(), *gradients))))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("gate, rate", [("softplus", 9.0), (-5000.0, 0.0)])
def test_the_slope_of_a_strong_gate_does_not_magnify_the_clamp(gate, rate: float):
    tensors, options, d_o, d_state = problem(T=70, gate=gate)
    tensors["A_log"][:] = rate
    check(tensors, options, d_o, d_state, factor=5.0)


def test_a_second_derivative_is_refused():
    tensors, _, _, _ = problem(T=5, H=1, gate=None)
    inputs = [tensors[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    weight = torch.ones(1, 5, 1, 16, requires_grad=True)
    o, _ = kda(*inputs, qk_l2norm=True, backend="triton")
    (d_q,) = torch.autograd.grad((o * weight).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(d_q.square().sum() + weight.square().sum(), weight)


def test_tables_made_while_a_graph_is_captured_are_not_kept(monkeypatch):
    """They are filled when the graph is replayed. Those that a graph reads outlive all others."""
    device, kept = torch.device("cuda"), tables_module._dense_tables
    monkeypatch.setattr(tables_module, "_dense_tables", lambda *key: kept(*key[:2], torch.device("cpu"), *key[3:]))
    monkeypatch.setattr(tables_module, "_DENSE", {})
    monkeypatch.setattr(tables_module, "_CAPTURED", {})

    def tables(num_tokens: int, is_capturing: bool):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        return tables_for(None, 1, num_tokens, device, 8, 0)

    inside = tables(7, True)
    outside = tables(7, False)
    assert outside is not inside
    assert tables(7, True) is outside
    for num_tokens in range(8, 50):
        tables(num_tokens, False)
    assert tables(7, False) is outside
    assert len(tables_module._DENSE) <= 32


def test_shared_tables_live_as_long_as_their_borders_and_are_those_of_no_other_tensor(monkeypatch):
    """Also while a graph is captured, and for an inference tensor: every layer of a step asks for them."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def tables(borders: torch.Tensor):
        return tables_for(borders, 1, 100, borders.device, 0, 0)

    with torch.inference_mode():
        buffer = torch.tensor([0, 30, 100])
        first, second = buffer[:], buffer[:]
        tables_module.share_tables(first)
        assert tables(first) is tables(first)
        assert tables(first).sequences.num_chunks.tolist() == [1, 2]
        buffer.copy_(torch.tensor([0, 90, 100]))  # the next step
        tables_module.share_tables(second)
        assert tables(second).sequences.num_chunks.tolist() == [2, 1]
        assert tables(buffer) is not tables(buffer)  # nobody said that it stays
        count = len(tables_module._SHARED)
        del first, second
        assert len(tables_module._SHARED) == count - 2


# On a GPU -------------------------------------------------------------------------------------------------------------

# bfloat16 rounds every operand by up to 2^-9 = 0.2%; the bars are the sheet's.
HALF = {"o": 5e-3, "state": 5e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "g": 1e-2, "beta": 1e-2, "initial": 8e-3}
HALF |= {"A_log": 2e-2, "dt_bias": 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [None, "softplus", -5.0])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64)])
def test_bfloat16_accuracy(gate, K: int, V: int):
    tensors, options, d_o, d_state = problem(T=1500, H=2, K=K, V=V, gate=gate, initial=True)
    tensors = {name: x.bfloat16() if x.dim() == 4 and name != "initial" else x for name, x in tensors.items()}
    want = run(tensors, options, d_o, d_state, backend="chunked", dtype=torch.float64, device="cuda")
    leaves = {name: x.cuda() for name, x in tensors.items()}
    got = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
    for name, value in want.items():
        error = ((got[name].double() - value).norm() / value.norm()).item()
        assert error < HALF[name], f"{name}: {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "K, V, gate, g_dtype, l2norm",
    [
        (64, 128, "softplus", torch.float16, True),
        (128, 64, -5.0, torch.float32, True),
        (128, 128, None, torch.float32, False),
        (32, 256, "softplus", torch.bfloat16, True),
    ],
)
def test_bfloat16_accuracy_of_packed_documents_with_mixed_widths_and_gates(K, V, gate, g_dtype, l2norm):
    cu = [0, 0, 1, 65, 700, 700, 1000]
    tensors, options, d_o, d_state = problem(
        T=1000, H=3, K=K, V=V, gate=gate, initial=True, cu=cu, beta_max=1.0, l2norm=l2norm
    )
    half = {name: tensors[name].bfloat16() for name in ("q", "k", "v", "beta")} | {"g": tensors["g"].to(g_dtype)}
    tensors |= half
    want = run(tensors, options, d_o, d_state, backend="chunked", dtype=torch.float64, device="cuda")
    got = run_as_given({name: x.cuda() for name, x in tensors.items()}, options, d_o.cuda(), d_state.cuda())
    for name, value in want.items():
        error = ((got[name].double() - value).norm() / value.norm()).item()
        assert error < HALF[name], f"{name}: {error:.2e}"


@pytest.mark.gpu
def test_rows_that_start_anywhere_give_the_same_bits_on_the_gpu():
    tensors, options, d_o, d_state = problem(T=200, H=2, K=64, V=64)
    leaves = {name: x.cuda().bfloat16() if x.dim() == 4 else x.cuda() for name, x in tensors.items()}
    first = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
    for name in ("q", "k", "v", "g"):
        shifted = torch.zeros(1, 200, 2, 67, device="cuda", dtype=torch.bfloat16)[..., 3:]
        leaves[name] = shifted.copy_(leaves[name])
    assert leaves["q"].data_ptr() % 16
    again = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [1e-4, 1000.0])
def test_any_gate_strength_stays_finite_on_the_gpu(spread: float):
    tensors, options, d_o, d_state = problem(T=300, H=2, K=128, V=128, spread=spread, gate=None)
    leaves = {name: x.cuda().bfloat16() if name in ("q", "k", "v") else x.cuda() for name, x in tensors.items()}
    leaves["g"][:, 7] = -1000.0
    got = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
    assert all(x.isfinite().all() for x in got.values())


def run_as_given(leaves, options, d_o, d_state, backend="triton"):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    gate = None
    if options["gate"] == "softplus":
        gate = SoftplusGate(leaves["A_log"], leaves["dt_bias"])
    elif options["gate"] is not None:
        gate = BoundedGate(leaves["dt_bias"], leaves["A_log"], lower_bound=options["gate"])
    o, state = kda(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial"), output_final_state=True, gate=gate, qk_l2norm=options["l2norm"],
        cu_seqlens=None if options["cu"] is None else torch.tensor(options["cu"], device="cuda"),
        beta_max=options["beta_max"], backend=backend,
    )  # fmt: skip
    ((o.float() * d_o).sum() + (state * d_state).sum()).backward()
    return {"o": o.detach(), "state": state.detach()} | {name: x.grad for name, x in leaves.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, factor", [(torch.float32, 10.0), (torch.float16, 200.0)])
def test_other_dtypes_on_the_gpu(dtype: torch.dtype, factor: float):
    """Three tf32 products keep about 21 bits, float16 inputs and tf32 products 11."""
    tensors, options, d_o, d_state = problem(T=300, K=64, V=64)
    tensors = {name: x.to(dtype) if x.dim() == 4 else x for name, x in tensors.items()}
    want = run(tensors, options, d_o, d_state, backend="chunked", dtype=torch.float64, device="cuda")
    got = run_as_given({name: x.cuda() for name, x in tensors.items()}, options, d_o.cuda(), d_state.cuda())
    assert_close(got, want, factor=factor)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits_on_the_gpu():
    tensors, options, d_o, d_state = problem(T=3000, H=4, K=128, V=128, cu=[0, 700, 701, 3000])
    leaves = {name: x.cuda().bfloat16() if x.dim() == 4 else x.cuda() for name, x in tensors.items()}
    first = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
    for _ in range(3):
        again = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_the_past_does_not_depend_on_the_future_on_the_gpu():
    tensors, options, d_o, d_state = problem(T=500, H=4, K=128, V=128, gate=None)
    leaves = {name: x.cuda().bfloat16() if x.dim() == 4 else x.cuda() for name, x in tensors.items()}
    first = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())["o"]
    for x in leaves.values():
        x[:, 233:] = torch.randn_like(x[:, 233:])
    leaves["g"][:, 233:] = -100.0
    second = run_as_given(leaves, options, d_o.cuda(), d_state.cuda())["o"]
    assert torch.equal(first[:, :233], second[:, :233])


@pytest.mark.gpu
def test_compiles_as_one_graph_and_is_captured():
    tensors, _, _, _ = problem(T=256, H=2, K=64, V=64, gate=None)
    q, k, v, g, beta = (tensors[name].cuda().bfloat16().requires_grad_() for name in ("q", "k", "v", "g", "beta"))
    cu = torch.tensor([0, 100, 256], device="cuda")

    def loss(q, k, v, g, beta):
        return kda(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True)[0].float().square().sum()

    eager = torch.autograd.grad(loss(q, k, v, g, beta), (q, k, v, g, beta))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v, g, beta), (q, k, v, g, beta))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        kda(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured, _ = kda(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(captured, kda(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True)[0])
