"""Kimi Delta Attention in Triton: forward and backward for any gate, weak or strong, at one speed.

Forward: gate (once), products inside the chunks, their inverse, the scan's operands, scan with output: five kernels.
Backward: gate, operands again, the states between the checkpoints of the forward pass (all at once), reverse scan,
signals, gradients. Kept for it, per token and head: 4 C bytes of products (P and A), two reciprocal norms, and one
state per CHECKPOINT_EVERY chunks. l2norm, gate and the sigmoid of beta are applied and differentiated inside.

    triton_chunk.py      gate, decays, products, inverse       triton_scan.py      recurrence over chunks
    triton_gradients.py  gradients inside chunks               triton_tables.py    chunks of packed documents

The two operators `perilune::kda_forward` and `perilune::kda_backward` are opaque to torch.compile, never wait for the
device and allocate by shape alone: whole graphs compile and CUDA graphs capture them. Results do not depend on
timing: the same call gives the same bits. bfloat16 inputs use bfloat16 operands with float32 accumulation, float16 ones
tf32, float32 ones three tf32 products; states and their gradients are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from perilune.kernels.kda import triton_chunk, triton_gradients, triton_scan
from perilune.kernels.kda.cuda import steps as cuda_steps
from perilune.kernels.kda.cuda import why_not_cuda
from perilune.kernels.kda.gates import Gate, SoftplusGate
from perilune.kernels.kda.triton_chunk import CHUNK, interval_table, later_table
from perilune.kernels.kda.triton_tables import Runs, Tables, tables_for
from perilune.kernels.launch import device_of, launch
from perilune.kernels.operator import is_traced
from perilune.kernels.triton_support import num_sms, why_not_triton

# A float32 state of 128 x 128 per 8 chunks is 128 bytes a token, half as much as its q.
CHECKPOINT_EVERY = 8
SHARED_MEMORY = 220 * 1024  # of one multiprocessor of Hopper, less what a kernel needs besides its operands


class Launch(NamedTuple):
    block: int  # channels per program or loop step
    num_warps: int
    num_stages: int


# Gates, scans and restart from a sweep on one H200, bfloat16, 32 heads of 128 ("candidates" in
# benchmarks/results/h200_first_round.json); the others by registers and spills of the compiled code, since they changed
# after it. A block never exceeds the width.
LAUNCH = {
    "gates": Launch(32, 4, 1),
    "products": Launch(32, 4, 1),
    "inverse": Launch(64, 2, 1),
    "operands": Launch(32, 4, 1),
    "scan": Launch(32, 4, 3),
    "restart": Launch(64, 4, 2),
    "transition": Launch(64, 4, 2),
    "scan_backward": Launch(32, 4, 3),
    "join": Launch(16, 8, 1),
    "signals": Launch(32, 4, 1),
    "gradients": Launch(32, 4, 1),
}
GATE_KINDS = {"none": 0, "softplus": 1, "bounded": 2}


def why_not_triton_kda(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> str | None:
    """The reason why these kernels cannot run this call, or None."""
    if reason := why_not_triton(q):
        return reason
    for x in (q, k, v, *others):
        if x is not None and x.dtype == torch.float64:
            return "the Triton kernels compute in float32; float64 needs backend='chunked'"
    for name, width in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if width not in (16, 32, 64, 128, 256):
            return f"the Triton kernels need {name} in 16, 32, 64, 128, 256, got {width}"
    return None


def triton_kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state_NHKV: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: Gate | None,
    qk_l2norm: bool,
    beta_max: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] in v's dtype and the final state [N, H, K, V] in float32."""
    kind, lower_bound, A_log, dt_bias = 0, 0.0, None, None
    if gate is not None:
        is_softplus = isinstance(gate, SoftplusGate)
        kind = GATE_KINDS["softplus" if is_softplus else "bounded"]
        lower_bound = 0.0 if isinstance(gate, SoftplusGate) else gate.lower_bound
        A_log, dt_bias = gate.A_log, gate.dt_bias
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, A_log, dt_bias, initial_state_NHKV)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _TritonKDA.apply(
        *tensors, cu_seqlens, scale, kind, lower_bound, qk_l2norm, 0.0 if beta_max is None else beta_max, needs_grad
    )


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor, A_log: Tensor | None,
        dt_bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, kind: int,
        lower_bound: float, l2norm: bool, beta_max: float, needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # The dispatcher of operators written in Python costs the host more than some calls cost the GPU.
        run = torch.ops.perilune.kda_forward if is_traced(q, k, v, x, beta, A_log, dt_bias) else _forward
        o, final, *saved = run(
            q, k, v, x, beta, A_log, dt_bias, initial, cu_seqlens, scale, kind, lower_bound, l2norm, beta_max,
            needs_grad,
        )  # fmt: skip
        if needs_grad:
            ctx.save_for_backward(q, k, v, x, beta, A_log, dt_bias, cu_seqlens, o, *saved)
            ctx.options = (scale, kind, lower_bound, l2norm, beta_max)
            ctx.initial_dtype = None if initial is None else initial.dtype
            ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        # With create_graph=True the operator is part of the graph, and refuses to be differentiated again. (What
        # `once_differentiable` returns would count as a constant where d_o is: a wrong second derivative.)
        q, k, v, x, beta, A_log, dt_bias, cu_seqlens, o, *saved = ctx.saved_tensors
        if d_o is None:
            d_o = torch.zeros_like(o)
        is_operator = torch.is_grad_enabled() or is_traced(q, o, d_o)
        run = torch.ops.perilune.kda_backward if is_operator else _backward
        d_q, d_k, d_v, d_x, d_beta, d_rate, d_bias, d_initial = run(
            q, k, v, x, beta, A_log, dt_bias, cu_seqlens, o, d_o, d_final, *saved, *ctx.options
        )
        return (
            d_q, d_k, d_v, d_x, d_beta,
            None if A_log is None else d_rate,
            None if dt_bias is None else d_bias,
            None if ctx.initial_dtype is None else d_initial.to(ctx.initial_dtype),
            *(None,) * 7,
        )  # fmt: skip


