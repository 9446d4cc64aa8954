"""Sample n of the visual corpus: a pure function of (config, seed, index, held_out).

Training and held-out samples never share a source. The hash of a source alone decides on which side it lies (one in
HELD_OUT_IN for testing), whatever the seed, the index and the config; a draw on the wrong side is drawn again. Icons
are parted before they are drawn (see icons.py).
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from perilune.data.generated import SplitMix
from perilune.data.scenes.animations import animation_scene
from perilune.data.scenes.charts import chart
from perilune.data.scenes.icons import icon_scene
from perilune.data.scenes.layouts import layout
from perilune.data.scenes.page_files import page_sample
from perilune.data.scenes.pages import page
from perilune.data.scenes.plain import plain_scene
from perilune.data.scenes.questions import caption, scene_questions
from perilune.data.scenes.sample import Draft, Sample, SampleKind, ScenesConfig
from perilune.data.scenes.svg import write_svg
from perilune.data.scenes.writing import text_scene

VERSION = 2  # part of cache keys: raise it when any sample changes
HELD_OUT_IN = 8

Maker = Callable[[SplitMix, ScenesConfig, tuple[int, int]], Draft]


def make_sample(
    seed: int, index: int, config: ScenesConfig, *, held_out: bool = False, with_questions: bool = True
) -> Sample:
    """Sample `index` of a stream that has no end and repeats nothing on purpose.

    `with_questions` False leaves the questions out, which take time; the picture is the same.
    """
    attempt = 0
    while True:
        dice = SplitMix(seed, index, int(held_out), attempt)
        kind, size = _kind(dice, config), dice.choose(config.sizes)
        if (
            kind == "icon"
        ):  # its pools are apart already: by set, or by the hash of the icon in whatever colour and size
            return _finished(icon_scene(dice, config, size, held_out=held_out), with_questions)
        if kind == "html" and config.pages:  # apart by the hash of the source too, see page_files.py
            return page_sample(dice, config, held_out=held_out, with_questions=with_questions)
        draft = _MAKERS[kind](dice, config, size)
        if is_held_out(draft.sample.source) == held_out:
            return _finished(draft, with_questions)
        attempt += 1


def _finished(draft: Draft, with_questions: bool) -> Sample:
    return replace(draft.sample, questions=draft.questions()) if with_questions else draft.sample


def is_held_out(source: str) -> bool:
    """Whether a source belongs to the test side."""
    return hashlib.blake2b(source.encode(), digest_size=8).digest()[0] % HELD_OUT_IN == 0


def _kind(dice: SplitMix, config: ScenesConfig) -> SampleKind:
    if not config.weights:
        return dice.choose(config.kinds)
    point = dice.below(1 << 32) / (1 << 32) * sum(config.weights)
    for kind, weight in zip(config.kinds, config.weights):
        point -= weight
        if point < 0:
            return kind
    return config.kinds[-1]


def _scene(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    picture = plain_scene(dice, config, size)
    sample = Sample(
        kind="scene",
        size=size,
        shapes=picture.shapes,
        svg=write_svg(picture),
        background=picture.background,
        caption=caption(picture),
    )
    return Draft(sample=sample, questions=lambda: scene_questions(dice, picture, config.max_questions))


_MAKERS: dict[SampleKind, Maker] = {
    "scene": _scene,
    "text": text_scene,
    "chart": chart,
    "layout": layout,
    "html": page,
    "animation": animation_scene,
}
