"""Muon: Newton-Schulz on stacks of matrices, and whole optimizer steps, beside torch.optim.Muon.

"NS" cases time the iteration alone on normalised stacks, in float16, in the form `orthogonalize` would choose, beside
the same iteration by three batched library products a step ("batched cuBLAS", same precision) and, where it is quick,
beside torch.optim.Muon's function called matrix by matrix ("torch loop", bfloat16). Small stacks wait for the host, so
both are also timed in CUDA graphs. Errors are against the same iteration in float64; "distance to polar" is 1 - cosine
with the exact polar factor, most of which is the coefficients' own.

"step" cases are transformers that consist of matrices only: per layer 4 of d x d and 2 of 4d x d, float32 parameters,
gradients and momentum; both optimizers launch by launch, and both in CUDA graphs. Floors: multiply-adds of the chosen
forms at the measured rate of large products, plus the bytes of gradient, momentum, parameter and 16-bit stack once each
at copy bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from perilune.bench.session import Bench
from perilune.kernels.newton_schulz import COEFFICIENTS, orthogonalize
from perilune.kernels.newton_schulz.dense import dense_orthogonalize
from perilune.kernels.newton_schulz.forms import Form, multiplications
from perilune.optim import MuonClip, Whole
from perilune.optim.muon import fast_dtype

JORDAN = COEFFICIENTS["jordan"]
# Relative error above which results are wrong rather than rounded: bfloat16 leaves 1% to 2% on these matrices, float16
# an eighth of it, float32 its eps times the slope 485 at zero; twice that.
LIMITS = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 485 * 2**-22}
BYTES_PER_PARAMETER = 24  # gradient 4, momentum 4 + 4, stack 2 + 2, parameter 4 + 4
POLAR_ROWS = 1024  # a singular value decomposition of larger matrices takes longer than everything else here


@dataclass(frozen=True)
class StackCase:
    batch: int
    rows: int
    columns: int
    loop: bool = False  # also time torch's function matrix by matrix

    @property
    def name(self) -> str:
        return f"NS {self.batch}x{self.rows}x{self.columns}"


GPU_STACKS = (
    StackCase(48, 768, 768, loop=True),
    StackCase(24, 768, 3072, loop=True),
    StackCase(32, 2048, 2048, loop=True),
    StackCase(16, 2048, 8192, loop=True),
    StackCase(64, 1408, 2048),  # experts of Moonlight
    StackCase(8, 2048, 7168),  # experts of Kimi K2
    StackCase(1, 4096, 4096, loop=True),
    StackCase(1, 8192, 8192),
    StackCase(1, 4096, 14336),
    StackCase(1024, 128, 4096),  # heads, one by one
    StackCase(256, 256, 256),
    StackCase(8, 512, 512),
    StackCase(1, 1024, 1024),
    StackCase(1, 1000, 3000),
    StackCase(4, 200, 500),
)
CPU_STACKS = (StackCase(4, 64, 64, loop=True), StackCase(2, 96, 384, loop=True))


@dataclass(frozen=True)
class StepCase:
    label: str
    width: int
    layers: int

    @property
    def name(self) -> str:
        return f"step {self.label} (d {self.width}, {self.layers} layers)"


GPU_STEPS = (StepCase("85M", 768, 12), StepCase("403M", 2048, 8))
CPU_STEPS = (StepCase("0.1M", 64, 2),)


def run(bench: Bench) -> None:
    torch.manual_seed(0)
    for case in GPU_STEPS if bench.is_gpu else CPU_STEPS:
        if bench.wants(case.name):
            _step(bench, case)
    for case in GPU_STACKS if bench.is_gpu else CPU_STACKS:
        if bench.wants(case.name):
            _newton_schulz(bench, case)


def _newton_schulz(bench: Bench, case: StackCase) -> None:
    x_BNM = torch.randn(case.batch, case.rows, case.columns, device=bench.device)
    dtype = fast_dtype(bench.device.type)
    _check_stack(bench, case, x_BNM, dtype)
    loop = None
    if case.loop:
        matrices = list(x_BNM.unbind(0))
        loop = bench.time(lambda: [_zeropower_via_newtonschulz(x, JORDAN[0], len(JORDAN), 1e-7) for x in matrices])
        del matrices
    if not bench.is_gpu:
        ours = bench.time(lambda: orthogonalize(x_BNM, dtype=dtype))
        bench.add(case.name, "orthogonalize", "ms", ours, peers={"torch loop": loop})
        return
    from perilune.kernels.newton_schulz.choice import choose_form
    from perilune.kernels.newton_schulz.forms import iterate
    from perilune.kernels.newton_schulz.triton import normalized_stack

    normalized = normalized_stack(x_BNM, dtype)
    batch, rows, columns = normalized.shape
    form = choose_form(batch, rows, columns, JORDAN)
    floor = _flops(batch, rows, columns, form) / bench.matmul_rate * 1e3
    # The iteration maps what it returned into the same range again, so that one buffer serves all repeats.
    ours = lambda: iterate(normalized, JORDAN, form)  # noqa: E731
    library = lambda: _library_iteration(normalized)  # noqa: E731
    mine, theirs = _in_turns(bench.time, ours, library)
    peers = {"batched cuBLAS": theirs, "torch loop": loop}
    bench.add(case.name, f"{form} form", "ms", mine, peers=peers, floor=floor)
    mine, theirs = _in_turns(bench.time_graph, ours, library)
    bench.add(case.name, f"{form} form, CUDA graph", "ms", mine, peers={"batched cuBLAS": theirs}, floor=floor)


def _in_turns(
    time: Callable[[Callable[[], Any]], float], ours: Callable[[], Any], theirs: Callable[[], Any]
) -> tuple[float, float]:
    """The better of two times each, whoever looks slower: ours, theirs, theirs, ours. The speed of a host drifts while
    it does other things, and the clock of a GPU with its load."""
    first, second, third, last = time(ours), time(theirs), time(theirs), time(ours)
    return min(first, last), min(second, third)


def _library_iteration(x_BNM: Tensor) -> Tensor:
    batch, rows, _ = x_BNM.shape
    other = torch.empty_like(x_BNM)
    gram, polynomial = (x_BNM.new_empty(batch, rows, rows) for _ in range(2))
    for a, b, c in JORDAN:
        torch.bmm(x_BNM, x_BNM.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x_BNM, polynomial, x_BNM, beta=a, out=other)
        x_BNM, other = other, x_BNM
    return x_BNM


def _check_stack(bench: Bench, case: StackCase, x_BNM: Tensor, dtype: torch.dtype) -> None:
    """The first and the last matrix against the iteration in float64."""
    chosen = x_BNM[[0, -1]] if case.batch > 1 else x_BNM
    want = dense_orthogonalize(chosen.double(), JORDAN, torch.float64)
    got = orthogonalize(x_BNM, dtype=dtype)
    got = got[[0, -1]] if case.batch > 1 else got
    theirs = torch.stack([_zeropower_via_newtonschulz(x, JORDAN[0], len(JORDAN), 1e-7) for x in chosen])
    bench.check(case.name, got, want, LIMITS[dtype], what="vs float64", peers={"torch": theirs})
    if min(case.rows, case.columns) <= POLAR_ROWS and case.columns <= 4 * POLAR_ROWS:
        u, _, vh = torch.linalg.svd(chosen[:1].double(), full_matrices=False)
        distances = [_one_minus_cosine(each[0], (u @ vh)[0]) for each in (got, theirs, want)]
        bench.add(case.name, "distance to polar", "", distances[0], peers={"torch": distances[1]}, floor=distances[2])


def _one_minus_cosine(x: Tensor, y: Tensor) -> float:
    return 1 - float((x.double() * y.double()).sum() / (x.double().norm() * y.double().norm()))


def _flops(batch: int, rows: int, columns: int, form: Form) -> float:
    return 2 * batch * multiplications(rows, columns, JORDAN, form)


def _matrices(case: StepCase, device: torch.device) -> nn.ParameterList:
    width = case.width
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    model = nn.ParameterList(
        [nn.Parameter(torch.randn(shape, device=device) * 0.02) for _ in range(case.layers) for shape in shapes]
    )
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    return model


def _muon(model: nn.ParameterList, *, capturable: bool = False) -> MuonClip:
    return MuonClip.for_model(model, lr=1e-3, qk_clip_tau=None, overrides={"*": Whole()}, capturable=capturable)


def _torch_muon(model: nn.ParameterList) -> torch.optim.Muon:
    return torch.optim.Muon(model.parameters(), lr=1e-3, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def _check_step(bench: Bench, case: StepCase) -> None:
    """How far the first step moves a tall and a square matrix, against float64."""
    moves = {}
    for name, build in {"ours": _muon, "torch": _torch_muon}.items():
        torch.manual_seed(1)
        model = _matrices(case, bench.device)
        chosen = [model[index] for index in (0, 4)]
        before = [parameter.detach().clone() for parameter in chosen]
        gradients = [parameter.grad for parameter in chosen]
        build(model).step()
        moves[name] = [(old - new).double() for old, new in zip(before, chosen)]
        # Read once more: the decay of 1e-4 of the parameter is part of the move.
        moves["exact"] = [
            1e-3
            * (
                0.2 * max(old.shape) ** 0.5 * dense_orthogonalize(g.double()[None], JORDAN, torch.float64)[0]
                + 0.1 * old
            )
            for old, g in zip(before, gradients)
        ]
    for index, what in enumerate(("update, square", "update, tall")):
        bench.check(
            case.name, moves["ours"][index], moves["exact"][index],
            LIMITS[fast_dtype(bench.device.type)], what=what, peers={"torch": moves["torch"][index]},
        )  # fmt: skip


def _step(bench: Bench, case: StepCase) -> None:
    _check_step(bench, case)
    model = _matrices(case, bench.device)
    size = sum(parameter.numel() for parameter in model)
    optimizer, peer = _muon(model, capturable=bench.is_gpu), _torch_muon(model)
    floor = size * BYTES_PER_PARAMETER / bench.copy_bandwidth * 1e3
    if bench.is_gpu:
        floor += _step_flops(case) / bench.matmul_rate * 1e3
    ours, theirs = _in_turns(bench.time, optimizer.step, peer.step)
    bench.add(case.name, "eager", "ms", ours, peers={"torch.optim.Muon": theirs}, floor=floor)
    bench.add(case.name, "extra memory", "GB", bench.peak_memory(optimizer.step) / 1e9)
    if bench.is_gpu:
        # The peer's lr becomes part of its graph, which no schedule could use, but takes the same time.
        ours, theirs = _in_turns(bench.time_graph, optimizer.step, peer.step)
        bench.add(case.name, "CUDA graph", "ms", ours, peers={"torch.optim.Muon": theirs}, floor=floor)


def _step_flops(case: StepCase) -> float:
    from perilune.kernels.newton_schulz.choice import choose_form

    total = 0.0
    for batch, columns in ((4 * case.layers, case.width), (2 * case.layers, 4 * case.width)):
        total += _flops(batch, case.width, columns, choose_form(batch, case.width, columns, JORDAN))
    return total
