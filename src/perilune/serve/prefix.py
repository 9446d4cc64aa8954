"""The prefix cache: what a new sequence can take over from earlier ones.

It takes over the longest chain of remembered pages that ends at a snapshot of the state (models without states: any
chain), and computes only what follows. Cached equals uncached, because a hash names everything a page depends on.

Snapshots are made

    at the last page border of a prompt, so that the same prompt, or a longer one, goes on from there;
    where a prompt left the pages that it shares with others (a system prompt, say);
    every `interval` tokens;
    at the last page border of an answer so far, moving with it, so that the next turn goes on from there.

Promises: what a running prompt is about to make available. A request that would profit waits for it, so that n samples
of one prompt compute it once.
"""

from dataclasses import dataclass

from perilune.serve.job import Job
from perilune.serve.pages import Pages, block_hashes, root_hash
from perilune.serve.states import States


@dataclass(frozen=True)
class Hit:
    """Remembered pages of the beginning of a sequence; the first `depth` can be taken over."""

    matched: list[int]
    depth: int


@dataclass(frozen=True)
class Snapshot:
    """A place where the state at the end of a share is going to be."""

    slot: int
    moves: bool
    """It follows the decoding, in the place of the job's last one."""


class PrefixCache:
    def __init__(self, pages: Pages, states: States, *, interval: int, enabled: bool = True) -> None:
        self._pages, self._states = pages, states
        self._interval = interval
        self._enabled = enabled
        self._epoch = 0  # of the weights
        self._promised: dict[bytes, tuple[Job, int]] = {}
        self._num_promises = 0

    def forget_all(self) -> None:
        """The weights changed: nothing from before is found again, nor what running jobs go on to remember."""
        self._epoch += 1
        self._num_promises += 1  # hashes differ from now on: everybody looks again
        self._pages.forget_all()
        self._states.forget_all()

    def lookup(self, job: Job) -> Hit:
        """What of `job` is in the cache; at least one token is left to compute, its logits are wanted."""
        if not self._enabled:
            return Hit([], 0)
        root = root_hash(job.salt, self._epoch)
        if job.root != root:
            job.root, job.hashes = root, []
        self._hash(job)
        if job.scores_prompt:
            return Hit([], 0)
        pages = self._pages.match(job.hashes[: self._last(job)])
        depth = len(pages)
        while self._states.needed and depth and job.hashes[depth - 1] not in self._states:
            depth -= 1
        return Hit(pages, depth)

    # --- promises ---------------------------------------------------------------------------------------------------

    def promise(self, job: Job, hit: Hit) -> None:
        """`job` was admitted with this hit: choose where its prefill leaves snapshots, and announce them."""
        job.borders = frozenset()
        if not self._enabled:
            return
        size, last = self._pages.page_size, self._last(job) * self._pages.page_size
        if not self._states.needed:
            promised = range(job.computed + size, last + 1, size)
        elif self._states.num_snapshots:
            places = {last, len(hit.matched) * size, *range(0, last, self._interval)}
            promised = job.borders = frozenset(place for place in places if place > job.computed)
        else:
            promised = ()
        for place in promised:
            self._promised.setdefault(job.hashes[place // size - 1], (job, place))
            self._num_promises += 1

    def is_promised(self, job: Job) -> bool:
        """Whether a running job is about to compute a longer prefix of this one than the cache holds.

        Asked at every step while `job` waits. Its blocks are gone through once; then one look at the promise it waits
        for is enough until that is kept or withdrawn, or, where there was none, until another one is made.
        """
        if not self._promised or job.scores_prompt:
            return False
        if job.awaited is not None and job.root == root_hash(job.salt, self._epoch) and self._is_open(job.awaited):
            return True
        job.awaited = None
        if job.unpromised == self._num_promises:
            return False
        depth = self.lookup(job).depth
        # The longest prefix: when that is there, so are the shorter ones.
        job.awaited = next(filter(self._is_open, reversed(job.hashes[depth : self._last(job)])), None)
        job.unpromised = -1 if job.awaited is not None else self._num_promises
        return job.awaited is not None

    def _is_open(self, block: bytes) -> bool:
        """Whether the prefix up to this block is promised and not there yet."""
        found = self._promised.get(block)
        return found is not None and found[0].landed < found[1]

    def withdraw(self, job: Job) -> None:
        """`job` runs no longer."""
        for block in job.hashes:
            if block in self._promised and self._promised[block][0] is job:
                del self._promised[block]
        job.newest_snapshot = None

    # --- keeping ----------------------------------------------------------------------------------------------------

    def reserve_snapshot(self, job: Job, end: int) -> Snapshot | None:
        """A place for the state of `job` at `end`, if it is worth keeping."""
        if not self._enabled or not self._states.num_snapshots or end % self._pages.page_size:
            return None
        moves = end not in job.borders and end % self._interval != 0
        if moves and end < job.length:
            return None
        if moves and job.newest_snapshot is not None and not self._states.has_room:
            self._states.forget(job.newest_snapshot)
            job.newest_snapshot = None
        # A snapshot that moves on is worth less than one that stays: it drives nobody out.
        slot = self._states.reserve(evict=not moves)
        return None if slot is None else Snapshot(slot, moves)

    def drop(self, snapshot: Snapshot | None) -> None:
        """Its job was pre-empted or removed before the step was over."""
        if snapshot is not None:
            self._states.unreserve(snapshot.slot)

    def remember(self, job: Job, end: int, snapshot: Snapshot | None) -> None:
        """The step is over that computed `job` up to `end`: others find its full pages, and the state there."""
        size = self._pages.page_size
        first, job.landed = job.landed // size, end
        num_full = end // size
        if not self._enabled or (num_full == first and snapshot is None):
            return
        self._hash(job)
        for index in range(first, num_full):
            self._pages.remember(job.pages[index], job.hashes[index])
        if snapshot is None:
            return
        block = job.hashes[num_full - 1]
        is_new = self._states.remember(block, snapshot.slot)
        if snapshot.moves:
            if job.newest_snapshot is not None:
                self._states.forget(job.newest_snapshot)
            job.newest_snapshot = block if is_new else None

    def _hash(self, job: Job) -> None:
        block_hashes(job.hashes, job.root, job.tokens, self._pages.page_size, job.pictures)

    def _last(self, job: Job) -> int:
        """Full pages before the newest token."""
        return (len(job.tokens) - 1) // self._pages.page_size
