"""Kimi Delta Attention in Triton, the recurrence over chunks in both directions (operands from triton_chunk.py).

    forward     D = U - W S         o = from_start S + P D          S <- state_decay * S + to_end^T D
    backward    dD = P^T do + to_end dS                             dS <- state_decay * dS + from_start^T do - W^T dD

A program carries BV value channels of one head's state, in float32, through a run of chunks. A run is a whole sequence
or a piece of one:

- Training keeps the state only at the start of every few chunks; the backward pass restarts all runs from there at
  once and stores what it needs of every chunk.
- Where heads and sequences are too few for the GPU, a sequence is cut exactly. A run is affine in its first state,
  S_out = M S_in + S_zero: `scan_chunks` on the V columns from 0 and on K more columns from the identity without U gives
  S_zero and M, `join_runs` walks over the few runs, and all runs start from their true states at once. Backwards alike,
  with M^T.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_tokens(first_chunk, num_chunks, chunk_start, chunk_length):
    """First token and number of tokens of a run; its chunks lie side by side."""
    first_token = tl.load(chunk_start + first_chunk)
    num_tokens = 0
    if num_chunks > 0:
        last = first_chunk + num_chunks - 1
        num_tokens = (tl.load(chunk_start + last) - first_token).to(tl.int32) + tl.load(chunk_length + last)
    return first_token, num_tokens


@triton.jit
def scan_chunks(
    W, U, to_end, from_start, P, state_decay,  # [chunks, H, C, ...]
    run_first_chunk, run_num_chunks, chunk_start, chunk_length, run_checkpoint,
    initial, o, final, checkpoints, states, writes, slots,
    o_token, o_head,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HAS_INITIAL: tl.constexpr, OUTPUT: tl.constexpr, FINAL: tl.constexpr, TRANSITION: tl.constexpr,
    CHECKPOINT_EVERY: tl.constexpr, KEEP_ALL: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: column blocks, heads, runs.

    initial, final [runs, H, K, V] float32; checkpoints [.., H, K, V]; states [chunks, H, K, V] and writes (D)
    [chunks, H, C, V] when KEEP_ALL. TRANSITION: column blocks from V on start from the identity, and final is
    [runs, H, K, V + K]. SLOTS: initial and final are one pool [slots, H, K, V], and `slots` [runs] says which is whose;
    a program reads what it will write, and nobody else does.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    run = tl.program_id(2)
    first_chunk = tl.load(run_first_chunk + run).to(tl.int64)
    num_chunks = tl.load(run_num_chunks + run)
    OPERAND = W.dtype.element_ty
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    columns = block * BV + tl.arange(0, BV)
    is_transition = TRANSITION and block * BV >= V
    S = tl.zeros([K, BV], tl.float32)
    state_tile = keys[:, None] * V + columns[None, :]
    owner = run.to(tl.int64)
    if SLOTS:
        owner = tl.load(slots + run).to(tl.int64)
    if HAS_INITIAL:
        S = tl.load(initial + (owner * H + head) * K * V + state_tile)
    if TRANSITION:
        S = tl.where(keys[:, None] == columns[None, :] - V, 1.0, 0.0)
    wide = rows[:, None] * K + keys[None, :]
    narrow = rows[:, None] * V + columns[None, :]
    square = rows[:, None] * C + rows[None, :]
    checkpoint = 0
    if CHECKPOINT_EVERY > 0:
        checkpoint = tl.load(run_checkpoint + run)

    first_token, num_tokens = run_tokens(first_chunk, num_chunks, chunk_start, chunk_length)

    for index in tl.range(0, num_chunks, num_stages=STAGES):
        record = (first_chunk + index) * H + head
        if CHECKPOINT_EVERY > 0:  # noqa: SIM102, a compile-time branch around one at run time
            if index % CHECKPOINT_EVERY == 0:
                slot = (checkpoint + index // CHECKPOINT_EVERY).to(tl.int64) * H + head
                tl.store(checkpoints + slot * K * V + state_tile, S.to(checkpoints.dtype.element_ty))
        rounded = S.to(OPERAND)
        w = tl.load(W + record * C * K + wide)
        if is_transition:
            D = tl.zeros([C, BV], tl.float32)
        else:
            D = tl.load(U + record * C * V + narrow).to(tl.float32)
        D -= tl.dot(w, rounded, input_precision=PRECISION)
        write = D.to(OPERAND)
        if KEEP_ALL:
            tl.store(states + record * K * V + state_tile, rounded)
            tl.store(writes + record * C * V + narrow, write)
        if OUTPUT:
            read = tl.load(from_start + record * C * K + wide)
            within = tl.load(P + record * C * C + square)
            out = tl.dot(read, rounded, input_precision=PRECISION)
            out = tl.dot(within, write, out, input_precision=PRECISION)
            local = index * C + rows
            pointers = o + (first_token + local)[:, None] * o_token + head * o_head + columns[None, :]
            tl.store(pointers, out.to(o.dtype.element_ty), mask=(local < num_tokens)[:, None])
        key = tl.load(to_end + record * C * K + wide)
        decay = tl.load(state_decay + record * K + keys)
        S = tl.dot(tl.trans(key), write, S * decay[:, None], input_precision=PRECISION)
    if FINAL:
        WIDTH: tl.constexpr = V + K if TRANSITION else V
        tl.store(final + (owner * H + head) * K * WIDTH + keys[:, None] * WIDTH + columns[None, :], S)


@triton.jit
def scan_chunks_backward(
    W, to_end, from_start, P, state_decay, d_o, states,
    run_first_chunk, run_num_chunks, chunk_start, chunk_length,
    d_final, d_states, d_writes, d_initial, flows,
    do_token, do_head,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HAS_FINAL: tl.constexpr, KEEP_ALL: tl.constexpr, TRANSITION: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: column blocks, heads, runs. d_states [chunks, H, K, V]: the gradient of the state *after* each chunk;
    d_writes (dD) [chunks, H, C, V]; d_final, d_initial [runs, H, K, V (+ K with TRANSITION)] float32;
    flows [chunks, H, V / BV, K]: state_decay * sum_v S dS, what the state's decay adds to the gradient of the gates."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    run = tl.program_id(2)
    first_chunk = tl.load(run_first_chunk + run).to(tl.int64)
    num_chunks = tl.load(run_num_chunks + run)
    OPERAND = W.dtype.element_ty
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    columns = block * BV + tl.arange(0, BV)
    is_transition = TRANSITION and block * BV >= V
    dS = tl.zeros([K, BV], tl.float32)
    state_tile = keys[:, None] * V + columns[None, :]
    if HAS_FINAL:
        dS = tl.load(d_final + (run.to(tl.int64) * H + head) * K * V + state_tile)
    if TRANSITION:
        dS = tl.where(keys[:, None] == columns[None, :] - V, 1.0, 0.0)
    wide = rows[:, None] * K + keys[None, :]
    narrow = rows[:, None] * V + columns[None, :]
    square = rows[:, None] * C + rows[None, :]

    first_token, num_tokens = run_tokens(first_chunk, num_chunks, chunk_start, chunk_length)
    if is_transition:
        num_tokens = 0

    for step in tl.range(0, num_chunks, num_stages=STAGES):
        index = num_chunks - 1 - step
        record = (first_chunk + index) * H + head
        rounded = dS.to(OPERAND)
        local = index * C + rows
        pointers = d_o + (first_token + local)[:, None] * do_token + head * do_head + columns[None, :]
        out = tl.load(pointers, mask=(local < num_tokens)[:, None], other=0.0)
        out = out.to(OPERAND)
        key = tl.load(to_end + record * C * K + wide)
        within = tl.load(P + record * C * C + square)
        dD = tl.dot(key, rounded, input_precision=PRECISION)
        dD = tl.dot(tl.trans(within), out, dD, input_precision=PRECISION)
        d_write = dD.to(OPERAND)
        if KEEP_ALL:
            tl.store(d_states + record * K * V + state_tile, rounded)
            tl.store(d_writes + record * C * V + narrow, d_write)
        read = tl.load(from_start + record * C * K + wide)
        w = tl.load(W + record * C * K + wide)
        decay = tl.load(state_decay + record * K + keys)
        dS *= decay[:, None]
        if KEEP_ALL:
            before = tl.load(states + record * K * V + state_tile).to(tl.float32)
            tl.store(flows + (record * (V // BV) + block) * K + keys, tl.sum(before * dS, 1))
        dS = tl.dot(tl.trans(read), out, dS, input_precision=PRECISION)
        dS -= tl.dot(tl.trans(w), d_write, input_precision=PRECISION)
    WIDTH: tl.constexpr = V + K if TRANSITION else V
    tl.store(d_initial + (run.to(tl.int64) * H + head) * K * WIDTH + keys[:, None] * WIDTH + columns[None, :], dS)


@triton.jit
def join_runs(
    affine, start, sequence_first_run, first, last, slots,
    H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_FIRST: tl.constexpr, REVERSE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """From the affine maps of the runs [runs, H, K, V + K] to the state each run starts from [runs, H, K, V].

    Grid: column blocks, heads, sequences. `first` [sequences, H, K, V] enters the sequence, `last` leaves it. SLOTS:
    both are one pool, as in `scan_chunks`.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(sequence_first_run + sequence)
    end = tl.load(sequence_first_run + sequence + 1)
    keys = tl.arange(0, K)
    columns = block * BV + tl.arange(0, BV)
    tile = keys[:, None] * V + columns[None, :]
    affine_tile = keys[:, None] * (V + K) + columns[None, :]
    transition = keys[:, None] * (V + K) + V + keys[None, :]
    S = tl.zeros([K, BV], tl.float32)
    owner = sequence.to(tl.int64)
    if SLOTS:
        owner = tl.load(slots + sequence).to(tl.int64)
    if HAS_FIRST:
        S = tl.load(first + (owner * H + head) * K * V + tile)
    for index in tl.range(0, end - begin):
        run = begin + index
        if REVERSE:
            run = end - 1 - index
        record = run.to(tl.int64) * H + head
        tl.store(start + record * K * V + tile, S)
        M = tl.load(affine + record * K * (V + K) + transition)
        zero = tl.load(affine + record * K * (V + K) + affine_tile)
        S = tl.dot(M, S, zero, input_precision="tf32x3")
    tl.store(last + (owner * H + head) * K * V + tile, S)
