"""Where things are, asked in text alone: a probe that no training of this package contains.

    left, above      which of two shapes lies further that way            its colour
    size             which of two shapes covers more                      its colour
    inside, overlap  a statement about two shapes                         true or false
    count            how many of the shapes are of one kind               1, 2, 3 or 4

Shapes are given as the source of an SVG or as sentences with coordinates; no picture is shown. Item n is a pure
function of (seed, n); kinds, forms and answers take turns, so that chance is known exactly. A model's answer is the
choice that it finds most likely as its whole reply (sum of log-probs with the end of the turn): nothing is sampled, and
no format has to be met.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from perilune.data.chat import encode, parse_messages, render
from perilune.data.generated import SplitMix
from perilune.data.picture_scores import Interval
from perilune.data.scenes import Picture, Shape, box, mask, write_svg
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.train.scores import evaluating

Kind = Literal["left", "above", "size", "inside", "overlap", "count"]
Form = Literal["svg", "sentences"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMS: tuple[Form, ...] = get_args(Form)
COUNT = 2000
SIDE = 112
GAP = 3
"""Pixels between shapes that are called apart."""
SHARED = 24
"""Pixels that two shapes have in common where they are said to overlap."""
LARGER = 1.5
ROW_TOKENS = 16_384
Document = tuple[list[int], list[bool]]
"""Tokens, and which of them are scored."""
_COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown", "gray", "black")
_STREAM = 0x73706174  # keeps these draws apart from those of the scenes


@dataclass(frozen=True, kw_only=True)
class Item:
    kind: Kind
    form: Form
    question: str
    choices: tuple[str, ...]
    answer: int
    """Which of the choices."""


@dataclass(frozen=True, kw_only=True)
class SpatialScore:
    right: tuple[bool, ...]
    accuracy: float
    chance: float
    by_kind: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """JSON; who was right, an item a bit, as hexadecimal digits."""
        return {
            "accuracy": self.accuracy, "chance": self.chance, "items": len(self.right), "by_kind": self.by_kind,
            "right": np.packbits(np.array(self.right, dtype=bool)).tobytes().hex(),
        }  # fmt: skip


def right_of(plain: dict[str, Any]) -> np.ndarray:
    """bool [items], of what `SpatialScore.plain` gave."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(plain["right"]), dtype=np.uint8))
    return bits[: plain["items"]].astype(bool)


# Items ----------------------------------------------------------------------------------------------------------------


def spatial_items(count: int = COUNT, *, seed: int = 0) -> list[Item]:
    if count < 1:
        raise ValueError(f"count is {count!r}, expected at least 1 item")
    return [spatial_item(number, seed=seed) for number in range(count)]


def spatial_item(number: int, *, seed: int = 0) -> Item:
    dice = SplitMix(_STREAM, seed, number)
    turn, kind = number // len(KINDS), KINDS[number % len(KINDS)]
    form, turn = FORMS[turn % len(FORMS)], turn // len(FORMS)
    if kind == "count":
        answer = turn % 4
        shapes, asked, choices = _counted(dice, answer)
    else:
        answer = turn % 2
        make = _stated if kind in ("inside", "overlap") else _compared
        shapes, asked, choices = make(dice, kind, answer)
    return Item(kind=kind, form=form, question=f"{_told(shapes, form)}\n{asked}", choices=choices, answer=answer)


_Asked = tuple[list[Shape], str, tuple[str, ...]]


def _compared(dice: SplitMix, kind: Kind, answer: int) -> _Asked:
    """Two shapes of which one is further or larger."""
    colours = dice.sample(_COLOURS, 4)
    while True:
        pair = [_shape(dice, colour) for colour in colours[:2]]
        if _order(kind, *pair) == (1, -1)[answer]:
            break
    words = {"left": "lies further to the left", "above": "is nearer to the top", "size": "takes up more room"}
    asked = f"Of the {_name(pair[0])} and the {_name(pair[1])}, which {words[kind]}? Answer with its colour alone."
    return _mixed(dice, pair, colours[2:]), asked, (colours[0], colours[1])


