"""Linear maps and RMSNorm with float32 parameters and activations of any dtype.

Parameters are always float32 (the master weights). A layer casts its weight to the dtype of the activation at use, so
the compute dtype of the whole model is decided in one place: where the embedding casts its output. No autocast.

On CUDA in half precision, maps of the same input share one matrix product with stacked weights (`projections`), and the
gradient of a weight leaves its product in float32: never rounded to half precision, never copied to be widened.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.kernels.norm import rms_norm
from perilune.kernels.operator import operator
from perilune.kernels.swiglu import swiglu
from perilune.optim.matrices import Adam, Layout

HALF = (torch.bfloat16, torch.float16)


def projections(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [..., in] times every weight [out_i, in], side by side: [..., sum of out_i] in the dtype of x."""
    if takes_one_product(x, *weights):
        y, _ = _projections(x, list(weights))
        return y
    return torch.cat([F.linear(x, weight.to(x.dtype)) for weight in weights], dim=-1)


def takes_one_product(x: Tensor, *weights: Tensor) -> bool:
    """Whether the operators below run on these: CUDA, activations in half precision, float32 weights, no autocast.

    In training also weights that were rounded on their way (FSDP). For inference rounded ones need no copy.
    """
    dtypes = (torch.float32, x.dtype) if torch.is_grad_enabled() else (torch.float32,)
    return (
        x.is_cuda
        and x.dtype in HALF
        and all(weight.dtype in dtypes for weight in weights)
        and not torch.is_autocast_enabled("cuda")
    )


_SEPARATE = ContextVar("separate products", default=False)


@contextmanager
def separate_products() -> Iterator[None]:
    """Every map multiplies by itself inside, as in training: a product with more columns may round differently."""
    token = _SEPARATE.set(True)
    try:
        yield
    finally:
        _SEPARATE.reset(token)


def side_by_side(x: Tensor, *linears: "Linear") -> Tensor | None:
    """x times the weights of all these maps in one product, if they lie side by side (side_by_side.py), else None."""
    if torch.is_grad_enabled() or _SEPARATE.get():
        return None
    whole = whole_of(*linears)
    if whole is None or whole.dtype != x.dtype:
        return None
    rows, columns = whole.shape
    filled = filled_rows(rows)
    if filled == rows or whole.storage_offset() + filled * columns > whole.untyped_storage().nbytes() // whole.itemsize:
        return F.linear(x, whole)
    # With what lies behind, whatever it is: rows of the product are then read in whole vectors.
    return F.linear(x, whole.as_strided((filled, columns), (columns, 1)))[..., :rows]


def filled_rows(rows: int) -> int:
    """So many rows of stacked weights that rows of their product begin at multiples of 16 elements."""
    return -(-rows // 16) * 16


def whole_of(*linears: "Linear") -> Tensor | None:
    """The weights of all these maps below each other, without a copy, if they lie so in memory, else None."""
    if not are_plain(*linears):
        return None
    first = linears[0].weight
    address, rows = first.data_ptr(), 0
    for linear in linears:
        weight = linear.weight
        if weight.data_ptr() != address or weight.dtype != first.dtype or not weight.is_contiguous():
            return None
        address += weight.nbytes
        rows += weight.shape[0]
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < address:
        return None  # neighbours by chance
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def are_plain(*modules: nn.Module) -> bool:
    """Whether to use the weights of these is all that calling them would do: an operator that fuses them asks first.

    It is not where a module was put in the place of one of ours (a LoRA adapter, a quantised map), where it has hooks,
    and where it has a bias.
    """
    return all(
        type(module) in (Linear, RMSNorm) and getattr(module, "bias", None) is None and not has_hooks(module)
        for module in modules
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see or change what goes through the module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Linear(nn.Linear):
    """nn.Linear without bias by default, computed in the dtype of its input."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and self.weight.dtype != x.dtype and takes_one_product(x, self.weight):
            return projections(x, [self.weight])
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def at_least_float32(x: Tensor) -> Tensor:
    """Upcast half precision, leave float32 and float64 as they are."""
    return x.float() if x.dtype in HALF else x


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, in float32, returned in the dtype of x."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"weight": Adam(weight_decay=True)}

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        if are_plain(self.gate_proj, self.up_proj):
            weights = (self.gate_proj.weight, self.up_proj.weight)
            if takes_one_product(x, *weights):
                return self.down_proj(swiglu(projections(x, weights)))
        both = side_by_side(x, self.gate_proj, self.up_proj)
        if both is not None:
            return self.down_proj(swiglu(both))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# ---------------------------------------------------------------------------------------------------------------------
# Products in half precision; gradients of weights are summed in float32


def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights below each other in `dtype`, in memory of their own."""
    # Not torch._foreach_copy_: its kernel gives too few blocks to tensors of this size and takes three times as long.
    if len(weights) == 1:
        return weights[0].to(dtype, copy=True)
    if len(weights) > 2:
        return torch.cat(list(weights)).to(dtype)  # two large kernels beat many small ones
    sizes = [weight.shape[0] for weight in weights]
    used = torch.empty(sum(sizes), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for part, weight in zip(used.split(sizes), weights, strict=True):
        part.copy_(weight)
    return used


def weight_gradient(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
    """dy^T x in float32, [O, I]."""
    if dy_NO.is_cuda:
        return torch.mm(dy_NO.T, x_NI, out_dtype=torch.float32)
    return dy_NO.T.float() @ x_NI.float()  # where tests look at the operator without a GPU


def _forward(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(y, the weights as they were used)"""
    used = stacked(weights, x.dtype)
    return F.linear(x, used), used


def _fake_forward(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    rows = sum(weight.shape[0] for weight in weights)
    return x.new_empty(*x.shape[:-1], rows), x.new_empty(rows, x.shape[-1])


def _backward(dy: Tensor, x: Tensor, used: Tensor, wants_dx: bool) -> tuple[Tensor, Tensor]:
    dy_NO, x_NI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = (dy_NO @ used).view(x.shape) if wants_dx else x.new_empty(0)
    return dx, weight_gradient(dy_NO, x_NI)


def _fake_backward(dy: Tensor, x: Tensor, used: Tensor, wants_dx: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if wants_dx else 0), used.new_empty(used.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights = inputs
    _, used = output
    ctx.sizes, ctx.wants_dx = [weight.shape[0] for weight in weights], x.requires_grad
    ctx.save_for_backward(x, used)
    ctx.mark_non_differentiable(used)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, backward: Callable[..., tuple[Tensor, Tensor]], dy: Tensor | None, _: None
) -> tuple[Tensor | None, list[Tensor | None]]:
    if dy is None:
        return None, [None] * len(ctx.sizes)
    dx, dweight = backward(dy, *ctx.saved_tensors, ctx.wants_dx)
    return dx if ctx.wants_dx else None, list(dweight.split(ctx.sizes))


_projections = operator(
    "projections",
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    save=_save,
    gradients=_gradients,
)
