"""Running engines in tests, and what they must give: the tokens of `generate`, step by step, alone."""

from functools import cache, partial
from unittest.mock import patch

import torch

from perilune.data.media import merge_media
from perilune.model import Decoder, MediaInput, SamplingConfig, generate
from perilune.serve.engine import Engine, EngineConfig, forbidden_ids
from perilune.serve.request import Output, Request, SamplingParams
from perilune.serve.runner import Runner
from perilune.serve.sampler import Sampler
from tests.serve import tiny

SMALL = EngineConfig(
    page_size=4, num_pages=40, max_sequences=4, token_budget=16, num_snapshots=6, snapshot_interval=16, patience=4
)


def make_engine(model: Decoder, config: EngineConfig = SMALL, *, padded: bool = False) -> Engine:
    """With `padded` steps are filled up to buckets, as those of CUDA graphs are."""
    runner, sampler = (partial(kind, use_graphs=padded or None) for kind in (Runner, Sampler))
    with patch("perilune.serve.engine.Runner", runner), patch("perilune.serve.engine.Sampler", sampler):
        return Engine(model, tiny.tokenizer(), config)


def ask(name: str, prompt: tuple[int, ...], **params: object) -> Request:
    return Request(request_id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def finish(engine: Engine, limit: int = 2000) -> dict[str, list[Output]]:
    """All events until the engine has nothing left to do, by request."""
    found: dict[str, list[Output]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"the engine is stuck: {engine.stats()}")


def answers(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    for request in requests:
        engine.add(request)
    return finish(engine)


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[Output]) -> str:
    return "".join(output.text() for output in outputs)


def check_nothing_is_held(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.pages_free == stats.pages
    states = engine._scheduler.states
    assert states.num_free == states.max_sequences and states.num_reserved == 0


@cache
def forbidden() -> tuple[int, ...]:
    return tuple(forbidden_ids(tiny.tokenizer(), tiny.BASE.vocab_size))


def generated(model: Decoder, request: Request) -> list[int]:
    """Without any engine; ends with the stop token, if there is one."""
    params = request.params
    assert params.seed is not None or params.temperature == 0
    sampling = SamplingConfig(
        max_new_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed or 0,
    )
    stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | {tiny.tokenizer().eos_id}
    found = []
    for token in generate(model, request.prompt, sampling, forbidden=forbidden(), media=media_of(request)):
        found.append(token)
        if token in stop_ids:
            break
    return found


def media_of(request: Request) -> MediaInput | None:
    if not request.media:
        return None
    batch = merge_media(request.media)
    positions = [place for picture in request.media for place in range(picture.start, picture.end)]
    return MediaInput(positions=torch.tensor(positions), pixels=torch.from_numpy(batch.pixels), grids=batch.grids)


@torch.no_grad()
def log_probs(model: Decoder, request: Request, answer: list[int]) -> torch.Tensor:
    """[prompt + answer, vocabulary]: row i predicts token i + 1, by one forward over all of them."""
    logits = model(torch.tensor([[*request.prompt, *answer]]), media=media_of(request))
    return logits[0].log_softmax(-1)
