"""Who plays the asides of episodes: frozen workers in an engine of their own, or the policy itself.

Frozen workers have the weights that the run began with, or those of another model, and never change: what they say is
an observation. These weights lie in the run's folder, so that a resumed run has the same workers.

    runs/NAME/workers/weights.safetensors  model.json  tokenizer.json

All workers of all episodes decode in one batch of their engine. It is not the policy's engine: after its first update
the policy has other weights, and one batch multiplies by one set of them. Jointly trained workers share the policy's.
"""

import json
import os
import secrets
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, ModelConfig
from perilune.rl.remote_engines import RemoteEngines
from perilune.rl.talk import TalkConfig, Workers
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.train.config_file import from_plain, to_plain

WORKERS = "workers"
WEIGHTS, MODEL, TOKENIZER = "weights.safetensors", "model.json", "tokenizer.json"
QUEUE = 1 << 20
"""Requests that may wait: in a run of its own nobody is refused."""


def frozen_copy(model: Decoder) -> Decoder:
    copy = Decoder(model.config)
    copy.load_state_dict(model.state_dict())
    return copy


def frozen_workers(
    model: Decoder,
    tokenizer: Tokenizer,
    engine: EngineConfig,
    talk: TalkConfig,
    *,
    device: torch.device,
    remote: RemoteEngines | None = None,
) -> Workers:
    """Workers with an engine of their own, which takes possession of `model`. Whoever asked closes it. With `remote`
    every one of its processes has such an engine, and none is made here."""
    # Routes are for training, and nothing of a frozen worker is trained.
    config = replace(engine, max_queue=QUEUE, record_routes=False)
    if remote is not None:
        remote.add_frozen(model, tokenizer, config)
        return Workers(engine=remote, tokenizer=tokenizer, config=talk)  # pyrefly: ignore[bad-argument-type]
    served = AsyncEngine(Engine(model, tokenizer, config, device=device))
    return Workers(engine=served, tokenizer=tokenizer, config=talk)


def save_workers(folder: Path, model: Decoder, tokenizer: Tokenizer) -> None:
    """Into the folder of a run; the weights appear last, complete or not at all."""
    place = folder / WORKERS
    place.mkdir(parents=True, exist_ok=True)
    (place / MODEL).write_text(json.dumps(to_plain(model.config), indent=2) + "\n", encoding="utf-8")
    tokenizer.save(place / TOKENIZER)
    aside = place / f".{WEIGHTS}.{secrets.token_hex(4)}"
    try:
        # Clones: tied weights share memory, which the format refuses.
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, aside)
        os.replace(aside, place / WEIGHTS)
    finally:
        aside.unlink(missing_ok=True)


def load_workers(folder: Path) -> tuple[Decoder, Tokenizer]:
    """Those of a run; FileNotFoundError names the folder that has none."""
    place = folder / WORKERS
    if not (place / WEIGHTS).exists():
        raise FileNotFoundError(f"{str(folder)!r} holds no workers: it has no {WORKERS}/{WEIGHTS}")
    plain = json.loads((place / MODEL).read_text(encoding="utf-8"))
    model = Decoder(from_plain(ModelConfig, plain, MODEL))
    model.load_state_dict(load_file(place / WEIGHTS))
    return model, Tokenizer.load(place / TOKENIZER)
