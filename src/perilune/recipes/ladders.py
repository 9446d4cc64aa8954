"""Scaling ladders by name: functions that compose rungs, arms, seeds and horizons.

`tiny` runs anywhere in half a minute. The others are for one GPU: widths 128, 192 and 256, and 320 held out, 8 layers
each (ladder/dial.py has the rules). They share their rungs, so that a run which two of them ask for is trained once.
Full attention has rotary positions, as Kimi K2 has; the MLA layers between KDA layers have none, as in Kimi Linear.
Their text lies in .cache/corpus unless `--set data.corpus.source=PATH` says otherwise.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from perilune.data import CorpusConfig
from perilune.data.probes import TASKS
from perilune.ladder import dial
from perilune.ladder.design import Arm, Horizon, Ladder, Rung
from perilune.model import KDAConfig, MLAConfig, ModelConfig, RopeConfig
from perilune.recipes.probes import probe_ladder
from perilune.train import DataConfig, RunConfig, TrainerConfig
from perilune.train.config_file import to_plain

CORPUS = ".cache/corpus"
WIDTHS, HELD_OUT_WIDTH = (128, 192, 256), 320

ALL_MLA = ("mla",) * dial.LAYERS
ALL_KDA = ("kda",) * dial.LAYERS
ONE_TO_ONE = ("kda", "mla") * (dial.LAYERS // 2)
THREE_TO_ONE = ("kda", "kda", "kda", "mla") * (dial.LAYERS // 4)
SEVEN_TO_ONE = ("kda",) * (dial.LAYERS - 1) + ("mla",)
FULL = {"model.layer_types": ALL_MLA, "model.mla.rope": to_plain(RopeConfig())}
NO_POSITIONS = {"model.layer_types": ALL_MLA}
ADAMW_LR = 0.25
"""Of the dial's learning rate: where AdamW's sweeps of matrices start. At the dial's own, three of three widths were
far above their best on an H200 (`no_positions`, width 256: 3.28 nats, 2.72 at half of it). Embedding, head and vectors
have the dial's own, as beside Muon: 0.21 nats better at width 128 than one learning rate for all (`adamw`)."""
BLOCK = {"model.residual": "block_attnres", "model.block_sublayers": 4}  # size 4 of the paper's ablation, 4 blocks here
SMALL_BLOCK = {**BLOCK, "model.block_sublayers": 2}  # 8 blocks, as many as the paper has


