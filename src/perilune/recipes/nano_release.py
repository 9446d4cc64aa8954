"""`perilune-nano`, the model that lives in the repository: text, pictures and tools in at most 25 MB.

    nano_release(sources)            pre-training: text with clear licences, our own texts, drawings
    nano_release_sft(folder, files)  fine-tuning: chat, tools, pictures, both roles of a swarm (nano_dialogues.py)

About 10.7M parameters: eight layers (Kimi Delta Attention and latent attention 3:1, Block Attention Residuals), a tower
of four for pictures, 4,096 tokens. In bfloat16 its weights take 23 MB. `tiny` makes a miniature of a stage for a CPU.
benchmarks/nano_release.py runs the stages one after the other and exports what comes out.
"""

import sysconfig
from dataclasses import replace
from pathlib import Path

from perilune.data import CorpusConfig, FusionConfig, VisionDataConfig
from perilune.model import KDAConfig, MLAConfig, ModelConfig, VisionConfig
from perilune.recipes.nano_dialogues import SCENES, DialogueCounts
from perilune.recipes.sft import sft
from perilune.train import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig

NAME = "perilune-nano"
MOST_BYTES = 25_000_000
"""Of the weights that may lie in the repository."""
SFT_LR_SHARE = 0.3
"""Of the learning rate of pre-training: fine-tuning has much to teach, and goes over it more than once."""
SFT_TOKENS = 4096
"""Of a row: the longest episode of an orchestrator has to fit."""
TINY_COUNTS = DialogueCounts(
    talk=24, decline=8, tools=16, pictures=16, orchestrators=8, workers=16, library_pages=1000
)  # fmt: skip
SKIPPED = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"),
    *("ensurepip", "turtledemo", "pydoc_data", "__pycache__"),
)
"""Folders of the standard library that are no text to learn from."""


def stdlib() -> str:
    """The folder of this Python's standard library: sources under the PSF licence, which every machine has."""
    return sysconfig.get_paths()["stdlib"]


def nano_release(sources: tuple[str, ...] = ()) -> RunConfig:
    """Pre-training on files and folders; without any, on the sources of the standard library."""
    return RunConfig(
        name=f"{NAME}-pretrain",
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=8,
            kda=KDAConfig(num_heads=4, head_dim=64),
            mla=MLAConfig(
                num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
            ),
            intermediate_size=704,
            residual="block_attnres",
            block_sublayers=4,
            tie_word_embeddings=True,
            vision=VisionConfig(
                hidden_size=192,
                num_hidden_layers=4,
                num_attention_heads=3,
                intermediate_size=768,
                pos_emb_height=16,
                pos_emb_width=16,
            ),
        ),
        data=DataConfig(
            corpus=CorpusConfig(
                source=sources or (stdlib(),), include_suffixes=(), exclude=SKIPPED, valid_fraction=0.01
            ),
            vocab_size=4096,
            digits=1,
            seq_len=1024,
            vision=VisionDataConfig(
                scenes=SCENES,
                tasks=("svg", "caption", "count", "spatial"),
                fusion=FusionConfig(share=0.35),
                workers=12,
                samples=64,
                sample_tokens=384,
            ),
        ),
        optimizer=OptimizerConfig(lr=4e-3),
        schedule=ScheduleConfig(warmup_steps=100, decay_fraction=0.3),
        trainer=TrainerConfig(
            steps=6000,
            global_batch_rows=64,
            micro_batch_rows=64,
            precision="bf16",
            eval_every=1000,
            eval_rows=128,
            checkpoint_every=1000,
            log_every=10,
            sample_prompts=("import os\n\n\ndef ", "Find the year of the ship "),
        ),
    )


def nano_release_sft(folder: str | Path, sources: tuple[str, ...]) -> RunConfig:
    """Fine-tuning of the run in `folder` on files of dialogues."""
    run = sft(folder, sources=sources)
    before = read_lr(run)
    rows = 16
    return replace(
        run,
        name=f"{NAME}-sft",
        data=replace(run.data, seq_len=SFT_TOKENS),
        optimizer=replace(run.optimizer, lr=SFT_LR_SHARE * before),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=50, decay_fraction=0.5, decay_shape="linear"),
        trainer=replace(
            run.trainer, steps=2000, global_batch_rows=rows, micro_batch_rows=rows, eval_rows=32, eval_every=500,
            checkpoint_every=500,
        ),
    )  # fmt: skip


def read_lr(run: RunConfig) -> float:
    """The learning rate of the pre-training that a fine-tuning starts from."""
    from perilune.recipes.sft import LR_SHARE

    return run.optimizer.lr / LR_SHARE


def tiny(run: RunConfig) -> RunConfig:
    """The stage in seconds on one core: the same parts, next to no learning."""
    model = replace(
        run.model,
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=4,
        kda=KDAConfig(num_heads=2, head_dim=32),
        mla=MLAConfig(
            num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
        ),
        intermediate_size=128,
        vision=VisionConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96,
                            pos_emb_height=4, pos_emb_width=4),
    )  # fmt: skip
    is_sft = run.data.chat is not None
    data = replace(run.data, vocab_size=1024 if not is_sft else run.data.vocab_size)
    if not is_sft:
        assert data.vision is not None
        vision = replace(data.vision, workers=0, dialect_texts=50, samples=2, sample_tokens=16)
        data = replace(data, seq_len=256, vision=vision)
    rows = 1 if is_sft else 4
    return replace(
        run,
        model=model if not is_sft else run.model,
        data=data,
        trainer=replace(
            run.trainer, steps=2, global_batch_rows=rows, micro_batch_rows=rows, precision="float32", device="cpu",
            eval_every=0, eval_rows=2, checkpoint_every=0, log_every=1, sample_tokens=8, report=False,
            tensorboard=False,
        ),
    )  # fmt: skip
