"""kda_signals on the CPU (emulator.h) against chunk_signals of the Triton path in float32, on the same inputs."""

import pytest
import torch

pytest.importorskip("triton")

from perilune.kernels.kda import kda, triton_gradients
from tests.kernels.test_kda_cuda import V, emulated, relative, strides

# y, d_L, d_P and d_v are bfloat16 (2^-9 each); d_L and d_v are formed from the rounded y, along and d_beta are sums of it.
LIMIT = 6e-3
NAMES = "v beta o d_o A writes chunk_start chunk_length signals d_L d_P d_v along d_beta".split()
OUTPUTS = "signals d_L d_P d_v along d_beta".split()


@pytest.fixture(scope="module")
def signals_kernel(tmp_path_factory, tool_path):
    tool_path("g++")
    return emulated("signals", tmp_path_factory.mktemp("signals"))


def strided(x: torch.Tensor, channels: int) -> torch.Tensor:
    """The same values with `channels` unused ones after every head, which must not be read: NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + channels), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize(
    "T, gate, beta_max, cu_seqlens, padding",
    [
        (100, "strong", None, None, 0),
        (64, "weak", 2.0, None, 8),
        (129, "weak", None, [0, 5, 5, 79, 129], 24),
        (1, "strong", 1.0, None, 0),
    ],
)
def test_signals_equal_the_triton_kernel(signals_kernel, monkeypatch, T, gate, beta_max, cu_seqlens, padding):
    H = 2
    q, k, v = (rounded(torch.randn(1, T, H, V)) for _ in range(3))
    beta = torch.randn(1, T, H) if beta_max else torch.sigmoid(torch.randn(1, T, H))
    g = {"strong": -5 * torch.sigmoid(torch.randn_like(q)), "weak": -0.003 * torch.randn_like(q).abs()}[gate]
    kernel, seen = triton_gradients.chunk_signals, {}

    class Spy:
        """Runs the Triton kernel on operands which bfloat16 holds, and keeps what went in and what came out."""

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                for name, x in zip(NAMES, arguments, strict=False):
                    if name in ("o", "d_o", "A", "writes", "signals"):
                        x.copy_(rounded(x))
                seen["given"] = {name: x.clone() for name, x in zip(NAMES, arguments, strict=False)}
                kernel[grid](*arguments, **options)
                seen["made"] = {name: x.clone() for name, x in zip(NAMES, arguments, strict=False) if name in OUTPUTS}

            return launch

    monkeypatch.setattr(triton_gradients, "chunk_signals", Spy())
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    ends = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    o, _ = kda(*leaves, qk_l2norm=True, beta_max=beta_max, cu_seqlens=ends, backend="triton")
    o.backward(torch.randn_like(o))

    given, made = seen["given"], seen["made"]
    rows = {name: strided(given[name].bfloat16(), padding) for name in ("v", "o", "d_o")}
    operands = {name: given[name].bfloat16().contiguous() for name in ("A", "writes", "signals")}
    nothing = float("nan")
    own = {"signals": operands["signals"]}
    own |= {name: torch.full(made[name].shape, nothing).bfloat16() for name in ("d_L", "d_P", "d_v")}
    own |= {name: torch.full(made[name].shape, nothing) for name in ("along", "d_beta")}
    signals_kernel(
        operands["A"].shape[0] * H, rows["v"], beta, rows["o"], rows["d_o"], operands["A"], operands["writes"],
        given["chunk_start"], given["chunk_length"], *own.values(),
        *strides(rows["v"]), *strides(beta), *strides(rows["o"]), *strides(rows["d_o"]),
        H, beta_max or 0.0, int(beta_max is not None),
    )  # fmt: skip
    written = given["chunk_length"] > 0
    for name, want in made.items():
        got = own[name]
        if name in ("signals", "d_L", "d_P"):  # of no chunk: never read
            got, want = got[written], want[written]
        assert relative(got, want) < LIMIT, name
