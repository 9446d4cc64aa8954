"""kda_signals on the CPU (emulator.h) against chunk_signals of the Triton path in float32, on the same inputs."""

import pytest
import torch

pytest.importorskip("triton")

from perilune.kernels.kda import cuda, kda, triton_gradients
from tests.kernels import test_kda_cuda
from tests.kernels.test_kda_cuda import emulated, relative, strides

# y, d_L, d_P and d_v are rounded to bfloat16 (2^-9), and all but d_P and q . dq follow from the rounded y.
LIMIT = 2 * 2**-9
INPUTS = ("v", "beta", "o", "d_o", "A", "writes", "chunk_start", "chunk_length")
OUTPUTS = ("signals", "d_L", "d_P", "d_v", "along", "d_beta")
ROUNDED = ("o", "d_o", "A", "writes", "signals")  # operands, which must hold in bfloat16 what they hold in float32
PER_CHUNK = ("signals", "d_L", "d_P")


@pytest.fixture(scope="module", params=cuda.WIDTHS)
def signals_kernel(request, tmp_path_factory, tool_path):
    tool_path("g++")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_kda_cuda, "V", request.param)
        yield request.param, emulated("signals", tmp_path_factory.mktemp("signals"), torch.bfloat16, 0)


def strided(x: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values in bfloat16, with NaN after every head."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + padding), float("nan"), dtype=torch.bfloat16)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize(
    "T, gate, beta_max, cu_seqlens, padding",
    [(100, "strong", None, None, 0), (64, "weak", 2.0, None, 8), (85, "weak", None, [0, 1, 1, 85], 24)],
)
def test_signals_equal_the_triton_kernel(signals_kernel, monkeypatch, T, gate, beta_max, cu_seqlens, padding):
    V, run = signals_kernel
    H, K = 2, 16  # K does not enter
    q, k, v = (torch.randn(1, T, H, width).bfloat16().float() for width in (K, K, V))
    beta = torch.randn(1, T, H) if beta_max else torch.sigmoid(torch.randn(1, T, H))
    g = {"strong": -5 * torch.sigmoid(torch.randn_like(q)), "weak": -0.003 * torch.randn_like(q).abs()}[gate]
    kernel, given, made = triton_gradients.chunk_signals, {}, {}

    class Spy:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                tensors = dict(zip(INPUTS + OUTPUTS, arguments, strict=False))
                for name in ROUNDED:
                    tensors[name].copy_(tensors[name].bfloat16())
                given.update({name: x.clone() for name, x in tensors.items()})
                kernel[grid](*arguments, **options)
                made.update({name: tensors[name].clone() for name in OUTPUTS})

            return launch

    monkeypatch.setattr(triton_gradients, "chunk_signals", Spy())
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    ends = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    o, _ = kda(*leaves, qk_l2norm=True, beta_max=beta_max, cu_seqlens=ends, backend="triton")
    o.backward(torch.randn_like(o))

    rows = [strided(given[name], padding) for name in ("v", "o", "d_o")]
    A, writes, own = given["A"].bfloat16(), given["writes"].bfloat16(), {"signals": given["signals"].bfloat16()}
    for name in ("d_L", "d_P", "d_v", "along", "d_beta"):
        dtype = torch.float32 if name in ("along", "d_beta") else torch.bfloat16
        own[name] = torch.full(made[name].shape, float("nan"), dtype=dtype)
    run(
        0, A.shape[0] * H, rows[0], beta, *rows[1:], A, writes, given["chunk_start"], given["chunk_length"],
        *own.values(), *strides(rows[0], beta, *rows[1:]), H, beta_max or 0.0, int(beta_max is not None),
    )  # fmt: skip
    is_chunk = given["chunk_length"] > 0
    for name, want in made.items():
        got = own[name]
        if name in PER_CHUNK:
            got, want = got[is_chunk], want[is_chunk]
        assert relative(got, want) < LIMIT, name
