"""Where Triton kernels may run, and which assembler they are trusted to."""

import warnings
from pathlib import Path

import pytest
import torch

from perilune.kernels import triton_support

pytest.importorskip("triton")


def assembler(folder: Path, version: str) -> Path:
    """A program that answers --version as ptxas does."""
    program = folder / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.93'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose only assemblers are those a test puts there."""
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: None)
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: real(path) and "/usr/local" not in str(path))
    triton_support._why_not_assembler.cache_clear()
    yield tmp_path
    triton_support._why_not_assembler.cache_clear()


def test_a_right_assembler_is_kept(machine, monkeypatch):
    mine = assembler(machine / "mine", "12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(mine))
    assert triton_support.why_not_assembler() is None
    assert triton_support.os.environ["TRITON_PTXAS_PATH"] == str(mine)


def test_a_newer_assembler_replaces_the_wrong_one(machine, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler(machine / "bundled", "12.8")))
    newer = assembler(machine / "toolkit", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    assert triton_support.why_not_assembler() is None
    assert triton_support.os.environ["TRITON_PTXAS_PATH"] == str(newer)


def test_without_a_right_assembler_the_reason_says_what_to_install(machine, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler(machine / "bundled", "12.8")))
    assembler(machine / "old", "11.8")
    monkeypatch.setenv("CUDA_HOME", str(machine / "old"))
    reason = triton_support.why_not_assembler()
    assert reason is not None and "triton>=3.8" in reason and "TRITON_PTXAS_PATH" in reason


def test_a_processor_runs_kernels_only_in_the_interpreter(monkeypatch):
    x = torch.zeros(1)
    monkeypatch.setattr(triton_support, "INTERPRETED", True)
    assert triton_support.why_not_triton(x) is None
    monkeypatch.setattr(triton_support, "INTERPRETED", False)
    assert "run on CUDA" in str(triton_support.why_not_triton(x))
    monkeypatch.setattr(triton_support, "HAS_TRITON", False)
    assert "not installed" in str(triton_support.why_not_triton(x))


def test_the_slow_path_is_announced_once():
    triton_support.warn_slow.cache_clear()
    with pytest.warns(UserWarning, match="kda runs without its GPU kernels, many times slower: no luck"):
        triton_support.warn_slow("kda", "no luck")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton_support.warn_slow("kda", "no luck")


def test_doctor_says_why_kernels_are_not_used():
    from perilune.doctor import kernels_line

    assert kernels_line({"torch": {"kernels": "ok"}}) == "ok"
    assert "slow: ptxas is too old" in kernels_line({"torch": {"kernels": "ptxas is too old"}})
