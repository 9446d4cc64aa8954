"""Random numbers by address: draw k of row n is a hash of (seed, n, k), the same on every machine and numpy version."""

from dataclasses import dataclass

import numpy as np

from perilune.data.packing import mix64_each

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draws:
    """Draws for several rows at once; each call takes a stream of its own, so that tasks can add calls freely."""

    seed: int
    rows: np.ndarray
    """int64 [N]: numbers of the rows."""

    def words(self, stream: int, count: int) -> np.ndarray:
        """uint64 [N, count], uniform."""
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
            base = mix64_each(np.array([self.seed & _MASK], dtype=np.uint64)) + np.uint64(stream)
            base = mix64_each(mix64_each(base) + self.rows.astype(np.uint64))
            return mix64_each(base[:, None] + np.arange(count, dtype=np.uint64)[None, :])

    def below(self, bound: int, stream: int, count: int) -> np.ndarray:
        """int64 [N, count] in [0, bound)."""
        return (self.words(stream, count) % np.uint64(bound)).astype(np.int64)

    def choice(self, options: int, stream: int, count: int) -> np.ndarray:
        """int64 [N, count]: different numbers in [0, options), in random order."""
        words = self.words(stream, options)
        if 4 * count > options:
            return np.argsort(words, axis=1, kind="stable")[:, :count]
        # The same numbers: of few, only the smallest words have to be in order.
        smallest = np.argpartition(words, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(words, smallest, axis=1), axis=1)
        return np.take_along_axis(smallest, order, axis=1)