# Operators ------------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, kind: int, lower_bound: float, l2norm: bool,
    beta_max: float, needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final state, and for the backward pass P, A, reciprocal norms, checkpoints (else empty)."""
    with device_of(q):
        call = _Call(
            q, k, v, x, beta, A_log, dt_bias, cu_seqlens, scale, kind, lower_bound, l2norm, beta_max,
            needs_grad=needs_grad,
        )  # fmt: skip
        if needs_grad and call.takes_cuda:
            cuda_steps.compile_ahead(call)
        P, A, rstd, operands, _ = call.prepare()
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        checkpoints = call.new_checkpoints(needs_grad)
        start, final = (None if initial is None else initial.float().contiguous()), call.new_states(call.num_sequences)
        runs = call.tables.sequences
        if call.tables.pieces is not None:
            runs = call.tables.pieces
            affine = call.scan(operands, P, runs, transition=True)
            start = call.join(affine, runs, start, final, is_reverse=False)
            call.scan(operands, P, runs, start=start, o=o, checkpoints=checkpoints)
        else:
            call.scan(operands, P, runs, start=start, o=o, final=final, checkpoints=checkpoints)
        if not needs_grad:
            P, A, rstd = (x.new_empty(0) for x in (P, A, rstd))  # outputs of an operator may not be one tensor
        return o, final, P, A, rstd, checkpoints


@torch.library.custom_op("perilune::kda_forward", mutates_args=())(_forward).register_fake
def _(q, k, v, x, beta, A_log, dt_bias, initial, cu_seqlens, scale, kind, lower_bound, l2norm, beta_max, needs_grad):
    call = _Shapes(q, k, v, cu_seqlens)
    empty = q.new_empty
    final = empty(call.state_shape(call.num_sequences), dtype=torch.float32)
    if not needs_grad:
        float32, operand = torch.float32, call.operand_dtype
        kept = (empty(0, dtype=dtype) for dtype in (operand, operand, float32, float32))
        return empty(v.shape, dtype=v.dtype), final, *kept
    square = (call.max_chunks, call.num_heads, CHUNK, CHUNK)
    return (
        empty(v.shape, dtype=v.dtype),
        final,
        empty(square, dtype=call.operand_dtype),
        empty(square, dtype=call.operand_dtype),
        empty((*q.shape[:3], 2), dtype=torch.float32),
        empty(call.state_shape(call.num_checkpoints), dtype=torch.float32),
    )


def _backward(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor | None, o: Tensor, d_o: Tensor, d_final: Tensor | None, P: Tensor, A: Tensor, rstd: Tensor,
    checkpoints: Tensor, scale: float, kind: int, lower_bound: float, l2norm: bool, beta_max: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, x, beta, A_log, dt_bias and the initial state."""
    with device_of(q):
        call = _Call(q, k, v, x, beta, A_log, dt_bias, cu_seqlens, scale, kind, lower_bound, l2norm, beta_max)
        d_o = cuda_steps.aligned(_rows(d_o)) if call.takes_cuda else _rows(d_o)
        _, _, _, operands, g = call.prepare(known=(A, rstd))
        states, writes = call.chunk_buffer(call.key_dim), call.chunk_buffer(CHUNK)
        call.scan(operands, P, call.tables.checkpoints, start=checkpoints, keep=(states, writes))
        operands["U"] = operands["U"].new_empty(0)
        end = None if d_final is None else d_final.float().contiguous()
        d_initial = call.new_states(call.num_sequences)
        d_states, signals, flows = torch.empty_like(states), torch.empty_like(writes), call.new_flows()
        keep = (states, d_states, signals, flows)
        runs = call.tables.sequences
        if call.tables.pieces is not None:
            runs = call.tables.pieces
            affine = call.scan_backward(operands, P, d_o, runs, transition=True)
            end = call.join(affine, runs, end, d_initial, is_reverse=True)
            call.scan_backward(operands, P, d_o, runs, end=end, keep=keep)
        else:
            call.scan_backward(operands, P, d_o, runs, end=end, keep=keep, d_initial=d_initial)
        operands.clear()
        d_q, d_k, d_v, d_x, d_beta, d_rate, d_bias = call.gradients(
            g, o, d_o, A, rstd, flows, writes, signals, states, d_states
        )  # fmt: skip
        return d_q, d_k, d_v, d_x, d_beta, d_rate, d_bias, d_initial


