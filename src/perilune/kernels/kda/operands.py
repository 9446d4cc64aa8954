"""From the caller's tensors to the operands of one segment of chunks, and their gradients back.

Loading applies everything that is local to a token: dtype, L2 norm of q and k, scale, the gate and its exponential,
and makes padding inert. Z = chunks x heads is the leading dim of every block. Nothing here is kept for the backward
pass, which loads the segment again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.kda.gates import Gate
from perilune.kernels.kda.layout import Layout, Segment
from perilune.kernels.kda.reference import L2NORM_EPS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything about one call that is not a tensor to differentiate."""

    layout: Layout
    num_heads: int
    scale: float
    gate: Gate | None
    qk_l2norm: bool
    dtype: torch.dtype
    needs_grad: bool


class Operands(NamedTuple):
    rows: Tensor  # [Z, 2, C, K] beta * k and scale * q, of normalised k and q
    key: Tensor  # [Z, C, K] normalised
    decay: Tensor  # [Z, C, K] exp(g)
    beta: Tensor  # [Z, C, 1]
    query_rstd: Tensor | None  # [Z, C, 1]
    key_rstd: Tensor | None


class GateParameters(NamedTuple):
    """A_log [H, 1, 1] and dt_bias [H, 1, K], which broadcast against [chunks, H, C, K], or their gradients."""

    log_rate: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, A_log: Tensor | None, dt_bias: Tensor | None, problem: Problem) -> GateParameters:
        log_rate = None if A_log is None else A_log.to(problem.dtype).view(problem.num_heads, 1, 1)
        bias = None if dt_bias is None else dt_bias.to(problem.dtype).view(problem.num_heads, 1, -1)
        return cls(log_rate, bias)


def load(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, gate_parameters: GateParameters, segment: Segment, problem: Problem
) -> Operands:
    key = compact(k, segment, problem)
    rows = key.new_empty(key.shape[0], 2, *key.shape[1:])
    write_row, read_row = rows.unbind(1)
    view = gather(q, segment, problem.layout)
    read_row.view(view.shape).copy_(view)
    strength = compact(beta, segment, problem).unsqueeze(-1)
    decay = _load_decay(g, gate_parameters, segment, problem)
    if segment.padding is not None:
        decay.unflatten(0, (-1, problem.num_heads)).masked_fill_(segment.padding, 1)
        strength.unflatten(0, (-1, problem.num_heads)).masked_fill_(segment.padding, 0)
    if problem.qk_l2norm:
        query_rstd, key_rstd = _reciprocal_norm(read_row), _reciprocal_norm(key)
        read_row.mul_(query_rstd * problem.scale)
        key.mul_(key_rstd)
    else:
        query_rstd = key_rstd = None
        read_row.mul_(problem.scale)
    torch.mul(key, strength, out=write_row)
    return Operands(rows, key, decay, strength, query_rstd, key_rstd)


def _load_decay(g: Tensor, gate_parameters: GateParameters, segment: Segment, problem: Problem) -> Tensor:
    log_rate, bias = gate_parameters
    raw = compact(g, segment, problem)
    if problem.gate is None or bias is None:
        return raw.exp_()
    return problem.gate.forward(raw.unflatten(0, (-1, problem.num_heads)), log_rate, bias).exp_().flatten(0, 1)


def _reciprocal_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2NORM_EPS).rsqrt_()


def query_gradient(d_read_row: Tensor, operands: Operands, problem: Problem) -> Tensor:
    """From the gradient of scale * q / |q| to that of q; overwrites it."""
    if operands.query_rstd is None:
        return d_read_row.mul_(problem.scale)
    read_row = operands.rows[:, 1]
    # One factor at each product: the square of a small scale would leave the number range. Below the normal numbers
    # there is no inverse; the gradient, proportional to the scale, is lost to rounding there anyway.
    inverse = 1 / problem.scale if abs(problem.scale) >= torch.finfo(problem.dtype).tiny else 0.0
    along = (d_read_row * read_row).sum(-1, keepdim=True).mul_(inverse)
    return d_read_row.addcmul_(read_row, along, value=-inverse).mul_(operands.query_rstd * problem.scale)


def key_gradient(d_key: Tensor, operands: Operands) -> Tensor:
    """From the gradient of k / |k| to that of k; overwrites it."""
    if operands.key_rstd is None:
        return d_key
    along = (d_key * operands.key).sum(-1, keepdim=True)
    return d_key.addcmul_(operands.key, along, value=-1).mul_(operands.key_rstd)


def gate_gradient(
    d_log_decay: Tensor,
    g: Tensor,
    parameters: GateParameters,
    totals: GateParameters,
    segment: Segment,
    problem: Problem,
) -> Tensor:
    """Gradient of the raw gate input of a segment; adds the segment's share to `totals`, the parameters' gradients."""
    if problem.gate is None or parameters.bias is None or totals.bias is None:
        return d_log_decay
    d_g = d_log_decay.unflatten(0, (-1, problem.num_heads))
    if segment.padding is not None:
        d_g.masked_fill_(segment.padding, 0)
    raw = compact(g, segment, problem).view_as(d_g)
    d_raw, d_log_rate = problem.gate.backward(raw, parameters.log_rate, parameters.bias, d_g)
    totals.bias.add_(d_raw.sum((0, 2)).unsqueeze(1))
    if totals.log_rate is not None and d_log_rate is not None:
        totals.log_rate.add_(d_log_rate.sum((0, 2, 3)).view_as(totals.log_rate))
    return d_raw.flatten(0, 1)


def gather(x_BTH: Tensor, segment: Segment, layout: Layout) -> Tensor:
    """Rows of a segment as [positions, sequences, H, C, ...]: a view for dense layouts, else [1, chunks, H, C, ...]."""
    if layout.source_rows is None:
        return _chunked_view(x_BTH[segment.batch_slice, segment.token_slice], layout.chunk_size)
    rows = x_BTH.flatten(0, 1).index_select(0, layout.source_rows[segment.token_slice])
    return _chunked_view(rows.unsqueeze(0), layout.chunk_size)


def compact(x_BTH: Tensor, segment: Segment, problem: Problem) -> Tensor:
    """Rows of a segment as a new contiguous block [Z, C, ...] in the compute dtype."""
    view = gather(x_BTH, segment, problem.layout)
    block = torch.empty(view.shape, dtype=problem.dtype, device=view.device)
    return block.copy_(view).flatten(0, 2)


def _chunked_view(x_BTH: Tensor, chunk_size: int) -> Tensor:
    return x_BTH.unflatten(1, (-1, chunk_size)).transpose(0, 1).transpose(2, 3)


class Target:
    """A tensor like `like`, [B, T, H, ...], that is filled segment by segment from blocks [Z, C, ...]."""

    def __init__(self, like: Tensor, layout: Layout):
        self.layout = layout
        self.shape = like.shape
        rows = like.shape[:2] if layout.source_rows is None else (1, layout.num_chunks * layout.chunk_size)
        self.buffer = torch.empty((*rows, *like.shape[2:]), dtype=like.dtype, device=like.device)

    def view(self, segment: Segment) -> Tensor:
        """[positions, sequences, H, C, ...], to be written."""
        return _chunked_view(self.buffer[segment.batch_slice, segment.token_slice], self.layout.chunk_size)

    def write(self, segment: Segment, block: Tensor) -> None:
        view = self.view(segment)
        view.copy_(block.view(view.shape))

    def result(self) -> Tensor:
        if self.layout.chunk_rows is None:
            return self.buffer
        return self.buffer.squeeze(0).index_select(0, self.layout.chunk_rows).view(self.shape)
