"""Dialogues that the models of benchmarks/parl_models.py are fine-tuned on, written by all cores at once.

    python benchmarks/parl_traces.py FILE                             9 in 10 serial, six in ten delegations well-formed
    python benchmarks/parl_traces.py FILE --mix well-formed           the control: all delegations are
    python benchmarks/parl_traces.py FILE --mix all-at-once           those that are hand out every item at once

Well-formed delegations hand out one item at a time, most of them; what that means for the experiment, a policy of a
dozen numbers shows in minutes (parl_simulated.py).

Beside them are dialogues in which the prompt says to hand out everything at once (--told): with the few of the others a
model of 21M parameters did not learn how (it lost 35 to 75 nats on such a turn, and as many on the answer after it).

A script of its own because every process of a pool reads its main script again, and this one imports no torch: twelve
processes begin within a second. What is written depends on the settings alone, not on the number of cores.

Every part has a library of its own, with the words of the environment's and none of its facts: a model that sees every
name with a dozen values learns to read them, not to know them.
"""

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_traces import AT_ONCE, WIDTHS, TraceConfig, traces

Mix = Literal["mostly-serial", "well-formed", "all-at-once"]
PARTS = 12
"""Of the traces, each with a seed and a library of its own, made side by side."""
OTHER_LIBRARIES = 1_000_000
"""Seeds of these libraries begin here; those that pre-training reads lie below."""
MIXES: dict[Mix, tuple[float, Mapping[int | None, float]]] = {
    "mostly-serial": (0.6, WIDTHS), "well-formed": (1.0, WIDTHS), "all-at-once": (0.6, AT_ONCE),
}  # fmt: skip
"""Of the delegations, a tenth in each of them: the well-formed ones, and these by how many items they hand out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    file: tyro.conf.Positional[Path]
    mix: Mix = "mostly-serial"
    orchestrators: int = 9000
    workers: int = 15_000
    """Dialogues of each role."""
    told: int = 1500
    """Dialogues whose prompt says to hand out everything at once: how it is done, not when."""
    seed: int = 0
    tiny: bool = False
    """From a small library, in one part."""


def environment_of(*, tiny: bool, **more: Any) -> WideSearch:
    """The task; in miniature with a small library."""
    if tiny:
        more = {"corpus": CorpusConfig(pages=400), "worker_steps": 3, **more}
    return WideSearch(**{"reply_tokens": 1024, "worker_reply_tokens": 192, **more})


def trace_configs(settings: Settings) -> list[TraceConfig]:
    """Of every part; together as many dialogues as asked for."""
    parts = 1 if settings.tiny else PARTS
    return [
        TraceConfig(
            orchestrators=len(range(part, settings.orchestrators, parts)),
            workers=len(range(part, settings.workers, parts)),
            told=len(range(part, settings.told, parts)),
            well_formed=MIXES[settings.mix][0],
            widths=MIXES[settings.mix][1],
            seed=settings.seed * PARTS + part,
            environment=environment_of(tiny=settings.tiny, corpus=_library(settings, part)),
        )
        for part in range(parts)
    ]


def _library(settings: Settings, part: int) -> CorpusConfig:
    seed = OTHER_LIBRARIES + settings.seed * PARTS + part
    return CorpusConfig(pages=400, seed=seed) if settings.tiny else CorpusConfig(seed=seed)


def write(settings: Settings) -> None:
    """Complete or not at all."""
    settings.file.parent.mkdir(parents=True, exist_ok=True)
    partial = settings.file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for lines in _made(trace_configs(settings)):
            file.writelines(lines)
    partial.replace(settings.file)


def _made(configs: list[TraceConfig]) -> Iterator[list[str]]:
    if len(configs) == 1:
        yield _lines(configs[0])
        return
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(configs), os.cpu_count() or 1), mp_context=spawned) as pool:
        yield from pool.map(_lines, configs)


def _lines(config: TraceConfig) -> list[str]:
    return [trace.line for trace in traces(config)]


if __name__ == "__main__":
    write(tyro.cli(Settings, description=__doc__))
