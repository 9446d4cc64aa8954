"""Causal attention over packed documents in tiles: memory O(T), hand-written backward, plain torch on any device.

The equations are in `reference.py`. The forward keeps one number per query and head, lse = log sum_j exp(s_ij), and a
running maximum and sum while it walks over key tiles (online softmax, arXiv 2205.14135); the head maximum falls out.
The backward recomputes each tile's weights p = exp(s - lse) and, with delta_i = do_i . o_i,

    dv_j += p_ij do_i,   ds_ij = p_ij (do_i . v_j - delta_i),   dq_i = scale ds_ij k_j,   dk_j += scale ds_ij q_i.

Tiles follow the documents: a long document is cut into query tiles that read their keys from the document's start to
the tile's own diagonal and nothing beyond; neighbouring short documents share one tile and a block-diagonal mask.
Either way only the last `size` keys of a tile need a mask, because they sit at the same positions as its queries.

Forbidden pairs count for nothing, whatever they hold. The mask overwrites, so an overflowing logit is gone; and a token
with NaN or infinity gets a tile of its own, because the zero weight of a forbidden pair would not silence it. To know,
every call adds up its inputs, for which the host waits on an accelerator.

Legend: B batch, K key heads, G query heads per key head, T tokens, D query width, V value width;
N = B x K (what a batched matmul loops over), R = G x tile size (its rows).
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.precision import full_precision

# Measured on 2 CPU cores with 8 heads of 48: smaller query tiles waste less above the diagonal but are bound by the
# cost of starting operators; larger ones fall out of the cache.
QUERY_TILE = 128
KEY_TILE = 1024
# A document shorter than this shares its tile with its neighbours.
SHORT_DOCUMENT = 64
LOG2_E = math.log2(math.e)
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Queries [start, stop) against keys [first_key, last_key), the last `size` keys being the queries' own positions.

    borders: where, counted from `start`, further documents begin inside the tile.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    borders: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.stop - self.start

    def key_ranges(self) -> list[tuple[int, int]]:
        """Cut the keys into ranges of about KEY_TILE; the masked last `size` keys always stay in the last range."""
        num_unmasked = self.last_key - self.size - self.first_key
        cuts = [self.first_key + i * KEY_TILE for i in range(num_unmasked // KEY_TILE + 1)]
        return list(zip(cuts, [*cuts[1:], self.last_key], strict=True))


@lru_cache(maxsize=64)
def plan_tiles(borders: tuple[int, ...], offset: int) -> tuple[Tile, ...]:
    """Tiles for the documents [borders[i], borders[i + 1]); query i sits at key position i + offset.

    A non-zero offset means one document with a longer (decoding) or shorter key sequence than query sequence; queries
    before the first key belong to no tile.
    """
    tiles: list[Tile] = []
    shared: list[int] = []

    def close_shared() -> None:
        if shared:
            start, stop = shared[0], shared[-1]
            inner = tuple(border - start for border in shared[1:-1])
            tiles.append(Tile(start=start, stop=stop, first_key=start, last_key=stop, borders=inner))
            shared.clear()

    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        first_query = max(start, -offset)
        length = stop - first_query
        if length <= 0:
            continue
        if length < SHORT_DOCUMENT and offset == 0:
            if shared and stop - shared[0] > QUERY_TILE:
                close_shared()
            shared.extend([stop] if shared else [start, stop])
            continue
        close_shared()
        size = math.ceil(length / math.ceil(length / QUERY_TILE))
        for at in range(first_query, stop, size):
            end = min(at + size, stop)
            tiles.append(Tile(start=at, stop=end, first_key=start, last_key=end + offset))
    close_shared()
    return tuple(tiles)


def isolate(tiles: tuple[Tile, ...], tokens: tuple[int, ...]) -> tuple[Tile, ...]:
    """Cut the tiles so that each of `tokens` (query positions, rising) is alone in its tile.

    A matrix product multiplies forbidden pairs by zero, which is harmless until a factor is not finite. Such a token
    must therefore not share a tile with queries that may not see it, or with keys that its query may not see.
    """
    if not tokens:
        return tiles
    pieces: list[Tile] = []
    for tile in tiles:
        inside = tokens[bisect_left(tokens, tile.start) : bisect_left(tokens, tile.stop)]
        if not inside or tile.size == 1:
            pieces.append(tile)
            continue
        offset = tile.last_key - tile.stop
        for start, stop in pairwise([tile.start, *(tile.start + border for border in tile.borders), tile.stop]):
            first_key = start if tile.borders else tile.first_key
            around = (cut for token in inside for cut in (token, token + 1) if start < cut < stop)
            for at, end in pairwise(sorted({start, stop, *around})):
                pieces.append(Tile(start=at, stop=end, first_key=first_key, last_key=end + offset))
    return tuple(pieces)


def _non_finite_tokens(*tensors: Tensor) -> tuple[int, ...]:
    """Positions [B, T, ...] with NaN or infinity, in order. The sum of a tensor tells at little cost when to look."""
    if not tensors:
        return ()
    totals = [x.sum().double() for x in tensors]
    if bool(torch.stack(totals).isfinite().all()):
        return ()
    broken_T = torch.stack([~x.isfinite().all(dim=(0, 2, 3)) for x in tensors]).any(dim=0)
    return tuple(broken_T.nonzero().flatten().tolist())


def _isolate_broken(tiles: tuple[Tile, ...], queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> tuple[Tile, ...]:
    """Give every token with a non-finite value its own tile; `queries` and `keys` are [B, T, heads, width]."""
    if all(tile.size == 1 for tile in tiles):  # decoding: no pair is forbidden
        return tiles
    offset = tiles[0].last_key - tiles[0].stop
    broken = {*_non_finite_tokens(*queries), *(token - offset for token in _non_finite_tokens(*keys))}
    return isolate(tiles, tuple(sorted(broken)))


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def _masks(size: int, borders: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bits of [size, size]: all ones for allowed pairs; the bits of -inf for forbidden ones.

    Forbidden are later keys and, where documents share the tile, keys of other documents.
    """
    bias = torch.full((size, size), float("-inf"), dtype=dtype, device=device).triu_(1)
    for border in borders:
        bias[border:, :border] = float("-inf")
    forbidden = bias.view(BITS[dtype])
    return torch.where(forbidden == 0, -1, 0).to(forbidden.dtype), forbidden


