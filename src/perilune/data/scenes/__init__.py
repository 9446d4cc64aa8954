"""The embedded visual corpus: pictures made on the fly, each with its source and with questions that have true answers.

    sample = make_sample(seed=0, index=7, config=ScenesConfig(kinds=("scene", "chart")))
    sample.svg, sample.questions, sample.caption
    picture = parse_svg(sample.svg)                  # back to shapes

Sample n is a pure function of (config, seed, n, held_out); held-out sources never occur in training. Nothing here needs
a font, a network or torch. The dialect of the sources: svg.py; of animations: animations.py; of pages: pages.py;
pages with their pictures from a file: page_files.py.
"""

from perilune.data.scenes.animations import Animation, frames, parse_animation, write_animation
from perilune.data.scenes.icons import IconPool, icon_pool
from perilune.data.scenes.make import VERSION, is_held_out, make_sample
from perilune.data.scenes.page_files import PagePool, page_pool
from perilune.data.scenes.sample import PlacedText, Question, Sample, SampleKind, ScenesConfig, ScenesError
from perilune.data.scenes.shapes import COLOURS, Shape, box, mask
from perilune.data.scenes.svg import DialectError, Picture, header, parse_svg, write_svg

__all__ = [
    "COLOURS",
    "VERSION",
    "Animation",
    "DialectError",
    "IconPool",
    "PagePool",
    "Picture",
    "PlacedText",
    "Question",
    "Sample",
    "SampleKind",
    "ScenesConfig",
    "ScenesError",
    "Shape",
    "box",
    "frames",
    "header",
    "icon_pool",
    "is_held_out",
    "make_sample",
    "mask",
    "page_pool",
    "parse_animation",
    "parse_svg",
    "write_animation",
    "write_svg",
]
