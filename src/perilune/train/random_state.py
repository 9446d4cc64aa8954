"""The global random generators of a rank as tensors, for the checkpoint: python, numpy, torch, cuda."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from perilune.train import ranks


def seed_everything(seed: int) -> None:
    """Every global generator; nothing of the loop draws from them, but a model or a sink may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def tensors() -> dict[str, torch.Tensor]:
    """The state of every global generator of this rank."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, cached]
    prefix = f"rng.{ranks.rank()}."
    states = {
        prefix + "python": _json_tensor(random.getstate()),
        prefix + "numpy": _json_tensor(numpy_state),
        prefix + "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states[prefix + "cuda"] = torch.cuda.get_rng_state()
    return states


def restore(loaded: Mapping[str, torch.Tensor]) -> None:
    prefix = f"rng.{ranks.rank()}."
    # A rank that did not exist at the time of the save keeps the generators its seed gave it.
    if prefix + "torch" not in loaded:
        return
    version, keys, gauss = _tensor_json(loaded[prefix + "python"])
    random.setstate((version, tuple(keys), gauss))
    kind, keys, position, has_gauss, cached = _tensor_json(loaded[prefix + "numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(loaded[prefix + "torch"])
    if torch.cuda.is_available() and prefix + "cuda" in loaded:
        torch.cuda.set_rng_state(loaded[prefix + "cuda"])


def _json_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _tensor_json(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.numpy()))
