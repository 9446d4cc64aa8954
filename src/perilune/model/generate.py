"""Decoding without a server: prefill, then one token at a time through the cache, as a stream of token ids.

Token number n is drawn as model/sampling.py says with uniform(seed, n), so the serving engine gives the same tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from perilune.model.decoder import Decoder
from perilune.model.sampling import FINE, PROBLEMS, Settings, draw, uniform
from perilune.model.vision import MediaInput


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    max_new_tokens: int = 128
    temperature: float = 0.8
    """0 is greedy."""
    top_p: float = 0.95
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this share of the largest one; 0 keeps all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, got {self.max_new_tokens!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be >= 0 (0 is greedy) and finite, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all), got {self.top_k!r}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed!r}")


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    *,
    stop: frozenset[int] = frozenset(),
    forbidden: Sequence[int] = (),
    media: MediaInput | None = None,
) -> Iterator[int]:
    """Yield new token ids one by one; ends before a stop token. `forbidden` ids are never sampled.

    `media` are the pictures of the prompt, with positions in it.
    """
    tokens = [int(token) for token in prompt]
    vocab_size = model.config.vocab_size
    if not tokens:
        raise ValueError("the prompt must hold at least one token: begin with the document-start token")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(f"the prompt holds {max(tokens)!r} and {min(tokens)!r}, expected ids in [0, {vocab_size})")
    if media is not None and len(media.positions) and not 0 <= int(media.positions.max()) < len(tokens):
        raise ValueError(
            f"media.positions reaches {int(media.positions.max())!r}, expected indices into the {len(tokens)} tokens "
            "of the prompt"
        )
    if len(set(forbidden)) >= vocab_size:
        raise ValueError(f"all {vocab_size} tokens are forbidden: nothing is left to sample")
    was_training = model.training
    model.eval()
    try:
        device = model.embed_tokens.weight.device
        banned = torch.tensor(list(forbidden), dtype=torch.long)
        cache = model.new_cache()
        feed, shown = tokens, None if media is None else media.to(device)
        for index in range(sampling.max_new_tokens):
            hidden = model.hidden(torch.tensor([feed], device=device), cache=cache, media=shown)
            logits = model.logits(hidden[:, -1]).double().cpu()
            logits[:, banned] = float("-inf")
            ids, problems = draw(logits, _settings(sampling, index))
            token, problem = int(ids[0]), int(problems[0])
            if problem != FINE:
                raise ValueError(f"token {index} after the prompt cannot be sampled: {PROBLEMS[problem]}")
            if token in stop:
                return
            yield token
            feed, shown = [token], None
    finally:
        model.train(was_training)


def _settings(sampling: SamplingConfig, index: int) -> Settings:
    """Those of a batch of one row."""
    return Settings(
        temperature=[sampling.temperature],
        top_k=[sampling.top_k],
        top_p=[sampling.top_p],
        min_p=[sampling.min_p],
        uniform=[uniform(sampling.seed, index)],
    )
