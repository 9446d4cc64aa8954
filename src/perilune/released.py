"""Where the released model lies: `models/perilune-nano`, in this folder or in the repository this package runs from.

    released_model()          its folder, or None
    named_in_vain()           what is wrong with the folder that a person named, or None

PERILUNE_NANO names another folder, or none at all when it is empty. Imports nothing: whoever asks need not have torch.
"""

import os
from pathlib import Path

NAME = "perilune-nano"
VARIABLE = "PERILUNE_NANO"
LEAST_BYTES = 10_000
"""Of weights: a file that only points to where they are is smaller."""


def released_model() -> Path | None:
    """The folder of the released model, if it is there and complete."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named and is_whole(Path(named)) else None
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        folder = root / "models" / NAME
        if is_whole(folder):
            return folder
    return None


def named_in_vain() -> str | None:
    """Why the folder of PERILUNE_NANO is not used; None where it is, or none is named."""
    named = os.environ.get(VARIABLE)
    if not named or is_whole(Path(named)):
        return None
    return f"{VARIABLE} is {named!r}, which holds no whole model: expected config.json, tokenizer.json and weights"


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a config, a vocabulary and weights."""
    if not ((folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return False
    weights = list(folder.glob("*.safetensors"))
    return bool(weights) and all(each.is_file() and each.stat().st_size >= LEAST_BYTES for each in weights)
