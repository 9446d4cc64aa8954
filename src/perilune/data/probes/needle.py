"""Needles: sentences with a key and a value, put into a long text; at its end every key is asked for.

    ... The code word of the harbour is lamp. ...  128,000 tokens of text  ... The code word of the harbour is  -> lamp

Values are words that the tokenizer writes as one token each, so a question is answered at one place: the value ranks
first among all the values in the text (works for small models, chance is 1 / needles), or first among all tokens (exact
match). The questions come one after the other, each followed by its answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perilune.data.probes.draws import Draws
from perilune.data.tokenizer import Tokenizer

KEYS = (
    *("harbour", "observatory", "lighthouse", "orchard", "quarry", "cathedral", "glacier", "monastery"),
    *("railway", "vineyard", "aqueduct", "museum", "canyon", "theatre", "reservoir", "fortress"),
    *("library", "workshop", "lagoon", "meadow", "tunnel", "balcony", "chapel", "bakery"),
)
_WORD = re.compile(rb" [a-z]{3,}")


@dataclass(frozen=True, kw_only=True)
class NeedleRow:
    tokens: np.ndarray
    """int64 [length]: text with needles, then the questions with their answers; the last answer is left out."""
    asked_at: np.ndarray
    """int64 [needles]: places whose next token is an answer."""
    answers: np.ndarray
    """int64 [needles]: the tokens that are right, in the order of the questions."""
    depths: np.ndarray
    """float [needles]: where in the text the needle lies, from 0 (first) to 1 (last)."""


def value_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that are a word with the space before it."""
    found = [token for token in range(tokenizer.vocab_size) if _WORD.fullmatch(tokenizer.token_bytes(token))]
    return np.array(found, dtype=np.int64)


def needle_row(
    text: np.ndarray, tokenizer: Tokenizer, *, length: int, needles: int, number: int, seed: int = 0
) -> NeedleRow:
    """Row `number`: its text begins elsewhere in `text`, and keys, values and places are drawn anew."""
    values = value_tokens(tokenizer)
    if not 1 <= needles <= min(len(KEYS), len(values)):
        raise ValueError(f"needles is {needles!r}, expected 1 to {min(len(KEYS), len(values))}")
    draws = Draws(seed, np.array([number]))
    keys = [KEYS[index] for index in draws.choice(len(KEYS), stream=1, count=needles)[0]]
    answers = values[draws.choice(len(values), stream=2, count=needles)[0]]
    order = draws.choice(needles, stream=3, count=needles)[0]
    questions = [tokenizer.encode(f"\nThe code word of the {key} is") for key in keys]
    end = tokenizer.encode(".\n")

    def sentence(index: int) -> list[int]:
        return [*questions[index], int(answers[index]), *end]

    asked = [token for index in order for token in sentence(index)][: -1 - len(end)]
    room = length - 1 - len(asked) - sum(len(sentence(index)) for index in range(needles))
    if room < needles:
        raise ValueError(f"length={length!r} is too short for {needles} needles and as many questions")
    if room > len(text):
        raise ValueError(
            f"a row of {length} tokens needs {room} tokens of held-out text, which has {len(text)}: "
            "take a smaller length, or another corpus"
        )
    begin = int(draws.below(len(text) - room + 1, stream=4, count=1)[0, 0])
    # One needle in each of as many equal parts: every depth is asked for in every row.
    offsets = draws.below(max(1, room // needles), stream=5, count=needles)[0]
    places = np.arange(needles) * (room // needles) + offsets
    pieces: list[Sequence[int] | np.ndarray] = [[tokenizer.bos_id]]
    at = 0
    for index, place in enumerate(places):
        pieces += [text[begin + at : begin + place], sentence(index)]
        at = int(place)
    pieces += [text[begin + at : begin + room], asked]
    tokens = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    lengths = np.array([len(questions[index]) for index in order])
    ends = np.cumsum(lengths + 1 + len(end)) - 1 - len(end)  # one past the last token of each question
    return NeedleRow(
        tokens=tokens,
        asked_at=len(tokens) - len(asked) + ends - 1,
        answers=answers[order],
        depths=(places / max(1, room))[order],
    )
