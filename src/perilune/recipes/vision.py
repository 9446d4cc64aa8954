"""Text and pictures on one GPU: a language model of about 30M parameters with a small MoonViT-3D.

`vision_small` writes pictures as code: scenes, charts, pages and animations (icons where a file of them is given). The
fusion recipes ask when pictures should enter: early, mid and late spend the same rows on pictures and on text.
"""

from dataclasses import replace

from perilune.data import FusionConfig, VisionDataConfig
from perilune.data.scenes import ScenesConfig
from perilune.model import KDAConfig, MLAConfig, ModelConfig, VisionConfig
from perilune.recipes.pretrain import nano, small
from perilune.train import OptimizerConfig, RunConfig, ScheduleConfig

TOWER = VisionConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024)
FUSION_SHARE = 0.1
"""Of all rows, as in the published comparison (arXiv 2602.02276, table 1)."""


def vision_small() -> RunConfig:
    """30M parameters and a tower of 6 layers on one GPU in minutes. Give it a corpus: --data.corpus.source PATH"""
    run = small()
    return replace(
        run,
        name="vision_small",
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=512,
            num_hidden_layers=8,
            kda=KDAConfig(num_heads=8, head_dim=64),
            mla=MLAConfig(
                num_attention_heads=8, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
            ),
            intermediate_size=1408,
            residual="block_attnres",
            block_sublayers=4,
            vision=TOWER,
        ),
        data=replace(
            run.data,
            vocab_size=4096,
            seq_len=1024,
            vision=VisionDataConfig(
                scenes=ScenesConfig(kinds=("scene", "text", "chart", "html", "animation")),
                tasks=("svg", "html", "video", "caption", "count", "box", "spatial", "ocr", "chart"),
                fusion=FusionConfig(share=0.5),
                workers=12,
                samples=128,
                sample_tokens=512,
            ),
        ),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(warmup_steps=50, decay_fraction=0.3),
        trainer=replace(
            run.trainer, steps=1500, global_batch_rows=64, micro_batch_rows=32, eval_every=250, eval_rows=128,
            checkpoint_every=0,
        ),
    )  # fmt: skip


def fused(run: RunConfig, timing: str) -> RunConfig:
    """The run with pictures entering "early", "mid" or "late", at the same number of vision and of text rows."""
    vision = run.data.vision
    if vision is None:
        raise ValueError(f"the run {run.name!r} has no pictures (data.vision is None): nothing can enter early or late")
    return replace(
        run,
        name=f"{run.name}_{timing}",
        data=replace(run.data, vision=replace(vision, fusion=vision.fusion.at(timing))),
    )


def text_control(run: RunConfig) -> RunConfig:
    """The run without pictures: the same tokenizer, text rows a step, steps and schedule."""
    vision = run.data.vision
    if vision is None:
        raise ValueError(f"the run {run.name!r} has no pictures (data.vision is None): it is its own control")
    rows = run.trainer.global_batch_rows * (1 - vision.fusion.share * (1 - vision.fusion.start))
    if abs(rows - round(rows)) > 1e-6:
        raise ValueError(
            f"trainer.global_batch_rows is {run.trainer.global_batch_rows!r}: {rows:.2f} text rows a step in the mean, "
            "expected a whole number; choose a multiple that the share divides"
        )
    return replace(
        run,
        name=f"{run.name}_text",
        model=replace(run.model, vision=None),
        data=replace(run.data, vision=replace(vision, fusion=FusionConfig(share=0.0))),
        trainer=replace(run.trainer, global_batch_rows=round(rows), decoupled_vision=False),
    )


def _fusion_base() -> RunConfig:
    """Small steps and the simple scenes of `nano`: of a short run a tenth has pictures, a late one sees them briefly.

    The learning rate falls only after the last entry, which it would hide: text gets better while it falls.
    """
    run = vision_small()
    scenes = nano().data.vision
    assert run.data.vision is not None and scenes is not None
    vision = replace(
        run.data.vision, scenes=scenes.scenes, tasks=("svg",), fusion=FusionConfig(share=FUSION_SHARE), samples=256,
        sample_tokens=128,
    )  # fmt: skip
    trainer = replace(run.trainer, global_batch_rows=40, micro_batch_rows=40, eval_every=50, eval_rows=64)
    schedule = replace(run.schedule, decay_fraction=0.15)
    return replace(run, name="fusion", data=replace(run.data, vision=vision), schedule=schedule, trainer=trainer)


def fusion_early() -> RunConfig:
    """Pictures from the first step, a tenth of the rows."""
    return fused(_fusion_base(), "early")


def fusion_mid() -> RunConfig:
    """Pictures after half of the run, a fifth of the rows from there on."""
    return fused(_fusion_base(), "mid")


def fusion_late() -> RunConfig:
    """Pictures after four fifths of the run, half of the rows from there on."""
    return fused(_fusion_base(), "late")


def fusion_text() -> RunConfig:
    """The control: the text of the fusion recipes without pictures."""
    return text_control(_fusion_base())
