"""Whole calls of KDA with the CUDA sources on the CPU (emulator.h): what `steps.py` hands to them, and whom it refuses.

Triton's interpreter has no products in bfloat16, so the scans between the sources run in float32. What is allocated is
filled with NaN first: a number that no kernel wrote would be seen.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from perilune.kernels.kda import BoundedGate, SoftplusGate, cuda, kda
from perilune.kernels.kda import triton as path
from perilune.kernels.kda.cuda import steps
from tests.kernels import test_kda_cuda
from tests.kernels.test_kda_cuda import emulated, relative

# Operands are rounded to bfloat16 (2^-9), in the scans' operands and once more in the gradients.
LIMIT = 4 * 2**-9


@pytest.fixture
def emulates_cuda(tmp_path, tool_path, monkeypatch):
    """From now on, calls in bfloat16 take the CUDA sources; returns the names of what was launched."""
    tool_path("g++")
    launched: list[str] = []
    allocate, allocate_like = torch.empty, torch.empty_like

    def launch(name, num_programs, arguments, key_dim, value_dim, *, gate=0, x=torch.bfloat16, known=0):
        monkeypatch.setattr(test_kda_cuda, "K", key_dim)
        monkeypatch.setattr(test_kda_cuda, "V", value_dim)
        launched.append(name)
        emulated(name, tmp_path, x, known)(gate, num_programs, *arguments)

    def unwritten(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    def wide(given):
        if isinstance(given, Tensor):
            return given.float() if given.dtype == torch.bfloat16 else given
        if isinstance(given, dict):
            return {name: wide(x) for name, x in given.items()}
        return tuple(wide(x) for x in given) if type(given) is tuple else given

    def in_float32(scan):
        @functools.wraps(scan)
        def run(self, operands, *given, **options):
            ours = wide(options)
            result = scan(self, wide(operands), *wide(given), **ours)
            outputs = [(options[name], ours[name]) for name in ("o",) if options.get(name) is not None]
            outputs += zip(options.get("keep") or (), ours.get("keep") or (), strict=True)
            for rounded, exact in outputs:
                rounded.copy_(exact)
            return result

        return run

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: unwritten(allocate(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: unwritten(allocate_like(x, **options)))
    monkeypatch.setattr(steps, "launch", launch)
    monkeypatch.setattr(steps, "compile_together", lambda *_: None)
    why_not = cuda.why_not_cuda_source
    monkeypatch.setattr(cuda, "why_not_cuda_source", lambda device: None if device.type == "cpu" else why_not(device))
    for name in ("scan", "scan_backward"):
        monkeypatch.setattr(path._Call, name, in_float32(getattr(path._Call, name)))
    return launched


def gradients(inputs: list[Tensor], parameters: list[Tensor], d_o: Tensor, d_state: Tensor, options: dict, gate):
    leaves = [x.detach().requires_grad_() for x in (*inputs, *parameters)]
    made = None if gate is None else gate(*leaves[5:])
    o, state = kda(*leaves[:5], gate=made, output_final_state=True, qk_l2norm=True, backend="triton", **options)
    return [o, state, *torch.autograd.grad([o, state], leaves, [d_o.to(o.dtype), d_state])]


@pytest.mark.parametrize(
    "T, K, V, gate, x, cu_seqlens, scale",
    [
        (70, 128, 64, "bounded", torch.float16, [0, 0, 1, 1, 70, 70], None),
        (1, 64, 128, "softplus", torch.bfloat16, None, -0.3),
        (30, 64, 64, "none", torch.float32, None, 0.0),
    ],
)
def test_calls_with_cuda_sources_equal_those_without(emulates_cuda, T, K, V, gate, x, cu_seqlens, scale):
    B, H = (1, 2) if cu_seqlens else (3, 1)
    wide = torch.randn(B, T, H, 3 * K + V + 4)  # rows that do not start at multiples of 16 bytes
    q, k, g, v, _ = wide.bfloat16().split((K, K, K, V, 4), -1)
    g = {"bounded": g.to(x), "softplus": g.to(x), "none": -g.abs().to(x)}[gate]
    beta = torch.randn(B, T, 2 * H).bfloat16()[..., ::2]
    parameters = [] if gate == "none" else [torch.randn(H), torch.randn(H, K)]
    kinds = {"bounded": lambda A_log, bias: BoundedGate(bias, A_log, lower_bound=-5.0), "softplus": SoftplusGate}
    borders = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    num_sequences = B if borders is None else len(borders) - 1
    d_o, d_state = torch.randn(B, T, H, V).bfloat16(), torch.randn(num_sequences, H, K, V)
    options = {"scale": scale, "beta_max": 2.0, "cu_seqlens": borders}
    given = (parameters, d_o, d_state, options, kinds.get(gate))
    exact = gradients([y.float() for y in (q, k, v, g, beta)], *given)
    assert not emulates_cuda  # float32 takes Triton
    rounded = gradients([q, k, v, g, beta], *given)
    assert emulates_cuda == ["prepare", "prepare", "signals", "gradients"]
    for got, want in zip(rounded, exact, strict=True):
        assert got.isfinite().all()
        # Without a past, gates decay nothing: their gradient is what is left of sums that cancel.
        assert relative(got, want) < LIMIT or got.float().norm() < 2**-14 * d_state.norm()


def test_keys_of_any_norm_take_triton_whose_inverse_has_the_range_of_float32(emulates_cuda):
    T, K = 20, 64
    q, k, v = (torch.randn(1, T, 1, K).bfloat16() for _ in range(3))
    k[:, [3, 9]] = 40.0  # products of 102,400 do not fit float16
    g, beta = torch.full((1, T, 1, K), -0.05), torch.full((1, T, 1), 0.9)
    call = (q, k, v, g, beta, None, None, None, K**-0.5, 0, 0.0)
    assert path._Call(*call, True, 0.0).takes_cuda
    assert not path._Call(*call, False, 0.0).takes_cuda


def test_what_the_kernels_cannot_do_is_named():
    cpu, half = torch.device("cpu"), torch.bfloat16
    for dtype, K, x, l2norm, reason in (
        (half, 64, half, True, "cpu"),
        (torch.float32, 64, half, True, "bfloat16"),
        (half, 32, half, True, "32"),
        (half, 64, torch.float8_e4m3fn, True, "float8"),
        (half, 64, half, False, "normalised"),
    ):
        assert reason in (cuda.why_not_cuda(cpu, dtype, K, 64, x=x, l2norm=l2norm) or "")


def test_rows_out_of_reach_of_the_kernels_are_copied():
    near, far = 2**25 - 8, 2**25  # 64 tokens of the second are 2^31 numbers apart, which 32 bits do not hold
    storage = torch.zeros(far + 64, dtype=torch.bfloat16)
    for step, is_copied in ((near, False), (far, True), (near + 1, True)):
        x = storage.as_strided((1, 2, 1, 64), (2 * step, step, 64, 1))
        got = steps.aligned(x)
        assert (got.data_ptr() != x.data_ptr()) == is_copied
        assert torch.equal(got, x) and got.stride(1) * 64 < 2**31


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beta_of_any_layout_has_one_stride_for_all_tokens(dtype):
    B, T, H = 2, 5, 2
    beta = torch.arange(100).to(dtype).as_strided((B, T, H), (20, 4, 10))
    given = steps._beta(SimpleNamespace(beta=path._rows(beta)))
    assert torch.equal(given.as_strided((B * T, H), given.stride()[1:]), beta.float().reshape(B * T, H))
    assert (given.data_ptr() == beta.data_ptr()) == (dtype == torch.float32)
