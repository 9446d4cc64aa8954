"""What a product on Hopper reads from registers stays there until it was read: kernels compiled here, without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled_for_hopper import overwritten, written

pytest.importorskip("triton")

LOOP = """
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R40, [R59+UR6+0x4000] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR12], R24, gsb0 ;
        /*0040*/                   FADD R12, R13, R12 ;
{wait}
        /*0060*/              @!P5 BRA `(.L_x_0) ;
"""
WAIT = "        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;"


def test_a_register_that_the_next_round_writes_before_a_wait_is_found() -> None:
    assert overwritten(LOOP.format(wait="")) == ["LDSM.16.M88.4 R40, [R59+UR6+0x4000]"]
    assert overwritten(LOOP.format(wait=WAIT.format(left="0x1"))) == ["LDSM.16.M88.4 R40, [R59+UR6+0x4000]"]
    assert overwritten(LOOP.format(wait=WAIT.format(left="0x0"))) == []


@pytest.mark.parametrize(
    ("instruction", "registers"),
    [
        ("LDS.128 R40, [R57+UR6+0x5000]", {40, 41, 42, 43}),
        ("@P0 STG.E.128 desc[UR16][R60.64], R16", set()),
        ("IADD3 R40, P6, R11, UR4, RZ", {40}),
        ("SHFL.BFLY PT, R23, R22, 0x4, 0x1f", {23}),
        ("ISETP.NE.AND P0, PT, R13, RZ, PT", set()),
        ("IMAD.WIDE R4, R2, 0x2, R6", {4, 5}),
    ],
)
def test_registers_that_instructions_write(instruction: str, registers: set[int]) -> None:
    assert written(instruction) == registers


def compiled(folder: Path, *names: str) -> list[dict]:
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((programs / name).exists() for name in ("nvdisasm", "ptxas")):
        pytest.skip("this Triton comes without its assembler and disassembler")
    here = Path(__file__).with_name("compiled_for_hopper.py")
    package = importlib.util.find_spec("perilune")
    assert package is not None and package.origin is not None
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(package.origin).parents[1]),
        "TRITON_CACHE_DIR": str(folder),
    }  # fmt: skip
    answer = subprocess.run([sys.executable, str(here), *names], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_sums_of_a_block_are_never_read_from_registers(tmp_path: Path) -> None:
    kernels = compiled(tmp_path, "residuals")
    of_sources = [kernel for kernel in kernels if kernel["kernel"] == "source_forward"]
    assert [kernel["from_registers"] for kernel in of_sources] == [0, 0, 0]
    assert not any(kernel["overwritten"] for kernel in kernels)


@pytest.mark.long
def test_neither_are_those_of_a_deep_network(tmp_path: Path) -> None:
    kernels = compiled(tmp_path, "many_residuals")
    of_sources = [kernel for kernel in kernels if kernel["kernel"] == "source_forward"]
    assert len(of_sources) >= 3 and not any(kernel["from_registers"] for kernel in of_sources)
    assert not any(kernel["overwritten"] for kernel in kernels)


@pytest.mark.long
def test_packed_attention_waits_for_products_before_it_overwrites_their_registers(tmp_path: Path) -> None:
    kernels = compiled(tmp_path, "attention")
    assert {"forward_kernel", "keys_kernel", "queries_kernel"} <= {kernel["kernel"] for kernel in kernels}
    assert any(kernel["from_registers"] for kernel in kernels)
    assert {kernel["kernel"]: kernel["overwritten"] for kernel in kernels if kernel["overwritten"]} == {}
