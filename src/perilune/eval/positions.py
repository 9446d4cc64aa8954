"""Loss by position: what a token is worth after 100 tokens of context, after 1,000, after 60,000.

Rows of one length are read from the held-out text, each as one document. Buckets double: [0, 64), [64, 128), ... A
model that uses its context gets better with every bucket; one that breaks beyond the length it was trained at shows
where. Buckets hold different text, so they compare well between models on the same rows, and less well with each other:
differences below their standard errors mean nothing.
"""

import math

import numpy as np
import torch

from perilune.eval.held_out import HeldOut
from perilune.model import Decoder
from perilune.train.scores import evaluating, token_scores

FIRST_BUCKET = 64


def loss_by_position(
    model: Decoder, held_out: HeldOut, *, length: int, rows: int, device: torch.device
) -> list[dict[str, float]]:
    """A record for each bucket: its borders, nats a token, bits a byte, tokens, and the standard error of the nats."""
    available = len(held_out.text) // length
    if available < 1:
        raise ValueError(
            f"--positions is {length}, but the held-out text has only {len(held_out.text)} tokens: "
            "take a smaller length, or another corpus with --corpus"
        )
    borders = bucket_borders(length)
    sums = np.zeros((len(borders) - 1, 4))  # tokens, nats, nats squared, bytes
    with evaluating(model):
        for row in range(min(rows, available)):
            # [BOS] stands in the place of the token before: every document that was trained on begins with it.
            tokens = np.append(held_out.bos_id, held_out.text[row * length : (row + 1) * length])
            on_device = torch.from_numpy(tokens).to(device)
            nats, _ = token_scores(model, on_device[None, :-1], on_device[None, 1:])
            nats = nats[0].double().cpu().numpy()
            sizes = held_out.bytes_per_token[tokens[1:]]
            for bucket, (start, stop) in enumerate(zip(borders, borders[1:])):
                part = nats[start:stop]
                sums[bucket] += [len(part), part.sum(), np.square(part).sum(), sizes[start:stop].sum()]
    return [
        {
            "from": start,
            "to": stop,
            "tokens": int(count),
            "nats": total / count,
            "standard_error": math.sqrt(max(0.0, squares / count - (total / count) ** 2) / count),
            "bits_per_byte": total / math.log(2) / size if size else math.nan,
        }
        for start, stop, (count, total, squares, size) in zip(borders, borders[1:], sums)
    ]


def bucket_borders(length: int) -> list[int]:
    """0, 64, 128, ... up to and with `length`."""
    borders = [0]
    while borders[-1] < length:
        borders.append(min(length, max(FIRST_BUCKET, 2 * borders[-1])))
    return borders
