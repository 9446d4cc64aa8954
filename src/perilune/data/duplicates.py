"""Texts that were there before, exactly or nearly, in one pass and without keeping any of them.

Exact: the hash of the text without white space at line ends. Near: a text is cut into shingles of three neighbouring
lines (blank ones left out, indentation ignored); of their 64-bit hashes those divisible by SAMPLING are its sketch. It
is nearly a copy when at least `threshold` of its sketch was seen in texts before it: copies with a changed version
number or licence, vendored packages, the same file in two releases. What is decided about a text depends only on the
texts before it and their order.
"""

import hashlib

SHINGLE_LINES = 3
SAMPLING = 4
MIN_SKETCH = 4
"""Shorter sketches say too little: such texts are only compared exactly."""


class Duplicates:
    """The texts seen so far, as hashes."""

    def __init__(self, *, threshold: float = 0.6) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold!r} must be in (0, 1]")
        self._threshold = threshold
        self._texts: set[bytes] = set()
        self._shingles: set[int] = set()

    def why_not(self, text: str) -> str | None:
        """Why a text is left out, in a few words; None when it is new, and from now on seen."""
        lines = text.splitlines()
        exact = hashlib.sha256("\n".join(map(str.rstrip, lines)).strip().encode()).digest()[:16]
        if exact in self._texts:
            return "duplicate"
        self._texts.add(exact)
        sketch = sketch_of(lines)
        if len(sketch) >= MIN_SKETCH:
            seen = sum(shingle in self._shingles for shingle in sketch)
            if seen >= self._threshold * len(sketch):
                return "near duplicate"
        self._shingles.update(sketch)
        return None


def sketch_of(lines: list[str]) -> set[int]:
    """Hashes of a sample of the shingles; which ones depends on the shingle alone."""
    stripped = [line for line in map(str.strip, lines) if line]
    found = set()
    for start in range(len(stripped) - SHINGLE_LINES + 1):
        shingle = "\n".join(stripped[start : start + SHINGLE_LINES])
        value = int.from_bytes(hashlib.blake2b(shingle.encode(), digest_size=8).digest(), "little")
        if value % SAMPLING == 0:
            found.add(value)
    return found
