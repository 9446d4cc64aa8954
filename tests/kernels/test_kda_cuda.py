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

from perilune.kernels.kda import BoundedGate, SoftplusGate, cuda, kda, triton_gradients
from perilune.kernels.kda import triton as path

HERE = Path(__file__).parent
K = V = 64


def emulated(name: str, folder: Path, x: torch.dtype, known: int) -> Callable[..., None]:
    text = cuda.source(name, K, V, x=x, known=known).replace("#define GATE 0", "static int GATE;")
    text = text[: text.index("// The instructions of")] + text[text.index("// A tile of 16 tokens") :]
    text = text.replace(
        "extern __shared__ __align__(16) unsigned char memory[];", "unsigned char *memory = emu_shared;"
    )
    signature = re.search(rf"kda_{name}\((.*?)\) \{{", text, re.DOTALL)
    assert signature is not None
    parameters = [each.strip() for each in re.sub(r"/\*.*?\*/", "", signature[1], flags=re.DOTALL).split(",")]
    names = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters)
    entry = f'extern "C" void run(int gate, int blocks, int shared, {", ".join(parameters)})'
    body = f"emu_run(blocks, shared, [=] {{ kda_{name}({names}); }});"
    text += f"\n{entry} {{ GATE = gate; {body} }}\n"
    program = folder / f"{name}_{known}_{str(x)[6:]}.cpp"
    program.write_text(f'#include "{HERE}/emulator.h"\n{text}')
    library = program.with_suffix(".so")
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w", str(program), "-o", str(library)]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run

    def call(gate: int, blocks: int, *values) -> None:
        converted = [
            ctypes.c_void_p(value.data_ptr()) if "*" in parameter
            else ctypes.c_double(value) if parameter.startswith("double")
            else ctypes.c_int(value)
            for parameter, value in zip(parameters, values, strict=True)
        ]  # fmt: skip
        run(gate, ctypes.c_int(blocks), ctypes.c_int(cuda.shared_memory(name, K, V, known=known)), *converted)

    return call


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, tool_path):
    tool_path("g++")
    folder, built = tmp_path_factory.mktemp("cuda"), {}

    def get(name: str, x: torch.dtype = torch.bfloat16, known: int = 0) -> Callable[..., None]:
        if (name, x, known) not in built:
            built[name, x, known] = emulated(name, folder, x, known)
        return built[name, x, known]

    return get


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[1:3]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


@pytest.mark.parametrize("T, gate", [(100, "strong"), (64, "weak"), (70, "huge"), (100, "softplus"), (130, "bounded")])
def test_cuda_sources_equal_the_triton_kernels(kernel, monkeypatch, T: int, gate: str):
    H = 2
    q, k, v = (torch.randn(1, T, H, K).bfloat16() for _ in range(3))
    logits, normal = torch.randn(1, T, H), torch.randn(1, T, H, K)
    A_log, dt_bias = torch.randn(H), torch.randn(H * K)
    kind = path.GATE_KINDS.get(gate, 0)
    gates = {"softplus": SoftplusGate(A_log, dt_bias), "bounded": BoundedGate(dt_bias, A_log, lower_bound=-5.0)}
    inputs = {"strong": -5 * torch.sigmoid(normal), "weak": -0.003 * normal.abs(), "huge": -300 * normal.abs()}
    x = inputs.get(gate, normal.bfloat16())
    beta_max = 2.0 if gate == "softplus" else 0.0
    beta = logits if beta_max else torch.sigmoid(logits)
    seen = {}

    class Spy:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                seen["gradients"] = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
                return chunk_gradients[grid](*arguments, **options)

            return launch

    chunk_gradients = triton_gradients.chunk_gradients
    monkeypatch.setattr(triton_gradients, "chunk_gradients", Spy())
    leaves = [x.float().clone().requires_grad_() for x in (q, k, v, x, beta)]
    parameters = [A_log, dt_bias] if kind else []
    for parameter in parameters:
        parameter.requires_grad_()
    options = {"gate": gates.get(gate), "qk_l2norm": True, "beta_max": beta_max or None, "backend": "triton"}
    o, state = kda(*leaves, **options, output_final_state=True)
    d_o = torch.randn_like(o).bfloat16().float()
    wanted = torch.autograd.grad([o, state], [*leaves, *parameters], [d_o, torch.randn_like(state)])
    d_q, d_k, _, d_x, d_beta, *d_parameters = wanted

    A_log, dt_bias = A_log.detach(), dt_bias.detach()
    scale, bound = K**-0.5, -5.0
    given = (A_log, dt_bias) if kind else (None, None)
    call = path._Call(
        *(x.float() for x in (q, k, v, x)), beta, *given, None, scale, kind, bound, True, beta_max
    )  # fmt: skip
    P, A, rstd, operands, log_decays = call.prepare()
    programs, tables = call.max_chunks * H, (call.tables.chunk_start, call.tables.chunk_length)
    names = ("W", "U", "to_end", "from_start")
    ints = (int(beta_max > 0), 1)
    numbers = (*strides(q, k, v, x, beta), H, scale, bound, beta_max, 1, *ints)
    own_P, own_A, norms, half = empty(*P.shape), empty(*A.shape), empty(1, T, H, 2, dtype=torch.float32), P
    for known in (0, 1):
        got, decay = {name: empty(*operands[name].shape) for name in names}, torch.zeros_like(operands["state_decay"])
        if known:
            half = empty(T, H, K, dtype=torch.float16)
        kernel("prepare", x.dtype, known)(
            kind, programs, q, k, v, x, A_log, dt_bias, beta, *tables, own_P, own_A, norms, *got.values(), decay, half,
            *numbers,
        )  # fmt: skip
        assert relative(own_P, P) < 6e-3 and relative(own_A, A) < 6e-3 and relative(norms, rstd) < 1e-6
        assert relative(decay, operands["state_decay"]) < 2e-3
        for name, value in got.items():
            assert relative(value, operands[name]) < 8e-3, (known, name)
    assert relative(half, log_decays.view(half.shape)) < 5e-4

    names = "q k g beta d_o rstd along intervals later flows start length signals writes states d_states d_L d_P"
    fed = dict(zip(names.split(), seen["gradients"]))
    strength = seen["gradients"][21][-1].clone().contiguous()
    rounded = [fed[name].bfloat16().contiguous() for name in ("signals", "writes", "states", "d_states", "d_L", "d_P")]
    own = [empty(1, T, H, K), empty(1, T, H, K), empty(1, T, H, K, dtype=x.dtype)]
    d_bias, d_rate = empty(call.max_chunks, H, K, dtype=torch.float32), empty(call.max_chunks, H, dtype=torch.float32)
    out, flows = fed["d_o"].bfloat16().contiguous(), fed["flows"].contiguous()
    kernel("gradients", x.dtype)(
        kind, programs, q, k, x, half, A_log, dt_bias, beta, out, fed["rstd"], fed["along"], flows, *tables, *rounded,
        *own, strength, d_bias, d_rate, *strides(q, k, x, beta, out), H, scale, bound, beta_max, 1,
        *ints,
    )  # fmt: skip
    for got_gradient, want in zip(own, (d_q, d_k, d_x), strict=True):
        assert relative(got_gradient, want) < 1e-2
    assert relative(strength.view(1, T, H), d_beta) < 1e-2
    if kind:
        assert relative(d_rate.sum(0), d_parameters[0]) < 1e-2
        assert relative(d_bias.sum(0).flatten(), d_parameters[1]) < 1e-2
