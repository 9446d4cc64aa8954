"""Learning-rate schedules as one pure function of the step.

    lr(step) = base_lr * min(warmup(step), decay(step))

    warmup(s) = (s + 1) / warmup_steps                 rises, reaches 1 on the last warm-up step, never 0
    "wsd"      1 until the last `decay_steps` steps, then falls to `final_fraction`   (arXiv 2404.06395)
                   linear:   1 - (1 - f) p              p = progress through the decay in [0, 1]
                   one_minus_sqrt: 1 - (1 - f) sqrt(p)  (arXiv 2405.18392)
    "cosine"   f + (1 - f) (1 + cos(pi p)) / 2 over everything after the warm-up
    "constant" 1

`p` reaches 1 at `total_steps`, one past the last step, so that no step of a run is spent at lr 0.
The minimum (not the product) lets a run shorter than warm-up + decay still rise and then fall.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    """Share of the run the WSD decay takes; ignored when `decay_steps` is given."""
    decay_steps: int | None = None
    decay_shape: Literal["linear", "one_minus_sqrt"] = "one_minus_sqrt"
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("wsd", "cosine", "constant"):
            raise ValueError(f'schedule.kind is {self.kind!r}, expected "wsd", "cosine" or "constant"')
        if self.decay_shape not in ("linear", "one_minus_sqrt"):
            raise ValueError(f'schedule.decay_shape is {self.decay_shape!r}, expected "linear" or "one_minus_sqrt"')
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps is {self.warmup_steps!r}, expected 0 or more")
        if not 0.0 <= self.decay_fraction <= 1.0:
            raise ValueError(f"schedule.decay_fraction is {self.decay_fraction!r}, expected a share between 0 and 1")
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ValueError(f"schedule.decay_steps is {self.decay_steps!r}, expected 0 or more, or None")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(f"schedule.final_fraction is {self.final_fraction!r}, expected a share between 0 and 1")


def decay_steps(config: ScheduleConfig, total_steps: int) -> int:
    """How many of `total_steps` the WSD decay takes."""
    wanted = config.decay_steps if config.decay_steps is not None else round(config.decay_fraction * total_steps)
    return min(wanted, total_steps)


def lr_at(step: int, config: ScheduleConfig, total_steps: int) -> float:
    """The multiplier in [0, 1] of the base learning rate for the 0-based optimizer step `step`."""
    if step < 0:
        raise ValueError(f"step is {step!r}, expected 0 or more")
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps!r}, expected 1 or more")
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return min(warmup, _decay(step, config, total_steps))


def _decay(step: int, config: ScheduleConfig, total_steps: int) -> float:
    fall = 1.0 - config.final_fraction
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":
        start = min(config.warmup_steps, total_steps - 1)
        progress = min(1.0, max(0.0, (step - start) / (total_steps - start)))
        return config.final_fraction + fall * 0.5 * (1.0 + math.cos(math.pi * progress))
    length = decay_steps(config, total_steps)
    if length == 0:
        return 1.0
    progress = min(1.0, max(0.0, (step - (total_steps - length)) / length))
    return 1.0 - fall * (progress if config.decay_shape == "linear" else math.sqrt(progress))
