"""BM25 over the pages of a corpus: the three best pages for a few words.

    score(page) = sum over words of  idf * tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length))
    idf         = ln(1 + (N - df + 0.5) / (df + 0.5))                               (Robertson and Zaragoza, 2009)

Words of the first sentence, which names the thing, count three times. Scores are added as integers and equal ones are
ordered by page id, so that every machine finds the same three. Words that stand on more than half of the pages find
nothing. Of the others in a query the first three count, so that one search is for one thing: with more, the three best
pages for three names would be theirs, and an agent alone would search for a third of its items.
"""

import re
from collections.abc import Sequence

import numpy as np

from perilune.rl.environments.wide_search_corpus import Corpus, Page

WORD = re.compile(r"[a-z0-9]+")
K1, B = 1.2, 0.75
TITLE_WEIGHT = 3
LONGEST_QUERY = 3
"""Words of a query that count."""
SCALE = 1 << 16
"""Of a score, as an integer."""


class Index:
    """Of a corpus. Making it reads every page once: seconds for 20,000."""

    def __init__(self, corpus: Corpus) -> None:
        self._pages = corpus.pages
        terms: dict[str, int] = {}
        found, lengths = [], np.zeros(len(self._pages), dtype=np.int64)
        for number, page in enumerate(self._pages):
            title = WORD.findall(corpus.first_sentence(page).lower())
            words = WORD.findall(corpus.text(page).lower()) + title * (TITLE_WEIGHT - 1)
            lengths[number] = len(words)
            found += [terms.setdefault(word, len(terms)) for word in words]
        pages = np.repeat(np.arange(len(self._pages)), lengths)
        pairs, counts = np.unique(np.array(found) * len(self._pages) + pages, return_counts=True)
        self._postings = _postings(pairs, counts, lengths, len(terms))
        self._terms = terms

    def search(self, query: str, count: int = 3) -> list[Page]:
        """The best pages, the best first; none where no word of the query is anywhere."""
        words = [word for word in dict.fromkeys(WORD.findall(query.lower())) if word in self._terms]
        known = [found for word in words if len((found := self._postings[self._terms[word]])[0])][:LONGEST_QUERY]
        scores = np.zeros(len(self._pages), dtype=np.int32)
        for pages, weights in known:
            scores[pages] += weights
        if not known:
            return []
        touched = np.concatenate([pages for pages, _ in known])
        reached, enough = scores[touched], len(known) * count
        if enough < len(reached):  # a page is among them once for every word it has
            touched = touched[reached >= np.partition(reached, -enough)[-enough]]
        best = sorted(set(touched.tolist()), key=lambda number: (-int(scores[number]), number))
        return [self._pages[number] for number in best[:count]]


def _postings(
    pairs: np.ndarray, counts: np.ndarray, lengths: np.ndarray, num_terms: int
) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """For each term its pages and what it adds to the score of each."""
    total = len(lengths)
    term, page = pairs // total, pairs % total
    frequency = np.bincount(term, minlength=num_terms)
    idf = np.log1p((total - frequency + 0.5) / (frequency + 0.5))
    weight = idf[term] * counts * (K1 + 1) / (counts + K1 * (1 - B + B * lengths[page] / lengths.mean()))
    scaled = np.rint(weight * SCALE).astype(np.int32)
    borders = np.searchsorted(term, np.arange(num_terms + 1))
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return [
        (page[start:end], scaled[start:end]) if end - start <= total / 2 else nothing
        for start, end in zip(borders, borders[1:])
    ]