@torch.library.custom_op("perilune::kda_backward", mutates_args=())(_backward).register_fake
def _(
    q, k, v, x, beta, A_log, dt_bias, cu_seqlens, o, d_o, d_final, P, A, rstd, checkpoints, scale, kind, lower_bound,
    l2norm, beta_max,
):  # fmt: skip
    call = _Shapes(q, k, v, cu_seqlens)

    def like(x: Tensor | None) -> Tensor:
        return (
            q.new_empty(0, dtype=call.operand_dtype)
            if x is None
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        )

    d_initial = q.new_empty(call.state_shape(call.num_sequences), dtype=torch.float32)
    return (*(like(t) for t in (q, k, v, x, beta, A_log, dt_bias)), d_initial)


# Launches -------------------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """x [B, T, H, ...] such that B and T are one dim with one stride and channels lie side by side."""
    if x.shape[1] == 1:  # the stride of T may be anything then, also in a contiguous tensor
        x = x.as_strided(x.shape, (x.stride(0), x.stride(0), *x.stride()[2:]))
    is_flat = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    is_dense = x.dim() == 3 or x.stride(-1) == 1
    is_near = x.shape[2] * x.stride(2) < 2**31  # kernels count the heads' offsets in 32 bits
    return x if is_flat and is_dense and is_near else x.contiguous()


