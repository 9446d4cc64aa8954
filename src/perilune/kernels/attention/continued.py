"""Attention of a run of queries at the end of longer keys: a prompt that goes on after cached tokens, for inference.

The meaning is that of `attention` with more keys than queries: the last query sits at the last key, and each sees what
is not behind it. `continued_attention` has all keys at hand. `attention_in_pieces` asks for them piece by piece, so
that what is kept compressed need never be expanded as a whole; `attention_of_runs` takes several runs, each with its
own keys, at once. Pieces are joined by their log-sum-exp,

    o = o_a + sigmoid(lse_b - lse_a) (o_b - o_a),   lse = log(exp(lse_a) + exp(lse_b)).

On CUDA in half precision the end of the keys, in which pairs are forbidden and whose length is any, is flash attention
(values are padded to the width of keys, as it takes one width only); whole pieces before it, all of one length, are
cuDNN's where it can: twice as fast on Hopper for the widths of MLA, but a plan is built for every new shape, which
takes up to half a second. So queries are filled up to a multiple of QUERY_STEP there. Elsewhere the tiled path of
`attention`, and plain products in tiles of queries.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.attention import attention, cudnn
from perilune.kernels.precision import full_precision

HALF = (torch.bfloat16, torch.float16)
MAX_FLASH_WIDTH = 256
PIECE = 16_384
"""Keys of a piece: of 32 heads of 192 and 128 half a gigabyte, and long enough to keep a GPU busy."""
QUERY_STEP = 512
PLAIN_ELEMENTS = 1 << 24
"""Logits that plain products hold at a time."""

PieceOf = Callable[[int, int], tuple[Tensor, Tensor]]
"""k [B, stop - start, H, D] and v [B, stop - start, H, Dv] of the keys [start, stop)"""

_refused: set[tuple[int, int]] = set()
"""Widths for which cuDNN found no plan; it says so only when asked."""


@torch.no_grad()
@full_precision
def continued_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: str | None = None) -> Tensor:
    """q [B, Tq, H, D], k [B, Tk, H, D], v [B, Tk, H, Dv], Tq <= Tk -> [B, Tq, H, Dv] in v's dtype.

    backend: "flash" (CUDA, half precision), "plain" or "tiled"; None takes flash where it can run.
    """
    if backend not in (None, "flash", "plain", "tiled"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'flash', 'plain' or 'tiled'.")
    if q.dim() != 4 or k.dim() != 4 or not 0 < q.shape[1] <= k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit: expected [B, T, H, D], at least one query and no "
            "more queries than keys"
        )
    if backend is None:
        backend = "flash" if _takes_flash(q, v) else None
    elif backend == "flash" and not _takes_flash(q, v):
        raise ValueError(
            f"backend='flash' cannot run here: it takes CUDA tensors of half precision and heads of at most "
            f"{MAX_FLASH_WIDTH}, got {q.dtype} of {q.shape[3]} on {q.device}; use backend=None"
        )
    if backend == "flash":
        return _flash(q, k, v, scale=scale, causal=True)[0]
    if backend == "plain":
        return _plain(q, k, v, scale=scale, causal=True)[0].to(v.dtype)
    o, _, _ = attention(q, k, v, scale=scale, clip_threshold=None, backend=backend)
    return o


@torch.no_grad()
@full_precision
def attention_in_pieces(
    q: Tensor, num_keys: int, piece_of: PieceOf, *, scale: float, piece: int | None = None, backend: str | None = None
) -> Tensor:
    """As `continued_attention`, with keys and values of `piece` tokens (PIECE), and those of the queries, at a time.

    backend: that of `continued_attention`, for all parts; "tiled" is "plain" where there are several.
    """
    piece = PIECE if piece is None else piece
    if piece < 1:
        raise ValueError(f"piece={piece!r} is no number of keys; expected at least 1.")
    before = max(num_keys - q.shape[1], 0) // piece * piece
    k, v = piece_of(before, num_keys)
    if before == 0:
        return continued_attention(q, k, v, scale=scale, backend=backend)
    on_flash = _takes_flash(q, v) if backend is None else backend == "flash"
    on_cudnn = backend is None and on_flash and q.shape[1] >= QUERY_STEP
    queries = _padded(q, 1, -(-q.shape[1] // QUERY_STEP) * QUERY_STEP) if on_cudnn else q
    o, lse = (_flash if on_flash else _plain)(q, k, v, scale=scale, causal=True)
    o, dtype = o.to(lse.dtype), v.dtype
    for start in range(0, before, piece):
        k, v = piece_of(start, start + piece)
        if on_cudnn and _takes_cudnn(queries, k, v):
            o_piece, lse_piece = (x[:, : q.shape[1]] for x in _cudnn_or_flash(queries, k, v, scale=scale))
        else:
            o_piece, lse_piece = (_flash if on_flash else _plain)(q, k, v, scale=scale, causal=False)
        o = torch.lerp(o, o_piece.to(o.dtype), torch.sigmoid(lse_piece - lse))
        lse = torch.logaddexp(lse, lse_piece)
    return o.to(dtype)


@torch.no_grad()
@full_precision
def attention_of_runs(
    q: Tensor, k: Tensor, v: Tensor, *, query_borders: Tensor, key_borders: Tensor, most_queries: int, most_keys: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """`continued_attention` of N runs side by side in one call, for what `takes_runs`; elsewhere plain, run by run.

    q [T, H, D], k [S, H, D], v [S, H, Dv] -> [T, H, Dv]. query_borders, key_borders [N + 1] int32: of the runs in T,
    and of their keys in S, which may go on behind the last. most_queries, most_keys: of one run, or more. A run may be
    empty, and one without keys gets zeros. The borders are not checked.
    """
    if not q.is_cuda:
        queries, keys = query_borders.tolist(), key_borders.tolist()
        spans = zip(queries, queries[1:], keys, keys[1:], strict=False)
        o = v.new_zeros(*q.shape[:2], v.shape[2])
        for a, b, c, d in spans:
            if b > a and d > c:
                o[a:b] = _plain(q[None, a:b], k[None, c:d], v[None, c:d], scale=scale, causal=True)[0][0].to(v.dtype)
        return o
    o, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, query_borders, key_borders, most_queries, most_keys, 0.0, True, False, scale=scale
    )  # fmt: skip
    return o


def takes_runs(q: Tensor, value_width: int) -> bool:
    """Whether `attention_of_runs` is one call for queries [..., D] and values of this width: flash takes one width."""
    width = q.shape[-1]
    return q.is_cuda and q.dtype in HALF and width == value_width and width % 8 == 0 and width <= MAX_FLASH_WIDTH


# Each of these returns o [B, Tq, H, Dv] and lse [B, Tq, H, 1], the logarithm of the sum of the weights ----------------


def _flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's operator itself: the public function may choose cuDNN, which would plan for every new length."""
    width = -(-max(q.shape[3], v.shape[3]) // 8) * 8
    heads_first = (_padded(x, 3, width).transpose(1, 2) for x in (q, k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal, False, scale=scale)
    return o.transpose(1, 2)[..., : v.shape[3]], lse[:, :, : q.shape[1]].transpose(1, 2).unsqueeze(-1)


def _cudnn_or_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """All queries see all keys."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    try:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, False, scale=scale
        )
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _refused.add((q.shape[3], v.shape[3]))
        warnings.warn(
            f"long prompts take flash attention, as cuDNN refused: {str(error).splitlines()[0]}", stacklevel=4
        )
        return _flash(q, k, v, scale=scale, causal=False)
    lse = lse.reshape(q.shape[0], q.shape[2], q.shape[1]).transpose(1, 2)
    return o.transpose(1, 2), lse.unsqueeze(-1)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """In float32, or float64 if the inputs are."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    places = torch.arange(num_keys, device=q.device)
    tile = max(1, PLAIN_ELEMENTS // (batch * heads * num_keys))
    outputs, sums = [], []
    for start in range(0, num_queries, tile):
        logits = scale * (q[:, :, start : start + tile] @ k.mT)
        if causal:
            last = num_keys - num_queries + start + torch.arange(logits.shape[2], device=q.device)
            logits = logits.masked_fill(places > last[:, None], -math.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        outputs.append((logits - lse).exp() @ v)
        sums.append(lse)
    return torch.cat(outputs, dim=2).transpose(1, 2), torch.cat(sums, dim=2).transpose(1, 2)


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and v.dtype == q.dtype and max(q.shape[3], v.shape[3]) <= MAX_FLASH_WIDTH


def _takes_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # Two rows of each: it is asked about widths and types, and would want as many queries as keys.
    few = (q[:, :2], k[:, :2], v[:, :2])
    return (q.shape[3], v.shape[3]) not in _refused and cudnn.why_not(*few, None) is None


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """With zeros, to `size`; not copied where it has that already, which F.pad would."""
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
