"""Pre-training: Kimi-Linear layers, Block Attention Residuals and MuonClip, from a laptop to one large GPU."""

from dataclasses import replace

from perilune.data import CorpusConfig, FusionConfig, VisionDataConfig
from perilune.data.scenes import ScenesConfig
from perilune.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from perilune.train import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig


def micro() -> RunConfig:
    """Seconds on one core, on a generated corpus: to see that an installation works."""
    return RunConfig(
        name="micro",
        model=ModelConfig(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=4,
            kda=KDAConfig(num_heads=2, head_dim=32),
            mla=MLAConfig(
                num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
            ),
            intermediate_size=192,
        ),
        data=DataConfig(corpus=CorpusConfig(source="generated"), vocab_size=512, seq_len=128),
        optimizer=OptimizerConfig(lr=5e-3),
        schedule=ScheduleConfig(warmup_steps=5),
        trainer=TrainerConfig(steps=60, global_batch_rows=8, micro_batch_rows=8, eval_every=20, checkpoint_every=30),
    )


def nano() -> RunConfig:
    """The whole recipe on the sources of Python's standard library and on drawings of one or two shapes.

    Within five minutes on two cores. Shapes lie on a grid of 7 pixels and each number is one token: what is left to
    learn is to look.
    """
    run = nano_text()
    tower = VisionConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        pos_emb_height=4,
        pos_emb_width=4,
    )
    pictures = VisionDataConfig(
        scenes=ScenesConfig(
            sizes=((56, 56),),
            max_shapes=2,
            primitives=("rect", "circle"),
            colours=("red", "green", "blue", "orange", "purple", "black"),
            background_share=0.0,
            grid=7,
        ),
        fusion=FusionConfig(share=3 / 11),
        sample_tokens=128,
    )
    return replace(
        run,
        name="nano",
        model=replace(run.model, vision=tower),
        data=replace(run.data, vision=pictures),
        trainer=replace(run.trainer, global_batch_rows=11, micro_batch_rows=8, eval_every=150),
    )


def nano_text() -> RunConfig:
    """`nano` without pictures, on the same text in the same order."""
    return RunConfig(
        name="nano_text",
        model=ModelConfig(
            vocab_size=2048,
            hidden_size=128,
            num_hidden_layers=4,
            kda=KDAConfig(num_heads=4, head_dim=32),
            mla=MLAConfig(
                num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
            ),
            intermediate_size=352,
            residual="block_attnres",
            block_sublayers=4,
        ),
        data=DataConfig(corpus=CorpusConfig(source="stdlib"), vocab_size=2048, seq_len=256),
        optimizer=OptimizerConfig(lr=5e-3),
        schedule=ScheduleConfig(warmup_steps=10, decay_fraction=0.4),
        trainer=TrainerConfig(
            steps=500,
            global_batch_rows=8,
            micro_batch_rows=8,
            eval_every=100,
            eval_rows=128,
            checkpoint_every=200,
            sample_prompts=("import os\n\n\ndef ", "class Queue:\n    def __init__(self"),
            sample_tokens=120,
        ),
    )


def nano_adamw() -> RunConfig:
    """`nano_text` with AdamW in place of MuonClip, at a learning rate of its own: the baseline to compare with."""
    run = nano_text()
    return replace(run, name="nano_adamw", optimizer=OptimizerConfig(kind="adamw", lr=3e-3))


def nano_moe() -> RunConfig:
    """`nano_text` with experts in every layer but the first."""
    run = nano_text()
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, moe_intermediate_size=128, routed_scaling_factor=2.446)
    return replace(run, name="nano_moe", model=replace(run.model, moe=moe))


def small() -> RunConfig:
    """About 60M parameters, bf16 on one GPU in minutes. Give it a corpus: --data.corpus.source PATH"""
    run = nano_text()
    return replace(
        run,
        name="small",
        model=ModelConfig(
            vocab_size=16384,
            hidden_size=512,
            num_hidden_layers=16,
            kda=KDAConfig(num_heads=8, head_dim=64),
            mla=MLAConfig(
                num_attention_heads=8, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
            ),
            intermediate_size=1408,
            residual="block_attnres",
            block_sublayers=4,
        ),
        data=replace(run.data, vocab_size=16384, seq_len=1024),
        optimizer=OptimizerConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=100, decay_fraction=0.2),
        trainer=replace(
            run.trainer, steps=2000, global_batch_rows=128, micro_batch_rows=32, precision="bf16", eval_every=200,
            eval_rows=256, checkpoint_every=500, log_every=10,
        ),
    )  # fmt: skip


def base() -> RunConfig:
    """About 280M parameters, width 1024, context 4096: the shape on which peers are measured."""
    run = small()
    return replace(
        run,
        name="base",
        model=ModelConfig(
            vocab_size=32768,
            hidden_size=1024,
            num_hidden_layers=16,
            kda=KDAConfig(num_heads=8, head_dim=128),
            mla=MLAConfig(
                num_attention_heads=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
            intermediate_size=2816,
            residual="block_attnres",
            block_sublayers=4,
        ),
        data=replace(run.data, vocab_size=32768, seq_len=4096),
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=replace(run.trainer, steps=5000, global_batch_rows=64, micro_batch_rows=8),
    )
