"""Launches of Triton kernels that cost the host little.

`kernel[grid](...)` finds out on every call which of its compiled forms suits: it looks at every argument (types, equal
to 1, divisible by 16), binds names and builds a key, and the launch looks at every pointer once more. That takes the
host longer than many of the kernels take the GPU. Both ways here go straight to the kernel that Triton compiled for the
first of several calls that are alike:

    launch   looks at the arguments of each call: for kernels over whatever tensors come
    Launch   looks at nothing, 2 us less: for who prepares a kernel for tensors of one kind and calls it many times
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are no multiples of it

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    programs: int | tuple[int, ...],
    arguments: tuple[Any, ...],
    key: tuple[Any, ...],
    constants: Mapping[str, Any],
) -> None:
    """kernel[programs](*arguments, **constants), on the device of the tensors.

    arguments: tensors (one or a tuple of them first), tuples of tensors, numbers: all parameters of the kernel that are
    no constants, which follow. key: the kernel, and what `constants` (with options such as num_warps) follow from.
    """
    first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    device = first.get_device()
    if first.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, arguments, key, constants)
        return
    plain: list[Any] = []
    kinds: list[Any] = []
    # Set by an address that is no multiple of 16, by an integer that does not fit into 32 bits, and by a tensor that is
    # elsewhere: Triton says what is wrong with a pointer to the host, the compiled kernel would just read there.
    bits = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            bits |= address & 15 | argument.get_device() ^ device
            kinds.append(argument.dtype)
            plain.append(address)
        elif isinstance(argument, tuple):
            addresses = tuple([x.data_ptr() for x in argument])
            for address, x in zip(addresses, argument, strict=True):
                bits |= address & 15 | x.get_device() ^ device
            kinds.extend([x.dtype for x in argument])
            plain.append(addresses)
        else:
            if isinstance(argument, int):
                bits |= argument >> 31
                kinds.append(16 if argument % 16 == 0 else argument == 1)
            else:
                kinds.append(type(argument))
            plain.append(argument)
    full_key = (device, *key, *kinds)
    known = _COMPILED.get(full_key)
    if known is not None and not bits:
        compiled, values = known
        compiled[(programs, 1, 1) if isinstance(programs, int) else (*programs, 1, 1)[:3]](*plain, *values)
        return
    # In Triton's interpreter there is nothing compiled.
    compiled = kernel[(programs,) if isinstance(programs, int) else programs](*arguments, **constants)
    if compiled is not None and not bits:
        _COMPILED[full_key] = compiled, tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])


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
    """Makes the device of `tensor` the current one, which is where Triton launches; where it is already, at less cost
    than torch.cuda.device_of."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device_of(tensor)
    return _NOTHING_TO_DO


_NOTHING_TO_DO = contextlib.nullcontext()
