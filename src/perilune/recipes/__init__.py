"""Recipes: a run is a Python function that returns one full, typed config.

`perilune train NAME` looks names up here; every field can be overridden on the command line.
"""

import difflib
from collections.abc import Callable

from perilune.recipes.pretrain import base, micro, nano, nano_adamw, nano_moe, nano_text, small
from perilune.recipes.probes import mqar, palindrome, stack
from perilune.recipes.vision import fusion_early, fusion_late, fusion_mid, fusion_text, vision_small
from perilune.train.run_config import RunConfig

__all__ = ["RECIPES", "UnknownRecipe", "recipe"]

RECIPES: dict[str, Callable[[], RunConfig]] = {
    function.__name__: function
    for function in (
        *(micro, nano, nano_text, nano_adamw, nano_moe, small, base),
        *(vision_small, fusion_early, fusion_mid, fusion_late, fusion_text),
        *(mqar, palindrome, stack),
    )
}


class UnknownRecipe(ValueError):
    """A name nobody gave a recipe."""


def recipe(name: str) -> RunConfig:
    """The config of the recipe `name`."""
    found = RECIPES.get(name.replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownRecipe(f"unknown recipe {name!r}: {hint}known are {', '.join(RECIPES)}")
    return found()
