"""The CUDA sources of KDA on the CPU: one thread per CUDA thread, warp instructions emulated (emulator.h).

Compared with the Triton kernels in float32. The kernels round operands to bfloat16 (2^-9) and gates to float16.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from perilune.kernels.kda import cuda, kda, triton_gradients
from perilune.kernels.kda import triton as path

HERE = Path(__file__).parent
K = V = 64


def emulated(name: str, folder: Path) -> Callable[..., None]:
    text = cuda.source(name, K, V)
    text = text[: text.index("// The instructions of")] + text[text.index("// A tile of 16 tokens") :]
    text = text.replace(
        "extern __shared__ __align__(16) unsigned char memory[];", "unsigned char *memory = emu_shared;"
    )
    signature = re.search(rf"kda_{name}\((.*?)\) \{{", text, re.DOTALL)
    assert signature is not None
    parameters = [each.strip() for each in re.sub(r"/\*.*?\*/", "", signature[1], flags=re.DOTALL).split(",")]
    names = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters)
    entry = f'extern "C" void run(int blocks, int shared, {", ".join(parameters)})'
    text += f"\n{entry} {{ emu_run(blocks, shared, [=] {{ kda_{name}({names}); }}); }}\n"
    program = folder / f"{name}.cpp"
    program.write_text(f'#include "{HERE}/emulator.h"\n{text}')
    library = program.with_suffix(".so")
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w", str(program), "-o", str(library)]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run

    def call(blocks: int, *values) -> None:
        converted = [
            ctypes.c_void_p(value.data_ptr()) if "*" in parameter
            else ctypes.c_double(value) if parameter.startswith("double")
            else ctypes.c_int(value)
            for parameter, value in zip(parameters, values, strict=True)
        ]  # fmt: skip
        run(ctypes.c_int(blocks), ctypes.c_int(cuda.shared_memory(name, K, V)), *converted)

    return call


@pytest.fixture(scope="module")
def kernels(tmp_path_factory, tool_path):
    tool_path("g++")
    folder = tmp_path_factory.mktemp("cuda")
    return {name: emulated(name, folder) for name in ("prepare", "gradients")}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def strides(x: torch.Tensor) -> list[int]:
    return list(x.stride()[1:3])


@pytest.mark.parametrize("T, gate", [(100, "strong"), (64, "weak"), (70, "huge")])
def test_cuda_sources_equal_the_triton_kernels(kernels, monkeypatch, T: int, gate: str):
    H = 2
    q, k, v = (torch.randn(1, T, H, K).bfloat16() for _ in range(3))
    beta = torch.sigmoid(torch.randn(1, T, H))
    normal = torch.randn(1, T, H, K)
    g = {"strong": -5 * torch.sigmoid(normal), "weak": -0.003 * normal.abs(), "huge": -300 * normal.abs()}[gate]
    seen = {}

    class Spy:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                seen["gradients"] = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
                return kernel[grid](*arguments, **options)

            return launch

    kernel = triton_gradients.chunk_gradients
    monkeypatch.setattr(triton_gradients, "chunk_gradients", Spy())
    leaves = [x.float().clone().requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = kda(*leaves, qk_l2norm=True, backend="triton")
    d_o = torch.randn_like(o).bfloat16().float()
    d_q, d_k, _, d_g, d_beta = torch.autograd.grad(o, leaves, d_o)

    call = path._Call(*(x.float() for x in (q, k, v)), g, beta, None, None, None, K**-0.5, 0, 0.0, True, 0.0)
    gates = call.gates()
    P, A, rstd, operands = call.prepare(gates)
    programs, half = call.max_chunks * H, gates.half()
    got = {name: torch.full(x.shape, float("nan")).bfloat16() for name, x in operands.items() if name != "state_decay"}
    decay, norms = torch.zeros_like(operands["state_decay"]), torch.zeros(1, T, H, 2)
    own_P, own_A = (torch.full(P.shape, float("nan")).bfloat16() for _ in range(2))
    tables = (call.tables.chunk_start, call.tables.chunk_length)
    numbers = (*strides(q), *strides(k), *strides(v), *strides(beta), H, K**-0.5, 0.0, 1, 0)
    outputs = (own_P, own_A, norms, *got.values(), decay)
    kernels["prepare"](programs, q, k, v, half, beta, *tables, *outputs, *numbers, 0)
    assert relative(own_P, P) < 6e-3 and relative(own_A, A) < 6e-3 and relative(norms, rstd) < 1e-6
    assert relative(decay, operands["state_decay"]) < 2e-3
    for name, value in got.items():
        assert relative(value, operands[name]) < 6e-3, name
    again = {name: torch.full_like(x, float("nan")) for name, x in got.items()}
    kernels["prepare"](programs, q, k, v, half, beta, *tables, own_P, own_A, norms, *again.values(), decay, *numbers, 1)
    for name, value in again.items():
        assert relative(value, operands[name]) < 8e-3, name

    names = "q k g beta d_o rstd along intervals later flows start length signals writes states d_states d_L d_P"
    fed = dict(zip(names.split(), seen["gradients"]))
    strength = seen["gradients"][21][-1].clone().contiguous()
    rounded = [fed[name].bfloat16().contiguous() for name in ("signals", "writes", "states", "d_states", "d_L", "d_P")]
    own = [torch.full((1, T, H, K), float("nan")).bfloat16() for _ in range(3)]
    out = fed["d_o"].bfloat16().contiguous()
    kernels["gradients"](
        programs, q, k, half, beta, out, fed["rstd"], fed["along"], fed["flows"].contiguous(), *tables, *rounded, *own,
        strength, *strides(q), *strides(k), *strides(beta), *strides(out), H, K**-0.5, 0.0, fed["flows"].shape[2], 1, 0,
    )  # fmt: skip
    for got_gradient, want in zip(own, (d_q, d_k, d_g), strict=True):
        assert relative(got_gradient, want) < 1e-2
    assert relative(strength.view(1, T, H), d_beta) < 1e-2
