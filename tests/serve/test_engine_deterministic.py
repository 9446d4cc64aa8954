"""deterministic=True: log-probs have the bits of the trainer's forward, whatever else runs."""

from dataclasses import replace

import pytest
import torch

from perilune.model.deterministic import token_log_probs
from perilune.serve.engine import EngineConfig
from perilune.serve.request import Request
from tests.serve import tiny
from tests.serve.engines import answers, ask, check_nothing_is_held, make_engine, media_of, tokens

CONFIG = EngineConfig(
    page_size=64,
    num_pages=14,
    max_sequences=3,
    token_budget=128,
    num_snapshots=4,
    snapshot_interval=64,
    deterministic=True,
)
LENGTHS = (3, 64, 70, 130, 200)


def requests(*, pictures: tuple[int, ...] = ()) -> list[Request]:
    trunk = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 201))
    made = []
    for n, length in enumerate(LENGTHS):
        prompt, media = tiny.prompt_with_pictures(trunk[:length], pictures)
        score = {"prompt_logprobs": 0} if n % 2 else {}
        made.append(replace(ask(str(n), prompt, seed=n, max_tokens=5, logprobs=0, **score), media=media))
    return made


@torch.no_grad()
def bits(variant: str, request: Request, answer: list[int]) -> list[float]:
    """Log-probs of all tokens but the first, by the trainer's forward."""
    model = tiny.fresh_model(variant, "float32")
    model.deterministic = True
    sequence = torch.tensor([[*request.prompt, *answer]])
    logits = model(sequence[:, :-1], media=media_of(request))[0]
    return token_log_probs(logits, sequence[0, 1:]).tolist()


@pytest.mark.parametrize("variant", ("hybrid", "block_attnres", "experts", "pictures"))
def test_logprobs_have_the_bits_of_the_trainers_forward(variant: str) -> None:
    engine = make_engine(tiny.fresh_model(variant, "float32"), CONFIG)
    asked = requests(pictures=(0, 1) if variant == "pictures" else ())
    found = answers(engine, *asked)
    again = answers(engine, *[replace(request, request_id=f"again {request.request_id}") for request in asked])
    assert engine.stats().cached_tokens > 0
    check_nothing_is_held(engine)
    for request in asked:
        exact = bits(variant, request, tokens(found[request.request_id]))
        for outputs in (found[request.request_id], again[f"again {request.request_id}"]):
            assert tokens(outputs) == tokens(found[request.request_id])
            logprobs = [each.logprob for output in outputs for each in output.logprobs]
            assert logprobs == exact[len(request.prompt) - 1 :]
            scores = outputs[0].prompt_logprobs
            assert scores is None or [each.logprob for each in scores if each is not None] == exact[: len(scores) - 1]
