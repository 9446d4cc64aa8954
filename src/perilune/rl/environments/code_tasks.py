"""Small functions to be written: families of tasks, each with parameters that are drawn.

    exercise = draw_exercise(drawn, "rotate", test=False, num_inputs=10)
    exercise.text         what the function has to do, in words
    exercise.inputs       arguments, and in `outputs` what belongs to them

Every family has a key: even in training tasks, odd in test tasks, and told in the text. So no task is in both. Outputs
of one exercise all differ, and at most one of them is an argument again: a function that ignores its input or hands it
back earns next to nothing. All values are JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Drawn = np.random.Generator
WORDS = (
    "amber", "bell", "cedar", "dune", "ember", "fern", "gate", "harbour", "iris", "jade", "kite", "lantern", "moss",
    "north", "opal", "pine", "quill", "reed", "sand", "tide", "umbra", "vale", "willow", "yarn", "zinc", "an", "by",
    "ox", "so", "up",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039)
MOST_TRIES = 2000


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of function with its parameters in place."""

    function: str
    signature: str
    text: str
    solve: Callable[..., Any]
    draw: Callable[[Drawn], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Exercise:
    function: str
    signature: str
    text: str
    inputs: list[list[Any]]
    outputs: list[Any]


def draw_exercise(drawn: Drawn, family: str, *, test: bool, num_inputs: int) -> Exercise:
    chosen = FAMILIES[family](drawn, 2 + 2 * int(drawn.integers(6)) + test)
    inputs: list[list[Any]] = []
    outputs: list[Any] = []
    returned = 0
    for _ in range(MOST_TRIES):
        arguments = chosen.draw(drawn)
        output = chosen.solve(*arguments)
        is_returned = output in arguments
        if output in outputs or (is_returned and returned):
            continue
        returned += is_returned
        inputs.append(arguments)
        outputs.append(output)
        if len(inputs) == num_inputs:
            return Exercise(function=chosen.function, signature=chosen.signature, text=chosen.text, inputs=inputs,
                            outputs=outputs)  # fmt: skip
    raise ValueError(f"{num_inputs!r} inputs with different outputs were not found for {family!r}, expected fewer")


# What inputs are made of ---------------------------------------------------------------------------------------------


def _integer(drawn: Drawn, low: int, high: int) -> int:
    return int(drawn.integers(low, high + 1))


def _numbers(drawn: Drawn) -> list[int]:
    return drawn.integers(-50, 100, size=_integer(drawn, 0, 14)).tolist()


def _string(drawn: Drawn, letters: str = LETTERS, longest: int = 16) -> str:
    return "".join(letters[index] for index in drawn.integers(len(letters), size=_integer(drawn, 0, longest)))


def _words(drawn: Drawn) -> list[str]:
    return [WORDS[index] for index in drawn.integers(len(WORDS), size=_integer(drawn, 0, 12))]


def _stock(drawn: Drawn) -> dict[str, int]:
    return {word: _integer(drawn, 0, 60) for word in _words(drawn)[:6]}


# Families ------------------------------------------------------------------------------------------------------------


def _rotate(drawn: Drawn, key: int) -> Family:
    def solve(text: str) -> str:
        shift = key % len(text) if text else 0
        return text[shift:] + text[:shift]

    return Family(function="rotate", signature="rotate(text)", solve=solve, draw=lambda drawn: [_string(drawn)],
                  text=f"Move the first letter of the string to its end, {key} times over, and return the "
                       "result; an empty string stays empty.")  # fmt: skip


def _shift(drawn: Drawn, key: int) -> Family:
    def solve(text: str) -> str:
        return "".join(LETTERS[(LETTERS.index(each) + key) % 26] if each in LETTERS else each for each in text)

    return Family(function="shift", signature="shift(text)", solve=solve,
                  draw=lambda drawn: [_string(drawn, LETTERS + " .")],
                  text=f"Replace each letter a to z by the one {key} places later in the alphabet, going on with a "
                       "after z; leave other characters as they are.")  # fmt: skip


def _pick_words(drawn: Drawn, key: int) -> Family:
    length = _integer(drawn, 2, 4)
    return Family(function="long_words", signature="long_words(words)",
                  solve=lambda words: " ".join(f"{word.upper()}{len(word) * key}" for word in words
                                               if len(word) > length),
                  draw=lambda drawn: [_words(drawn)],
                  text=f"From a list of words take those of more than {length} letters, in their order. Write each in "
                       f"capital letters and directly behind it {key} times the number of its letters. Return them "
                       "joined by single spaces.")  # fmt: skip


def _sum_of_some(drawn: Drawn, key: int) -> Family:
    extra = _integer(drawn, 1, 9)
    return Family(function="sum_of_some", signature="sum_of_some(numbers)",
                  solve=lambda numbers: sum(number for number in numbers if number % key) + extra * len(numbers),
                  draw=lambda drawn: [_numbers(drawn)],
                  text=f"Add up the integers of the list that are not divisible by {key}, then add {extra} for every "
                       "integer of the list, and return the result.")  # fmt: skip


def _chunks(drawn: Drawn, key: int) -> Family:
    return Family(function="chunks", signature="chunks(numbers)",
                  solve=lambda numbers: [numbers[start : start + key] for start in range(0, len(numbers), key)],
                  draw=lambda drawn: [drawn.integers(-50, 100, size=_integer(drawn, key + 1, 3 * key + 4)).tolist()],
                  text=f"Cut a list into lists of {key} elements, in order; the last one may be shorter.")  # fmt: skip


def _digits(drawn: Drawn, key: int) -> Family:
    def solve(number: int) -> list[int]:
        digits = [number % key]
        while number := number // key:
            digits.append(number % key)
        return digits[::-1]

    return Family(function="digits", signature="digits(number)", solve=solve,
                  draw=lambda drawn: [_integer(drawn, 0, 50_000)],
                  text=f"Return the digits of an integer from 0 up in base {key}, as a list of integers, the most "
                       "significant one first; 0 has one digit.")  # fmt: skip


def _sort_by_rest(drawn: Drawn, key: int) -> Family:
    falling = bool(drawn.integers(2))
    sign = -1 if falling else 1
    return Family(function="sort_by_rest", signature="sort_by_rest(numbers)",
                  solve=lambda numbers: sorted(numbers, key=lambda number: (number % key, sign * number)),
                  draw=lambda drawn: [drawn.integers(-50, 100, size=_integer(drawn, 8, 16)).tolist()],
                  text=f"Sort integers by their remainder modulo {key} (as Python's % gives it), from small to large; "
                       f"those with the same remainder from {'large to small' if falling else 'small to large'}."
                  )  # fmt: skip


def _count_words(drawn: Drawn, key: int) -> Family:
    def solve(words: list[str]) -> dict[str, int]:
        return {word: words.count(word) + key for word in words}

    return Family(function="count_words", signature="count_words(words)", solve=solve,
                  draw=lambda drawn: [_words(drawn)],
                  text=f"Return a dict from each word of the list to {key} plus the number of times it is in it."
                  )  # fmt: skip


def _windows(drawn: Drawn, key: int) -> Family:
    width = _integer(drawn, 2, 4)
    return Family(function="windows", signature="windows(numbers)",
                  solve=lambda numbers: [sum(numbers[start : start + width]) * key
                                         for start in range(len(numbers) - width + 1)],
                  draw=lambda drawn: [_numbers(drawn)],
                  text=f"For every {width} neighbours in the list, from left to right, return their sum times {key}, "
                       f"as a list; a list of fewer than {width} gives an empty one.")  # fmt: skip


def _polynomial(drawn: Drawn, key: int) -> Family:
    slope, rest = _integer(drawn, -9, 9), _integer(drawn, -20, 20)
    return Family(function="polynomial", signature="polynomial(x)",
                  solve=lambda x: key * x * x + slope * x + rest, draw=lambda drawn: [_integer(drawn, -200, 200)],
                  text=f"Return {key} times the square of x, plus {slope} times x, plus {rest}.")  # fmt: skip


def _clamp(drawn: Drawn, key: int) -> Family:
    low, high = -key, key * _integer(drawn, 3, 6)
    return Family(function="clamp", signature="clamp(numbers)",
                  solve=lambda numbers: [min(max(number, low), high) for number in numbers],
                  draw=lambda drawn: [_numbers(drawn)],
                  text=f"Replace every integer below {low} by {low} and every one above {high} by {high}; return the "
                       "list.")  # fmt: skip


def _by_first_letter(drawn: Drawn, key: int) -> Family:
    def solve(words: list[str]) -> dict[str, int]:
        return {word[0]: key * sum(len(other) for other in words if other[0] == word[0]) for word in words}

    return Family(function="by_first_letter", signature="by_first_letter(words)", solve=solve,
                  draw=lambda drawn: [_words(drawn)],
                  text="Return a dict from each first letter of the words to the number of letters that the words "
                       f"beginning with it have together, times {key}.")  # fmt: skip


def _restock(drawn: Drawn, key: int) -> Family:
    def solve(stock: dict[str, int], sold: dict[str, int]) -> dict[str, int]:
        left = {name: count - sold.get(name, 0) for name, count in stock.items()}
        return {name: count if count >= key else key for name, count in left.items()}

    def draw(drawn: Drawn) -> list[Any]:
        stock = _stock(drawn)
        return [stock, {name: _integer(drawn, 0, 30) for name in [*stock, *_words(drawn)] if drawn.integers(2)}]

    return Family(function="restock", signature="restock(stock, sold)", solve=solve, draw=draw,
                  text="Both arguments are dicts from names to integers. Take what was sold off the stock; what is not "
                       f"in stock does not matter. Where fewer than {key} are left, there are {key} again. Return the "
                       "new stock.")  # fmt: skip


def _runs(drawn: Drawn, key: int) -> Family:
    def solve(text: str) -> str:
        parts, start = [], 0
        for end in range(1, len(text) + 1):
            if end == len(text) or text[end] != text[start]:
                length = end - start
                parts.append(f"{text[start]}{length * key}" if length > 1 else text[start])
                start = end
        return "".join(parts)

    return Family(function="runs", signature="runs(text)", solve=solve,
                  draw=lambda drawn: [_string(drawn, "abc", 20)],
                  text="Shorten runs of equal letters: a run of two or more becomes its letter and then the number of "
                       f"its letters times {key}; a single letter stays. Return the string.")  # fmt: skip


def _transposed(drawn: Drawn, key: int) -> Family:
    def draw(drawn: Drawn) -> list[Any]:
        rows, columns = _integer(drawn, 1, 4), _integer(drawn, 1, 4)
        return [drawn.integers(-9, 10, size=(rows, columns)).tolist()]

    return Family(function="transposed", signature="transposed(rows)",
                  solve=lambda rows: [[key * value for value in column] for column in zip(*rows)], draw=draw,
                  text=f"A matrix is a list of rows of integers. Return its transpose with every entry times {key}."
                  )  # fmt: skip


def _without_repeats(drawn: Drawn, key: int) -> Family:
    return Family(function="without_repeats", signature="without_repeats(numbers)",
                  solve=lambda numbers: list(dict.fromkeys(number // key for number in numbers)),
                  draw=lambda drawn: [_numbers(drawn)],
                  text=f"Divide every integer by {key}, rounding down, then leave out what came before in the list; "
                       "keep the order.")  # fmt: skip


def _sequence(drawn: Drawn, key: int) -> Family:
    first, modulus = _integer(drawn, 1, 5), PRIMES[_integer(drawn, 0, len(PRIMES) - 1)]

    def solve(n: int) -> int:
        value, following = first, key
        for _ in range(n):
            value, following = following, (key * following + value) % modulus
        return value

    return Family(function="sequence", signature="sequence(n)", solve=solve,
                  draw=lambda drawn: [_integer(drawn, 0, 60)],
                  text=f"A sequence begins with {first}, {key}. Each further term is {key} times the one before plus "
                       f"the one before that, modulo {modulus}. Return term n, counted from 0.")  # fmt: skip


FAMILIES: Mapping[str, Callable[[Drawn, int], Family]] = {
    "rotate": _rotate, "shift": _shift, "long_words": _pick_words, "sum_of_some": _sum_of_some, "chunks": _chunks,
    "digits": _digits, "sort_by_rest": _sort_by_rest, "count_words": _count_words, "windows": _windows,
    "polynomial": _polynomial, "clamp": _clamp, "by_first_letter": _by_first_letter, "restock": _restock, "runs": _runs,
    "transposed": _transposed, "without_repeats": _without_repeats, "sequence": _sequence,
}  # fmt: skip
