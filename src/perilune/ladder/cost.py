"""What a cell will cost, before it is run: steps, tokens, FLOPs, memory.

    FLOPs of a token = 6 P + attention        P: active parameters without the embedding (forward 2, backward 4)

    attention, per layer and token    MLA   6 (d_qk + d_v) H T / 2      causal: half of the T keys on average
                                      KDA   6 H (3 K V + C (K + V))     state in and out, pairs inside chunks of C = 64

Time before anything was measured is that of one H200 at an assumed utilisation: 5% for every 64 channels of width
beyond the first 64, and 40% at most. Small models are bound by launches; `base` at width 1024 was measured at 49%
(benchmarks/results/bench_train.json).

Memory is an estimate to refuse what cannot fit: float32 weights, gradients and optimizer state, activations kept for
the backward pass, logits of a chunk. It is meant to be within a factor of 1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from perilune.ladder.design import Arm, Cell, Ladder, Rung
from perilune.model import Decoder, ModelConfig
from perilune.train import RunConfig

CHUNK = 64
H200_FLOPS = 790e12  # dense bf16, as measured


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of a cell: where each horizon branches off and ends."""

    warmup_steps: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cost:
    parameters: int
    flops_per_token: float
    tokens: tuple[int, ...]
    """A horizon's own, shortest first."""
    trained_tokens: int
    """All of the cell: the trunk and every decay."""
    memory_bytes: int

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.trained_tokens


def active_parameters(config: RunConfig) -> int:
    """Those that take part in a token's products: all but the embedding."""
    return _parameters(config.model)[0]


@lru_cache(maxsize=512)
def _parameters(model: ModelConfig) -> tuple[int, int]:
    """Active without the embedding, and all of them."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return decoder.num_parameters(active=True, embedding=False), decoder.num_parameters()


def assumed_speed(config: RunConfig) -> float:
    """Tokens a second of a run that has an H200 for itself, before any was measured.

    Steps as CUDA graphs, at widths 128 and 256: 2.7M to 3.0M and 2.3M to 2.6M (benchmarks/train_graphs.py).
    """
    utilisation = min(max(0.07 * (config.model.hidden_size / 64 - 1) + 0.015, 0.02), 0.40)
    return H200_FLOPS * utilisation / flops_per_token(config)


def tokens_per_step(config: RunConfig) -> int:
    return config.trainer.global_batch_rows * config.data.seq_len


def schedule(ladder: Ladder, rung: Rung) -> Schedule:
    """The same for all arms: the baseline's size says how many tokens a horizon has."""
    config = Cell(rung=rung, arm=ladder.baseline, seed=ladder.seeds[0]).config()
    parameters, per_step = active_parameters(config), tokens_per_step(config)
    horizons = ladder.ordered_horizons()
    ends = tuple(max(2, math.ceil(horizon.tokens_per_parameter * parameters / per_step)) for horizon in horizons)
    starts = tuple(max(1, end - max(1, round(ladder.decay_fraction * end))) for end in ends)
    return Schedule(warmup_steps=max(1, round(ladder.warmup_fraction * ends[0])), starts=starts, ends=ends)


def cost(ladder: Ladder, rung: Rung, arm: Arm) -> Cost:
    config = Cell(rung=rung, arm=arm, seed=ladder.seeds[0]).config()
    steps, per_step = schedule(ladder, rung), tokens_per_step(config)
    decays = sum(end - start for start, end in zip(steps.starts, steps.ends, strict=True))
    return Cost(
        parameters=active_parameters(config),
        flops_per_token=flops_per_token(config),
        tokens=tuple(end * per_step for end in steps.ends),
        trained_tokens=(steps.starts[-1] + decays) * per_step,
        memory_bytes=memory_bytes(config),
    )


def flops_per_token(config: RunConfig) -> float:
    model, length = config.model, config.data.seq_len
    mla, kda = model.mla, model.kda
    widths = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    by_kind = {
        "mla": 6 * widths * mla.num_attention_heads * length / 2,
        "kda": 6 * kda.num_heads * (3 * kda.head_dim**2 + CHUNK * 2 * kda.head_dim),
    }
    return 6 * active_parameters(config) + sum(by_kind[kind] for kind in model.layer_pattern())


def memory_bytes(config: RunConfig) -> int:
    model, trainer = config.model, config.trainer
    parameters = _parameters(model)[1]
    states = 4 * (4 if config.optimizer.kind == "adamw" else 3)  # weight, gradient, and one or two moments
    tokens = trainer.micro_batch_rows * config.data.seq_len
    size = 2 if trainer.precision == "bf16" else 4
    kept = 12 * model.hidden_size + 3 * model.intermediate_size  # per token and layer: projections, norms, SwiGLU
    logits = min(tokens * model.vocab_size, 2**28) * 6
    return int(states * parameters + tokens * model.num_hidden_layers * kept * size + logits)


def horizon_names(ladder: Ladder) -> tuple[str, ...]:
    return tuple(horizon.name for horizon in ladder.ordered_horizons())
