"""One token: the fused KDA step, MLA decoding over a paged latent cache, grouped-query decoding through torch.

"step" is timed inside a CUDA graph, "eager call" is one of many calls in a row without one, by the host's clock:
launching is the difference. The KDA step moves on to other slots at every call, as the layers of a model do: the states
come from device memory, not from the second-level cache. fla's step is given the finished q, k, v and works in place;
it has no convolution, no gated norm and no slots of its own to look up.

Floors are bytes over measured copy bandwidth: state, convolution window and the token's vectors for KDA, the cached
rows of all sequences for MLA, keys and values for grouped queries. "share of copy bandwidth" is floor over time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from perilune.bench import peers
from perilune.bench.session import Bench
from perilune.kernels.kda.decode import kda_decode
from perilune.kernels.kda.gates import SoftplusGate
from perilune.kernels.mla_decode import gqa_decode, mla_decode

# Rounding of weights, products and outputs to bfloat16 gives 0.1% to 0.4% of relative RMS error.
LIMIT = 1e-2
WIDTH = 4
NORM_EPS = 1e-5
COLD_BYTES = 200 << 20  # several second-level caches: what was touched before so many bytes is no longer there
LATENT, ROPE, PAGE = 512, 64, 64
CHECKED_TOKENS = 5000
LARGEST_CACHE = 90e9


def run(bench: Bench) -> None:
    for num_sequences in (1, 8, 64, 256) if bench.is_gpu else (1, 4):
        _kda_step(bench, num_sequences, torch.float32)
    if bench.is_gpu:
        _kda_step(bench, 64, torch.bfloat16)
    shapes = [(1, 131072), (8, 131072), (32, 131072), (1, 1 << 20), (8, 1 << 20), (32, 1 << 20)]
    for batch, length in shapes if bench.is_gpu else [(2, 300)]:
        for num_heads in (16, 32, 64) if bench.is_gpu else (4,):
            _mla(bench, batch, length, num_heads)
    for batch, length in ((1, 131072), (8, 32768)) if bench.is_gpu else ((2, 100),):
        _gqa(bench, batch, length)


# KDA ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """The arguments of one kda_decode call, less pools and slots."""

    num_heads: int
    head_dim: int
    qkv: Tensor
    gate_input: Tensor
    beta_logits: Tensor
    output_gate: Tensor
    conv_weight: Tensor
    norm_weight: Tensor
    gate: SoftplusGate

    def __call__(self, conv_pool: Tensor, state_pool: Tensor, slots: Tensor) -> Tensor:
        return kda_decode(
            self.qkv, self.gate_input, self.beta_logits, self.output_gate, conv_pool, state_pool, slots,
            conv_weight=self.conv_weight, norm_weight=self.norm_weight, gate=self.gate, norm_eps=NORM_EPS,
        )  # fmt: skip

    def exactly(self, conv_pool: Tensor, state_pool: Tensor, slots: Tensor) -> Tensor:
        """In float64, operator after operator."""
        return kda_decode(
            self.qkv.double(), self.gate_input.double(), self.beta_logits.double(), self.output_gate.double(),
            conv_pool, state_pool, slots,
            conv_weight=self.conv_weight.double(), norm_weight=self.norm_weight.double(),
            gate=SoftplusGate(self.gate.A_log.double(), self.gate.dt_bias.double()), norm_eps=NORM_EPS,
            backend="torch",
        )  # fmt: skip


def _random_step(bench: Bench, num_sequences: int, num_heads: int, head_dim: int) -> Step:
    generator = torch.Generator(bench.device).manual_seed(0)
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=bench.device)

    width = num_heads * head_dim
    return Step(
        num_heads=num_heads,
        head_dim=head_dim,
        qkv=normal(num_sequences, 3 * width).to(dtype),
        gate_input=normal(num_sequences, width).to(dtype),
        beta_logits=normal(num_sequences, num_heads).to(dtype),
        output_gate=normal(num_sequences, width).to(dtype),
        conv_weight=0.5 * normal(3 * width, WIDTH),
        norm_weight=1 + 0.1 * normal(head_dim),
        gate=SoftplusGate(0.5 * normal(num_heads), normal(width) - 4),
    )


def _kda_step(bench: Bench, num_sequences: int, state_dtype: torch.dtype) -> None:
    num_heads, head_dim = (32, 128) if bench.is_gpu else (2, 32)
    name = f"kda step {num_sequences} sequences H{num_heads}"
    case = name if state_dtype == torch.float32 else f"{name} {state_dtype} state"
    if not bench.wants(case):
        return
    step = _random_step(bench, num_sequences, num_heads, head_dim)
    state_bytes = num_heads * head_dim * head_dim * state_dtype.itemsize
    groups = -(-COLD_BYTES // (num_sequences * state_bytes)) if bench.is_gpu else 2
    num_slots = groups * num_sequences
    conv_pool = torch.randn(num_slots, 3 * num_heads * head_dim, WIDTH - 1, device=bench.device)
    conv_pool = conv_pool.to(step.qkv.dtype)
    state_pool = torch.randn(num_slots, num_heads, head_dim, head_dim, device=bench.device).to(state_dtype)
    slots = torch.randperm(num_slots, device=bench.device).view(groups, num_sequences)

    exact_pools = (conv_pool.double(), state_pool[slots[0]].double())
    exact_slots = torch.arange(num_sequences, device=bench.device)
    exact = step.exactly(exact_pools[0][slots[0]].clone(), exact_pools[1], exact_slots)
    bench.check(case, step(conv_pool, state_pool, slots[0]), exact, LIMIT)
    bench.check(case, state_pool[slots[0]], exact_pools[1], LIMIT, "state")
    del exact_pools, exact

    turns = cycle(slots)
    ours = bench.time_graph(lambda: step(conv_pool, state_pool, next(turns)))
    fla = _fla_step(bench, step, state_pool, num_sequences) if bench.is_gpu and state_dtype == torch.float32 else None
    window_bytes = conv_pool[0].numel() * conv_pool.element_size()
    # The output is as wide as its gate.
    tokens = (step.qkv, step.gate_input, step.beta_logits, step.output_gate, step.output_gate)
    token_bytes = sum(x[0].numel() * x.element_size() for x in tokens)
    moved = num_sequences * (2 * state_bytes + 2 * window_bytes + token_bytes)
    floor = moved / bench.copy_bandwidth * 1e6
    bench.add(case, "step", "us", 1e3 * ours, peers={"fla": fla and 1e3 * fla}, floor=floor)
    bench.add(case, "share of copy bandwidth", "%", 100 * floor / (1e3 * ours), lower_is_better=False)
    if bench.is_gpu:
        bench.add(case, "eager call", "us", 1e3 * bench.time_in_a_row(lambda: step(conv_pool, state_pool, next(turns))))


def _fla_step(bench: Bench, step: Step, state_pool: Tensor, num_sequences: int) -> float | None:
    module = peers.optional("fla.ops.kda.fused_recurrent", bench)
    if module is None:
        return None
    heads = (num_sequences, 1, step.num_heads, step.head_dim)
    q, k, v = (part.reshape(heads) for part in step.qkv.chunk(3, dim=-1))
    raw, beta, out = step.gate_input.view(heads), step.beta_logits.unsqueeze(1), torch.empty_like(v)
    turns = cycle(state_pool.split(num_sequences))

    def call() -> None:
        module.fused_recurrent_kda_fwd(
            q, k, v, raw, beta, A_log=step.gate.A_log, dt_bias=step.gate.dt_bias, initial_state=next(turns),
            inplace_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, out=out,
        )  # fmt: skip

    bench.note("fla's step has no convolution, gated norm or slots: it does less than ours")
    return peers.attempt(bench, "fla", lambda: bench.time_graph(call))


# MLA ------------------------------------------------------------------------------------------------------------------


def _mla(bench: Bench, batch: int, length: int, num_heads: int) -> None:
    latent, rope = (LATENT, ROPE) if bench.is_gpu else (32, 16)
    case = f"mla B{batch} T{length} H{num_heads}"
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    cache_bytes = batch * length * (latent + rope) * dtype.itemsize
    if not bench.wants(case):
        return
    if cache_bytes > LARGEST_CACHE:
        bench.note(f"{case}: left out, its cache has {cache_bytes / 1e9:.0f} GB")
        return
    scale = 192**-0.5
    pages = -(-length // PAGE)
    cache = torch.empty(batch * pages, PAGE, latent + rope, dtype=dtype, device=bench.device).normal_()
    table = torch.randperm(batch * pages, device=bench.device).int().view(batch, pages)
    q = torch.randn(batch, num_heads, latent + rope, device=bench.device).to(dtype)

    some = torch.full((batch,), min(length, CHECKED_TOKENS), dtype=torch.int32, device=bench.device)
    some[0] = min(length, 77)
    o, lse = mla_decode(q, cache, table, some, latent_dim=latent, scale=scale)
    # The definition in float64, on the pages that are read.
    read = table[:, : -(-CHECKED_TOKENS // PAGE)].contiguous()
    exact_cache = cache[read.long().flatten()].double()
    exact_table = torch.arange(read.numel(), device=bench.device).int().view_as(read)
    exact = mla_decode(
        q.double(), exact_cache, exact_table, some, latent_dim=latent, scale=scale, backend="reference"
    )  # fmt: skip
    bench.check(case, o, exact[0], LIMIT)
    bench.check(case, lse, exact[1], LIMIT, "lse")
    del exact, exact_cache

    lengths = torch.full((batch,), length, dtype=torch.int32, device=bench.device)

    def call() -> tuple[Tensor, Tensor]:
        return mla_decode(q, cache, table, lengths, latent_dim=latent, scale=scale)

    _add_with_share(bench, case, bench.time_graph(call), cache_bytes)
    if bench.is_gpu and batch == 1:
        bench.add(case, "eager call", "us", 1e3 * bench.time_in_a_row(call))


def _gqa(bench: Bench, batch: int, length: int) -> None:
    num_heads, num_kv_heads, width = (32, 8, 128) if bench.is_gpu else (4, 2, 16)
    case = f"gqa B{batch} T{length} H{num_heads}/{num_kv_heads}"
    if not bench.wants(case):
        return
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    q = torch.randn(batch, num_heads, width, device=bench.device).to(dtype)
    k, v = (torch.empty(batch, length, num_kv_heads, width, device=bench.device, dtype=dtype).normal_() for _ in "kv")
    few = min(length, CHECKED_TOKENS)
    some = torch.full((batch,), few, dtype=torch.int32, device=bench.device)
    exact = gqa_decode(q.double(), k[:, :few].double(), v[:, :few].double())
    bench.check(case, gqa_decode(q, k, v, some), exact, LIMIT)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=bench.device)
    calls: dict[str, Callable[[], Tensor]] = {
        case: lambda: gqa_decode(q, k, v),
        f"{case} lengths": lambda: gqa_decode(q, k, v, lengths),
    }
    for name, call in calls.items():
        _add_with_share(bench, name, bench.time_graph(call), 2 * k.numel() * k.element_size())


def _add_with_share(bench: Bench, case: str, milliseconds: float, moved: int) -> None:
    floor = moved / bench.copy_bandwidth * 1e6
    bench.add(case, "step", "us", 1e3 * milliseconds, floor=floor)
    bench.add(case, "share of copy bandwidth", "%", 100 * floor / (1e3 * milliseconds), lower_is_better=False)
