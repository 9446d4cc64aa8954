"""Checks that a small model can pass already, beside its loss: kinds of text, and whether it copies from its context.

    bits per byte     of every domain of the held-out text (folders, or what the records of a corpus say they are)
    copying           random tokens twice: how many of the second time are right (copying.py)

A change that helps one kind of text and hurts another, or that buys loss and no copying, shows here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from perilune.data import Tokenizer, ValidationSet
from perilune.model import Decoder
from perilune.train.copying import copy_accuracy
from perilune.train.evaluate import validate

ROWS = 16
"""Of each domain: 16,384 tokens in rows of 1,024."""
COPY_LENGTHS = (16, 64)
COPY_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Downstream:
    domains: Mapping[str, float] = field(default_factory=dict)
    """Bits per byte, the largest domain first."""
    copying: Mapping[str, float] = field(default_factory=dict)
    """Share of right tokens, by how many there are to copy; lengths that a row cannot hold are left out."""


def downstream(
    model: Decoder, tokenizer: Tokenizer, valid: ValidationSet, *, seq_len: int, device: torch.device
) -> Downstream:
    """What the model, as it is now, does with the held-out text of a run and with copies."""
    sizes = {"rows": ROWS, "micro_batch_rows": ROWS, "device": device}
    return Downstream(
        domains={
            domain: validate(model, ValidationSet(store, seq_len), **sizes)["bits_per_byte"]
            for domain, store in valid.store.by_domain().items()
        },
        copying={
            str(length): copy_accuracy(model, tokenizer, length=length, rows=COPY_ROWS, device=device)["accuracy"]
            for length in COPY_LENGTHS
            if 2 * length <= seq_len
        },
    )