class _Shapes:
    """What follows from shapes and dtypes alone."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None):
        self.batch, self.num_tokens, self.num_heads, self.key_dim = q.shape
        self.value_dim = v.shape[-1]
        self.rows = self.batch * self.num_tokens
        per_sequence = -(-self.num_tokens // CHUNK)
        if cu_seqlens is None:
            self.num_sequences = self.batch
            self.max_chunks = self.batch * per_sequence
            self.num_checkpoints = self.batch * -(-per_sequence // CHECKPOINT_EVERY)
        else:
            self.num_sequences = cu_seqlens.shape[0] - 1
            self.max_chunks = self.rows // CHUNK + self.num_sequences
            self.num_checkpoints = self.max_chunks // CHECKPOINT_EVERY + self.num_sequences
        dtypes = {q.dtype, k.dtype, v.dtype}
        is_bfloat16 = dtypes == {torch.bfloat16}
        self.operand_dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        self.operand_size = self.operand_dtype.itemsize
        self.gate_dtype = torch.float16 if is_bfloat16 else torch.float32
        self.precision = "tf32x3" if torch.float32 in dtypes else "tf32"

    def state_shape(self, count: int) -> tuple[int, int, int, int]:
        return (count, self.num_heads, self.key_dim, self.value_dim)


class _Call(_Shapes):
    """One call: its tensors, tables and launch parameters, and a method per kernel."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, kind: int, lower_bound: float, l2norm: bool, beta_max: float,
        *, needs_grad: bool = True,
    ):  # fmt: skip
        super().__init__(q, k, v, cu_seqlens)
        self.q, self.k, self.v, self.x, self.beta = (_rows(t) for t in (q, k, v, x, beta))
        self.A_log, self.dt_bias = (None if t is None else t.contiguous() for t in (A_log, dt_bias))
        self.scale, self.kind, self.lower_bound, self.l2norm, self.beta_max = scale, kind, lower_bound, l2norm, beta_max
        self.device = q.device
        self.takes_cuda = None is why_not_cuda(
            q.device, self.operand_dtype, self.key_dim, self.value_dim, x=x.dtype, l2norm=l2norm
        )
        if self.takes_cuda:
            self.q, self.k, self.v, self.x = (cuda_steps.aligned(t) for t in (self.q, self.k, self.v, self.x))
        self.tables: Tables = tables_for(
            cu_seqlens, self.batch, self.num_tokens, q.device, CHECKPOINT_EVERY if needs_grad else 0, self.piece()
        )
        self.intervals = _constant(interval_table, self.gate_dtype, q.device)
        self.later = _constant(later_table, self.operand_dtype, q.device)

    def piece(self) -> int:
        """Chunks per piece when sequences are split because heads and sequences alone leave processors idle."""
        if self.key_dim > 128:
            return 0  # `join_runs` holds a matrix of K x K in shared memory
        programs = self.num_sequences * self.num_heads * (self.value_dim // self.launch("scan", self.value_dim).block)
        chunks = self.max_chunks // self.num_sequences
        pieces = min(num_sms(self.device) // max(programs, 1), chunks // (4 * CHECKPOINT_EVERY))
        if pieces < 3:
            return 0
        per_piece = -(-chunks // pieces)
        return -(-per_piece // CHECKPOINT_EVERY) * CHECKPOINT_EVERY

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.operand_dtype, device=self.device)

    def chunk_buffer(self, rows: int) -> Tensor:
        return self.empty(self.max_chunks, self.num_heads, rows, self.value_dim)

    def new_states(self, count: int) -> Tensor:
        return self.empty(*self.state_shape(count), dtype=torch.float32)

    def new_flows(self) -> Tensor:
        parts = self.value_dim // self.launch("scan_backward", self.value_dim).block
        return self.empty(self.max_chunks, self.num_heads, parts, self.key_dim, dtype=torch.float32)

    def new_checkpoints(self, needs_grad: bool) -> Tensor:
        return self.new_states(self.num_checkpoints) if needs_grad else self.empty(0, dtype=torch.float32)

    def gates(self) -> Tensor:
        g = self.empty(self.rows, self.num_heads, self.key_dim, dtype=self.gate_dtype)
        block, num_warps, _ = LAUNCH["gates"]
        triton_chunk.activate_gate[(self.num_heads * triton.cdiv(self.rows, block),)](
            self.x, self.A_log, self.dt_bias, g, *self.x.stride()[1:3], self.rows, self.num_heads, self.lower_bound,
            K=self.key_dim, ROWS=block, GATE=self.kind, HAS_RATE=self.A_log is not None, num_warps=num_warps,
        )  # fmt: skip
        return g

    def prepare(
        self, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
        """P, A, reciprocal norms, the operands of the scans and the gates; A and the norms may be known from before."""
        H, K, V = self.num_heads, self.key_dim, self.value_dim
        if self.takes_cuda:
            return cuda_steps.prepare(self, known)
        g = self.gates()
        grid = (self.max_chunks * H,)
        tables = self.tables
        strides = (*self.q.stride()[1:3], *self.k.stride()[1:3])
        if known is None:
            block, num_warps, num_stages = self.launch("products", K)
            square = (self.max_chunks, H, CHUNK, CHUNK)
            P, A = self.empty(*square), self.empty(*square)
            # Products of normalised keys fit float16, whose 11 bits are worth more than bfloat16's range.
            is_half = self.operand_dtype == torch.bfloat16 and self.l2norm
            L = self.empty(*square, dtype=torch.float16 if is_half else torch.float32)
            rstd = self.empty(self.batch, self.num_tokens, H, 2, dtype=torch.float32)
            triton_chunk.chunk_products[grid](
                self.q, self.k, g, self.beta, tables.chunk_start, tables.chunk_length, self.intervals, P, L, rstd,
                *strides, *self.beta.stride()[1:3], H, self.scale, self.beta_max, K,
                K=K, BK=block, C=CHUNK, L2NORM=self.l2norm, BETA_SIGMOID=self.beta_max > 0, PRECISION=self.precision,
                num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
            _, num_warps, num_stages = LAUNCH["inverse"]
            triton_chunk.invert_chunks[grid](
                L, tables.chunk_length, A, H,
                PRECISION=self.precision, C=CHUNK, num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
        else:
            A, rstd = known
            P = A
        names = {"W": K, "U": V, "to_end": K, "from_start": K}
        operands = {name: self.empty(self.max_chunks, H, CHUNK, width) for name, width in names.items()}
        operands["state_decay"] = self.empty(self.max_chunks, H, K, dtype=torch.float32)
        block, num_warps, num_stages = self.launch("operands", K)
        triton_chunk.chunk_operands[grid](
            self.q, self.k, self.v, g, self.beta, tables.chunk_start, tables.chunk_length, self.intervals, rstd, A,
            *operands.values(),
            *strides, *self.v.stride()[1:3], *self.beta.stride()[1:3], H, self.scale, self.beta_max, K, V,
            K=K, V=V, BK=block, BV=min(block, V), C=CHUNK, L2NORM=self.l2norm, BETA_SIGMOID=self.beta_max > 0,
            PRECISION=self.precision, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        return P, A, rstd, operands, g

    def scan(
        self, operands: dict[str, Tensor], P: Tensor, runs: Runs, *, start: Tensor | None = None,
        o: Tensor | None = None, final: Tensor | None = None, checkpoints: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None, transition: bool = False, slots: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Carry the states through all runs; with `transition` return the runs' affine maps.

        slots: of every run, where `start` and `final` are one pool.
        """
        K, V = self.key_dim, self.value_dim
        num_runs, width = runs.num_chunks.shape[0], V + K if transition else V
        if transition:
            final = self.empty(num_runs, self.num_heads, K, width, dtype=torch.float32)
        every = CHECKPOINT_EVERY if checkpoints is not None and checkpoints.numel() else 0
        name = "transition" if transition else "scan" if keep is None else "restart"
        block, num_warps, num_stages = self.scan_launch(name)
        unused = P
        states, writes = keep if keep is not None else (unused, unused)
        output = P if o is None else o
        constants = {
            "K": K, "V": V, "BV": block, "C": CHUNK, "HAS_INITIAL": start is not None, "OUTPUT": o is not None,
            "FINAL": final is not None, "TRANSITION": transition, "CHECKPOINT_EVERY": every,
            "KEEP_ALL": keep is not None, "SLOTS": slots is not None, "PRECISION": self.precision,
            "STAGES": num_stages, "num_warps": num_warps,
        }  # fmt: skip
        launch(
            triton_scan.scan_chunks, (width // block, self.num_heads, num_runs),
            (
                operands["W"], operands["U"], operands["to_end"], operands["from_start"], P, operands["state_decay"],
                runs.first_chunk, runs.num_chunks, self.tables.chunk_start, self.tables.chunk_length,
                runs.first_checkpoint, unused if start is None else start, output, unused if final is None else final,
                unused if checkpoints is None else checkpoints, states, writes, unused if slots is None else slots,
                *output.stride()[1:3], self.num_heads,
            ),
            ("scan_chunks", *constants.values()), constants,
        )  # fmt: skip
        return unused if final is None else final

    def scan_launch(self, name: str) -> Launch:
        """Stages: how many chunks' operands are in flight, at most as many as the shared memory holds."""
        launch = self.launch(name, self.value_dim)
        rows = CHUNK * (3 * self.key_dim + CHUNK) + (CHUNK + self.key_dim) * launch.block
        return launch._replace(num_stages=max(1, min(launch.num_stages, SHARED_MEMORY // (rows * self.operand_size))))

    def launch(self, name: str, width: int) -> Launch:
        return LAUNCH[name]._replace(block=min(LAUNCH[name].block, width))

    def scan_backward(
        self, operands: dict[str, Tensor], P: Tensor, d_o: Tensor, runs: Runs, *, end: Tensor | None = None,
        keep: tuple[Tensor, ...] | None = None, d_initial: Tensor | None = None, transition: bool = False,
    ) -> Tensor:  # fmt: skip
        """Carry the gradients of the states backwards through all runs."""
        K, V = self.key_dim, self.value_dim
        num_runs, width = runs.num_chunks.shape[0], V + K if transition else V
        if d_initial is None:
            d_initial = self.empty(num_runs, self.num_heads, K, width, dtype=torch.float32)
        block, num_warps, num_stages = self.scan_launch("scan_backward")
        states, d_states, d_writes, flows = keep if keep is not None else (P, P, P, P)
        triton_scan.scan_chunks_backward[(width // block, self.num_heads, num_runs)](
            *(operands[name] for name in ("W", "to_end", "from_start")), P, operands["state_decay"], d_o, states,
            runs.first_chunk, runs.num_chunks, self.tables.chunk_start, self.tables.chunk_length,
            P if end is None else end, d_states, d_writes, d_initial, flows, *d_o.stride()[1:3], self.num_heads,
            K=K, V=V, BV=block, C=CHUNK, HAS_FINAL=end is not None, KEEP_ALL=keep is not None, TRANSITION=transition,
            PRECISION=self.precision, STAGES=num_stages, num_warps=num_warps,
        )  # fmt: skip
        return d_initial

    def join(
        self, affine: Tensor, runs: Runs, first: Tensor | None, last: Tensor, *, is_reverse: bool,
        slots: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The state every run starts from; fills `last` with what leaves each sequence. slots: as in `scan`."""
        start = self.new_states(runs.num_chunks.shape[0])
        block, num_warps, _ = self.launch("join", self.value_dim)
        triton_scan.join_runs[(self.value_dim // block, self.num_heads, self.num_sequences)](
            affine, start, runs.of_sequence, affine if first is None else first, last,
            affine if slots is None else slots, self.num_heads,
            K=self.key_dim, V=self.value_dim, BV=block, HAS_FIRST=first is not None, REVERSE=is_reverse,
            SLOTS=slots is not None, num_warps=num_warps,
        )  # fmt: skip
        return start

    def gradients(
        self, g: Tensor, o: Tensor, d_o: Tensor, A: Tensor, rstd: Tensor, flows: Tensor, writes: Tensor,
        signals: Tensor, states: Tensor, d_states: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if self.takes_cuda:
            return cuda_steps.gradients(self, g, o, d_o, A, rstd, flows, writes, signals, states, d_states)
        H, K, V = self.num_heads, self.key_dim, self.value_dim
        tables = self.tables
        o = _rows(o)
        d_L, d_P = torch.empty_like(A), torch.empty_like(A)
        d_v = torch.empty(self.v.shape, dtype=self.v.dtype, device=self.device)
        along = self.empty(self.rows, H, 2, dtype=torch.float32)
        parts = K // self.launch("gradients", K).block
        d_beta = self.empty(parts + 1, self.rows, H, dtype=torch.float32)
        block, num_warps, num_stages = self.launch("signals", V)
        triton_gradients.chunk_signals[(self.max_chunks * H,)](
            self.v, self.beta, o, d_o, A, writes, tables.chunk_start, tables.chunk_length, signals, d_L, d_P, d_v,
            along, d_beta[parts],
            *self.v.stride()[1:3], *self.beta.stride()[1:3], *o.stride()[1:3], *d_o.stride()[1:3],
            H, self.beta_max, V,
            V=V, BV=block, C=CHUNK, BETA_SIGMOID=self.beta_max > 0, PRECISION=self.precision,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        d_q, d_k, d_x = (torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in (self.q, self.k, self.x))
        block, num_warps, num_stages = self.launch("gradients", K)
        triton_gradients.chunk_gradients[(self.max_chunks * H * parts,)](
            self.q, self.k, g, self.beta, d_o, rstd, along, self.intervals, self.later, flows,
            tables.chunk_start, tables.chunk_length, signals, writes, states, d_states, d_L, d_P, d_q, d_k, d_x, d_beta,
            *self.q.stride()[1:3], *self.k.stride()[1:3], *self.beta.stride()[1:3], *d_o.stride()[1:3],
            H, self.rows, self.scale, self.beta_max,
            K=K, V=V, BK=block, BV=min(128, V), C=CHUNK, FLOWS=flows.shape[2], L2NORM=self.l2norm,
            BETA_SIGMOID=self.beta_max > 0, PRECISION=self.precision, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        d_rate, d_bias = self.gate_gradients(d_x)
        d_beta = d_beta.sum(0).view(self.beta.shape)
        if self.beta_max > 0:
            open_share = torch.sigmoid(self.beta.float())
            d_beta *= self.beta_max * open_share * (1 - open_share)
        return d_q, d_k, d_v, d_x, d_beta.to(self.beta.dtype), d_rate, d_bias

    def gate_gradients(self, d_x: Tensor) -> tuple[Tensor, Tensor]:
        """Turns the gradient of the log decay, in d_x, into that of the gate's input."""
        if self.dt_bias is None:
            d_x.masked_fill_(self.x < triton_chunk.SMALLEST_LEARNING_GATE.value, 0.0)
            return self.empty(0), self.empty(0)
        block, num_warps, _ = LAUNCH["gates"]
        parts = triton.cdiv(self.rows, block)
        d_rate, d_bias = (self.empty(parts, self.num_heads, self.key_dim, dtype=torch.float32) for _ in range(2))
        triton_gradients.gate_gradients[(self.num_heads * parts,)](
            self.x, self.A_log, self.dt_bias, d_x, d_x, d_rate, d_bias,
            *self.x.stride()[1:3], self.rows, self.num_heads, self.lower_bound,
            K=self.key_dim, ROWS=block, GATE=self.kind, HAS_RATE=self.A_log is not None, num_warps=num_warps,
        )  # fmt: skip
        d_bias = d_bias.sum(0).view(self.dt_bias.shape).to(self.dt_bias.dtype)
        if self.A_log is None:
            return self.empty(0), d_bias
        return d_rate.sum((0, 2)).view(self.A_log.shape).to(self.A_log.dtype), d_bias


@cache  # few, and a CUDA graph may go on reading them
@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def _constant(table: Callable[[torch.dtype, torch.device], Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return table(dtype, device)
