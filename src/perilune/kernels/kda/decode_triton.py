"""One KDA token per sequence in one launch: convolution, gate, state update and gated RMSNorm (arXiv 2510.26692).

One program owns one head of one sequence, so the state and the convolution window are read once, written once and seen
by nobody else: no atomics, no order between programs, no scratch memory. With S the state after its decay, both
products with S are taken in one pass, because the read of the updated state needs no second one:

    S' = S + k delta^T,   delta = beta (v - S^T k)        =>        q^T S' = S^T q + (q . k) delta

The traffic is the state twice (read and write); everything else is a few percent of it. The state is cut into tiles of
BLOCK_V value columns; a tile's loads are all in flight before the convolutions are computed. A launch overlaps with the
end of the one before it (`dependent_launch.py`): with one sequence, launching is much of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.dependent_launch import overlapping
from perilune.kernels.launch import device_of
from perilune.kernels.triton_support import INTERPRETED

L2NORM_EPS = tl.constexpr(1e-6)
ONE_BY_ONE = tl.constexpr(INTERPRETED)  # the interpreter would add tuples number by number, in Python


@triton.jit
def _convolution(x_row, window_row, weight, channel, in_head, W: tl.constexpr):
    """silu(convolution) of `channel`, rounded as the layer rounds it, and the window after it, oldest input first."""
    x = tl.load(x_row + channel, mask=in_head, other=0.0)
    y = x.to(tl.float32) * tl.load(weight + channel * W + (W - 1), mask=in_head, other=0.0)
    window = ()
    for tap in tl.static_range(W - 1):
        old = tl.load(window_row + channel * (W - 1) + tap, mask=in_head, other=0.0)
        y += old.to(tl.float32) * tl.load(weight + channel * W + tap, mask=in_head, other=0.0)
        if tap > 0:
            window = window + (old,)
    window = window + (x.to(window_row.dtype.element_ty),)
    return (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32), window


@triton.jit
def _store_window(window_row, window, channel, in_head, W: tl.constexpr):
    for tap in tl.static_range(W - 1):
        tl.store(window_row + channel * (W - 1) + tap, window[tap], mask=in_head)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) without overflow; the first terms of the series where 1 + exp(-|x|) would round to 1."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small * (1.0 - 0.5 * small), tl.log(1.0 + small))


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_triples(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _sum_pair(a, b):
    """Sums over the first dim, in one reduction: what it costs is its barriers."""
    if ONE_BY_ONE:
        return tl.sum(a, axis=0), tl.sum(b, axis=0)
    else:
        return tl.reduce((a, b), 0, _add_pairs)


@triton.jit
def _sum_triple(a, b, c):
    if ONE_BY_ONE:
        return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)
    else:
        return tl.reduce((a, b, c), 0, _add_triples)


@triton.jit
def _decode_kernel(
    qkv, gate_input, beta_logits, output_gate, conv_weight, a_log, dt_bias, norm_weight,
    conv_pool, state_pool, slots, out,
    qkv_stride, gate_stride, beta_stride, output_gate_stride, conv_slot_stride, state_slot_stride,
    scale, lower_bound, beta_scale, norm_eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_A_LOG: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    tile_v = tl.arange(0, TILES)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    out_row = out + (sequence * H + head) * V
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot < 0:
        tl.store(out_row + tile_v, tl.zeros([TILES, BLOCK_V], out.dtype.element_ty), mask=tile_v < V)
    else:
        # Key channel = row * DEPTH + depth. Rows lie across warps and depth within a thread, whose addresses then
        # differ by constants; as [K, V] each of them would occupy two registers.
        DEPTH: tl.constexpr = BLOCK_K // ROWS
        IS_WHOLE: tl.constexpr = BLOCK_K == K and TILES * BLOCK_V == V
        row = tl.arange(0, ROWS)[:, None, None]
        depth = tl.arange(0, DEPTH)[None, :, None]
        value = tl.arange(0, BLOCK_V)
        state_tile = state_pool + slot * state_slot_stride + head * K * V
        state_tile = state_tile + (row * (DEPTH * V) + value[None, None, :]) + depth * V
        in_key_rows = row * DEPTH + depth < K
        if IS_WHOLE:
            state = tl.load(state_tile)
        else:
            state = tl.load(state_tile, mask=in_key_rows & (value < V)[None, None, :], other=0.0)
        # Keeps these loads in front of the next ones, which the vectors below wait for: one latency instead of two. For
        # the same reason everything else that is read from memory is read here.
        tl.debug_barrier()

        key = tl.arange(0, BLOCK_K)
        in_key = key < K
        x_row = qkv + sequence * qkv_stride
        window_row = conv_pool + slot * conv_slot_stride
        q_channel = head * K + key
        k_channel = H * K + head * K + key
        q, q_window = _convolution(x_row, window_row, conv_weight, q_channel, in_key, W)
        k, k_window = _convolution(x_row, window_row, conv_weight, k_channel, in_key, W)
        v_channel = 2 * H * K + head * V + value
        v, v_window = _convolution(x_row, window_row, conv_weight, v_channel, value < V, W)
        raw = tl.load(gate_input + sequence * gate_stride + head * K + key, mask=in_key, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + head * K + key, mask=in_key, other=0.0)
        rate = tl.exp(tl.load(a_log + head)) if HAS_A_LOG else 1.0
        beta = tl.sigmoid(tl.load(beta_logits + sequence * beta_stride + head).to(tl.float32)) * beta_scale
        gate_row = output_gate + sequence * output_gate_stride + head * V
        factor = tl.sigmoid(tl.load(gate_row + tile_v, mask=tile_v < V, other=0.0).to(tl.float32))
        factor *= tl.load(norm_weight + tile_v, mask=tile_v < V, other=0.0)

        decay = tl.exp(lower_bound * tl.sigmoid(rate * raw) if BOUNDED else -rate * _softplus(raw))
        # Gathering at its own index pins a vector: the compiler hands it over through shared memory instead of
        # computing it again in the layout of the state, once for every thread that holds a part of its row.
        decay = tl.reshape(tl.gather(decay, key, axis=0), [ROWS, DEPTH])[:, :, None]
        q_rows = tl.reshape(tl.gather(q, key, axis=0), [ROWS, DEPTH])[:, :, None]
        k_rows = tl.reshape(tl.gather(k, key, axis=0), [ROWS, DEPTH])[:, :, None]
        # The norms are applied later, to what is linear in q and k.
        q_square, k_square, q_dot_k = _sum_triple(q * q, k * k, q * k)
        q_factor = scale * tl.rsqrt(q_square + L2NORM_EPS)
        k_factor = tl.rsqrt(k_square + L2NORM_EPS)
        q_dot_k *= q_factor * k_factor

        o = tl.zeros([TILES, BLOCK_V], tl.float32)
        for tile in tl.static_range(TILES):
            in_value = tile * BLOCK_V + value < V
            mask = in_key_rows & in_value[None, None, :]
            if tile > 0:
                if IS_WHOLE:
                    state = tl.load(state_tile + tile * BLOCK_V)
                else:
                    state = tl.load(state_tile + tile * BLOCK_V, mask=mask, other=0.0)
                v_channel += BLOCK_V
                v, v_window = _convolution(x_row, window_row, conv_weight, v_channel, in_value, W)
            v = tl.gather(v, value, axis=0)
            decayed = state.to(tl.float32) * decay
            predicted, read = _sum_pair(tl.sum(decayed * k_rows, axis=1), tl.sum(decayed * q_rows, axis=1))
            delta = beta * (v - k_factor * predicted)
            read = q_factor * read + q_dot_k * delta
            new_state = (decayed + k_rows * (k_factor * delta)[None, None, :]).to(state.dtype)
            if IS_WHOLE:
                tl.store(state_tile + tile * BLOCK_V, new_state)
            else:
                tl.store(state_tile + tile * BLOCK_V, new_state, mask=mask)
            o = tl.where((tl.arange(0, TILES) == tile)[:, None], read[None, :], o)
            # Several threads may read the same element of a window: none may write it before all have read it.
            tl.debug_barrier()
            _store_window(window_row, v_window, v_channel, in_value, W)
        _store_window(window_row, q_window, q_channel, in_key, W)
        _store_window(window_row, k_window, k_channel, in_key, W)

        o = o.to(out.dtype.element_ty).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(tl.sum(o * o, axis=1), axis=0) / V + norm_eps)
        tl.store(out_row + tile_v, (o * rstd * factor).to(out.dtype.element_ty), mask=tile_v < V)


# (key dim, bytes of a number in the state) -> (BLOCK_V, num_warps). Measured on an H200 for 128-wide heads: few warps
# that hold the whole state of a head win, because everything but the state's own arithmetic is repeated by every warp
# or waited for. The other widths follow that as far as their registers allow.
LAUNCHES = {
    (64, 4): (64, 2),
    (64, 2): (64, 2),
    (128, 4): (128, 4),
    (128, 2): (128, 4),
    (256, 4): (32, 4),
    (256, 2): (64, 8),
}


def run_kda_decode(
    qkv: Tensor, gate_input: Tensor, beta_logits: Tensor, output_gate: Tensor, conv_weight: Tensor,
    a_log: Tensor | None, dt_bias: Tensor, norm_weight: Tensor, conv_pool: Tensor, state_pool: Tensor, slots: Tensor,
    scale: float, lower_bound: float | None, beta_scale: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    batch = qkv.shape[0]
    _, num_heads, key_dim, value_dim = state_pool.shape
    width = conv_weight.shape[1]
    out = torch.empty(batch, num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    block_k = max(16, triton.next_power_of_2(key_dim))
    largest_block_v, num_warps = LAUNCHES[max(64, block_k), state_pool.element_size()]
    block_v = min(largest_block_v, max(16, triton.next_power_of_2(value_dim)))
    # A warp loads 16 bytes a thread: so many rows at once.
    rows = min(block_k, num_warps * max(1, 512 // (state_pool.element_size() * block_v)))
    with device_of(qkv):
        _decode_kernel[(batch * num_heads,)](
            qkv, gate_input, beta_logits, output_gate, conv_weight, a_log, dt_bias, norm_weight,
            conv_pool, state_pool, slots, out,
            qkv.stride(0), gate_input.stride(0), beta_logits.stride(0), output_gate.stride(0),
            conv_pool.stride(0), state_pool.stride(0),
            scale, 0.0 if lower_bound is None else lower_bound, beta_scale, norm_eps,
            H=num_heads, K=key_dim, V=value_dim, W=width,
            BLOCK_K=block_k, BLOCK_V=block_v, TILES=triton.next_power_of_2(triton.cdiv(value_dim, block_v)), ROWS=rows,
            BOUNDED=lower_bound is not None, HAS_A_LOG=a_log is not None, num_warps=num_warps,
            **overlapping(qkv.device),
        )  # fmt: skip
    return out


# What torch.compile sees. Without it the function itself is called: the dispatcher costs the host more than it does.
kda_decode_op = torch.library.custom_op(
    "perilune::kda_decode", run_kda_decode, mutates_args=("conv_pool", "state_pool")
)


@kda_decode_op.register_fake
def _(qkv: Tensor, gate_input: Tensor, beta_logits: Tensor, output_gate: Tensor, conv_weight: Tensor,
      a_log: Tensor | None, dt_bias: Tensor, norm_weight: Tensor, conv_pool: Tensor, state_pool: Tensor, slots: Tensor,
      scale: float, lower_bound: float | None, beta_scale: float, norm_eps: float) -> Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape[0], state_pool.shape[1] * state_pool.shape[3])
