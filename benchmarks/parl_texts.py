"""Text that the base of benchmarks/parl_models.py reads beside a corpus, written by all cores at once.

    python benchmarks/parl_texts.py FILE --libraries 7         documents as JSON lines: id, split, text

Pages have the form of the library's and none of its facts: they are of libraries with other seeds. A document is what a
reader of a few pages has on the desk: a list of results, the pages in another order, and questions with their answers.

    p24554: Dark Snow is a bridge in the west.
    p37433: Dark Horse is a bridge in the east.

    p37433
    Dark Horse is a bridge in the east. The year is 1964. The builder is Albert Thompson. ...

    Find the year of the bridge Dark Horse.
    Dark Horse: 1964

What a list names is opened, and what a page says is said again: to find something is to copy the right words, and a
model learns that sooner from text that does it all the time than from pages alone (`--no-notes`). A page is written
down beside the page of something that it names, so that some questions take two of them; every sixth document has
several things of a kind, and questions about all of them. What is written depends on the settings alone, not on the
number of cores. A script of its own, without torch, as parl_traces.py is.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from perilune.rl.environments.wide_search_corpus import KINDS, REFERENCES, Corpus, CorpusConfig, Page
from perilune.rl.environments.wide_search_questions import Question

OTHER_LIBRARIES = 1000
"""Seeds of libraries that are read begin here: no task is about them."""
LIBRARIES_OF_A_SEED = 100
VALID_EVERY = 50
"""One document in so many is for validation."""
CHAINS = 2
"""Of a page and one that it names, in a document."""
TABLE_EVERY = 6
TABLE_ITEMS = (4, 8)
"""Things of one kind in such a document, least and most."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    file: tyro.conf.Positional[Path]
    libraries: int = 7
    pages: int = 20_000
    """Of each library."""
    notes: bool = True
    """Lists, questions and answers around the pages."""
    seed: int = 0
    processes: int | None = None
    """None: as many as there are cores."""


def write(settings: Settings) -> None:
    """Complete or not at all."""
    if not 0 <= settings.libraries <= LIBRARIES_OF_A_SEED:
        raise SystemExit(f"--libraries is {settings.libraries!r}, expected 0 to {LIBRARIES_OF_A_SEED}")
    settings.file.parent.mkdir(parents=True, exist_ok=True)
    partial = settings.file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for text in _made(settings):
            file.write(text)
    partial.replace(settings.file)


def _made(settings: Settings) -> Iterator[str]:
    first = OTHER_LIBRARIES + LIBRARIES_OF_A_SEED * settings.seed
    configs = [CorpusConfig(pages=settings.pages, seed=first + number) for number in range(settings.libraries)]
    notes = [settings.notes] * len(configs)
    workers = min(len(configs), settings.processes or os.cpu_count() or 1)
    if workers <= 1:
        yield from map(_lines, configs, notes)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_lines, configs, notes)


def _lines(config: CorpusConfig, notes: bool) -> str:
    lines = []
    for number, text in enumerate(documents(config, notes=notes)):
        split = "valid" if number % VALID_EVERY == 0 else "train"
        lines.append(json.dumps({"id": f"library-{config.seed}-{number}", "split": split, "text": text}))
    return "\n".join(lines) + "\n"


def documents(config: CorpusConfig, *, notes: bool = True) -> Iterator[str]:
    """Every page that is not out of date begins a chain once; the second of a chain is a page that the first names."""
    corpus, drawn = Corpus(config), np.random.default_rng([config.seed, 21])
    current = {page.entity: page for page in corpus.pages if not page.is_old}
    old = {page.entity: page for page in corpus.pages if page.is_old}
    order = drawn.permutation(corpus.num_entities)
    for number, start in enumerate(range(0, len(order) - CHAINS + 1, CHAINS)):
        if notes and number % TABLE_EVERY == TABLE_EVERY - 1:
            yield _table(corpus, current, drawn)
        told = [_chain(corpus, int(entity), drawn) for entity in order[start : start + CHAINS]]
        entities = list(dict.fromkeys(entity for entity, _, second in told for entity in (entity, second)))
        pages = [current[entity] for entity in entities]
        pages += [old[entity] for entity in entities if entity in old]  # both: the list may not say which is which
        yield _with_notes(corpus, pages, told, drawn) if notes else _plain(corpus, pages)


def _chain(corpus: Corpus, entity: int, drawn: np.random.Generator) -> tuple[int, str, int]:
    """A thing, an attribute that names another one, and that one."""
    names = [name for name in KINDS[corpus.kind(entity)] if name in REFERENCES]
    reference = names[int(drawn.integers(len(names)))]
    return entity, reference, corpus.follow(entity, (reference, ""))[-1]


def _plain(corpus: Corpus, pages: list[Page]) -> str:
    told = [corpus.text(page) for page in pages] + [corpus.snippet(page) for page in reversed(pages)]
    return "\n\n".join(told)


def _with_notes(
    corpus: Corpus, pages: list[Page], chains: list[tuple[int, str, int]], drawn: np.random.Generator
) -> str:
    results = "\n".join(corpus.snippet(pages[at]) for at in drawn.permutation(len(pages)))
    opened = [f"{pages[at].id}\n{corpus.text(pages[at])}" for at in drawn.permutation(len(pages))]
    asked: list[str] = []
    for entity, reference, second in chains:
        asked += [_answered(corpus, entity, (name,)) for name in _some(corpus, entity, drawn, 2)]
        (last,) = _some(corpus, second, drawn, 1)
        asked += [_answered(corpus, second, (last,)), _answered(corpus, entity, (reference, last))]
    return "\n\n".join([results, *opened, *(asked[at] for at in drawn.permutation(len(asked)))])


def _table(corpus: Corpus, current: Mapping[int, Page], drawn: np.random.Generator) -> str:
    kind = tuple(KINDS)[drawn.integers(len(KINDS))]
    count = int(drawn.integers(TABLE_ITEMS[0], TABLE_ITEMS[1] + 1))
    entities = [int(entity) for entity in drawn.choice(corpus.of(kind, "train"), count, replace=False)]
    results = "\n".join(corpus.snippet(current[entities[at]]) for at in drawn.permutation(count))
    opened = [f"{current[entities[at]].id}\n{corpus.text(current[entities[at]])}" for at in drawn.permutation(count)]
    names = tuple(map(corpus.name, entities))
    asked = [
        "\n".join([
            Question(kind=kind, names=names, path=(attribute,)).text,
            *(f"{name}: {corpus.value(entity, attribute)}" for name, entity in zip(names, entities)),
        ])
        for attribute in _some(corpus, entities[0], drawn, 2)
    ]  # fmt: skip
    return "\n\n".join([results, *opened, *asked])


def _some(corpus: Corpus, entity: int, drawn: np.random.Generator, count: int) -> list[str]:
    names = KINDS[corpus.kind(entity)]
    return [names[at] for at in drawn.permutation(len(names))[:count]]


def _answered(corpus: Corpus, entity: int, path: tuple[str, ...]) -> str:
    """A question with the values that lead to its answer."""
    name = corpus.name(entity)
    passed = corpus.follow(entity, path)
    steps = [f"{attribute}: {corpus.value(at, attribute)}" for at, attribute in zip(passed, path[:-1])]
    answer = f"{name}: {corpus.value(passed[-1], path[-1])}"
    return "\n".join([Question(kind=corpus.kind(entity), names=(name,), path=path).text, *steps, answer])


if __name__ == "__main__":
    write(tyro.cli(Settings, description=__doc__))
