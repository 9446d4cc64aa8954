"""A job: how far one request has come. Pure data, changed by the scheduler alone.

    computed <= length = len(tokens) + pending

`tokens` are the prompt and what was sampled, as far as the host knows; `pending` counts sampled tokens that it has not
seen yet; `computed` are those whose latents and state exist, or will when the steps under way are over. A prompt is
being prefilled while computed < length - 1; from then on every step computes the newest token and samples the next.
"""

from dataclasses import dataclass, field

from perilune.serve.request import Picture


@dataclass(eq=False, kw_only=True)
class Job:
    request_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    priority: int = 0
    pictures: tuple[Picture, ...] = ()
    salt: str = ""
    waits: bool = False
    """Its next token cannot be sampled before the host knows the last one."""
    bursts: bool = False
    """Nobody looks at its tokens one by one: several may be sampled before the host knows the first."""
    stop_ids: frozenset[int] = frozenset()
    """What was sampled after one of them is dropped."""
    scores_prompt: bool = False
    """Log-probs of the prompt are still to be given: every prompt token is computed, none taken from the cache."""

    rank: tuple[int, int] = (0, 0)
    pending: int = 0
    computed: int = 0
    landed: int = 0
    """Tokens whose step is over: their pages can be shared."""
    pages: tuple[int, ...] = ()
    slot: int | None = None
    """None: it waits."""
    removed: bool = False
    num_cached: int | None = None
    """Tokens the prefix cache had when it was first admitted."""
    sample_row: int = 0
    """Its row among the ids sampled in the step planned last."""

    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    """Of the full pages of known tokens."""
    borders: frozenset[int] = frozenset()
    """Where its prefill leaves snapshots."""
    newest_snapshot: bytes | None = None
    """Of its decoding so far: a newer one takes its place."""
    awaited: bytes | None = None
    """While it waits: the block of a promise that it waits for."""
    unpromised: int = -1
    """While it waits: how many promises had been made when none was for it."""

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def goal(self) -> int:
        """Tokens to compute in all: the last one that is sampled never is."""
        return self.num_prompt + (self.max_tokens - 1 if self.max_tokens else 0)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def prefills(self) -> bool:
        return self.computed < len(self.tokens) + self.pending - 1

    @property
    def decodes(self) -> bool:
        """All but its newest token is computed, and another one is wanted."""
        is_next = self.computed == len(self.tokens) + self.pending - 1
        return is_next and self.computed < self.goal and not (self.waits and self.pending)
