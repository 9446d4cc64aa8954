"""Reversal: T / 2 symbols, a separator, the same symbols from the last to the first; the second half is the answer.

    c a b a | a b a c

The last symbol is asked for at once, the first after all others: every distance up to T is needed, and nothing may be
forgotten before its turn.
"""

import numpy as np

from perilune.data.probes.draws import Draws

SEPARATOR = 0


def generate(draws: Draws, *, seq_len: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [N, seq_len + 1] and where the answers are among the targets, bool [N, seq_len]."""
    length = seq_len // 2
    symbols = 1 + draws.below(vocab_size - 1, stream=1, count=length)
    separator = np.full((len(symbols), seq_len + 1 - 2 * length), SEPARATOR, dtype=np.int64)  # two for an odd length
    tokens = np.concatenate([symbols, separator, symbols[:, ::-1]], axis=1)
    answers = np.zeros((len(symbols), seq_len), dtype=bool)
    answers[:, -length:] = True
    return tokens, answers
