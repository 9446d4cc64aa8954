"""The parts of a running training, and how far it is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.data import Fusion
from perilune.model import Decoder
from perilune.train.background_save import Saves
from perilune.train.batches import RunData
from perilune.train.checkpoint import OnPhase
from perilune.train.optimizer import Optimization
from perilune.train.outputs import Outputs
from perilune.train.parallel import Parallel
from perilune.train.run_config import RunConfig


@dataclass(kw_only=True)
class Position:
    """How far a run is; all of it goes into the checkpoint."""

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    rows: int = 0
    """Rows of data consumed, over all ranks."""
    tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The parts of a running training."""

    config: RunConfig
    folder: Path
    device: torch.device
    data: RunData
    fusion: Fusion | None
    """Which rows hold pictures; None: none of them."""
    model: Decoder
    """What of it is on this rank."""
    num_parameters: int
    num_active_parameters: int
    """Of the whole model; active are those that a token meets."""
    parallel: Parallel | None
    """How the model is spread over ranks; None: one process."""
    optimization: Optimization
    position: Position
    outputs: Outputs
    saves: Saves
    on_phase: OnPhase
    """Told of every phase of the loop."""
    on_save_phase: OnPhase
    """Told of every phase of a save, in the thread that writes."""
