"""Which experts every token met: written down while a server computes, taken again while a trainer does.

Server and trainer get the same router scores up to the last bits. Where two experts are almost equal they then choose
different ones, and the log-prob of the token jumps. Routing replay (arXiv 2510.11370) takes this away: the server
records its choice, and the trainer uses it, with weights from its own scores, so that the router still learns:

    recorded    book[l, row of token i] = experts that token i chose in the l-th layer of experts, best first
    replayed    y_i = shared(x_i) + scaling * sum_{e in book[l, i]} s_e / (sum of these s + 1e-20) * expert_e(x_i)

where s = sigmoid(W x) are the scores of whoever replays; gradients flow through those of the recorded experts.

A book is [layers of experts, rows, experts per token] in uint8, in int16 from 257 experts on. Recording writes into a
book made before, at rows named by a tensor on the device: it waits for nothing and can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # a config names the layers, and the layers name what is here
    from perilune.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """Choices go into a book. Tokens past the end of `rows` fill a tile up, and are not recorded."""

    book: Tensor
    """[layers, rows, k]; of one layer [rows, k]"""
    rows: Tensor
    """[tokens] int64: where in the book each token is"""

    def layer(self, index: int) -> Recorded:
        return Recorded(book=self.book[index], rows=self.rows)

    def between(self, start: int, end: int) -> Recorded:
        """Of tokens start .. end."""
        return Recorded(book=self.book, rows=self.rows[start:end])

    def chosen(self, num_tokens: int) -> None:
        """Nothing is given: the router chooses."""

    def record(self, experts_NK: Tensor) -> None:
        """In the book of one layer."""
        self.book.index_copy_(0, self.rows, experts_NK[: len(self.rows)].to(self.book.dtype))


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """Choices come from a book, which has one row per token."""

    book: Tensor
    """[layers, tokens, k]; of one layer [tokens, k]"""

    def layer(self, index: int) -> Replayed:
        return Replayed(book=self.book[index])

    def between(self, start: int, end: int) -> Replayed:
        """Of tokens start .. end."""
        return Replayed(book=self.book[:, start:end])

    def chosen(self, num_tokens: int) -> Tensor:
        """[num_tokens, k] of one layer; tokens past the end of the book fill a tile up, and take the first expert."""
        given = self.book.long()
        missing = num_tokens - len(given)
        return torch.cat([given, given.new_zeros(missing, given.shape[1])]) if missing else given

    def record(self, experts_NK: Tensor) -> None:
        """They are known."""


Routes = Recorded | Replayed


def num_expert_layers(config: ModelConfig) -> int:
    return sum(config.is_moe_layer(index) for index in range(config.num_hidden_layers))


def route_dtype(config: ModelConfig) -> torch.dtype:
    assert config.moe is not None
    return torch.uint8 if config.moe.num_experts <= 256 else torch.int16


def bytes_per_token(config: ModelConfig) -> int:
    """Of a book; 0 for a model without experts."""
    if config.moe is None:
        return 0
    return num_expert_layers(config) * config.moe.num_experts_per_token * route_dtype(config).itemsize


def new_book(config: ModelConfig, num_rows: int, device: torch.device | str | None = None) -> Tensor:
    """[layers of experts, num_rows, k], zeros."""
    if config.moe is None:
        raise ValueError("model.moe is None, expected a model with experts: a dense one has no routes to record")
    shape = (num_expert_layers(config), num_rows, config.moe.num_experts_per_token)
    return torch.zeros(shape, dtype=route_dtype(config), device=device)


def check_routes(routes: Routes, config: ModelConfig, num_tokens: int) -> None:
    """ValueError unless the book is one of this model, with a row for each of `num_tokens` tokens."""
    per_token = 0 if config.moe is None else config.moe.num_experts_per_token
    layers = num_expert_layers(config)
    found = (routes.book.shape[0], len(routes.rows) if isinstance(routes, Recorded) else routes.book.shape[1])
    if (*found, routes.book.shape[2]) != (layers, num_tokens, per_token):
        raise ValueError(
            f"routes has a book of shape {tuple(routes.book.shape)} for {found[1]} tokens, expected {layers} layers of "
            f"experts, {num_tokens} tokens and {per_token} experts per token"
        )