def _mask(x_NRT: Tensor, tile: Tile, *, with_minus_inf: bool) -> None:
    """Overwrite forbidden pairs with -inf or 0, whatever they hold: NaN and infinity too.

    Adding -inf would keep a NaN. masked_fill is seven times slower on CPU than these operations on the bits.
    """
    if tile.size == 1:
        return
    allowed, minus_inf = _masks(tile.size, tile.borders, x_NRT.dtype, x_NRT.device)
    corner = x_NRT.view(allowed.dtype).unflatten(1, (-1, tile.size))[..., -tile.size :]
    corner &= allowed
    if with_minus_inf:
        corner |= minus_inf


def _by_key_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, T, H, D] -> [B, K, G, T, D], a view."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _merge_batch(x_BKGTD: Tensor) -> Tensor:
    """[B, K, G, T, D] -> [N, G, T, D]: a view for one batch row (packed training) whatever its strides, else a copy."""
    return x_BKGTD[0] if x_BKGTD.shape[0] == 1 else x_BKGTD.flatten(0, 1)


def _inputs(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = k.shape[2]
    q_NGTD, k_N1TD, v_N1TV = (_merge_batch(_by_key_head(x.to(dtype), num_kv_heads)) for x in (q, k, v))
    return q_NGTD, k_N1TD[:, 0], v_N1TV[:, 0]


def _attend_range(
    q_NRD: Tensor,
    k_NTD: Tensor,
    v_NTV: Tensor,
    scale: float,
    tile: Tile,
    key_range: tuple[int, int],
    max_so_far: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's queries against one range of its keys: row maximum with `max_so_far`, row sum, unscaled output."""
    first, last = key_range
    weights_NRT = torch.baddbmm(q_NRD[:, :1, :1], q_NRD, k_NTD[:, first:last].mT, beta=0, alpha=scale)
    if last == tile.last_key:
        _mask(weights_NRT, tile, with_minus_inf=True)
    max_NR1 = weights_NRT.amax(dim=-1, keepdim=True)
    if max_so_far is not None:
        max_NR1 = torch.maximum(max_NR1, max_so_far)
    # exp2 is vectorised better than exp on CPU.
    weights_NRT.sub_(max_NR1).mul_(LOG2_E).exp2_()
    return max_NR1, weights_NRT.sum(dim=-1, keepdim=True), torch.bmm(weights_NRT, v_NTV[:, first:last])


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, tiles: tuple[Tile, ...]) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, num_queries, num_heads, _ = q.shape
        num_kv_heads, value_width = k.shape[2], v.shape[3]
        q_NGTD, k_NTD, v_NTV = _inputs(q, k, v, dtype)
        heads = (batch, num_kv_heads, num_heads // num_kv_heads)

        # Zeros and -inf stay where a query belongs to no tile, that is, may see no key.
        o = q.new_zeros(batch, num_queries, num_heads, value_width, dtype=v.dtype)
        o_BKGTV = _by_key_head(o, num_kv_heads)
        lse_BKGT = q.new_zeros(*heads, num_queries, dtype=dtype)
        max_BKGT = q.new_full((*heads, num_queries), float("-inf"), dtype=dtype)
        tiles = _isolate_broken(tiles, (q,), (k, v))
        for tile in tiles:
            queries = slice(tile.start, tile.stop)
            q_NRD = q_NGTD[:, :, queries].flatten(1, 2)
            first_range, *more_ranges = tile.key_ranges()
            max_NR1, sum_NR1, o_NRV = _attend_range(q_NRD, k_NTD, v_NTV, scale, tile, first_range)
            for key_range in more_ranges:
                old_max, old_sum, old_o = max_NR1, sum_NR1, o_NRV
                max_NR1, sum_NR1, o_NRV = _attend_range(q_NRD, k_NTD, v_NTV, scale, tile, key_range, old_max)
                shrink_NR1 = (old_max - max_NR1).exp_()
                sum_NR1.addcmul_(old_sum, shrink_NR1)
                o_NRV.addcmul_(old_o, shrink_NR1)
            rows = (*heads, tile.size)
            torch.div(o_NRV.view(*rows, -1), sum_NR1.view(*rows, 1), out=o_BKGTV[..., queries, :])
            torch.add(max_NR1.view(rows), sum_NR1.log_().view(rows), out=lse_BKGT[..., queries])
            max_BKGT[..., queries] = max_NR1.view(rows)

        if max_BKGT.numel():
            max_logit = max_BKGT.amax(dim=(0, 3)).flatten()
        else:
            max_logit = q.new_full((num_heads,), float("-inf"), dtype=dtype)
        ctx.save_for_backward(q, k, v, o, lse_BKGT)
        ctx.scale, ctx.tiles = scale, tiles
        ctx.mark_non_differentiable(max_logit)
        return o, max_logit

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_o: Tensor, _grad_max_logit: Tensor):
        q, k, v, o, lse_BKGT = ctx.saved_tensors
        dtype, scale, num_kv_heads = lse_BKGT.dtype, ctx.scale, k.shape[2]
        heads = lse_BKGT.shape[:3]
        q_NGTD, k_NTD, v_NTV = _inputs(q, k, v, dtype)
        grad_o = grad_o.to(dtype)
        do_NGTV = _merge_batch(_by_key_head(grad_o, num_kv_heads))
        delta_BKGT = _by_key_head((grad_o * o).sum(dim=-1, keepdim=True), num_kv_heads)[..., 0]
        minus_delta_NGT, minus_lse_NGT = -delta_BKGT.flatten(0, 1), -LOG2_E * lse_BKGT.flatten(0, 1)

        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        dq_BKGTD, dk_BK1TD, dv_BK1TV = (_by_key_head(x, num_kv_heads) for x in (dq, dk, dv))
        dk_BKTD, dv_BKTV = dk_BK1TD[:, :, 0], dv_BK1TV[:, :, 0]
        for tile in _isolate_broken(ctx.tiles, (grad_o,), ()):
            queries = slice(tile.start, tile.stop)
            q_NRD, do_NRV = q_NGTD[:, :, queries].flatten(1, 2), do_NGTV[:, :, queries].flatten(1, 2)
            minus_lse_NR1 = minus_lse_NGT[:, :, queries].flatten(1, 2)[..., None]
            minus_delta_NR1 = minus_delta_NGT[:, :, queries].flatten(1, 2)[..., None]
            for first, last in tile.key_ranges():
                k_tile, v_tile = k_NTD[:, first:last], v_NTV[:, first:last]
                weights_NRT = torch.baddbmm(minus_lse_NR1, q_NRD, k_tile.mT, alpha=scale * LOG2_E)
                if last == tile.last_key:
                    _mask(weights_NRT, tile, with_minus_inf=True)
                weights_NRT.exp2_()
                dv_BKTV[:, :, first:last] += torch.bmm(weights_NRT.mT, do_NRV).unflatten(0, heads[:2])
                ds_NRT = torch.baddbmm(minus_delta_NR1, do_NRV, v_tile.mT).mul_(weights_NRT)
                if last == tile.last_key:
                    # The weight is zero there, but do_i . v_j or delta_i may not be finite.
                    _mask(ds_NRT, tile, with_minus_inf=False)
                dq_NRD = torch.baddbmm(q_NRD[:, :1, :1], ds_NRT, k_tile, beta=0, alpha=scale)
                dq_BKGTD[..., queries, :] += dq_NRD.view(*heads, tile.size, -1)
                dk_NTD = torch.baddbmm(q_NRD[:, :1, :1], ds_NRT.mT, q_NRD, beta=0, alpha=scale)
                dk_BKTD[:, :, first:last] += dk_NTD.unflatten(0, heads[:2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, borders: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, Tq, H, Dv] and max_logit [H]; `borders` are the document borders 0 = b_0 <= ... <= b_N = Tq."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    tiles = plan_tiles((0, num_queries) if borders is None else borders, num_keys - num_queries) if len(q) else ()
    return _TiledAttention.apply(q, k, v, scale, tiles)
