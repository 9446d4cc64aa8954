"""Times every Triton kernel of KDA over candidate launch parameters, for the table LAUNCH in kernels/kda/triton.py.

    python benchmarks/kda_launch.py [--tokens 32768] [--heads 32] [--head-dim 128] [--seconds 120] [--json PATH]

First the accuracy of the whole operator against float64 (relative RMS error in percent), for strong, weak, bounded and
softplus gates, then each kernel with the shipped parameters, then the candidates as long as the time lasts, and at the
end forward and forward + backward with the best of them. Needs a CUDA device.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib import metadata

import torch
from torch import Tensor
from triton.testing import do_bench

from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, kda
from perilune.kernels.kda import triton as path
from perilune.kernels.triton_support import why_not_triton

CANDIDATES = {
    "gates": [(16, 4, 1), (64, 8, 1)],
    "products": [(64, 4, 1), (32, 4, 2), (64, 4, 2)],
    "inverse": [(64, 1, 1), (64, 4, 1)],
    "operands": [(64, 4, 1), (32, 4, 2)],
    "scan": [(32, 4, 2), (64, 4, 2), (16, 4, 3)],
    "restart": [(32, 4, 3), (32, 4, 2)],
    "scan_backward": [(32, 4, 2), (64, 4, 2)],
    "signals": [(64, 4, 1), (32, 4, 2)],
    "gradients": [(32, 4, 2), (16, 4, 1)],
}
GATES = ("strong", "weak", "bounded", "softplus")


def inputs(kind: str, T: int, H: int, D: int, seed: int = 0) -> tuple[list[Tensor], Gate | None]:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v, x = (normal(1, T, H, D).bfloat16() for _ in range(4))
    beta = torch.sigmoid(normal(1, T, H))
    A_log, dt_bias = torch.zeros(H, device="cuda"), torch.zeros(H * D, device="cuda")
    gate: Gate | None = None
    if kind == "strong":
        x = -5 * torch.sigmoid(x.float())
    elif kind == "weak":
        x = -0.003 * (0.5 + torch.rand(x.shape, generator=generator, device="cuda"))
    elif kind == "bounded":
        gate = BoundedGate(dt_bias, A_log, lower_bound=-5.0)
    else:
        gate = SoftplusGate(A_log, dt_bias)
    return [q, k, v, x, beta], gate


def accuracy(kind: str, T: int = 1024, H: int = 2, D: int = 128) -> dict[str, float]:
    tensors, gate = inputs(kind, T, H, D, seed=1)
    d_o = torch.randn(1, T, H, D, device="cuda").bfloat16()
    results = []
    for backend, dtype in (("chunked", torch.float64), ("triton", None)):
        leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in tensors]
        o, state = kda(*leaves, gate=gate, qk_l2norm=True, output_final_state=True, backend=backend)
        o.backward(d_o.to(o.dtype))
        results.append([o, state, *(x.grad for x in leaves)])
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta")
    errors = ((got.double() - want).norm() / want.norm() for want, got in zip(*results))
    return {name: round(error.item() * 100, 3) for name, error in zip(names, errors)}


def kernels(T: int, H: int, D: int) -> dict[str, Callable[[], object]]:
    """One function per entry of the launch table, on operands that lie ready."""
    (q, k, v, x, beta), gate = inputs("bounded", T, H, D)
    assert isinstance(gate, BoundedGate)
    call = path._Call(
        q, k, v, x, beta, gate.A_log, gate.dt_bias, None, D**-0.5, path.GATE_KINDS["bounded"], -5.0, True, 0.0
    )
    P, A, rstd, _, _ = call.prepare()
    *_, operands, g = call.prepare(known=(A, rstd))
    o, d_o = torch.empty_like(v), torch.randn_like(v)
    final, d_initial, checkpoints = call.new_states(1), call.new_states(1), call.new_checkpoints(True)
    states, writes = call.chunk_buffer(D), call.chunk_buffer(path.CHUNK)
    d_states, signals = torch.empty_like(states), torch.empty_like(writes)
    tables = call.tables

    def scan_backward() -> Tensor:
        flows = call.new_flows()
        keep = (states, d_states, signals, flows)
        call.scan_backward(operands, P, d_o, tables.sequences, keep=keep, d_initial=d_initial)
        return flows

    def gradients() -> object:
        return call.gradients(g, o, d_o, A, rstd, flows, writes, signals, states, d_states)

    call.scan(operands, P, tables.sequences, o=o, final=final, checkpoints=checkpoints)
    call.scan(operands, P, tables.checkpoints, start=checkpoints, keep=(states, writes))
    flows = scan_backward()
    return {
        "gates": call.gates,
        "products": call.prepare,  # with inverse and operands
        "inverse": call.prepare,
        "operands": lambda: call.prepare(known=(A, rstd)),
        "scan": lambda: call.scan(operands, P, tables.sequences, o=o, final=final, checkpoints=checkpoints),
        "restart": lambda: call.scan(operands, P, tables.checkpoints, start=checkpoints, keep=(states, writes)),
        "scan_backward": scan_backward,
        "signals": gradients,  # with the gradients proper and those of the gate
        "gradients": gradients,
    }


def milliseconds(function: Callable[[], object]) -> float:
    return round(do_bench(function, warmup=10, rep=40, return_mode="median"), 4)


def whole(kind: str, T: int, H: int, D: int) -> dict[str, float]:
    tensors, gate = inputs(kind, T, H, D)
    d_o = torch.randn_like(tensors[2])
    leaves = [x.requires_grad_() for x in tensors]

    def forward() -> Tensor:
        return kda(*leaves, gate=gate, qk_l2norm=True, backend="triton")[0]

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, d_o)

    with torch.no_grad():
        alone = milliseconds(forward)
    together = milliseconds(both)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    extra = (torch.cuda.max_memory_allocated() - before) / T / H
    return {"forward ms": alone, "forward + backward ms": together, "bytes per token and head": round(extra)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 32768), ("heads", 32), ("head-dim", 128), ("seconds", 120)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if reason := why_not_triton(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")):
        raise SystemExit(f"kda_launch: {reason}")
    shape = (arguments.tokens, arguments.heads, arguments.head_dim)
    started = time.monotonic()
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: metadata.version(name) for name in ("torch", "triton")},
        "shape": dict(zip(("tokens", "heads", "head_dim"), shape)),
    }

    result["accuracy %"] = {kind: accuracy(kind) for kind in GATES}
    print(result["accuracy %"])
    functions = kernels(*shape)
    shipped = {name: milliseconds(function) for name, function in functions.items()}
    result["kernels ms"] = shipped
    print("shipped", shipped)
    tried: dict[str, float] = {}
    for name, candidates in CANDIDATES.items():
        best, best_time = path.LAUNCH[name], shipped[name]
        for candidate in candidates:
            if time.monotonic() - started > arguments.seconds:
                break
            path.LAUNCH[name] = path.Launch(*candidate)
            tried[f"{name} {candidate}"] = took = milliseconds(functions[name])
            print(name, candidate, took, flush=True)
            if took < best_time:
                best, best_time = path.Launch(*candidate), took
        path.LAUNCH[name] = best
    result["candidates ms"] = tried
    result["best"] = {name: tuple(launch) for name, launch in path.LAUNCH.items()}
    result["whole"] = {kind: whole(kind, *shape) for kind in GATES}
    print("best", result["best"])
    print(json.dumps(result["whole"], indent=1))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
