"""Training: `train(config)` runs a RunConfig to its end; `load_run(folder)` gives back what it made."""

from perilune.train.batches import DataConfig
from perilune.train.checkpoint import CheckpointError
from perilune.train.interrupt import Interrupted
from perilune.train.optimizer import OptimizerConfig
from perilune.train.run_config import RunConfig, TrainerConfig
from perilune.train.run_folder import RunError, load_run, read_config
from perilune.train.schedule import ScheduleConfig
from perilune.train.trainer import TrainingStopped, train

__all__ = [
    "CheckpointError",
    "DataConfig",
    "Interrupted",
    "OptimizerConfig",
    "RunConfig",
    "RunError",
    "ScheduleConfig",
    "TrainerConfig",
    "TrainingStopped",
    "load_run",
    "read_config",
    "train",
]
