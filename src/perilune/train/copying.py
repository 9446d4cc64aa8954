"""Induction: random tokens, then the same tokens again. The second time every token but the first follows from context.

    [BOS] a f q c ... a f q c ...

No knowledge of language helps, so the accuracy on the second half shows whether a model looks things up in its context
(arXiv 2209.11895). It appears in small models and early in training.
"""

import numpy as np
import torch

from perilune.data.probes.draws import Draws
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.train.scores import evaluating, token_scores


def copy_accuracy(
    model: Decoder, tokenizer: Tokenizer, *, length: int, rows: int, device: torch.device, seed: int = 0
) -> dict[str, float]:
    """Share of right tokens in the second half, nats a token there and in the first, of `length` random tokens."""
    if length < 2:
        raise ValueError(f"length={length!r}: expected at least 2 tokens to copy")
    text_tokens = np.flatnonzero(np.asarray(tokenizer.bytes_per_token) > 0)
    drawn = text_tokens[Draws(seed, np.arange(rows)).below(len(text_tokens), stream=length, count=length)]
    whole = np.concatenate([np.full((rows, 1), tokenizer.bos_id), drawn, drawn], axis=1)
    nats, right = [], []
    with evaluating(model):
        for row in torch.from_numpy(whole).to(device):
            row_nats, row_right = token_scores(model, row[None, :-1], row[None, 1:])
            nats.append(row_nats[0])
            right.append(row_right[0])
    nats_RT, right_RT = torch.stack(nats).double(), torch.stack(right).double()
    # The first token of the second half cannot be known.
    return {
        "length": length,
        "accuracy": float(right_RT[:, length + 1 :].mean()),
        "nats": float(nats_RT[:, length + 1 :].mean()),
        "nats_first_half": float(nats_RT[:, :length].mean()),
    }
