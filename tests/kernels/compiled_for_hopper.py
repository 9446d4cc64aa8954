"""Triton kernels as they are compiled for a Hopper GPU, on a machine without one; what their machine code does.

`python compiled_for_hopper.py residuals attention` prints a line of JSON for every kernel that those launch:

    {"kernel": NAME, "from_registers": N, "overwritten": [...]}

from_registers: products (wgmma) whose first operand is in registers. Such a product reads them while later instructions
run: until it was waited for they must not change. overwritten: instructions of a loop that write them earlier, the next
round of the loop included. Launches run nothing here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WRITES_NO_REGISTER = (
    "ST", "RED", "LDGSTS", "BAR", "BRA", "EXIT", "ISETP", "FSETP", "HSETP", "PSETP", "PLOP", "WARP", "DEPBAR", "NOP",
    "LDGDEPBAR", "R2UR", "R2P", "U", "VOTEU", "SYNCS", "FENCE", "MEMBAR", "ERRBAR", "BSSY", "BSYNC", "CCTL", "ELECT",
)  # fmt: skip
LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
JUMP = re.compile(r"BRA `\((\.L_x_\d+)\)")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\S* R(\d+), (?:R(\d+), )?gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
A_REGISTERS = 4
"""A thread's share of 64 x 16 numbers of 16 bits, two to a register."""


def written(instruction: str) -> set[int]:
    """Numbers of the registers that an instruction writes, but for products."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    found = re.match(r"\s*(?:U?P\w+,\s*)*R(\d+)", rest)
    if found is None or name.startswith(WRITES_NO_REGISTER):
        return set()
    count = 4 if ".128" in name or name.startswith("LDSM") else 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(found[1]), int(found[1]) + count))


def loops(machine_code: str) -> Iterator[list[str]]:
    """The instructions of every loop, from the label a jump goes back to until the jump."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in machine_code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.search(line):
            instructions.append(instruction[1].strip())
            jump = JUMP.search(instruction[1])
            if jump is not None and jump[1] in labels:
                yield instructions[labels[jump[1]] :]


def overwritten(machine_code: str) -> list[str]:
    """Instructions that write registers of a product that was not waited for, in two rounds of every loop."""
    found = []
    for body in loops(machine_code):
        groups: list[set[int]] = [set()]  # committed products in order; the last ones are not committed yet
        for instruction in [*body, *body]:
            if wait := WAIT.search(instruction):
                left = int(wait[1], 16)
                groups = [*groups[:-1][len(groups) - 1 - left :], groups[-1]] if left else [set()]
            elif product := PRODUCT.search(instruction):
                if product[3] is not None:
                    groups[-1] |= set(range(int(product[3]), int(product[3]) + A_REGISTERS))
                if "gsb0" in instruction:
                    groups.append(set())
            elif written(instruction) & set().union(*groups):
                found.append(instruction)
    return sorted(set(found))


def disassembled(code: bytes) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([str(program), "-c", file.name], capture_output=True, text=True, check=True).stdout


class _Hopper:
    """In the place of Triton's driver: a GPU that is asked what it is, and nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compiled_launches() -> list[tuple[str, Any]]:
    """From now on a launch compiles, and adds (name, compiled kernel) to this list."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Hopper())  # pyrefly: ignore[bad-argument-type]
    compile_or_run: Any = JITFunction.run
    found: dict[str, tuple[str, Any]] = {}
    listed: list[tuple[str, Any]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        compiled = compile_or_run(kernel, *arguments, grid=grid, warmup=True, **options)
        if compiled.hash not in found:
            found[compiled.hash] = kernel.__name__, compiled
            listed.append(found[compiled.hash])

    JITFunction.run = run
    return listed


def residuals() -> None:
    """The forward of a network of two blocks."""
    _blocks([2, 2, 1])


def many_residuals() -> None:
    """That of a deep one: so many queries that a product may take all warps of a group."""
    _blocks([4] * 10 + [1])


def _blocks(sizes: list[int]) -> None:
    import torch

    from perilune.kernels.attnres.triton import Bank, Carried, triton_merge_norm, triton_open

    width, tokens = 384, 16384
    queries, weight = torch.zeros(sum(sizes), width), torch.ones(width)
    embedding = torch.zeros(tokens, width, dtype=torch.bfloat16)
    norms = {"eps": 1e-6, "norm_eps": 1e-6}
    bank, running, pending = Bank(), Carried(embedding), None
    with torch.no_grad():
        for block in range(len(sizes)):
            bank, normed, mixes, log_sums = triton_open(
                bank, running, pending, queries, weight, sizes=sizes[block:], all_queries=sum(sizes), **norms
            )
            if block < len(sizes) - 1:
                running, pending = triton_merge_norm(
                    None,
                    normed,
                    mixes[0],
                    log_sums[0],
                    queries[sum(sizes[:block]) + 1],
                    weight,
                    num_sources=block + 1,
                    **norms,
                )


def attention() -> None:
    import torch

    import perilune.kernels.attention.packed  # noqa: F401  (registers the operators)

    q, k = (torch.zeros(1, 512, 2, 96, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
    borders = torch.tensor([0, 100, 512], dtype=torch.int32)
    o, log_sums, _ = torch.ops.perilune.packed_attention(q, k, v, borders, 0.1)
    torch.ops.perilune.packed_attention_backward(o, q, k, v, o, log_sums, borders, 0.1)


def main() -> None:
    kernels = compiled_launches()
    for name in sys.argv[1:]:
        {"residuals": residuals, "many_residuals": many_residuals, "attention": attention}[name]()
    for name, compiled in kernels:
        code = disassembled(compiled.asm["cubin"])
        products = [product for product in map(PRODUCT.search, code.splitlines()) if product is not None]
        from_registers = sum(product[3] is not None for product in products)
        print(json.dumps({"kernel": name, "from_registers": from_registers, "overwritten": overwritten(code)}))


if __name__ == "__main__":
    main()
