"""A model on paper: what a runner has to do with a plan, in plain Python, checking at every token that it may.

The "latent" of a token and the "state" after it are both the digest of all tokens up to it, with pictures. A share may
only run if the state in its slot, and every latent in its pages before it, is that of exactly its own prefix: so a page
or a slot handed out wrongly, a hit at the wrong place or a snapshot of something else is found at once.
"""

import hashlib
from collections.abc import Sequence

from perilune.serve.plan import StepPlan

EMPTY = b"nothing yet"
VOCABULARY = 29


def digest_after(before: bytes, token: int, picture: bytes = b"") -> bytes:
    return hashlib.sha256(before + token.to_bytes(8, "little", signed=True) + picture).digest()


def next_token(state: bytes) -> int:
    return state[0] % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy decoding of the model on paper gives, without any engine (and without pictures)."""
    state, tokens = EMPTY, []
    for token in prompt:
        state = digest_after(state, token)
    for _ in range(count):
        tokens.append(next_token(state))
        state = digest_after(state, tokens[-1])
    return tokens


class PaperRunner:
    def __init__(self, *, page_size: int, has_states: bool = True, has_pages: bool = True, border: int = 1) -> None:
        self.page_size, self.border = page_size, border
        self.has_states, self.has_pages = has_states, has_pages
        self.slots: dict[int, bytes] = {}
        self.latents: dict[tuple[int, int], bytes] = {}
        self.num_computed = 0

    def run(self, plan: StepPlan, late_ids: Sequence[int] = ()) -> list[list[int]]:
        """The greedy token of every share that samples, in every round."""
        rounds = [self._round(plan, late_ids)]
        self._save(plan, 0)
        for number in range(1, plan.rounds):
            assert all(len(share.tokens) == 1 and share.samples for share in plan.shares)
            rounds.append(self._round(plan.later_round(number), rounds[-1]))
            self._save(plan, number)
        return rounds

    def _save(self, plan: StepPlan, number: int) -> None:
        for source, target, after in plan.save:
            assert 0 <= after < plan.rounds
            if after == number:
                self.slots[target] = self.slots[source]

    def _round(self, plan: StepPlan, late_ids: Sequence[int]) -> list[int]:
        slots = [share.slot for share in plan.shares]
        assert len(set(slots)) == len(slots), "two shares of one step write to one slot"
        lengths = [len(share.tokens) > 1 for share in plan.shares]
        assert lengths == sorted(lengths), "decodes come first"
        for slot in plan.clear:
            self.slots[slot] = EMPTY
        for source, target in plan.load:
            self.slots[target] = self.slots[source]
        written: set[tuple[int, int]] = set()
        sampled = []
        for share in plan.shares:
            assert share.start % self.border == 0
            tokens = list(share.tokens)
            if share.late_row is not None:
                assert tokens[-1] == -1
                tokens[-1] = late_ids[share.late_row]
            assert -1 not in tokens
            state = self._prefix(share.pages, share.start, share.slot)
            for position, token in enumerate(tokens, start=share.start):
                picture = next((p.key for p in share.pictures if p.start <= position < p.end), b"")
                state = digest_after(state, token, picture)
                place = share.pages[position // self.page_size], position % self.page_size
                assert place not in written, "two shares of one step write to one row"
                written.add(place)
                self.latents[place] = state
                if (position + 1) % self.border == 0:
                    self.slots[share.slot] = state
            self.num_computed += len(tokens)
            if share.samples:
                sampled.append(next_token(state))
        return sampled

    def _prefix(self, pages: Sequence[int], start: int, slot: int) -> bytes:
        """The digest before position `start`, which slot and pages must agree on."""
        if self.has_pages and self.has_states:
            last = self._latent(pages, start - 1)
            assert self.slots[slot] == last, "the state in the slot is not that of this prefix"
            return last
        return self._latent(pages, start - 1) if self.has_pages else self.slots[slot]

    def _latent(self, pages: Sequence[int], position: int) -> bytes:
        if position < 0:
            return EMPTY
        return self.latents[pages[position // self.page_size], position % self.page_size]
