"""Probes of memory: 2 layers x 2 heads x 128 (arXiv 2510.26692, section 5.1), rows of 256 to 2048 tokens.

    probe("mqar", length=512, arm="mla")        one run
    probe_ladder("mqar")                         lengths as rungs, arms against each other, for `perilune ladder`

The arms differ in how they remember: Kimi Delta Attention, the same with one decay a head, without its convolution,
softmax attention without positions and with them, and one layer of each. All have the same width, heads and MLP.

On MQAR of 256 tokens two layers of softmax attention were still at a blind guess after 1,500 steps, with positions and
without. Rows of short problems may come first (data/probes/rows.py): `--data.probe.short-first 192000`, in rows, are
1,500 steps of them at 256 tokens. benchmarks/probes.py gives them to every arm that fails without.
"""

from collections.abc import Mapping
from typing import Any

from perilune.data.probes import TASKS, ProbeConfig, Task
from perilune.ladder.design import Arm, Horizon, Ladder, Rung
from perilune.model import KDAConfig, MLAConfig, ModelConfig, RopeConfig
from perilune.train import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig
from perilune.train.config_file import from_plain, to_plain

LENGTHS = (256, 512, 1024, 2048)
TOKENS_PER_STEP = 32_768
VOCABULARY = 1024

ARMS: dict[str, dict[str, Any]] = {
    "kda": {},
    "kda_head_decay": {"model.kda.decay": "head"},
    "kda_no_conv": {"model.kda.short_conv_kernel_size": 1},
    "mla": {"model.layer_types": ("mla", "mla")},
    "mla_rope": {"model.layer_types": ("mla", "mla"), "model.mla.rope": to_plain(RopeConfig())},
    "hybrid": {"model.layer_types": ("kda", "mla")},
}
"""Fields by path, as an arm of a ladder changes them."""


def probe(task: Task, *, length: int = 256, arm: str = "kda") -> RunConfig:
    """The run of one task at one length with one way to remember."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: known are {', '.join(TASKS)}")
    if arm not in ARMS:
        raise ValueError(f"unknown arm {arm!r}: known are {', '.join(ARMS)}")
    rows = max(1, TOKENS_PER_STEP // length)
    base = RunConfig(
        name=f"{task}-{length}-{arm}",
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=2,
            layer_types=("kda", "kda"),
            kda=KDAConfig(num_heads=2, head_dim=128),
            mla=MLAConfig(
                num_attention_heads=2, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
            intermediate_size=768,
            residual="plain",
        ),
        data=DataConfig(vocab_size=VOCABULARY, seq_len=length, probe=ProbeConfig(task=task)),
        optimizer=OptimizerConfig(lr=5e-3),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=50, decay_fraction=1.0, decay_shape="linear"),
        trainer=TrainerConfig(
            steps=10_000,
            global_batch_rows=rows,
            micro_batch_rows=rows,
            precision="bf16",
            log_every=50,
            eval_every=250,
            eval_rows=4 * rows,
            checkpoint_every=0,
            tensorboard=False,
        ),
    )
    return changed(base, ARMS[arm])


def probe_ladder(task: Task, *, steps: int = 10_000, seeds: tuple[int, ...] = (0,)) -> Ladder:
    """Lengths in the place of sizes. One horizon, as many tokens for each: what `steps` steps train on."""
    base = probe(task)
    parameters = parameters_in_products(base)
    return Ladder(
        name=f"probe-{task}",
        rungs=tuple(Rung(name=f"t{length}", config=probe(task, length=length)) for length in LENGTHS),
        arms=tuple(Arm(name=name, changes=changes) for name, changes in ARMS.items()),
        seeds=seeds,
        horizons=(Horizon(name="full", tokens_per_parameter=steps * TOKENS_PER_STEP / parameters),),
    )


def parameters_in_products(config: RunConfig) -> int:
    from perilune.ladder.cost import active_parameters  # builds the model on the meta device: only when asked

    return active_parameters(config)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The config with fields by path replaced."""
    plain = to_plain(config)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = plain
        for name in parents:
            place = place[name]
        place[last] = to_plain(value)
    return from_plain(RunConfig, plain)


def mqar() -> RunConfig:
    """Associative recall with Kimi Delta Attention; --data.seq-len and --model.* make the other cases."""
    return probe("mqar")


def palindrome() -> RunConfig:
    """Reversal with Kimi Delta Attention."""
    return probe("palindrome")


def stack() -> RunConfig:
    """Sixty-four stacks with Kimi Delta Attention."""
    return probe("stack")
