"""One dial for each rung: everything of a run's size follows from its width, by rules with a source.

Depth stays at 8 layers on all rungs, so that the patterns 1:1, 3:1 and 7:1 of KDA to MLA are exact on each of them and
arms compare at equal depth; width is what grows. With d the width and N the parameters of the plain 3:1 model at that
width, without the embedding:

    heads          d / 64, of 64 channels          KDA and MLA kernels are measured at 64 and 128 (nanochat: 128)
    MLA            latent d / 2, shared key part 32, per head 64 + 64, as in the recipes `small` and `base`
    SwiGLU         11/4 d                          as in `small` and `base`; 8/3 d rounded up to a multiple of 16
    vocabulary     8192                            the head is then 36% of N at d = 128, 20% at d = 320
    context        1024
    batch          327,680 (N / 108M)^(2/3) tokens, in multiples of 8 rows
                                                   OLMo ladder, arXiv 2412.04403 (2048 x 160 tokens at 108M)
    lr             0.00235 (N / 108M)^(-1/3)       the same source's 0.0047, halved as OLMo-core does: where the sweep
                                                   starts, which has the last word. Muon's updates have AdamW's RMS
                                                   (Moonlight, arXiv 2502.16982): one learning rate for a run. AdamW
                                                   alone wants less at these sizes (recipes/ladders.py)
    betas          0.9, 0.99                       OLMo-core below 524,288 tokens a batch
    weight decay   0.1                             Moonlight and Kimi K2
    horizon        20 N tokens, and 10 N           Chinchilla, arXiv 2203.15556; a second, shorter one from the same run
    warm-up        N tokens                        OLMo ladder; the tenth part of the shorter horizon
    decay          the last fifth of a horizon     between OLMo's tenth and MiniCPM's (arXiv 2404.06395) tenth to fifth
    validation     1024 rows, a million tokens     the same for all arms and seeds

Measured so far: MuonClip's best learning rate at d = 256 is the dial's, without positions
(benchmarks/results/ladder/no_positions/sweep).
"""

from __future__ import annotations

from perilune.data import CorpusConfig
from perilune.ladder.cost import active_parameters
from perilune.ladder.design import Horizon, Rung
from perilune.model import KDAConfig, MLAConfig, ModelConfig
from perilune.train import DataConfig, OptimizerConfig, RunConfig, TrainerConfig

LAYERS = 8
HEAD_WIDTH = 64
VOCABULARY = 8192
CONTEXT = 1024
ROWS = 8
REFERENCE = 108e6  # parameters at which the rules for batch and learning rate are anchored
HORIZONS = (
    Horizon(name="10x", tokens_per_parameter=10.0),
    Horizon(name="20x", tokens_per_parameter=20.0),
)
WARMUP_FRACTION = 0.1
DECAY_FRACTION = 0.2


def rung(width: int, *, source: str, is_held_out: bool = False) -> Rung:
    """The rung of a width: plain residuals, KDA to MLA 3:1, MuonClip; arms change that."""
    return Rung(name=f"w{width}", config=run_at(width, source=source), is_held_out=is_held_out)


def run_at(width: int, *, source: str) -> RunConfig:
    if width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise ValueError(f"the dial is at width {width!r}: expected a multiple of {HEAD_WIDTH}, the width of a head")
    heads = width // HEAD_WIDTH
    model = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        kda=KDAConfig(num_heads=heads, head_dim=HEAD_WIDTH),
        mla=MLAConfig(
            num_attention_heads=heads, kv_lora_rank=width // 2, qk_nope_head_dim=HEAD_WIDTH, qk_rope_head_dim=32,
            v_head_dim=HEAD_WIDTH,
        ),
        intermediate_size=11 * width // 4,
        residual="plain",
    )  # fmt: skip
    run = RunConfig(
        name=f"w{width}",
        model=model,
        data=DataConfig(
            corpus=CorpusConfig(source=source, valid_fraction=0.02), vocab_size=VOCABULARY, seq_len=CONTEXT
        ),
    )
    relative = active_parameters(run) / REFERENCE
    rows = batch_rows(relative)
    return RunConfig(
        name=run.name,
        model=model,
        data=run.data,
        optimizer=OptimizerConfig(lr=learning_rate(relative), weight_decay=0.1, adam_betas=(0.9, 0.99)),
        trainer=TrainerConfig(
            global_batch_rows=rows,
            micro_batch_rows=rows,
            precision="bf16",
            log_every=10,
            eval_rows=1024,
            checkpoint_every=0,
        ),
    )


def batch_rows(relative: float) -> int:
    """`relative` is N / 108M."""
    return max(1, round(327_680 * relative ** (2 / 3) / CONTEXT / ROWS)) * ROWS


def learning_rate(relative: float) -> float:
    return float(f"{0.00235 * relative ** (-1 / 3):.3g}")
