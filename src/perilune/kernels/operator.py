"""An operator with a hand-written backward, known to torch.compile and cheap to call without it.

`torch.library` operators go through a dispatcher written in Python, which costs the host more than many kernels cost
the GPU: a training step of small layers would wait for it. So the same two functions are wrapped twice: as custom
operators for whoever traces, and as a plain autograd Function for whoever just calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = {Tensor, torch.nn.Parameter}


def is_traced(*inputs: Any) -> bool:
    """Whether somebody sees or replaces what operators do: torch.compile, modes (FakeTensorMode, make_fx, selective
    checkpoints, counters of FLOPs) and classes of tensors. They know the operators, not the memory that kernels write.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(isinstance(x, Tensor) and type(x) not in PLAIN for x in inputs)


def operator(
    name: str,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake_forward: Callable[..., Any],
    fake_backward: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., Any],
) -> Callable[..., Any]:
    """Registers `perilune::name` and `perilune::name_backward` and returns what to call.

    forward, backward: compute on real tensors; their annotations are the schema. The fakes give shapes.
    save(ctx, inputs, output): keeps what the backward needs. (ctx.needs_input_grad differs between the two; ask the
    inputs themselves whether they require a gradient.)
    gradients(ctx, backward, *d_outputs): one gradient or None per input of forward. It calls the `backward` it is
    given. A list of tensors among the inputs has a list of gradients.
    """
    full_name = f"perilune::{name}"
    forward_operator = torch.library.custom_op(full_name, mutates_args=())(forward)
    forward_operator.register_fake(fake_forward)
    backward_operator = torch.library.custom_op(f"{full_name}_backward", mutates_args=())(backward)
    backward_operator.register_fake(fake_backward)

    def traced_gradients(ctx: Any, *d_outputs: Any) -> Any:
        return gradients(ctx, backward_operator, *d_outputs)

    torch.library.register_autograd(full_name, traced_gradients, setup_context=save)

    class Eager(torch.autograd.Function):
        """Lists come flattened, with their lengths (-1 for what is no list) first: autograd only sees flat tensors."""

        @staticmethod
        def forward(ctx: Any, lengths: tuple[int, ...], *flat: Any) -> Any:
            ctx.lengths = lengths
            inputs = _grouped(lengths, flat)
            output = forward(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *d_outputs: Any) -> Any:
            # With create_graph=True the operator is part of the graph, and refuses to be differentiated again. (What
            # `once_differentiable` returns would count as a constant where d_outputs are: a wrong second derivative.)
            is_operator = torch.is_grad_enabled() or is_traced(*d_outputs)
            found = gradients(ctx, backward_operator if is_operator else backward, *d_outputs)
            return None, *_flattened(found if isinstance(found, tuple) else (found,))

    def call(*inputs: Any) -> Any:
        flat = _flattened(inputs)
        if is_traced(*flat):
            return forward_operator(*inputs)
        if not torch.is_grad_enabled():
            return forward(*inputs)
        lengths = tuple(len(x) if isinstance(x, list) else -1 for x in inputs)
        return Eager.apply(lengths, *flat)

    return call


def _flattened(values: tuple[Any, ...]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(value) if isinstance(value, list) else flat.append(value)
    return flat


def _grouped(lengths: tuple[int, ...], flat: tuple[Any, ...]) -> tuple[Any, ...]:
    values, at = [], 0
    for length in lengths:
        values.append(flat[at] if length < 0 else list(flat[at : at + length]))
        at += 1 if length < 0 else length
    return tuple(values)
