"""Pages: the places of latents, and which of them hold a prefix that somebody may ask for again.

A page has room for `page_size` tokens. A page whose tokens are all computed gets the hash of its block,

    hash_i = sha256(hash_{i-1}, tokens of block i, keys and places of the pictures in it),   hash_{-1} = root

where the root names the salt and the epoch of the weights. Equal hash, equal prefix: equal content. A released page
keeps its content and its hash until the page is needed for something else, the one unused for longest first and the
end of a sequence before its beginning. No torch: a page is a number.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from perilune.serve.request import Picture


def root_hash(salt: str, epoch: int) -> bytes:
    return hashlib.sha256(f"{epoch}\n{salt}".encode()).digest()


def block_hashes(
    known: list[bytes], root: bytes, tokens: Sequence[int], page_size: int, pictures: Sequence[Picture] = ()
) -> None:
    """Extend `known`, hashes of the first blocks of `tokens`, by those of the full blocks after them."""
    for index in range(len(known), len(tokens) // page_size):
        start, end = index * page_size, (index + 1) * page_size
        digest = hashlib.sha256(known[-1] if known else root)
        digest.update(array("q", tokens[start:end]).tobytes())
        for picture in pictures:
            if picture.start < end and picture.end > start:
                digest.update(picture.key + picture.start.to_bytes(8, "little"))
        known.append(digest.digest())


class Pages:
    """Counts references to `num_pages` pages and remembers what the unused ones still hold."""

    def __init__(self, num_pages: int, page_size: int, *, on_evict: Callable[[bytes], None] | None = None) -> None:
        """`on_evict` hears the hash of a page whose content is given up."""
        self.num_pages, self.page_size = num_pages, page_size
        self._on_evict = on_evict
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused = OrderedDict.fromkeys(range(num_pages))  # the first is taken first

    @property
    def num_free(self) -> int:
        """Pages that nobody uses, with a remembered prefix or without."""
        return len(self._unused)

    @property
    def num_remembered(self) -> int:
        return len(self._page_of)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Pages to write to. Whoever asks has looked at `num_free`."""
        assert count <= len(self._unused), f"{count} pages asked for, {len(self._unused)} free"
        taken = []
        for _ in range(count):
            page, _ = self._unused.popitem(last=False)
            self._forget(page)
            self._references[page] = 1
            taken.append(page)
        return taken

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest remembered beginning of this chain of blocks."""
        found = []
        for block in hashes:
            page = self._page_of.get(block)
            if page is None:
                break
            found.append(page)
        return found

    def num_unused(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody uses at the moment, so that sharing them takes from `num_free`."""
        return sum(self._references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more user of matched pages."""
        for page in pages:
            self._references[page] += 1
            self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One user less. Without users a page waits for reuse: at once if it holds nothing, else after the others."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} released more often than taken"
            if self._references[page] == 0:
                self._unused[page] = None
                if page not in self._hash_of:
                    self._unused.move_to_end(page, last=False)

    def remember(self, page: int, block: bytes) -> None:
        """`page` now holds the full block of this hash. The first page that holds a block is the one that is found."""
        if block not in self._page_of and page not in self._hash_of:
            self._page_of[block], self._hash_of[page] = page, block

    def forget_all(self) -> None:
        """No prefix is found any more; pages in use stay in use."""
        for page in list(self._hash_of):
            self._forget(page)

    def _forget(self, page: int) -> None:
        block = self._hash_of.pop(page, None)
        if block is not None:
            del self._page_of[block]
            if self._on_evict is not None:
                self._on_evict(block)
