"""What a scaling ladder is: rungs x arms x seeds, each trained to several token horizons, and the cells it consists of.

A rung is the recipe at one size. An arm is a change of any field of it (optimizer, pattern of layers, residual, data),
made on every rung alike or with values for a rung of its own, such as a tuned learning rate. A cell is one arm on one
rung with one seed: one run that goes on at a constant learning rate (the trunk), from which each horizon branches off
to decay (WSD, arXiv 2404.06395), so that a run of the longest horizon gives a point for each.

Arms are paired: with the same seed they see the same rows in the same order, and start from the same weights where both
have them. All arms of a rung train on the tokens that the baseline's size asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perilune.model import ModelConfig
from perilune.train import RunConfig, ScheduleConfig
from perilune.train.config_file import from_plain, to_plain

OWN_SOURCES = ("stdlib", "generated")


@dataclass(frozen=True, kw_only=True)
class Rung:
    name: str
    config: RunConfig
    """The recipe at this size, before an arm changes it; steps, schedule, seed and name are the ladder's."""
    is_held_out: bool = False
    """Predicted from the others before it is run, and left out of fits."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values by path: {"optimizer.kind": "adamw", "optimizer.lr": 3e-3}."""
    by_rung: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More of them for a rung by name."""


@dataclass(frozen=True, kw_only=True)
class Horizon:
    name: str
    tokens_per_parameter: float
    """Parameters of the baseline that take part in products: all but the embedding."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    name: str
    rungs: tuple[Rung, ...]
    arms: tuple[Arm, ...]
    """The first is the baseline."""
    seeds: tuple[int, ...] = (0, 1, 2)
    horizons: tuple[Horizon, ...] = (Horizon(name="1x", tokens_per_parameter=20.0),)
    decay_fraction: float = 0.2
    """Share of a horizon's steps that its decay takes."""
    warmup_fraction: float = 0.02
    """Share of the shortest horizon's steps."""
    max_epochs: float = 4.0
    question: str = ""
    """What it is to answer, in a sentence; stands above its report."""
    combinations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """An arm with the changes of several others, and those others: do their gains multiply?"""

    def __post_init__(self) -> None:
        for what, names in (
            ("rungs", [rung.name for rung in self.rungs]),
            ("arms", [arm.name for arm in self.arms]),
            ("horizons", [horizon.name for horizon in self.horizons]),
            ("seeds", list(self.seeds)),
        ):
            if not names:
                raise ValueError(f"ladder {self.name!r} has no {what}")
            if len(set(names)) != len(names):
                raise ValueError(f"ladder {self.name!r}: {what} {names!r} are not all different")
        for name in [*(rung.name for rung in self.rungs), *(arm.name for arm in self.arms), self.name]:
            if not name or not all(letter.isalnum() or letter in "-_." for letter in name) or name.startswith("."):
                raise ValueError(f"{name!r} names files: expected letters, digits, '-', '_' and '.'")
        for arm in self.arms:
            for rung in arm.by_rung:
                if rung not in {each.name for each in self.rungs}:
                    raise ValueError(f"arm {arm.name!r} has values for rung {rung!r}, which is not in the ladder")
        names = {arm.name for arm in self.arms[1:]}
        for combined, singles in self.combinations.items():
            for name in (combined, *singles):
                if name not in names:
                    raise ValueError(f"combination {combined!r} names {name!r}, which is no arm beside the baseline")
        if not 0 < self.decay_fraction <= 1 or not 0 <= self.warmup_fraction <= 1:
            raise ValueError("decay_fraction and warmup_fraction are shares: expected numbers between 0 and 1")
        if any(horizon.tokens_per_parameter <= 0 for horizon in self.horizons):
            raise ValueError("a horizon needs more than 0 tokens per parameter")

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def rung(self, name: str) -> Rung:
        return next(rung for rung in self.rungs if rung.name == name)

    def with_rungs(self, rungs: Sequence[Rung]) -> Ladder:
        """The same ladder with some of its rungs; what arms say of the others goes with them."""
        names = {rung.name for rung in rungs}
        arms = (
            replace(arm, by_rung={rung: values for rung, values in arm.by_rung.items() if rung in names})
            for arm in self.arms
        )
        return replace(self, rungs=tuple(rungs), arms=tuple(arms))

    def ordered_horizons(self) -> tuple[Horizon, ...]:
        return tuple(sorted(self.horizons, key=lambda horizon: horizon.tokens_per_parameter))

    def cells(self, *, held_out: bool = False) -> Iterator[Cell]:
        """Cheap rungs first, and all arms of a seed before the next seed: what is there first compares already."""
        for rung in self.rungs:
            if rung.is_held_out == held_out:
                for seed in self.seeds:
                    for arm in self.arms:
                        yield Cell(rung=rung, arm=arm, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Cell:
    rung: Rung
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rung.name}+{self.arm.name}+{self.seed}"

    def config(self) -> RunConfig:
        """The recipe with the arm's changes and the seed; ValueError names a field that does not exist."""
        plain = to_plain(self.rung.config)
        for path, value in {**self.arm.changes, **self.arm.by_rung.get(self.rung.name, {})}.items():
            _set(plain, path, to_plain(value), arm=self.arm.name)
        config = from_plain(RunConfig, plain)
        quiet = replace(config.trainer, report=False, tensorboard=False, tracker=None, sample_prompts=())
        return replace(config, name=self.name, seed=self.seed, trainer=quiet)