def _order(kind: Kind, one: Shape, other: Shape) -> int:
    """1: the first is further left, further up or larger; -1: the second; 0: not clear enough to be asked."""
    if kind == "size":
        ratio = int(mask(one, SIDE, SIDE).sum()) / int(mask(other, SIDE, SIDE).sum())
        return 1 if ratio >= LARGER else (-1 if ratio <= 1 / LARGER else 0)
    axis = 0 if kind == "left" else 1
    first, second = box(one), box(other)
    if first[axis + 2] + GAP <= second[axis]:
        return 1
    return -1 if second[axis + 2] + GAP <= first[axis] else 0


def _stated(dice: SplitMix, kind: Kind, answer: int) -> _Asked:
    """A statement about how two shapes lie; what is drawn over what does not matter."""
    wanted = {"inside": ("inside",), "overlap": ("inside", "around", "across")}[kind]
    others = tuple(way for way in ("inside", "around", "across", "apart") if way not in wanted)
    way = dice.choose(others if answer else wanted)
    colours = dice.sample(_COLOURS, 4)
    while True:
        pair = [_shape(dice, colour) for colour in colours[:2]]
        if _position(*pair) == way:
            break
    one, other = _name(pair[0]), _name(pair[1])
    said = f"the {one} lies wholly within the {other}" if kind == "inside" else f"the {one} and the {other} overlap"
    return _mixed(dice, pair, colours[2:]), f"True or false: {said}. Answer true or false.", ("true", "false")


def _position(one: Shape, other: Shape) -> str | None:
    """How two shapes lie: the first inside or around the second, across its edge, or apart. None: hard to say."""
    first, second = mask(one, SIDE, SIDE), mask(other, SIDE, SIDE)
    common = int((first & second).sum())
    if common == 0:
        a, b = box(one), box(other)
        is_clear = any(a[axis + 2] + GAP <= b[axis] or b[axis + 2] + GAP <= a[axis] for axis in (0, 1))
        return "apart" if is_clear else None
    if common == first.sum():
        return "inside"
    if common == second.sum():
        return "around"
    outside = min(int(first.sum()), int(second.sum())) - common
    return "across" if common >= SHARED and outside >= SHARED else None


def _counted(dice: SplitMix, answer: int) -> _Asked:
    others = dice.below(4)
    kind, other_kind = dice.sample(("circle", "rect"), 2)
    kinds = [kind] * (answer + 1) + [other_kind] * others
    shapes = [_shape(dice, dice.choose(_COLOURS), kind=each) for each in dice.sample(kinds, len(kinds))]
    word = {"circle": "circles", "rect": "rectangles"}[kind]
    return shapes, f"How many {word} are listed? Answer with a number.", ("1", "2", "3", "4")


def _shape(dice: SplitMix, colour: str, *, kind: str | None = None) -> Shape:
    if (kind or dice.choose(("rect", "circle"))) == "circle":
        radius = dice.between(6, 32)
        centre = [dice.between(radius, SIDE - radius) for _ in range(2)]
        return Shape(kind="circle", numbers=(*centre, radius), fill=colour)
    width, height = (dice.between(10, 70) for _ in range(2))
    height += width == height  # a square is a rectangle too: none is drawn
    left, top = dice.below(SIDE - width + 1), dice.below(SIDE - height + 1)
    return Shape(kind="rect", numbers=(left, top, width, height), fill=colour)


def _mixed(dice: SplitMix, pair: list[Shape], colours: list[str]) -> list[Shape]:
    """The two shapes among up to two others."""
    shapes = [*pair, *(_shape(dice, colour) for colour in colours[: dice.below(3)])]
    return dice.sample(shapes, len(shapes))


def _name(shape: Shape) -> str:
    return f"{shape.colour} {shape.name}"


def _told(shapes: list[Shape], form: Form) -> str:
    if form == "svg":
        return write_svg(Picture(width=SIDE, height=SIDE, shapes=tuple(shapes)))
    return f"On a sheet of {SIDE} by {SIDE}, where y counts downwards: " + " ".join(map(_sentence, shapes))


def _sentence(shape: Shape) -> str:
    n = shape.numbers
    article = "An" if shape.colour[0] in "aeiou" else "A"
    if shape.kind == "circle":
        return f"{article} {shape.colour} circle has its centre at ({n[0]}, {n[1]}) and a radius of {n[2]}."
    return f"{article} {shape.colour} rectangle reaches from ({n[0]}, {n[1]}) to ({n[0] + n[2]}, {n[1] + n[3]})."


