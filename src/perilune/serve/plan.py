"""One step of the engine, as the scheduler hands it to the runner: plain data, no torch.

    for slot in plan.clear: runner.clear_state(slot)
    for source, target in plan.load: runner.copy_state(source, target)      the engine does these,
    logits = runner.run(plan, late_ids)                                     in this order
    for source, target, _ in plan.save: runner.copy_state(source, target)

A share is a run of tokens of one sequence. Its state slot holds the state after the tokens before `start` and, when the
step is over, the state after `end`; the latents of its tokens go to their places in its pages, position i to row
i % page_size of pages[i // page_size]. Shares of one token (decodes) come first, longer ones (prefill chunks) after.

Late tokens: with asynchronous scheduling a step is planned before the ids of the step before it are on the host. Such
a share has `late_row`, and its last token (-1 in `tokens`) is late_ids[late_row], where `late_ids` are the ids sampled
in the step before, on the device, one per share with `samples`, in plan order.

Bursts: a step of decodes alone may have several rounds, in each of which every share with as many `rounds` computes one
more token, the one that was sampled in the round before, on the device. Shares with more rounds come first, so that
those of a round are the first few of the plan, and their rows the same in all rounds. States are saved after the round
that `save` names.

Deterministic: `start` is always a multiple of the tile (model/deterministic.py), counted from position 0, and a decode
replays its sequence from the last such border. The slot then holds the state at the last border at or before `end`: a
share that ends before the next border leaves its slot as it was. There are no late tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal

from perilune.serve.request import Picture

Want = Literal["none", "last", "all"]


@dataclass(kw_only=True, slots=True, eq=False)
class Share:
    """Tokens start .. end of one sequence. Nothing changes it; a frozen class would take three times as long to make,
    and there is one for every token."""

    request_id: str
    start: int
    """Position of the first token."""
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    """All pages of the sequence in order, at least up to `end`; the same object from step to step until they change."""
    slot: int
    want: Want
    """Which rows of logits the runner returns: none, that of the last token, or one per token."""
    samples: bool
    """A token is sampled from the last row."""
    pictures: tuple[Picture, ...] = ()
    """Those with a place among these tokens; the others need not be encoded."""
    late_row: int | None = None
    rounds: int = 1
    """Tokens that it computes one after the other; more than one in bursts alone."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def last_end(self) -> int:
        """Tokens of the sequence that are computed when all rounds are over."""
        return self.end + self.rounds - 1

    @property
    def num_rows(self) -> int:
        """Rows of logits it gets."""
        return 1 if self.want == "last" else len(self.tokens) if self.want == "all" else 0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    shares: tuple[Share, ...] = ()
    clear: tuple[int, ...] = ()
    """Slots of sequences that begin at position 0."""
    load: tuple[tuple[int, int], ...] = ()
    """(snapshot, slot) of sequences that begin at a cached prefix."""
    save: tuple[tuple[int, int, int], ...] = ()
    """(slot, snapshot, round) of states worth keeping after that round of this step."""

    @property
    def rounds(self) -> int:
        return self.shares[0].rounds if self.shares else 1

    def in_round(self, number: int) -> int:
        """How many shares take part in it."""
        return sum(share.rounds > number for share in self.shares)

    def later_round(self, number: int) -> "StepPlan":
        """Round `number`, not the first, as a step of its own."""
        going = self.shares[: self.in_round(number)]
        return StepPlan(
            shares=tuple(
                replace(share, start=share.start + number, tokens=(-1,), late_row=row, rounds=1)
                for row, share in enumerate(going)
            )
        )

    @property
    def num_decodes(self) -> int:
        """How many shares, all at the front, have one token."""
        return sum(len(share.tokens) == 1 for share in self.shares)

    @property
    def num_tokens(self) -> int:
        return sum(len(share.tokens) for share in self.shares)
