"""Multi-query associative recall (Zoology, arXiv 2312.04927).

    k4 v9 k1 v2 . . k7 v5 .  | . k1 v2 k7 v5 . . k1 v2          . is noise, answers are the values of the second part

First every pair is shown once, then as many questions ask for keys at random. (Were each asked for once, the last
answers would follow from the others.) Pairs and questions are spread over their halves at random, with noise symbols in
between, so that neither the distance nor the place gives a value away. Keys, values and noise are different symbols. A
model has to hold all pairs at once: their number is the capacity asked for, the length only the distance.
"""

import numpy as np

from perilune.data.probes.draws import Draws

NOISE = 16
"""Symbols that mean nothing, the first of the vocabulary."""
TOKENS_PER_PAIR = 16
"""By default a row of T tokens has T / 16 pairs."""


def generate(draws: Draws, *, seq_len: int, vocab_size: int, num_pairs: int | None) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [N, seq_len + 1] and where the answers are among the targets, bool [N, seq_len]."""
    pairs = max(1, seq_len // TOKENS_PER_PAIR) if num_pairs is None else num_pairs
    symbols = (vocab_size - NOISE) // 2
    if pairs > symbols:
        raise ValueError(
            f"probe.num_pairs is {pairs}, more than the {symbols} keys of vocab_size={vocab_size}: "
            "raise data.vocab_size"
        )
    if 4 * pairs > seq_len:
        raise ValueError(
            f"probe.num_pairs={pairs} needs {4 * pairs} tokens, but seq_len is {seq_len}: "
            "every pair is shown, and asked for"
        )
    count = len(draws.rows)
    keys = NOISE + draws.choice(symbols, stream=1, count=pairs)
    values = NOISE + symbols + draws.below(symbols, stream=2, count=pairs)
    asked = draws.below(pairs, stream=3, count=pairs)
    tokens = draws.below(NOISE, stream=4, count=seq_len + 1)
    # The last input must have its target, so pairs occupy tokens 0 .. seq_len; the question part takes what is left.
    half = (seq_len + 1) // 2
    shown_at = _places(draws, pairs, half, stream=5)
    asked_at = half + _places(draws, pairs, seq_len + 1 - half, stream=6)
    row = np.arange(count)[:, None]
    tokens[row, shown_at], tokens[row, shown_at + 1] = keys, values
    tokens[row, asked_at], tokens[row, asked_at + 1] = keys[row, asked], values[row, asked]
    answers = np.zeros((count, seq_len), dtype=bool)
    answers[row, asked_at] = True  # the target of a key is the token after it
    return tokens, answers


def _places(draws: Draws, pairs: int, length: int, *, stream: int) -> np.ndarray:
    """Where `pairs` blocks of two begin in `length` tokens, ascending: every arrangement is as likely as any other."""
    gaps = length - 2 * pairs
    chosen = np.sort(draws.choice(gaps + pairs, stream=stream, count=pairs), axis=1)
    return chosen + np.arange(pairs)
