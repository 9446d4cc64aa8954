"""Greedy answers through the engine are those that the model gives module by module, and the model stays as it was."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from perilune.data.media import MediaPrompt, prompt_tokens
from perilune.model import Decoder
from perilune.serve import greedy
from perilune.serve.greedy import greedy_answers
from perilune.train.drawing import answers
from tests.serve import tiny


def prompts(*seeds: int | None) -> list[MediaPrompt]:
    """A question for every number; about the picture of that seed (twice, where it is odd), or about none."""
    tokenizer, found = tiny.tokenizer(), []
    for number, seed in enumerate(seeds):
        images = [] if seed is None else [tiny.picture(seed)] * (1 + seed % 2)
        asked = prompt_tokens(tokenizer, "the moon " * (1 + number % 3), images=images)
        found.append(MediaPrompt(tokens=[tokenizer.bos_id, *asked.tokens], media=asked.media))
    return found


def model(residual: str = "block_attnres") -> Decoder:
    config = replace(tiny.VARIANTS["pictures"], num_hidden_layers=4, layer_types=("kda", "mla") * 2, residual=residual)
    return Decoder(replace(config, compute_dtype="float32", block_sublayers=3), seed=3)


@pytest.mark.parametrize("residual", ["plain", "block_attnres"])
def test_answers_are_those_of_the_model_module_by_module(residual):
    decoder, asked = model(residual), prompts(0, 1, 2, 3, None, 5, 0, 1)
    expected = answers(decoder, tiny.tokenizer(), asked, max_new_tokens=24)
    assert len(set(expected)) > 2, "answers that are all alike would not tell pictures apart"
    assert greedy_answers(decoder, tiny.tokenizer(), asked, max_new_tokens=24) == expected


def test_more_prompts_than_run_at_once_wait_their_turn(monkeypatch):
    monkeypatch.setattr(greedy, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(greedy, "PROMPT_TOKENS", 8)  # prompts are cut, also inside their pictures
    decoder, asked = model(), prompts(0, 1, 2, 3, 4, 5)
    expected = answers(decoder, tiny.tokenizer(), asked, max_new_tokens=12)
    assert greedy_answers(decoder, tiny.tokenizer(), asked, max_new_tokens=12) == expected


def test_special_tokens_are_no_text_however_likely():
    """Weights are made such that the end of a turn is what the model likes best."""
    tokenizer, decoder = tiny.tokenizer(), model("plain")
    liked = tokenizer.special_ids["<|im_end|>"]
    with torch.no_grad():
        decoder.head_weight()[liked] = 0
        hidden = decoder.hidden(torch.tensor([prompts(None)[0].tokens]))[0, -1]
        decoder.head_weight()[liked] = 100 * hidden
    asked = prompts(None)
    expected = answers(decoder, tokenizer, asked, max_new_tokens=6)
    assert greedy_answers(decoder, tokenizer, asked, max_new_tokens=6) == expected
    assert expected != [""]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_keeps_its_weights_and_its_mode(dtype):
    decoder = model().train()
    decoder.set_compute_dtype(dtype)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    greedy_answers(decoder, tiny.tokenizer(), prompts(0, None), max_new_tokens=4)
    assert decoder.training
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_nothing_of_the_engine_stays(monkeypatch):
    held = []

    class Watched(greedy.Engine):
        def __init__(self, decoder: Decoder, *given, **named) -> None:
            super().__init__(decoder, *given, **named)
            self.itself = self  # what holds itself is there until somebody looks for it, as graphs are
            held.extend([weakref.ref(self), weakref.ref(decoder)])

    monkeypatch.setattr(greedy, "Engine", Watched)
    gc.disable()
    try:
        greedy_answers(model(), tiny.tokenizer(), prompts(0), max_new_tokens=2)
        assert len(held) == 2 and all(each() is None for each in held)
    finally:
        gc.enable()


def test_nothing_asked_is_nothing_answered():
    assert greedy_answers(model(), tiny.tokenizer(), [], max_new_tokens=4) == []
    assert greedy_answers(model(), tiny.tokenizer(), prompts(0), max_new_tokens=0) == [""]
