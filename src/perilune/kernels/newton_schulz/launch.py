"""A Triton kernel that is launched many times with arguments of one kind.

`kernel[grid](...)` finds out on every call which of its compiled forms suits: it looks at every argument, binds names
and builds a key, which takes the host longer than many of the kernels here take the GPU. What suits only depends on
types, integer values, alignment of pointers and constants. So whoever knows these keeps one `Launch` for each kind and
pays for the search once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are no multiples of it


class Launch:
    """`kernel` on `grid` with `constants` (the last parameters of the kernel, in order) and options such as num_warps.

    Calls take the other arguments by position. All calls must agree on everything but the values of floats and the
    addresses of tensors, which must stay multiples of 16 bytes if they were at the first call; and they must be made
    with the same current device.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_options", "_run", "_values")

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: Mapping[str, Any], **options: int) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._constants = dict(constants)
        self._values = tuple(constants.values())
        self._options = options
        self._run: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> None:
        if self._run is not None:
            self._run(*arguments, *self._values)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, **self._options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._run = compiled[self._grid]


def is_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of `tensor` the current one; where it is already, at less cost than torch.cuda.device_of."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device_of(tensor)
    return _NOTHING_TO_DO


_NOTHING_TO_DO = contextlib.nullcontext()
