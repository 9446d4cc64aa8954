"""A corpus made of integers: small programs, prose, tables and listings with structure a tiny model can learn.

Document n is a pure function of (seed, n). Only 64-bit integer arithmetic decides (splitmix64, Steele et al. 2014), so
the text is the same on every machine and Python version: tests pin losses on it. Each kind of document has a regularity
that shows in the loss as soon as a model finds it: results that follow from arithmetic, names that return, balanced
brackets, subjects that agree with verbs, values that are asked for again (recall).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

VERSION = 1  # part of the corpus fingerprint: raise it when any text changes
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

T = TypeVar("T")


def mix64(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters its input."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class SplitMix:
    """splitmix64: a stream of 64-bit integers from a seed."""

    def __init__(self, *seeds: int) -> None:
        self._state = 0
        for seed in seeds:
            self._state = mix64((self._state + _GOLDEN + seed) & _MASK)

    def below(self, bound: int) -> int:
        """An integer in [0, bound); the bias of the modulus is below bound / 2**64."""
        self._state = (self._state + _GOLDEN) & _MASK
        return mix64(self._state) % bound

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def choose(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


_NAMES = (
    *("moon", "orbit", "tide", "comet", "crater", "signal", "beacon", "rover"),
    *("module", "antenna", "sample", "pilot", "engine", "mirror", "lens", "anchor"),
)
_VERBS = ("scale", "shift", "merge", "count", "align", "filter", "rotate", "extend", "reduce", "balance")
_PEOPLE = ("Ada", "Grace", "Emmy", "Sofia", "Alan", "Kurt", "Henri", "Niels", "Mary", "Edwin")
_PLACES = ("the harbour", "the north ridge", "the old observatory", "the dry lake", "the landing site", "the library")
_ACTS = (("walk", "to"), ("return", "from"), ("travel", "past"), ("drive", "around"), ("wait", "near"))
_WEATHER = ("It is cold.", "The sky is clear.", "A storm is close.", "Dust hangs in the air.")


def _program(random: SplitMix) -> str:
    """Functions with their results worked out below: arithmetic that has to be right."""
    lines: list[str] = []
    for _ in range(random.between(2, 5)):
        name = f"{random.choose(_VERBS)}_{random.choose(_NAMES)}"
        factor, offset = random.between(2, 9), random.between(1, 20)
        argument = random.choose(("x", "n", "value", "count"))
        lines += [
            f"def {name}({argument}):",
            f'    """Multiply by {factor}, then add {offset}."""',
            f"    result = {argument} * {factor} + {offset}",
            "    return result",
            "",
        ]
        for _ in range(random.between(1, 3)):
            value = random.below(50)
            lines.append(f"assert {name}({value}) == {value * factor + offset}")
        lines.append("")
    return "\n".join(lines)


def _prose(random: SplitMix) -> str:
    """Sentences whose verb agrees with the subject and whose pronoun agrees with the verb."""
    first, second = random.sample(_PEOPLE, 2)
    sentences = []
    for _ in range(random.between(5, 14)):
        verb, preposition = random.choose(_ACTS)
        place = random.choose(_PLACES)
        kind = random.below(4)
        if kind == 0:
            sentences.append(f"{first} and {second} {verb} {preposition} {place}. They do not {verb} alone.")
        elif kind == 1:
            sentences.append(f"{random.choose((first, second))} {verb}s {preposition} {place} every day.")
        elif kind == 2:
            hours = random.between(2, 12)
            sentences.append(f"After {hours} hours and {hours + 1} more, {2 * hours + 1} hours are gone.")
        else:
            sentences.append(random.choose(_WEATHER))
    return f"# {first} and {second}\n\n" + " ".join(sentences) + "\n"


def _recall(random: SplitMix) -> str:
    """Keys with values, then questions about them: what linear attention has to remember."""
    keys = random.sample(_NAMES, random.between(4, 10))
    values = {key: random.between(100, 999) for key in keys}
    asked = [random.choose(keys) for _ in range(random.between(3, 8))]
    listing = "\n".join(f"{key} = {values[key]}" for key in keys)
    return listing + "\n---\n" + "\n".join(f"{key}? {values[key]}" for key in asked) + "\n"


def _nested(random: SplitMix) -> str:
    """JSON-like values: every bracket that opens closes, deeper lines are indented further."""

    def value(depth: int) -> str:
        kind = random.below(4) if depth < 3 else random.below(2)
        if kind == 0:
            return str(random.below(1000))
        if kind == 1:
            return f'"{random.choose(_NAMES)}"'
        pad = "  " * (depth + 1)
        if kind == 2:
            items = [value(depth + 1) for _ in range(random.between(1, 4))]
            return "[\n" + ",\n".join(pad + item for item in items) + "\n" + "  " * depth + "]"
        fields = [f'"{key}": {value(depth + 1)}' for key in random.sample(_NAMES, random.between(1, 4))]
        return "{\n" + ",\n".join(pad + field for field in fields) + "\n" + "  " * depth + "}"

    return "\n".join(value(0) for _ in range(random.between(2, 5))) + "\n"


def _sequence(random: SplitMix) -> str:
    """Arithmetic progressions in lines of equal step."""
    lines = []
    for _ in range(random.between(3, 9)):
        start, step = random.below(100), random.between(1, 12)
        lines.append(f"by {step}: " + " ".join(str(start + step * n) for n in range(random.between(5, 12))))
    return "\n".join(lines) + "\n"


KINDS: tuple[tuple[str, Callable[[SplitMix], str]], ...] = (
    ("program", _program),
    ("prose", _prose),
    ("recall", _recall),
    ("nested", _nested),
    ("sequence", _sequence),
)


def generate(seed: int, num_documents: int) -> Iterator[tuple[str, str]]:
    """(id, text) of every document."""
    for number in range(num_documents):
        random = SplitMix(VERSION, seed, number)
        kind, write = random.choose(KINDS)
        yield f"{kind}-{number:06d}", write(random)
