"""block_backward of Attention Residuals in CUDA C++, on the CPU (emulator.h), against its equations in float64."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune.kernels.attnres import cuda

HERE = Path(__file__).parent
WIDTH = 1024  # the emulator has four warps


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, tool_path):
    """Runs the kernel on what `cuda.arguments` gives."""
    tool_path("g++")
    folder, built = tmp_path_factory.mktemp("cuda"), {}

    def run(given: ctypes.Structure, queries: int) -> None:
        if queries not in built:
            built[queries] = emulated(folder, queries)
        shared = cuda.shared_memory(WIDTH, queries)
        built[queries](ctypes.c_int(given.programs), ctypes.c_int(shared), given)

    return run


def emulated(folder: Path, queries: int):
    text = cuda.source(WIDTH, queries, 1)
    start, end = text.index("// The instructions of"), text.index("// Gradients of the sources")
    text = text[:start] + text[end:]
    text = text.replace(
        "extern __shared__ __align__(16) unsigned char memory[];", "unsigned char *memory = emu_shared;"
    )
    entry = 'extern "C" void run(int blocks, int shared, Gradients given)'
    text += f"\n{entry} {{ emu_run(blocks, shared, [=] {{ attnres_block_backward(given); }}); }}\n"
    program = folder / f"block_backward_{queries}.cpp"
    program.write_text(f'#include "{HERE}/emulator.h"\n{text}')
    library = program.with_suffix(".so")
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w", str(program), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).run


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


class Block:
    """Random inputs; the outputs are filled with NaN before."""

    def __init__(
        self, num_sources: int, queries: int, num_tokens: int, width: int, *, accumulate: bool = True, device="cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(num_sources)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        def nan(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan, device=device)

        rows, total = (num_tokens, width), queries + 3
        self.sources = [normal(*rows).bfloat16() for _ in range(num_sources)]
        self.scores = [normal(num_tokens, total + 1) for _ in range(num_sources)]
        self.weight, self.norm = 1 + 0.2 * normal(width), 1 + normal(num_tokens).square()
        self.s = normal(num_tokens, queries, num_sources)
        self.p = self.s.softmax(dim=-1)
        self.kept = torch.stack([self.p, self.s], dim=2).contiguous()
        self.grads = [normal(*rows).bfloat16() for _ in range(queries)]
        self.bases = [normal(num_tokens) for _ in range(queries)]
        self.prior = normal(num_sources, *rows).bfloat16() if accumulate else None
        self.grad = nan(num_sources, *rows).bfloat16()
        self.coefficients = [nan(num_tokens, queries) for _ in range(num_sources)]

    def arguments(self, programs: int) -> ctypes.Structure:
        self.partial = torch.full((programs, self.weight.numel()), torch.nan, device=self.weight.device)
        return cuda.arguments(
            self.sources, self.scores, self.coefficients, self.grads, self.bases, self.weight, self.kept, self.norm,
            self.prior, self.grad, self.partial,
        )  # fmt: skip

    def check(self) -> None:
        """Equations of block_backward in `triton_blocks.py`."""
        v, g = torch.stack(self.sources).double(), torch.stack(self.grads).double()
        p, s, norm = self.p.double(), self.s.double(), self.norm.double()[:, None]
        r, width = torch.stack([score[:, -1] for score in self.scores]).double(), v.shape[-1]
        unit = torch.einsum("tn,ntd->td", p[:, 0], v) * norm
        grad_weight = (g[0] * unit).sum(0)
        scaled = g[0] * self.weight.double()
        along, length = (scaled * unit).sum(-1), unit.square().sum(-1)
        g[0] = (scaled - unit * along[:, None] / width) * norm
        first_base = along * (length / width - 1)
        dots = torch.einsum("qtd,ntd->tqn", g, v)
        if len(self.sources) == 1:  # whose weight does not move
            first_base, dots = first_base * 0, dots * 0
        ds = p * (dots + torch.stack([first_base, *self.bases[1:]], dim=-1)[..., None])
        shrink = torch.einsum("tqn,tqn->nt", ds, s) * r.square() / width
        grad = torch.einsum("tqn,qtd->ntd", p, g) - shrink[..., None] * v
        # Rounded to bfloat16 once; the others carry 16 bits of weights and of the first gradient, and float32 sums.
        assert relative(self.grad, grad if self.prior is None else grad + self.prior.double()) < 2**-8
        assert relative(self.partial.sum(0), grad_weight) < 2**-15
        assert relative(torch.stack(self.coefficients), torch.einsum("tqn,nt->ntq", ds, r)) < 2**-14


@pytest.mark.parametrize(
    "num_sources, queries, num_tokens, accumulate",
    [(8, 6, 3, True), (5, 6, 1, False), (2, 7, 3, True), (1, 6, 2, True), (3, 1, 2, True)],
)
def test_gradients_of_a_block_equal_the_definition(
    kernel, num_sources: int, queries: int, num_tokens: int, accumulate: bool
) -> None:
    block = Block(num_sources, queries, num_tokens, WIDTH, accumulate=accumulate)
    kernel(block.arguments(programs=min(2, num_tokens)), queries)
    block.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_sources, queries, width", [(8, 6, 1024), (3, 6, 2048), (8, 6, 2048), (2, 7, 1280), (7, 2, 4096)]
)
def test_gpu_gradients_of_a_block_equal_the_definition_and_repeat_their_bits(
    num_sources: int, queries: int, width: int
) -> None:
    device, num_tokens, results = torch.device("cuda", torch.cuda.current_device()), 1000, []
    for _ in range(2):
        block = Block(num_sources, queries, num_tokens, width, device=device)
        given = block.arguments(cuda.num_programs(num_tokens, width, num_sources, device))
        cuda.launch(given, width, queries, device)
        block.check()
        results.append([block.grad, block.partial, *block.coefficients])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_what_the_kernel_cannot_do_is_named() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    half, full = torch.bfloat16, torch.float32
    for arguments, reason in (
        ((cpu, half, full, WIDTH, 8, 6), "cpu"),
        ((gpu, full, full, WIDTH, 8, 6), "bfloat16"),
        ((gpu, half, half, WIDTH, 8, 6), "float32"),
        ((gpu, half, full, 1000, 8, 6), "1000"),
        ((gpu, half, full, WIDTH, 9, 6), "8 sources"),
    ):
        assert reason in (cuda.why_not_cuda(*arguments) or "")


def test_queries_in_half_precision_are_refused_before_the_kernel_writes_beyond_their_coefficients() -> None:
    block = Block(2, 2, 1, WIDTH)
    block.coefficients = [x.bfloat16() for x in block.coefficients]
    with pytest.raises(TypeError, match="bfloat16"):
        block.arguments(programs=1)
