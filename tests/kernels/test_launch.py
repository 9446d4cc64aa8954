"""Launches go to the compiled kernel of the first call of their kind, and to Triton where that kernel may not fit."""

from typing import Any

import pytest
import torch

from perilune.kernels import launch as module
from perilune.kernels.launch import Launch, launch


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


def test_a_grid_of_several_dimensions_is_filled_up_to_three() -> None:
    kernel, source, out = Kernel(), torch.zeros(64), torch.zeros(64)
    for grid in ((3, 2), (5, 4)):
        launch(kernel, grid, ((source, out), out, 7), ("key",), CONSTANTS)
    assert kernel.calls[0][0] == (3, 2)
    assert kernel.compiled.calls[0][0] == (5, 4, 1)


class Elsewhere(torch.Tensor):
    """As if on another device, for which the compiled kernel has no address."""

    def get_device(self) -> int:
        return 3


CASES = ["source", "out", "dtype", "number", "float", "key", "interpreted", "source elsewhere", "out elsewhere"]


@pytest.mark.parametrize("case", CASES)
def test_what_the_compiled_kernel_may_not_fit_goes_through_triton(case: str) -> None:
    kernel, x = Kernel(interpreted=case == "interpreted"), torch.zeros(64)
    launch(kernel, 1, ((x, x), x, 7), ("key",), CONSTANTS)
    odd = x[1:]
    elsewhere = x.as_subclass(Elsewhere)
    source = {"source": odd, "source elsewhere": elsewhere}.get(case, x)
    out = {"out": odd, "dtype": x.half(), "out elsewhere": elsewhere}.get(case, x)
    number, key = {"number": 1 << 31, "float": 7.0}.get(case, 7), ("other" if case == "key" else "key",)
    launch(kernel, 1, ((x, source), out, number), key, CONSTANTS)
    assert len(kernel.calls) == 2
    assert kernel.compiled is None or not kernel.compiled.calls


def test_a_kernel_compiled_for_an_odd_address_is_not_kept() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, 1, ((x, x), x[1:], 7), ("key",), CONSTANTS)
    launch(kernel, 1, ((x, x), x, 7), ("key",), CONSTANTS)
    assert len(kernel.calls) == 2 and not kernel.compiled.calls


@pytest.mark.parametrize("numbers", [(1, 2), (1, 1e-6), (2, 1), (16, 17), (17, 32), (0, 1e-6)], ids=str)
def test_what_triton_makes_of_an_integer_is_not_taken_for_another_number(numbers: tuple[float, float]) -> None:
    """Triton compiles 1 as a constant and multiples of 16 as such; an eps may come as an integer, too."""
    kernel, x = Kernel(), torch.zeros(64)
    for number in (*numbers, numbers[1]):
        launch(kernel, 1, ((x, x), x, number), ("key",), CONSTANTS)
    assert len(kernel.calls) == 2 and len(kernel.compiled.calls) == 1


class Prepared(Kernel):
    arg_names = ("out_ptr", "number", "WIDTH", "NORM")


def test_a_prepared_launch_is_compiled_once_and_then_called_with_its_constants() -> None:
    kernel, x = Prepared(), torch.zeros(64)
    prepared = Launch(kernel, (5, 2), {"WIDTH": 8, "NORM": True}, num_warps=4)
    for _ in range(2):
        prepared(x, 7)
    assert len(kernel.calls) == 1 and kernel.calls[0][0] == (5, 2, 1) and kernel.calls[0][2] == CONSTANTS
    ((grid, arguments),) = kernel.compiled.calls
    assert grid == (5, 2, 1) and arguments[0] is x and arguments[1:] == (7, 8, True)
