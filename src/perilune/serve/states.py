"""States: slots of fixed size for what KDA layers remember of a sequence, and snapshots of them.

A running sequence owns one slot. A snapshot is a further slot with a copy of the state at a page border, found by the
hash of the block that ends there: only at such a place can another sequence take over a prefix. Snapshots are few and
large (one weighs as much as thousands of latents), so the one unused for longest gives way to a new one. A model
without KDA layers needs none of this: every page border will do. No torch: a slot is a number.
"""

from collections import OrderedDict
from heapq import heappop, heappush


class States:
    """Slots 0 .. max_sequences - 1 are for sequences, those behind them for snapshots."""

    def __init__(self, max_sequences: int, num_snapshots: int, *, needed: bool = True) -> None:
        """`needed` is false for a model whose layers keep no state."""
        self.needed = needed
        self.max_sequences = max_sequences
        self.num_snapshots = num_snapshots if needed else 0
        self._free = list(range(max_sequences))  # a heap
        self._free_snapshots = list(range(max_sequences + self.num_snapshots - 1, max_sequences - 1, -1))
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # the first is given up first

    @property
    def num_slots(self) -> int:
        return self.max_sequences + self.num_snapshots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_remembered(self) -> int:
        return len(self._snapshot_of)

    @property
    def has_room(self) -> bool:
        """Whether a snapshot can be made without giving up another."""
        return bool(self._free_snapshots)

    @property
    def num_reserved(self) -> int:
        """Snapshots that are being written."""
        return self.num_snapshots - len(self._free_snapshots) - len(self._snapshot_of)

    def take(self) -> int:
        """The lowest free slot: slots of running sequences then lie in a row, and a step reads them where they are.
        Whoever asks has looked at `num_free`."""
        return heappop(self._free)

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} released twice"
        heappush(self._free, slot)

    def reserve(self, *, evict: bool) -> int | None:
        """A place for a new snapshot, or None; with `evict` the one unused for longest may give way."""
        if self._free_snapshots:
            return self._free_snapshots.pop()
        if evict and self._snapshot_of:
            return self._snapshot_of.popitem(last=False)[1]
        return None

    def unreserve(self, snapshot: int) -> None:
        """Nobody will look for what was to be written there."""
        self._free_snapshots.append(snapshot)

    def remember(self, block: bytes, snapshot: int) -> bool:
        """The reserved `snapshot` holds the state at the end of this block; False where another already does."""
        if block in self._snapshot_of:
            self.unreserve(snapshot)
            return False
        self._snapshot_of[block] = snapshot
        return True

    def __contains__(self, block: bytes) -> bool:
        return block in self._snapshot_of

    def find(self, block: bytes) -> int:
        """The snapshot at the end of this block, from now on the last to be given up."""
        self._snapshot_of.move_to_end(block)
        return self._snapshot_of[block]

    def forget(self, block: bytes) -> None:
        if (snapshot := self._snapshot_of.pop(block, None)) is not None:
            self._free_snapshots.append(snapshot)

    def forget_all(self) -> None:
        for block in list(self._snapshot_of):
            self.forget(block)
