"""Launches of Triton kernels that cost the host little.

Triton looks at every argument of every call to find the compiled kernel that fits (types, divisibility by 16, options),
and at every pointer once more before the launch. For a kernel over a list of tensors that takes the host longer than
many kernels take the GPU. Here the caller names what a compiled kernel depends on by a key; a later call with the same
key, with tensors of the same dtypes at aligned addresses, goes straight to the kernel that Triton compiled for the
first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], key: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """kernel[(programs,)](*arguments, **constants).

    arguments: tensors, tuples of tensors, numbers: all parameters of the kernel that are no constants, which follow.
    key: what a compiled kernel depends on beside dtypes: kernel and device, what `constants` (options such as num_warps
    among them) follow from, and integers that Triton specialises.
    """
    plain: list[Any] = []
    dtypes: list[Any] = []
    bits = 0  # set by an address that is no multiple of 16 and by an integer that does not fit into 32 bits
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            bits |= address & 15
            dtypes.append(argument.dtype)
            plain.append(address)
        elif isinstance(argument, tuple):
            addresses = tuple([x.data_ptr() for x in argument])
            for address in addresses:
                bits |= address & 15
            dtypes.extend([x.dtype for x in argument])
            plain.append(addresses)
        else:
            if isinstance(argument, int):
                bits |= argument >> 31
            plain.append(argument)
    full_key = (*key, *dtypes)
    known = _COMPILED.get(full_key)
    if known is not None and not bits:
        compiled, values = known
        compiled[(programs, 1, 1)](*plain, *values)
        return
    # In Triton's interpreter there is nothing compiled.
    compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is not None and not bits:
        _COMPILED[full_key] = compiled, tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
