"""Decayed products inside one chunk, exact for any gate.

For rows x_i and keys k_j of a chunk of C tokens with per-channel decays a = exp(g) in [0, 1] we need, for j < i,

    product_ij = sum_d x_id k_jd a_{j+1,d} a_{j+2,d} ... a_{i,d}

Writing the decay as exp(G_i - G_j) with G = cumsum(g) and splitting it into exp(G_i) and exp(-G_j) overflows, and the
difference of two large sums loses the digits of a weak gate that follows a strong one. Here the pairs are split by a
binary tree instead: the two halves of a block of 2b tokens meet at their border, and

    a_{j+1} ... a_i  =  fall_j * rise_i      j in the earlier half, i in the later half
    rise_i = product of a from the start of i's half up to i,     fall_j = product of a after j to the end of j's half

Both factors are products of at most C numbers in [0, 1] formed by log2(C) multiplications: nothing overflows, nothing
is subtracted, a decay of 0 is legal, and no value depends on a later token than its own pair. One level of the tree is
one batched matmul; one exp per token serves all levels. At the root, rise is the decay from the chunk's start (which
multiplies the incoming state) and fall the decay to its end (which multiplies what is written to the outgoing state).

The inverse of the unit lower triangular I + L grows along the same tree: the corner of two inverted halves is
-A_late L_corner A_early.

Gradients of log-decays come down the tree the same way: d_rise and d_fall hold the gradients of log rise and log fall.

Shape letters: Z chunks x heads, R = 2 row operands (beta * k, scale * q), C chunk, K key dim, n blocks, b half a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Below this many multiplications per matrix torch.bmm on CPU takes an unvectorised loop.
SMALLEST_BMM = 400


class Level(NamedTuple):
    """One level of the tree: decayed operands, and the factors themselves when the backward will need them."""

    half: int
    rows: Tensor  # [Z, n, R, b, K] x * rise, later halves
    keys: Tensor  # [Z, n, b, K] k * fall, earlier halves
    rise: Tensor | None  # [Z, n, b, K], later halves
    fall: Tensor | None  # [Z, n, b, K], earlier halves; None at the leaves, where it is 1


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[..., C, K] -> earlier and later halves [..., n, b, K] of every block, as views."""
    *outer, chunk_size, width = x.shape
    early, late = x.view(*outer, chunk_size // (2 * half), 2, half, width).unbind(-3)
    return early, late


def _diagonal_blocks(x: Tensor, half: int, row_half: int, column_half: int) -> Tensor:
    """[Z, ..., C, C] -> view [Z, n, ..., b, b] of one quarter of every diagonal block of 2b x 2b."""
    *outer, chunk_size, _ = x.shape
    *strides, row, column = x.stride()
    size = (outer[0], chunk_size // (2 * half), *outer[1:], half, half)
    stride = (strides[0], 2 * half * (row + column), *strides[1:], row, column)
    return x.as_strided(size, stride, x.storage_offset() + half * (row_half * row + column_half * column))


def climb(
    rows_ZRCK: Tensor, key_ZCK: Tensor, decay_ZCK: Tensor, *, keep_factors: bool
) -> tuple[list[Level], Tensor, Tensor]:
    """All levels, then rise and fall [Z, C, K] of the whole chunk. `decay_ZCK` is overwritten: it becomes rise."""
    chunk_size = key_ZCK.shape[-2]
    rise, fall = decay_ZCK, torch.ones_like(decay_ZCK)
    levels, half = [], 1
    while half < chunk_size:
        rise_early, rise_late = _halves(rise, half)
        fall_early, _ = _halves(fall, half)
        key_early, _ = _halves(key_ZCK, half)
        _, rows_late = _halves(rows_ZRCK, half)
        kept_rise = rise_late.clone() if keep_factors else None
        kept_fall = fall_early.clone() if keep_factors and half > 1 else None
        Z, num_blocks, _, width = rise_late.shape
        rows = rise.new_empty(Z, num_blocks, rows_ZRCK.shape[1], half, width)
        torch.mul(rows_late.transpose(1, 2), rise_late.unsqueeze(2), out=rows)
        keys = key_early.contiguous() if half == 1 else torch.mul(key_early, fall_early).contiguous()
        levels.append(Level(half, rows, keys, kept_rise, kept_fall))
        fall_early *= rise_late[..., -1:, :]
        rise_late *= rise_early[..., -1:, :]
        half *= 2
    return levels, rise, fall


def products(levels: list[Level], rows_ZRCK: Tensor, key_ZCK: Tensor) -> tuple[Tensor, Tensor]:
    """From the decayed operands: P [Z, C, C] (read rows, lower triangle) and A = (I + L)^-1 (write rows)."""
    Z, chunk_size, _ = key_ZCK.shape
    reads = key_ZCK.new_zeros(Z, chunk_size, chunk_size)
    inverse = torch.zeros_like(reads)
    torch.sum(rows_ZRCK[:, 1] * key_ZCK, dim=-1, out=reads.diagonal(dim1=-2, dim2=-1))
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    for half, rows, keys, _, _ in levels:
        if half == 1:
            corner = (rows * keys.unsqueeze(2)).sum(-1, keepdim=True)
        else:
            corner = torch.bmm(rows.flatten(0, 1).flatten(1, 2), keys.flatten(0, 1).mT).view(*rows.shape[:-1], half)
        write_corner, read_corner = corner.unbind(2)
        _diagonal_blocks(reads, half, 1, 0).copy_(read_corner)
        if half > 1:
            early = _diagonal_blocks(inverse, half, 0, 0).reshape(-1, half, half)
            late = _diagonal_blocks(inverse, half, 1, 1).reshape(-1, half, half)
            write_corner = torch.bmm(torch.bmm(late, write_corner.reshape(-1, half, half)), early).view_as(write_corner)
        torch.neg(write_corner, out=_diagonal_blocks(inverse, half, 1, 0))
    return reads, inverse


def descend(
    levels: list[Level],
    d_products_ZRCC: Tensor,
    rows_ZRCK: Tensor,
    key_ZCK: Tensor,
    d_rows_ZRCK: Tensor,
    d_key_ZCK: Tensor,
    d_rise_ZCK: Tensor,
    d_fall_ZCK: Tensor,
) -> None:
    """Backward of `climb` and `products`: adds to d_rows and d_key and turns d_rise into the gradient of g.

    d_products holds the gradients of L (write rows) and P (read rows); entries above the diagonal are not read, nor L's
    diagonal. On entry d_rise and d_fall hold the gradients of log rise and log fall of the whole chunk.
    """
    d_read_diagonal = d_products_ZRCC[:, 1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    d_rows_ZRCK[:, 1].addcmul_(d_read_diagonal, key_ZCK)
    d_key_ZCK.addcmul_(d_read_diagonal, rows_ZRCK[:, 1])
    for half, rows, keys, rise, fall in reversed(levels):
        assert rise is not None
        d_rise_early, d_rise_late = _halves(d_rise_ZCK, half)
        d_fall_early, _ = _halves(d_fall_ZCK, half)
        total_late, total_early = d_rise_late.sum(-2), d_fall_early.sum(-2)
        d_rise_early[..., -1, :] += total_late
        d_rise_late[..., -1, :] += total_early

        d_rows, d_keys = _corner_backward(_diagonal_blocks(d_products_ZRCC, half, 1, 0), rows, keys)
        d_rise_late.addcmul_(rows[:, :, 0], d_rows[:, :, 0]).addcmul_(rows[:, :, 1], d_rows[:, :, 1])
        _, d_rows_late = _halves(d_rows_ZRCK, half)
        d_rows_late.transpose(1, 2).addcmul_(d_rows, rise.unsqueeze(2))
        d_key_early, _ = _halves(d_key_ZCK, half)
        if fall is None:
            d_key_early += d_keys
        else:
            d_fall_early.addcmul_(keys, d_keys)
            d_key_early.addcmul_(d_keys, fall)


def _corner_backward(d_corner: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """corner = rows keys^T: d_corner [Z, n, R, b, b] -> gradients of rows [Z, n, R, b, K] and keys [Z, n, b, K]."""
    half, width = keys.shape[-2:]
    if rows.shape[2] * half * half * width >= SMALLEST_BMM and half > 1:
        d_corner = d_corner.flatten(0, 1).flatten(1, 2)
        d_rows = torch.bmm(d_corner, keys.flatten(0, 1)).view_as(rows)
        return d_rows, torch.bmm(d_corner.mT, rows.flatten(0, 1).flatten(1, 2)).view_as(keys)
    d_rows = d_corner[..., :1] * keys[:, :, None, :1]
    for j in range(1, half):
        d_rows.addcmul_(d_corner[..., j : j + 1], keys[:, :, None, j : j + 1])
    d_keys = torch.zeros_like(keys)
    for r in range(rows.shape[2]):
        for i in range(half):
            d_keys.addcmul_(d_corner[:, :, r, i].unsqueeze(-1), rows[:, :, r, i : i + 1])
    return d_rows, d_keys
