"""Launches go to the compiled kernel of the first call with their key, and to Triton where that kernel may not fit."""

from typing import Any

import pytest
import torch

from perilune.kernels import launch as module
from perilune.kernels.launch import launch


class Compiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """What `launch` uses of a kernel of Triton; in the interpreter nothing is compiled."""

    arg_names = ("sources", "out_ptr", "number", "WIDTH", "NORM")

    def __init__(self, *, interpreted: bool = False) -> None:
        self.compiled = None if interpreted else Compiled()
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, **constants: Any) -> Compiled | None:
            self.calls.append((grid, arguments, constants))
            return self.compiled

        return run


CONSTANTS = {"num_warps": 4, "NORM": True, "WIDTH": 8}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILED", {})


def test_a_known_key_takes_addresses_and_constants_in_order_straight_to_the_compiled_kernel() -> None:
    kernel, source, out = Kernel(), torch.zeros(64), torch.zeros(64)
    for programs in (3, 5):
        launch(kernel, programs, ((source, out), out, 7), ("key",), CONSTANTS)
    assert kernel.calls == [((3,), ((source, out), out, 7), CONSTANTS)]
    addresses = (source.data_ptr(), out.data_ptr())
    assert kernel.compiled.calls == [((5, 1, 1), (addresses, out.data_ptr(), 7, 8, True))]


@pytest.mark.parametrize("case", ["source", "out", "dtype", "number", "key", "interpreted"])
def test_what_the_compiled_kernel_may_not_fit_goes_through_triton(case: str) -> None:
    kernel, x = Kernel(interpreted=case == "interpreted"), torch.zeros(64)
    launch(kernel, 1, ((x, x), x, 7), ("key",), CONSTANTS)
    odd = x[1:]
    source, out = (odd if case == "source" else x), (odd if case == "out" else x.half() if case == "dtype" else x)
    number, key = (1 << 31 if case == "number" else 7), ("other" if case == "key" else "key",)
    launch(kernel, 1, ((x, source), out, number), key, CONSTANTS)
    assert len(kernel.calls) == 2
    assert kernel.compiled is None or not kernel.compiled.calls


def test_a_kernel_compiled_for_an_odd_address_is_not_kept() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, 1, ((x, x), x[1:], 7), ("key",), CONSTANTS)
    launch(kernel, 1, ((x, x), x, 7), ("key",), CONSTANTS)
    assert len(kernel.calls) == 2 and not kernel.compiled.calls