# Scores ---------------------------------------------------------------------------------------------------------------


def spatial_score(
    model: Decoder, tokenizer: Tokenizer, items: Sequence[Item], *, row_tokens: int = ROW_TOKENS
) -> SpatialScore:
    """How many of the items the model gets right; several rows of about `row_tokens` tokens, each one forward pass."""
    chosen = [int(np.argmax(scores)) for scores in choice_log_probs(model, tokenizer, items, row_tokens=row_tokens)]
    right = [choice == item.answer for choice, item in zip(chosen, items, strict=True)]
    kinds = sorted({item.kind for item in items})
    return SpatialScore(
        right=tuple(right),
        accuracy=float(np.mean(right)),
        chance=float(np.mean([1 / len(item.choices) for item in items])),
        by_kind={
            kind: float(np.mean([is_right for is_right, item in zip(right, items) if item.kind == kind]))
            for kind in kinds
        },
    )


def choice_log_probs(
    model: Decoder, tokenizer: Tokenizer, items: Sequence[Item], *, row_tokens: int = ROW_TOKENS
) -> list[list[float]]:
    """log p of every choice of every item as the whole reply."""
    documents = [_document(tokenizer, item.question, choice) for item in items for choice in item.choices]
    scores = iter(documents_log_probs(model, documents, row_tokens=row_tokens))
    return [[next(scores) for _ in item.choices] for item in items]


def documents_log_probs(model: Decoder, documents: Sequence[Document], *, row_tokens: int = ROW_TOKENS) -> list[float]:
    """log p of the marked tokens of each."""
    found: list[float] = []
    with evaluating(model):
        row: list[Document] = []
        for document in documents:
            if row and sum(len(tokens) for tokens, _ in row) + len(document[0]) > row_tokens:
                found += _row_log_probs(model, row)
                row = []
            row.append(document)
        found += _row_log_probs(model, row)
    return found


def _document(tokenizer: Tokenizer, question: str, reply: str) -> Document:
    messages = parse_messages([{"role": "user", "content": question}, {"role": "assistant", "content": reply}])
    made = encode(tokenizer, render(messages, thinking=False, add_generation_prompt=False))
    return made.tokens, made.produced


def _row_log_probs(model: Decoder, row: Sequence[Document]) -> list[float]:
    """The sum of log-probs of what was replied, of each document of a row."""
    device = model.embed_tokens.weight.device
    tokens = np.concatenate([each[:-1] for each, _ in row])
    borders = np.cumsum([0, *(len(each) - 1 for each, _ in row)])
    places, chosen, owner = [], [], []
    for number, ((each, produced), start) in enumerate(zip(row, borders)):
        said = np.flatnonzero(produced[1:])
        places.append(start + said)
        chosen.append(np.asarray(each)[1:][said])
        owner.append(np.full(len(said), number))
    hidden = model.hidden(
        torch.from_numpy(tokens).to(device, torch.long)[None],
        cu_seqlens=torch.from_numpy(borders).to(device, torch.int32),
    )[0, torch.from_numpy(np.concatenate(places)).to(device)]
    targets = torch.from_numpy(np.concatenate(chosen)).to(device, torch.long)
    log_probs = model.logits(hidden).double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    sums = torch.zeros(len(row), dtype=torch.float64, device=device)
    return sums.index_add(0, torch.from_numpy(np.concatenate(owner)).to(device), log_probs).tolist()


def paired_interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], *, rounds: int = 2000, seed: int = 0
) -> Interval:
    """Mean of after - before and its 95% interval: items are drawn again with replacement, and seeds where there are
    several. Both are [seeds][items], the same items in the same order."""
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if differences.ndim != 2 or not differences.size:
        raise ValueError(f"differences have the shape {differences.shape}, expected [seeds, items] with one of each")
    generator = np.random.default_rng(seed)
    seeds, items = differences.shape
    means = [
        differences[generator.integers(0, seeds, seeds)].mean(0)[generator.integers(0, items, items)].mean()
        for _ in range(rounds)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high))
