"""Scaling ladders by name: functions that compose rungs, arms, seeds and horizons."""

from collections.abc import Callable

from perilune.data import CorpusConfig
from perilune.ladder.design import Arm, Horizon, Ladder, Rung
from perilune.model import KDAConfig, MLAConfig, ModelConfig
from perilune.train import DataConfig, RunConfig, TrainerConfig


def tiny() -> Ladder:
    """MuonClip against AdamW in half a minute on one core, on a generated corpus: to see that a ladder works."""
    return Ladder(
        name="tiny",
        rungs=tuple(Rung(name=f"w{width}", config=_tiny_rung(width)) for width in (16, 24, 32)),
        arms=(
            Arm(name="adamw", changes={"optimizer.kind": "adamw", "optimizer.lr": 1e-2}),
            Arm(name="muonclip", changes={"optimizer.kind": "muonclip", "optimizer.lr": 2e-2}),
        ),
        seeds=(0, 1),
        horizons=(Horizon(name="half", tokens_per_parameter=0.25), Horizon(name="full", tokens_per_parameter=0.5)),
    )


def _tiny_rung(width: int) -> RunConfig:
    return RunConfig(
        name=f"w{width}",
        model=ModelConfig(
            vocab_size=320,
            hidden_size=width,
            num_hidden_layers=2,
            layer_types=("kda", "mla"),
            kda=KDAConfig(num_heads=1, head_dim=16),
            mla=MLAConfig(
                num_attention_heads=1, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
            ),
            intermediate_size=3 * width,
            residual="plain",
        ),
        data=DataConfig(corpus=CorpusConfig(source="generated", num_documents=200), vocab_size=320, seq_len=64),
        trainer=TrainerConfig(global_batch_rows=8, micro_batch_rows=8, eval_rows=64, checkpoint_every=0),
    )


LADDERS: dict[str, Callable[[], Ladder]] = {"tiny": tiny}
