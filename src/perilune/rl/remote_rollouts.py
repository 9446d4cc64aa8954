"""Episodes over many processes: `Rollouts` for engines that are elsewhere.

    rollouts = rollouts_on(engine, tokenizer, environments, config)       of this process, or of `RemoteEngines`
    collected = await rollouts.collect(jobs, iteration=3)

Same jobs, same weights, same trajectories, in the same order: bit by bit with a deterministic engine on a CPU. Episodes
are handed out one by one, to whichever process has the fewest, `concurrency` to each at a time. Those of a process that
is lost are played again elsewhere (`Collected.num_again`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.data.tokenizer import Tokenizer
from perilune.rl.environment import Environment
from perilune.rl.remote_engines import RemoteEngines
from perilune.rl.remote_player import Stage
from perilune.rl.rollout import Collected, Job, RolloutConfig, Rollouts, collected
from perilune.rl.talk import Workers
from perilune.serve.async_engine import AsyncEngine


class RemoteRollouts:
    def __init__(
        self,
        engines: RemoteEngines,
        environments: Mapping[str, Environment],
        config: RolloutConfig,
        *,
        workers: Workers | None = None,
    ) -> None:
        """Of `workers` only their settings count: every process has its own."""
        self._engines, self._config = engines, config
        self._stage = Stage(
            environments=dict(environments),
            config=config,
            asides=None if workers is None else workers.config,
            trains_asides=workers is not None and workers.trained,
        )
        self._put: tuple[str, Any] | None = None

    async def collect(self, jobs: Sequence[Job], *, iteration: int) -> Collected:
        """Play all of them. RemoteError when there is no process left to play them."""
        if self._put is None:
            self._put = await self._engines.put(self._stage)
        name, stage = self._put
        before = self._engines.num_again
        most = self._config.concurrency
        tasks = [asyncio.ensure_future(self._engines.play(name, stage, job, most=most)) for job in jobs]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return replace(collected(jobs, found), num_again=self._engines.num_again - before)


def rollouts_on(
    engine: AsyncEngine | RemoteEngines,
    tokenizer: Tokenizer,
    environments: Mapping[str, Environment],
    config: RolloutConfig,
    *,
    workers: Workers | None = None,
) -> Rollouts | RemoteRollouts:
    """Those that fit the engine."""
    if isinstance(engine, RemoteEngines):
        return RemoteRollouts(engine, environments, config, workers=workers)
    return Rollouts(engine, tokenizer, environments, config, workers=workers)
