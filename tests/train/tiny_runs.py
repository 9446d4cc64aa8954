"""Configs of runs small enough for a test: a few thousand parameters on the generated corpus."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.data.corpus import CorpusConfig
from perilune.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from perilune.train import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig

VOCAB = 320

MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=("kda", "mla"),
    kda=KDAConfig(num_heads=2, head_dim=16),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    intermediate_size=64,
    residual="plain",
)
MOE = MoEConfig(num_experts=4, num_experts_per_token=2, moe_intermediate_size=16, first_k_dense_replace=1)


def tiny_run(cache: Path, **changes: Any) -> RunConfig:
    """`changes` are fields of RunConfig, or dicts of fields of its parts."""
    config = RunConfig(
        name="tiny",
        seed=1,
        model=MODEL,
        data=DataConfig(
            corpus=CorpusConfig(source="generated", num_documents=60, valid_fraction=0.1),
            vocab_size=VOCAB,
            seq_len=32,
            cache_dir=str(cache),
        ),
        optimizer=OptimizerConfig(lr=0.01, orthogonalize_dtype="float32"),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=2, decay_fraction=0.5),
        trainer=TrainerConfig(
            steps=6,
            global_batch_rows=4,
            micro_batch_rows=2,
            eval_every=3,
            eval_rows=4,
            checkpoint_every=2,
            keep_last=2,
            device="cpu",
            sample_prompts=("def ",),
            sample_tokens=4,
            report=False,
            tensorboard=False,
        ),
    )
    for name, change in changes.items():
        part = getattr(config, name)
        config = replace(config, **{name: replace(part, **change) if isinstance(change, dict) else change})
    return config
