"""Everything a run is a function of: one frozen dataclass composed from those of its parts."""

import math
from dataclasses import dataclass, field
from typing import Literal

from perilune.data import Fusion
from perilune.data.media import PATCH_SIZE
from perilune.model import ModelConfig
from perilune.model.lora import LoraConfig
from perilune.train.batches import DataConfig
from perilune.train.optimizer import OptimizerConfig
from perilune.train.parallel import ParallelConfig, ParallelError
from perilune.train.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    steps: int = 1000
    global_batch_rows: int = 16
    """Rows of `data.seq_len` tokens in one optimizer step, over all ranks."""
    micro_batch_rows: int = 16
    """Rows of one forward and backward on one rank; gradients are accumulated up to the global batch."""
    precision: Literal["float32", "bf16"] = "float32"
    """Of the computation. Parameters, gradients, reductions and optimizer state are float32 either way."""
    grad_clip: float | None = 1.0
    """Norm above which AdamW's gradients are scaled down; Muon's direction does not depend on it."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    compile: bool = False
    cuda_graphs: bool | None = None
    """Replay forward, backward and MuonClip as CUDA graphs, which saves the host's time to launch them and keeps
    their activations in memory. None: where it can be done and micro-batches are small; True: where it can be."""
    decoupled_vision: bool = False
    """Run the vision tower over the batch twice, keeping none of its activations during the language model's step."""

    log_every: int = 1
    eval_every: int = 100
    """Steps between validations; 0: only after the last step."""
    eval_rows: int = 32
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 2
    checkpoint_in_background: bool = True
    """Go on training while a checkpoint is written, from a copy in host memory; off: wait for the disk."""
    hang_timeout_s: float = 1800.0
    """On many ranks: end the run, naming the rank that others wait for, after so long without progress."""
    max_bad_steps: int = 10
    """Stop after so many steps in a row whose loss or gradient is not finite."""

    sample_prompts: tuple[str, ...] = ()
    sample_tokens: int = 64
    sample_temperature: float = 0.8

    report: bool = True
    """Write report.html at the end."""
    tensorboard: bool = True
    tracker: Literal["wandb", "trackio"] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_rows", "micro_batch_rows", "log_every", "eval_rows", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)!r}, expected 1 or more")
        for name in ("eval_every", "checkpoint_every", "keep_last", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"trainer.{name} is {getattr(self, name)!r}, expected 0 or more")
        if not 0 < self.hang_timeout_s < math.inf:
            raise ValueError(
                f"trainer.hang_timeout_s is {self.hang_timeout_s!r}, expected a positive number of seconds"
            )
        if self.grad_clip is not None and not 0 < self.grad_clip < math.inf:
            raise ValueError(
                f"trainer.grad_clip is {self.grad_clip!r}, expected a positive norm, or None for no clipping"
            )
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f'trainer.precision is {self.precision!r}, expected "float32" or "bf16"')
        if not 0 <= self.sample_temperature < math.inf:
            raise ValueError(f"trainer.sample_temperature is {self.sample_temperature!r}, expected 0 or more")
        if self.tracker not in (None, "wandb", "trackio"):
            raise ValueError(f'trainer.tracker is {self.tracker!r}, expected "wandb", "trackio" or None')


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    seed: int = 0
    start_from: str | None = None
    """Folder of a run whose weights this one starts from; the optimizer starts anew."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that learn in place of the weights; rank 0: the weights themselves learn."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks of `torchrun` share the work; one process needs nothing of it."""

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith(".") or "/" in self.name or "\\" in self.name:
            raise ValueError(f"name is {self.name!r}, expected a folder name without slashes or a leading dot")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed!r}, expected a whole number from 0 to 2**63 - 1")
        if self.data.has_pictures and self.model.vision is None:
            raise ValueError(
                "data.vision is set but model.vision is None: give the model a tower, or set data.vision.fusion.share=0"
            )
        if self.data.has_pictures and self.model.vision is not None and self.model.vision.patch_size != PATCH_SIZE:
            raise ValueError(
                f"model.vision.patch_size is {self.model.vision.patch_size!r}, expected {PATCH_SIZE}: "
                "the rows' pictures are cut into patches of that size"
            )
        if self.model.vocab_size < self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size is {self.model.vocab_size!r}, smaller than "
                f"data.vocab_size={self.data.vocab_size!r}: make them equal"
            )

    def check_ranks(self, world_size: int) -> None:
        """ParallelError unless this run can be spread over so many ranks."""
        parallel = self.parallel.check(self.model, world_size)
        for axis in ("tp", "pp", "ep"):
            if self.lora.rank and getattr(parallel, axis) > 1:
                raise ParallelError(
                    f"parallel.{axis}={getattr(parallel, axis)} with lora.rank={self.lora.rank}: adapters are not cut; "
                    "spread them by dp_shard or dp_replicate"
                )
        assert parallel.dp_shard is not None
        parts, rows = parallel.dp_replicate * parallel.dp_shard, self.trainer.global_batch_rows
        if rows < parts:
            raise ParallelError(
                f"trainer.global_batch_rows is {rows!r}, expected a row for each of the {parts} ranks that read rows: "
                "raise it, or start fewer ranks"
            )
        if parallel.pp > 1:
            self._check_micro_batches(parallel.pp, parts)
        if self.data.seq_len % parallel.cp:
            raise ParallelError(
                f"parallel.cp={parallel.cp} cannot split rows of data.seq_len={self.data.seq_len} evenly: "
                "take a divisor of it"
            )

    def _check_micro_batches(self, pp: int, parts: int) -> None:
        """A pipeline takes micro-batches of one length, and at least one for each stage."""
        rows, micro = self.trainer.global_batch_rows, self.trainer.micro_batch_rows
        if rows % (parts * micro) or rows < parts * micro * pp:
            raise ParallelError(
                f"parallel.pp={pp} needs micro-batches of one length, at least {pp} on each of {parts} ranks that read "
                f"rows: trainer.global_batch_rows is {rows!r} with trainer.micro_batch_rows={micro!r}; make it a "
                f"multiple of {parts * micro}, at least {parts * micro * pp}"
            )

    def fusion(self) -> Fusion | None:
        """Which rows of this run hold pictures; None: none of them."""
        if self.data.vision is None or not self.data.has_pictures:
            return None
        return Fusion.of(self.data.vision.fusion, self.trainer.steps * self.trainer.global_batch_rows)