def trunk(config: RunConfig, *, steps: int, warmup_steps: int) -> RunConfig:
    """The run up to where a horizon branches off."""
    schedule = ScheduleConfig(kind="constant", warmup_steps=warmup_steps)
    trainer = replace(config.trainer, steps=steps, eval_every=0, keep_last=1)
    return replace(config, schedule=schedule, trainer=trainer)


def branch(config: RunConfig, *, horizon: Horizon, start: int, steps: int, warmup_steps: int) -> RunConfig:
    """The decay of a horizon, from `start` on."""
    schedule = replace(config.schedule, kind="wsd", warmup_steps=warmup_steps, decay_steps=steps - start)
    trainer = replace(config.trainer, steps=steps, eval_every=0, keep_last=1)
    return replace(config, name=f"{config.name}+{horizon.name}", schedule=schedule, trainer=trainer)


def fingerprint(*configs: RunConfig, start: ModelConfig) -> str:
    """Of everything that decides a result: the configs, and the model whose initial weights are shared.

    Names, the device, ranks and how often something is written do not, nor do positions of the model that lends its
    initial weights, which have none; what lies under the corpus' path is compared by content (`Result.corpus`).
    """
    plain = [to_plain(config) for config in configs]
    for each in plain:
        for name in ("name", "parallel"):
            each.pop(name)
        each["optimizer"].pop("payload_dtype")
        for name in ("device", "log_every", "checkpoint_every", "micro_batch_rows", "keep_last", "max_bad_steps"):
            each["trainer"].pop(name)
        for name in ("hang_timeout_s", "cuda_graphs"):
            each["trainer"].pop(name)
        each["data"].pop("cache_dir")
        if each["data"]["corpus"]["source"] not in OWN_SOURCES:
            each["data"]["corpus"].pop("source")
    lender = replace(start, mla=replace(start.mla, rope=None))
    text = json.dumps([*plain, to_plain(lender)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _set(plain: dict[str, Any], path: str, value: Any, *, arm: str) -> None:
    *parents, last = path.split(".")
    at: Any = plain
    for name in parents:
        at = at.get(name) if isinstance(at, dict) else None
    if not isinstance(at, dict) or last not in at:
        raise ValueError(f"arm {arm!r} changes {path!r}, which is not a field of a run")
    at[last] = value
