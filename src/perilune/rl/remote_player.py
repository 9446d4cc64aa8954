"""One process that plays episodes for a run elsewhere: an engine of its own with the run's weights, and `Rollouts`.

Runs as an actor of Ray (remote_engines.py), but knows nothing of Ray. What it returns is what the run would have got by
itself: an episode depends on its job and the weights alone. With a deterministic engine it computes with as many
threads as the run has, so that the last bits agree as well.
"""

import asyncio
import contextlib
import os
import socket
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, ModelConfig
from perilune.rl.environment import Environment
from perilune.rl.rollout import Failure, Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig, Workers
from perilune.rl.trajectory import Trajectory
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig

MOST_STAGES = 4
"""Kept at once: that of training, and those of the last evaluations."""
PlainWeights = Mapping[str, tuple[np.ndarray, str, tuple[int, ...]]]
"""Bytes, dtype and shape by name: arrays are what Ray hands from process to process without a copy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EnginePlan:
    """An engine that is to be made."""

    model: ModelConfig
    tokenizer: Tokenizer
    config: EngineConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayerPlan:
    """What a player is, whatever it plays."""

    policy: EnginePlan
    frozen: EnginePlan | None
    """Of those who play asides and are not trained."""
    device: str
    num_threads: int
    folder: str
    """Of the run's process: files that environments name are looked for from there, where it exists."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What is played: environments and how."""

    environments: Mapping[str, Environment]
    config: RolloutConfig
    asides: TalkConfig | None
    """Of those who play asides; None: nobody does."""
    trains_asides: bool


class Player:
    def __init__(self, plan: PlayerPlan) -> None:
        self._plan = plan
        self._stages: OrderedDict[str, Rollouts] = OrderedDict()  # least recently used first
        self._fetching = asyncio.Lock()

    async def open(self, weights: PlainWeights, version: int, frozen: PlainWeights | None) -> tuple[str, int]:
        """Make the engines; the machine and process it is."""
        plan = self._plan
        torch.set_num_threads(plan.num_threads)
        with contextlib.suppress(OSError):
            os.chdir(plan.folder)
        self._engine = await asyncio.to_thread(_engine, plan.policy, weights, version, plan.device)
        self._frozen: AsyncEngine | None = None
        if plan.frozen is not None and frozen is not None:
            self._frozen = await asyncio.to_thread(_engine, plan.frozen, frozen, 0, plan.device)
        return socket.gethostname(), os.getpid()

    async def ping(self) -> None:
        """Answers as long as the event loop runs."""

    async def load(self, weights: PlainWeights, version: int) -> None:
        await self._engine.load_weights(tensors_of(weights), version)

    async def play(self, name: str, stage: Sequence[Awaitable[Stage]], job: Job) -> Trajectory | Job | Failure:
        """An episode of the stage with this name, which is fetched once and kept for a while."""
        async with self._fetching:
            if name not in self._stages:
                self._stages[name] = self._rollouts(await stage[0])
            self._stages.move_to_end(name)
            rollouts = self._stages[name]
            if len(self._stages) > MOST_STAGES:
                await self._stages.popitem(last=False)[1].close()
        return await rollouts.play(job)

    def _rollouts(self, stage: Stage) -> Rollouts:
        policy, frozen = self._plan.policy, self._plan.frozen
        workers = None
        if stage.asides is not None and stage.trains_asides:
            workers = Workers(engine=self._engine, tokenizer=policy.tokenizer, config=stage.asides, trained=True)
        elif stage.asides is not None and self._frozen is not None and frozen is not None:
            workers = Workers(engine=self._frozen, tokenizer=frozen.tokenizer, config=stage.asides)
        return Rollouts(self._engine, policy.tokenizer, stage.environments, stage.config, workers=workers)


def _engine(plan: EnginePlan, weights: PlainWeights, version: int, device: str) -> AsyncEngine:
    model = Decoder(plan.model)
    model.load_state_dict(tensors_of(weights))
    return AsyncEngine(Engine(model, plan.tokenizer, plan.config, device=device, weight_version=version))


# --- weights ----------------------------------------------------------------------------------------------------------


def plain_weights(model: nn.Module) -> PlainWeights:
    """A copy on the host."""
    found = {}
    for name, value in model.state_dict().items():
        flat = value.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
        found[name] = (flat.numpy(), str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return found


def tensors_of(weights: PlainWeights) -> dict[str, Tensor]:
    """To be read only: several processes may look at the same memory."""
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (flat, dtype_name, shape) in weights.items():
            dtype = getattr(torch, dtype_name)
            # A view of no bytes at all is refused.
            found[name] = (
                torch.from_numpy(flat).view(dtype).reshape(shape) if flat.size else torch.empty(shape, dtype=dtype)
            )
    return found
