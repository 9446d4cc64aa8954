"""How an engine is set up, and how much memory its pages and states take.

`EngineConfig` is what a person chooses. `fitted` fills in what depends on model and memory: how many pages there are
and how long a sequence may get.
"""

from dataclasses import dataclass, replace

import torch

from perilune.model import ModelConfig
from perilune.model.deterministic import TILE
from perilune.model.paged import bytes_per_page, bytes_per_slot
from perilune.model.routes import bytes_per_token

GIB = 1 << 30
USUAL_BURST = 8
MOST_NAMES = 1 << 17
"""Pages of a model that keeps no latents: they cost nothing but the bookkeeping."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    page_size: int = 64
    """Tokens in a page; prefixes are shared by whole pages."""
    num_pages: int | None = None
    """None: as many as `memory_gib` leaves room for."""
    memory_gib: float | None = None
    """For pages, states and snapshots. None: 85% of what is free on a GPU, 1 GiB on a CPU."""
    max_sequences: int = 32
    """That run at once."""
    token_budget: int = 2048
    """Tokens that one step computes: decodes first, prompts in chunks with what is left."""
    num_snapshots: int | None = None
    """States kept for the prefix cache. None: one per sequence that may run."""
    snapshot_interval: int = 4096
    """Tokens between two snapshots of a long prompt."""
    prefix_caching: bool = True
    deterministic: bool = False
    """Log-probs bit by bit those of the trainer's forward, whatever else runs; slower."""
    asynchronous: bool | None = None
    """Launch a step before the tokens of the last one are on the host. None: on a GPU, unless deterministic."""
    burst: int | None = None
    """Tokens that a step samples for each answer that is wanted whole, where nothing else is to be done: the host has
    its work once for all of them, and what is sampled after the end of an answer is lost. None: 8 on a GPU, else 1."""
    max_queue: int = 256
    """Requests that may wait; more are refused."""
    max_length: int | None = None
    """Prompt and answer together. None: what the pages hold, at most 1,048,576."""
    patience: int = 64
    """Later requests that may overtake an earlier one per level of priority."""
    record_routes: bool = False
    """Keep the experts that every token met, so that requests can ask for them (SamplingParams.routes): for routing
    replay in reinforcement learning."""

    def __post_init__(self) -> None:
        positive = ("page_size", "max_sequences", "token_budget", "snapshot_interval", "max_queue", "patience")
        for name in positive:
            _at_least(name, getattr(self, name), 1)
        for name, least in (("num_pages", 1), ("num_snapshots", 0), ("max_length", 2)):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least)
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ValueError(f"memory_gib is {self.memory_gib!r}, expected a positive number")
        if self.snapshot_interval % self.page_size:
            raise ValueError(
                f"snapshot_interval is {self.snapshot_interval!r}, expected a multiple of page_size={self.page_size!r}"
            )
        if self.burst is not None:
            _at_least("burst", self.burst, 1)
            most = 1 if self.deterministic else self.page_size
            if self.burst > most:
                raise ValueError(
                    f"burst is {self.burst!r}, expected at most {most}: "
                    + ("deterministic steps wait for tokens" if self.deterministic else "the size of a page")
                )
        border = self.border
        if self.token_budget < self.max_sequences + border:
            raise ValueError(
                f"token_budget is {self.token_budget!r}, expected at least max_sequences={self.max_sequences!r} + "
                f"{border}: one token for every running sequence, and room for a prompt"
            )
        if self.deterministic and self.asynchronous:
            raise ValueError(
                "asynchronous is True, expected False or None with deterministic=True: it waits for tokens"
            )
        if self.page_size % border:
            raise ValueError(
                f"page_size is {self.page_size!r}, expected a multiple of {border} with deterministic=True"
            )

    @property
    def border(self) -> int:
        """Where shares of a sequence may begin: at multiples of it."""
        return TILE if self.deterministic else 1

    def is_asynchronous(self, device: torch.device) -> bool:
        if self.asynchronous is None:
            return device.type == "cuda" and not self.deterministic
        return self.asynchronous

    def rounds(self, device: torch.device) -> int:
        """Of a burst."""
        if self.burst is None:
            return min(USUAL_BURST, self.page_size) if device.type == "cuda" and not self.deterministic else 1
        return self.burst

    @property
    def snapshots(self) -> int:
        if not self.prefix_caching:
            return 0
        return self.max_sequences if self.num_snapshots is None else self.num_snapshots


def fitted(config: EngineConfig, model: ModelConfig, device: torch.device) -> EngineConfig:
    """`config` with `num_pages` and `max_length` decided; ValueError when the memory holds too little to serve."""
    num_pages, max_length = config.num_pages, config.max_length
    if config.record_routes and model.moe is None:
        raise ValueError("record_routes is True, expected False for a model without experts: it has no routes")
    if num_pages is None:
        num_pages = _pages_that_fit(config, model, device)
    longest = num_pages * config.page_size
    max_length = min(longest, 1 << 20) if max_length is None else max_length
    if max_length > longest:
        raise ValueError(
            f"max_length is {max_length!r}, but {num_pages} pages of {config.page_size} tokens hold {longest}: "
            "lower max_length, or raise num_pages or memory_gib"
        )
    return replace(config, num_pages=num_pages, max_length=max_length)


def _pages_that_fit(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    wanted = 1 << 20 if config.max_length is None else config.max_length
    # Twice what all sequences can fill: more would never be used, except to remember old prefixes.
    enough = 2 * config.max_sequences * -(-wanted // config.page_size)
    page = bytes_per_page(model, config.page_size)
    page += config.page_size * bytes_per_token(model) if config.record_routes else 0
    if page == 0:  # no layer keeps latents: a page is only a name for tokens
        return min(enough, MOST_NAMES)
    if config.memory_gib is not None:
        memory = int(config.memory_gib * GIB)
    elif device.type == "cuda":
        memory = int(0.85 * torch.cuda.mem_get_info(device)[0])
    else:
        memory = GIB
    states = (config.max_sequences + config.snapshots + 1) * bytes_per_slot(model)  # one for padding
    num_pages = (memory - states) // page
    if num_pages < 1:
        raise ValueError(
            f"{memory / GIB:.2f} GiB hold no page beside the states of max_sequences={config.max_sequences!r} and "
            f"{config.snapshots} snapshots ({states / GIB:.2f} GiB): raise memory_gib, or lower one of the two"
        )
    return min(num_pages, enough)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")
