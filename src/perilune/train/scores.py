"""Scores of single tokens, for sequences of any length: logits exist for a piece of the sequence at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from perilune.model import Decoder

PIECE_ELEMENTS = 1 << 26
"""Logits held at a time."""


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Eval mode without gradients, and back to the mode before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def token_scores(model: Decoder, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of every target in nats, float32 [B, T], and whether it is the most likely token, bool [B, T].

    Rows are documents of their own, seen from their first token on.
    """
    hidden = model.hidden(tokens_BT).flatten(0, 1)
    targets = targets_BT.flatten()
    nats = torch.empty(len(targets), device=hidden.device)
    right = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
    step = max(1, PIECE_ELEMENTS // model.config.vocab_size)
    for start in range(0, len(targets), step):
        piece = slice(start, start + step)
        logits = model.logits(hidden[piece]).float()
        nats[piece] = torch.nn.functional.cross_entropy(logits, targets[piece], reduction="none")
        right[piece] = logits.argmax(-1) == targets[piece]
    return nats.view(targets_BT.shape), right.view(targets_BT.shape)