def tiny() -> Ladder:
    """MuonClip against AdamW in half a minute on one core, on a generated corpus: to see that a ladder works."""
    rungs = [Rung(name=f"w{width}", config=_tiny_rung(width)) for width in (16, 24, 32)]
    return Ladder(
        name="tiny",
        question="Does a ladder work on this machine? MuonClip against AdamW on a generated corpus.",
        rungs=(*rungs, Rung(name="w40", config=_tiny_rung(40), is_held_out=True)),
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


def muon() -> Ladder:
    """MuonClip against AdamW: full attention, plain residuals, both with a tuned learning rate."""
    return _ladder(
        "muon",
        "What does MuonClip buy over AdamW, both with tuned learning rates?",
        Arm(name="adamw", changes={**FULL, "optimizer.kind": "adamw"}),
        Arm(name="muonclip", changes=FULL),
    )


def no_positions() -> Ladder:
    """MuonClip against AdamW in full attention without positions, AdamW with one learning rate: the first look."""
    ladder = _ladder(
        "no_positions",
        "MuonClip against AdamW where attention has to find positions by itself: why is AdamW so far behind?",
        Arm(name="adamw", changes={**NO_POSITIONS, "optimizer.kind": "adamw"}),
        Arm(name="muonclip", changes=NO_POSITIONS),
    )
    alone = {rung.name: {"optimizer.lr": ADAMW_LR * rung.config.optimizer.lr} for rung in ladder.rungs}
    return replace(ladder, arms=(replace(ladder.arms[0], by_rung=alone), ladder.arms[1]))


def adamw() -> Ladder:
    """Which AdamW is a fair baseline: one learning rate for all, or a hotter one for embedding, head and vectors?

    Full attention without positions, as the ladders had it then.
    """
    rung = dial.rung(WIDTHS[0], source=CORPUS)
    lr = ADAMW_LR * rung.config.optimizer.lr
    settings: dict[str, dict[str, Any]] = {
        "one_lr": {"optimizer.lr": lr},
        "hot2": {"optimizer.lr": lr, "optimizer.adam_lr": 2 * lr},
        "hot4": {"optimizer.lr": lr, "optimizer.adam_lr": 4 * lr},
        "hot8": {"optimizer.lr": lr, "optimizer.adam_lr": 8 * lr},
        "cool_hot8": {"optimizer.lr": lr / 2, "optimizer.adam_lr": 4 * lr},
        "warm_hot4": {"optimizer.lr": 2 * lr, "optimizer.adam_lr": 8 * lr},
        "beta95": {"optimizer.lr": lr, "optimizer.adam_betas": (0.9, 0.95)},
    }
    return Ladder(
        name="adamw",
        question="Does AdamW want another learning rate for embedding, head and vectors, or a shorter memory?",
        rungs=(rung,),
        arms=tuple(
            Arm(name=name, changes={**NO_POSITIONS, "optimizer.kind": "adamw", **changes})
            for name, changes in settings.items()
        ),
        seeds=(0,),
        horizons=dial.HORIZONS[:1],
        decay_fraction=dial.DECAY_FRACTION,
        warmup_fraction=dial.WARMUP_FRACTION,
    )


def attention() -> Ladder:
    """Patterns of Kimi Delta Attention and full attention (MLA) at equal tokens, with MuonClip.

    The baseline has rotary positions; `nope` is the same without, as the MLA layers of the patterns are.
    """
    patterns = {"3to1": THREE_TO_ONE, "1to1": ONE_TO_ONE, "7to1": SEVEN_TO_ONE, "kda": ALL_KDA, "nope": ALL_MLA}
    return _ladder(
        "attention",
        "What does Kimi Linear (KDA to MLA 3:1) buy over full attention, and what do other patterns?",
        Arm(name="mla", changes=FULL),
        *(Arm(name=name, changes={"model.layer_types": pattern}) for name, pattern in patterns.items()),
    )


def residual() -> Ladder:
    """Block and full Attention Residuals against plain ones, and against plain ones with scalars, on Kimi Linear."""
    return _ladder(
        "residual",
        "What do block and full Attention Residuals buy over plain ones, and over plain ones with learned scalars?",
        Arm(name="plain", changes=_kimi_linear({})),
        # The strengthened baseline: its gain may hold part of what Attention Residuals buy.
        Arm(name="scalars", changes=_kimi_linear({"model.residual": "scalars"})),
        Arm(name="block", changes=_kimi_linear(BLOCK)),
        Arm(name="block2", changes=_kimi_linear(SMALL_BLOCK)),
        Arm(name="full", changes=_kimi_linear({"model.residual": "attnres"})),
    )


def together() -> Ladder:
    """MuonClip, Kimi Linear and block Attention Residuals: each alone, and all three."""
    adamw = {"optimizer.kind": "adamw"}
    return _ladder(
        "together",
        "Do the gains of MuonClip, Kimi Linear and Attention Residuals multiply?",
        Arm(name="none", changes={**FULL, **adamw}),
        Arm(name="muon", changes=FULL),
        Arm(name="linear", changes=_kimi_linear(adamw)),
        Arm(name="attnres", changes={**FULL, **BLOCK, **adamw}),
        Arm(name="all", changes=_kimi_linear(BLOCK)),
        combinations={"all": ("muon", "linear", "attnres")},
    )


def qk_clip() -> Ladder:
    """QK-Clip off, at 100 and at 30, with a learning rate eight times that of the dial: do logits grow, does it harm?

    All layers are MLA without positions, and what AdamW trains keeps the dial's learning rate.
    """
    rungs = tuple(dial.rung(width, source=CORPUS) for width in WIDTHS)
    hot = {
        rung.name: {"optimizer.lr": 8 * rung.config.optimizer.lr, "optimizer.adam_lr": rung.config.optimizer.lr}
        for rung in rungs
    }
    return Ladder(
        name="qk_clip",
        question="What does QK-Clip do to attention logits at a learning rate that makes them grow, and to the loss?",
        rungs=rungs,
        arms=tuple(
            Arm(
                name=name,
                changes={
                    **NO_POSITIONS,
                    "optimizer.qk_clip_tau": tau,
                    "optimizer.exact_logits_above": 10.0,
                },
                by_rung=hot,
            )
            for name, tau in (("off", None), ("tau100", 100.0), ("tau30", 30.0))
        ),
        horizons=dial.HORIZONS[:1],
        decay_fraction=dial.DECAY_FRACTION,
        warmup_fraction=dial.WARMUP_FRACTION,
    )


def _kimi_linear(changes: dict[str, Any]) -> dict[str, Any]:
    return {"model.layer_types": THREE_TO_ONE, **changes}


def _ladder(name: str, question: str, *arms: Arm, combinations: dict[str, tuple[str, ...]] | None = None) -> Ladder:
    rungs = (
        *(dial.rung(width, source=CORPUS) for width in WIDTHS),
        dial.rung(HELD_OUT_WIDTH, source=CORPUS, is_held_out=True),
    )
    cooler = {
        rung.name: {
            "optimizer.lr": ADAMW_LR * rung.config.optimizer.lr, "optimizer.adam_lr": rung.config.optimizer.lr
        }
        for rung in rungs
    }  # fmt: skip
    return Ladder(
        name=name,
        question=question,
        rungs=rungs,
        arms=tuple(
            replace(arm, by_rung=cooler) if arm.changes.get("optimizer.kind") == "adamw" else arm for arm in arms
        ),
        horizons=dial.HORIZONS,
        decay_fraction=dial.DECAY_FRACTION,
        warmup_fraction=dial.WARMUP_FRACTION,
        combinations=combinations or {},
    )


LADDERS: dict[str, Callable[[], Ladder]] = {
    function.__name__: function
    for function in (tiny, muon, adamw, no_positions, attention, residual, together, qk_clip)
} | {f"probe-{task}": partial(probe_ladder, task) for task in TASKS}
