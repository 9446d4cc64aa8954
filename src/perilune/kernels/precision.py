"""Operators compute in the precision they document, also inside `torch.autocast`.

Autocast would run the matrix products inside an operator in half precision, although the operator promises float32
sums for float32 inputs. The caller's autocast decides what the caller's own layers hand in, and nothing more.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(operator: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run `operator` with autocast off for the device of its first tensor.

    Also for the `backward` of an autograd Function, whose author cannot know where the caller calls backward().
    """

    @wraps(operator)
    def without_autocast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device_type = _device_type((*args, *kwargs.values()))
        if device_type is None or not torch.is_autocast_enabled(device_type):
            return operator(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return operator(*args, **kwargs)

    return without_autocast


def _device_type(arguments: Iterable[object]) -> str | None:
    for argument in arguments:
        if isinstance(argument, list | tuple) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument.device.type
    return None
