"""The library of wide search: the same on every machine, hard to search in the ways it says, and without leaks."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.environment import draws
from perilune.rl.environments.wide_search_corpus import (
    KINDS,
    NUMBERS,
    OLD_MARK,
    OLD_PAGE,
    REFERENCES,
    WORDS,
    Corpus,
    CorpusConfig,
)
from perilune.rl.environments.wide_search_index import LONGEST_QUERY, Index
from perilune.rl.environments.wide_search_questions import Question, draw_question, parse_question, truth_of
from perilune.rl.environments.wide_search_tools import library_of, tools
from perilune.swarm.tools.tool import ToolError

SMALL = CorpusConfig(pages=2000)
LIBRARY = library_of(SMALL)
CORPUS = LIBRARY.corpus
ENTITIES = st.integers(0, CORPUS.num_entities - 1)


def test_a_library_is_a_function_of_its_config():
    again, other = Corpus(SMALL), Corpus(CorpusConfig(pages=2000, seed=1))
    assert [CORPUS.text(page) for page in CORPUS.pages] == [again.text(page) for page in again.pages]
    assert CORPUS.pages == again.pages
    assert CORPUS.pages != other.pages


def test_the_published_library_never_changes():
    """Committed numbers (the cap, trained models) rest on these pages."""
    corpus = Corpus(CorpusConfig())
    first = corpus.pages[0]
    assert (len(corpus.pages), first.id, corpus.text(first)) == (20_000, FIRST_ID, FIRST_PAGE)


FIRST_ID = "p10001"
FIRST_PAGE = (
    "Falling Prairie is a ship in the east. The place is Simple Ocean. The place was Short Rabbit until 1958. The "
    "captain is Henry Duke. The captain was Felix Carson until 1956. The year is 1761. The material is ash. The speed "
    "is 36. The length is 663."
)


def test_there_are_as_many_pages_as_asked_and_twelve_attributes():
    assert len(CORPUS.pages) == len(CORPUS.by_id) == SMALL.pages
    assert sum(page.is_old for page in CORPUS.pages) == SMALL.pages * SMALL.old_share
    assert len({*REFERENCES, *NUMBERS, *WORDS}) == 12 == len({name for names in KINDS.values() for name in names})


def test_pages_and_snippets_are_short():
    assert max(len(CORPUS.text(page).split()) for page in CORPUS.pages) <= 120
    assert max(len(CORPUS.snippet(page).split()) for page in CORPUS.pages) <= 20


@given(ENTITIES)
def test_a_page_says_every_attribute_of_its_thing_once_and_as_it_is(entity):
    page = next(page for page in CORPUS.pages if page.entity == entity and not page.is_old)
    said = dict(re.findall(r"The (\w+) is ([^.]+)\.", CORPUS.text(page)))
    assert said == {name: CORPUS.value(entity, name) for name in KINDS[CORPUS.kind(entity)]}
    assert OLD_PAGE not in CORPUS.text(page)


@given(ENTITIES)
def test_outdated_values_are_other_values_and_say_so(entity):
    page = next(page for page in CORPUS.pages if page.entity == entity and not page.is_old)
    for name, before, _ in re.findall(r"The (\w+) was ([^.]+) until (\d+)\.", CORPUS.text(page)):
        assert before == CORPUS.value(entity, name, is_old=True) != CORPUS.value(entity, name)


def test_old_pages_say_that_they_are_old_and_half_of_them_in_the_results_too():
    old = [page for page in CORPUS.pages if page.is_old]
    assert all(OLD_PAGE in CORPUS.text(page) for page in old)
    marked = [page for page in old if OLD_MARK in CORPUS.snippet(page)]
    assert 0.3 < len(marked) / len(old) < 0.7


def test_nothing_refers_to_itself():
    for entity in range(CORPUS.num_entities):
        for name in set(REFERENCES) & set(KINDS[CORPUS.kind(entity)]):
            assert CORPUS.value(entity, name) != CORPUS.name(entity) or REFERENCES[name] != CORPUS.kind(entity)


def test_a_kind_and_a_name_are_of_one_thing_and_names_are_shared_between_kinds():
    assert len(CORPUS.by_name) == CORPUS.num_entities
    corpus = Corpus(CorpusConfig())
    names = [name for kind, name in corpus.by_name if kind != "person"]
    assert len(set(names)) < 0.9 * len(names)


def test_no_page_of_one_split_names_anything_of_the_other():
    """So no page that a training task needs tells an answer of a test task, and none of test is needed in training."""
    names = {"train": set(), "test": set()}
    for entity in range(CORPUS.num_entities):
        names[CORPUS.split(entity)].add(CORPUS.name(entity))
    assert not names["train"] & names["test"]
    for page in CORPUS.pages:
        text = CORPUS.text(page)
        said = set(re.findall(r"[A-Z]\w+ [A-Z]\w+", re.sub(r"\. The |\. This ", ". ", text)))
        assert said and said <= names[CORPUS.split(page.entity)]


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 10}, {"pages": 10**6}, {"test_share": 0.0}, {"old_share": 0.9}, {"unmarked_share": 1.5}],
)  # fmt: skip
def test_a_library_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CorpusConfig(**wrong)


# Searching ------------------------------------------------------------------------------------------------------------


def test_a_search_for_a_name_and_its_kind_shows_the_page():
    for entity in range(CORPUS.num_entities):
        hits = LIBRARY.index.search(f"{CORPUS.name(entity)} {CORPUS.kind(entity)}")
        assert any(hit.entity == entity and not hit.is_old for hit in hits)


def test_the_index_finds_what_the_formula_ranks_first():
    corpus = Corpus(CorpusConfig(pages=200))
    index = Index(corpus)
    for query in ("Old Fox", "bridge", "Amber river granite", corpus.name(3), f"{corpus.name(5)} ship"):
        assert index.search(query) == bm25(corpus, query)


def bm25(corpus, query):
    """The definition, slowly."""
    k1, b = 1.2, 0.75
    texts = [re.findall(r"[a-z0-9]+", (corpus.text(page) + 2 * f" {corpus.first_sentence(page)}").lower())
             for page in corpus.pages]  # fmt: skip
    mean = np.mean([len(text) for text in texts])
    scores = dict.fromkeys(range(len(texts)), 0)
    for word in query.lower().split():
        count = sum(word in text for text in texts)
        if not 0 < count <= len(texts) / 2:
            continue
        idf = np.log(1 + (len(texts) - count + 0.5) / (count + 0.5))
        for number, text in enumerate(texts):
            tf = text.count(word)
            scores[number] += round(65536 * idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(text) / mean)))
    best = sorted((number for number in scores if scores[number]), key=lambda number: (-scores[number], number))
    return [corpus.pages[number] for number in best[:3]]


@given(st.text(max_size=60), st.integers(1, 5))
def test_any_query_gives_at_most_as_many_pages_as_asked(query, count):
    hits = LIBRARY.index.search(query, count)
    assert len(hits) <= count and len(set(hits)) == len(hits)


@given(ENTITIES, ENTITIES)
def test_one_search_is_for_one_thing(entity, other):
    """Two names in one query find no more than the first of them: nobody searches for many things at once."""
    query = f"{CORPUS.name(entity)} {CORPUS.kind(entity)}"
    assert len(query.split()) == LONGEST_QUERY
    assert LIBRARY.index.search(f"{query} {CORPUS.name(other)}") == LIBRARY.index.search(query)


def test_results_tell_no_values():
    for page in CORPUS.pages:
        assert " The " not in CORPUS.snippet(page)


def test_words_that_are_nowhere_or_everywhere_find_nothing():
    for query in ("", "   ", "xyzzy", "the is", "?!"):
        assert LIBRARY.search(query) == "Nothing found."


def test_tools_are_declared_in_few_words():
    assert [tool.name for tool in tools(LIBRARY)] == ["search", "open", "answer"]
    assert all(len(tool.declaration) < 300 and tool.may_repeat for tool in tools(LIBRARY))


@pytest.mark.parametrize("page", ["", "p1", "Old Fox", "10001", "p" * 10_000])
def test_a_page_that_is_not_there_is_told_in_few_words(page):
    with pytest.raises(ToolError, match="there is no page") as told:
        LIBRARY.open(page)
    assert len(str(told.value)) < 100


@pytest.mark.parametrize("arguments", [{}, {"query": 7}, {"query": None}, {"query": "x", "count": 3}, {"page": "p1"}])
def test_a_call_with_wrong_arguments_is_told_which_it_takes(arguments):
    search = tools(LIBRARY)[0]
    assert search.validate is not None
    with pytest.raises(ToolError, match="search takes one argument, query"):
        search.validate(arguments)


# Questions ------------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["wide", "narrow", "chain"]),
    st.sampled_from(["train", "test"]),
    st.integers(0, 10**6),
    st.floats(0, 1),
)
def test_a_question_is_read_as_it_was_written(kind, split, number, two_hops):
    question = draw_question(CORPUS, kind, split, draws("questions", split, number), two_hops=two_hops)
    assert parse_question(question.text) == question
    assert [item for item, _ in truth_of(CORPUS, question)] == list(question.names)
    assert len(set(question.names)) == len(question.names)
    assert all(CORPUS.split(CORPUS.by_name[question.kind, name]) == split for name in question.names)


@settings(max_examples=200)
@given(
    st.text(max_size=200) | st.sampled_from(["Find the speed of the bridge Old Fox.", "Find the year of the town Old."])
)
def test_what_is_no_question_is_read_as_none(text):
    assert parse_question(text) is None


def test_the_truth_of_two_hops_is_on_the_second_page():
    ship = int(CORPUS.of("ship", "test")[0])
    captain = CORPUS.by_name["person", CORPUS.value(ship, "captain")]
    question = Question(kind="ship", names=(CORPUS.name(ship),), path=("captain", "trade"))
    assert question.text == f"Find the trade of the captain of the ship {CORPUS.name(ship)}."
    assert truth_of(CORPUS, question) == [(CORPUS.name(ship), CORPUS.value(captain, "trade"))]
    assert question.oracle_steps == 4
