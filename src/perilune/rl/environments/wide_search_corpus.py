"""A library of made-up pages about bridges, ships, towns and people: what the wide-search questions are about.

    corpus = Corpus(CorpusConfig())           20,000 pages; the same config gives the same pages, on every machine
    corpus.value(entity, "length")            what is true now
    corpus.text(page)                         the page as `open` shows it, written when asked for

    Amber Falcon is a bridge in the east. The place is Grey Oak. The length was 398 until 1987. The length is 412. ...

Every page is about one thing and says its attributes, twelve kinds in all, one short sentence each, in an order of its
own. What makes a search hard:

    shared words     names are two words out of short lists: many pages share one of the two
    wrong kind       a bridge, a ship and a town may bear the same name
    outdated values  a sentence that says "was ... until" stands beside the one that is true
    old pages        a second page about the same thing, all of it outdated; it says so, but often only once it is open
    two hops         values name other pages: a town has a mayor, who has a teacher, who lives in a town

No name is in both splits, and a page names only things of its own split: nothing that a test task asks can be read off
a page that training needs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perilune.rl.environment import Split
from perilune.rl.environments.wide_search_names import FIRST, GIVEN, MATERIALS, SECOND, SURNAMES, TRADES

KINDS: dict[str, tuple[str, ...]] = {
    "bridge": ("place", "builder", "year", "length", "height", "material"),
    "ship": ("place", "captain", "year", "length", "speed", "material"),
    "town": ("mayor", "builder", "year", "height", "population", "trade"),
    "person": ("place", "teacher", "year", "height", "trade"),
}
"""Attributes of each kind of thing."""
SHARES = {"bridge": 0.28, "ship": 0.28, "town": 0.2, "person": 0.24}
REFERENCES = {"place": "town", "builder": "person", "captain": "person", "mayor": "person", "teacher": "person"}
"""Attributes whose value is the name of another thing, and its kind."""
NUMBERS = {
    "year": (1500, 2000),
    "length": (20, 1000),
    "height": (10, 1000),
    "speed": (5, 100),
    "population": (200, 10_000),
}
WORDS = {"material": MATERIALS, "trade": TRADES}
REGIONS = ("north", "east", "south", "west")
OLD_PAGE = "This page is out of date."
OLD_MARK = "Old page."
SPLITS: tuple[Split, ...] = ("train", "test")
IDS = (10_000, 100_000)
"""Page ids are five digits that mean nothing: they have to be searched for."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    pages: int = 20_000
    seed: int = 0
    test_share: float = 0.2
    old_share: float = 0.1
    """Of all pages: second pages about a thing, outdated."""
    unmarked_share: float = 0.5
    """Of the old pages: those that do not say so in a list of results."""
    outdated_share: float = 0.25
    """Of the sentences: those beside which an outdated one stands."""

    def __post_init__(self) -> None:
        if not 200 <= self.pages <= 40_000:
            raise ValueError(f"corpus.pages is {self.pages!r}, expected 200 to 40,000: there are no more names")
        for name in ("test_share", "old_share", "unmarked_share", "outdated_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"corpus.{name} is {getattr(self, name)!r}, expected a share between 0 and 1")
        if not 0.1 <= self.test_share <= 0.5 or self.old_share > 0.3:
            raise ValueError(
                f"corpus.test_share is {self.test_share!r} and old_share {self.old_share!r}, expected 0.1 to 0.5 and "
                "at most 0.3: both splits need things to ask about"
            )


@dataclass(frozen=True, kw_only=True)
class Page:
    id: str
    entity: int
    is_old: bool
    is_marked: bool = False
    """An old page that says so in a list of results."""


class Corpus:
    """Things are numbers from 0; `pages` are in the order of their ids."""

    def __init__(self, config: CorpusConfig) -> None:
        self.config = config
        drawn = np.random.default_rng([config.seed, 7])
        self.num_entities = config.pages - int(config.pages * config.old_share)
        self._kind, self._split = self._sorts()
        self._name = self._names(drawn)
        count = self.num_entities
        self._now = {name: self._values(name, drawn) for name in (*REFERENCES, *NUMBERS, *WORDS)}
        self._then = {name: self._values(name, drawn, other_than=now) for name, now in self._now.items()}
        self._order = np.argsort(drawn.random((count, 6)), axis=1)
        self._is_outdated = drawn.random((count, 6)) < config.outdated_share
        self._until = drawn.integers(1900, 2000, (count, 6))
        self._region = drawn.integers(0, len(REGIONS), count)
        self.pages = self._pages(drawn)

    @cached_property
    def by_id(self) -> dict[str, Page]:
        return {page.id: page for page in self.pages}

    @cached_property
    def by_name(self) -> dict[tuple[str, str], int]:
        """A thing by its kind and name, which are its own."""
        return {(self.kind(entity), self.name(entity)): entity for entity in range(self.num_entities)}

    def kind(self, entity: int) -> str:
        return tuple(KINDS)[self._kind[entity]]

    def split(self, entity: int) -> Split:
        return SPLITS[self._split[entity]]

    def name(self, entity: int) -> str:
        first, second = (GIVEN, SURNAMES) if self.kind(entity) == "person" else (FIRST, SECOND)
        return f"{first[self._name[entity] // len(second)]} {second[self._name[entity] % len(second)]}"

    def of(self, kind: str, split: Split) -> np.ndarray:
        """All things of a kind in a split."""
        return np.flatnonzero((self._kind == tuple(KINDS).index(kind)) & (self._split == SPLITS.index(split)))

    def value(self, entity: int, attribute: str, *, is_old: bool = False) -> str:
        if attribute not in KINDS[self.kind(entity)]:
            raise KeyError(f"a {self.kind(entity)} has no {attribute}: it has {', '.join(KINDS[self.kind(entity)])}")
        number = int((self._then if is_old else self._now)[attribute][entity])
        if attribute in REFERENCES:
            return self.name(number)
        return WORDS[attribute][number] if attribute in WORDS else str(number)

    def follow(self, entity: int, path: tuple[str, ...]) -> list[int]:
        """The things passed on the way along a path of attributes, the first one included: those whose page is read."""
        passed = [entity]
        for attribute in path[:-1]:
            passed.append(int(self._now[attribute][passed[-1]]))
        return passed

    def first_sentence(self, page: Page) -> str:
        kind = self.kind(page.entity)
        return f"{self.name(page.entity)} is a {kind} in the {REGIONS[self._region[page.entity]]}."

    def text(self, page: Page) -> str:
        """All of a page."""
        entity = page.entity
        told = [self.first_sentence(page), *([OLD_PAGE] if page.is_old else [])]
        attributes = KINDS[self.kind(entity)]
        for place in self._order[entity]:
            if place >= len(attributes):
                continue
            attribute = attributes[place]
            now = f"The {attribute} is {self.value(entity, attribute, is_old=page.is_old)}."
            if self._is_outdated[entity, place] and not page.is_old:
                before = self.value(entity, attribute, is_old=True)
                then = f"The {attribute} was {before} until {self._until[entity, place]}."
                told += [then, now] if self._until[entity, place] % 2 else [now, then]
            else:
                told.append(now)
        return " ".join(told)

    def snippet(self, page: Page) -> str:
        """The page in a list of results."""
        return f"{page.id}: {self.first_sentence(page)}{f' {OLD_MARK}' if page.is_marked else ''}"

    # Drawing --------------------------------------------------------------------------------------------------------

    def _sorts(self) -> tuple[np.ndarray, np.ndarray]:
        """The kind and the split of every thing, in blocks."""
        kinds, splits = [], []
        for split, share in enumerate((1 - self.config.test_share, self.config.test_share)):
            here = round(self.num_entities * share) if split == 0 else self.num_entities - len(kinds)
            counts = [int(here * SHARES[kind]) for kind in KINDS]
            counts[-1] += here - sum(counts)
            for kind, count in enumerate(counts):
                kinds += [kind] * count
                splits += [split] * count
        return np.array(kinds), np.array(splits)

    def _names(self, drawn: np.random.Generator) -> np.ndarray:
        """Pairs of words, as one number; those of one split are not in the other."""
        names = np.zeros(self.num_entities, dtype=np.int64)
        for first, second, kinds in ((FIRST, SECOND, ("bridge", "ship", "town")), (GIVEN, SURNAMES, ("person",))):
            pairs = drawn.permutation(len(first) * len(second))
            border = int(len(pairs) * self.config.test_share)
            for split, pool in (("test", pairs[:border]), ("train", pairs[border:])):
                for kind in kinds:
                    chosen = self.of(kind, split)
                    names[chosen] = drawn.choice(pool, len(chosen), replace=False)
        return names

    def _values(self, attribute: str, drawn: np.random.Generator, other_than: np.ndarray | None = None) -> np.ndarray:
        """One value for every thing, though not every kind has the attribute. References stay in their split."""
        if attribute in REFERENCES:
            values = np.zeros(self.num_entities, dtype=np.int64)
            for number, split in enumerate(SPLITS):
                here = np.flatnonzero(self._split == number)
                pool = self.of(REFERENCES[attribute], split)
                places = drawn.integers(0, len(pool), len(here))
                for avoided in (here, *([] if other_than is None else [other_than[here]])):  # not itself, not the same
                    places = np.where(pool[places] == avoided, (places + 1) % len(pool), places)
                if other_than is not None:  # the second step away may have come back to itself
                    places = np.where(pool[places] == here, (places + 1) % len(pool), places)
                values[here] = pool[places]
            return values
        low, high = NUMBERS.get(attribute) or (0, len(WORDS[attribute]))
        values = drawn.integers(low, high, self.num_entities)
        if other_than is not None:
            values = np.where(values == other_than, (values - low + 1) % (high - low) + low, values)
        return values

    def _pages(self, drawn: np.random.Generator) -> tuple[Page, ...]:
        count = self.config.pages
        old = drawn.choice(self.num_entities, count - self.num_entities, replace=False)
        marked = drawn.random(len(old)) >= self.config.unmarked_share
        numbers = drawn.choice(np.arange(*IDS), count, replace=False)
        living = enumerate(numbers[: self.num_entities])
        pages = [Page(id=f"p{number}", entity=entity, is_old=False) for entity, number in living]
        pages += [
            Page(id=f"p{number}", entity=int(entity), is_old=True, is_marked=bool(mark))
            for entity, number, mark in zip(old, numbers[self.num_entities :], marked)
        ]
        return tuple(sorted(pages, key=lambda page: page.id))
