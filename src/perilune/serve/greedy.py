"""Greedy answers to many prompts with pictures at once, through the engine: what a trained model draws or says.

    texts = greedy_answers(model, tokenizer, prompts, max_new_tokens=512)

The same answers as train/drawing.py gives module by module, up to the rounding of half precision. On a GPU the engine
replays CUDA graphs: a token for 256 pictures costs one launch where the modules cost hundreds. The model stays as it
is: the engine gets a copy, since it rounds the weights that it is given.
"""

import copy
import gc
from collections.abc import Sequence

import torch

from perilune.data.media import MediaPrompt, pad_positions
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.serve.engine import Engine, EngineConfig
from perilune.serve.request import Picture, Request, SamplingParams

MOST_AT_ONCE = 256
PROMPT_TOKENS = 8192
"""Of prompts in one step: pictures keep such a step from being a graph, so there should be few of them."""


def greedy_answers(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], *, max_new_tokens: int
) -> list[str]:
    """The greedy answer to every prompt, up to the end of its document; plain text, without special tokens."""
    if not prompts or max_new_tokens < 1:
        return [""] * len(prompts)
    at_once = min(MOST_AT_ONCE, len(prompts))
    config = EngineConfig(
        max_sequences=at_once,
        token_budget=PROMPT_TOKENS + at_once,
        max_length=max(len(prompt.tokens) for prompt in prompts) + max_new_tokens,
        max_queue=len(prompts),
        prefix_caching=False,
    )
    if model.embed_tokens.weight.is_cuda:
        torch.cuda.empty_cache()  # what a training keeps in reserve; the engine takes what the device has left
    engine = Engine(copy.deepcopy(model), tokenizer, config, forbidden=_no_text(tokenizer))
    try:
        return _asked(engine, tokenizer, prompts, max_new_tokens)
    finally:
        del engine
        gc.collect()  # graphs and what they call hold each other
        if model.embed_tokens.weight.is_cuda:
            torch.cuda.empty_cache()


def _asked(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], max_new_tokens: int) -> list[str]:
    params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
    for number, prompt in enumerate(prompts):
        request = Request(
            request_id=str(number), prompt=tuple(prompt.tokens), params=params, media=_placed(prompt, tokenizer),
            whole=True,
        )  # fmt: skip
        engine.add(request)
    written: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"the engine failed at prompt {output.request_id}: {output.error}")
            written[int(output.request_id)] += output.token_ids
    return [tokenizer.decode(token for token in tokens if token != tokenizer.eos_id) for tokens in written]


def _placed(prompt: MediaPrompt, tokenizer: Tokenizer) -> tuple[Picture, ...]:
    """The pictures of a prompt, each with the place of its first pad."""
    places = pad_positions(prompt.tokens, tokenizer)
    found, at = [], 0
    for media in prompt.media:
        found.append(Picture.of(media, int(places[at])))
        at += media.num_tokens
    return tuple(found)


def _no_text(tokenizer: Tokenizer) -> list[int]:
    """Special tokens but the end of the document."""
    return [token for token, size in enumerate(tokenizer.bytes_per_token) if not size and token != tokenizer.eos_id]
