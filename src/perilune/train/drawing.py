"""Answers about many pictures at once: greedy decoding in batches, module by module.

Prompts of the same length share one decode cache, so that sixty-four pictures cost about as many steps as one. The
pictures of a batch go through the vision tower together, once.

This is what `Answering` means, without a server. `serve/greedy.py` answers the same through the engine; whoever may
import both gives that one to a run, since on a GPU it is much faster.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from perilune.data.media import MediaPrompt, merge_media, pad_positions
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, MediaInput
from perilune.train.evaluate import forbidden_tokens


class Answering(Protocol):
    """Greedy answers to prompts, in their order, as plain text up to the end of the document."""

    def __call__(
        self, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], *, max_new_tokens: int
    ) -> list[str]: ...


@torch.no_grad()
def answers(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], *, max_new_tokens: int, batch_size: int = 64
) -> list[str]:
    """The greedy answer to every prompt, up to the end of its document."""
    found = [""] * len(prompts)
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.tokens), []).append(number)
    was_training = model.training
    model.eval()
    try:
        for numbers in by_length.values():
            for first in range(0, len(numbers), batch_size):
                batch = numbers[first : first + batch_size]
                texts = _answer_batch(model, tokenizer, [prompts[number] for number in batch], max_new_tokens)
                for number, text in zip(batch, texts, strict=True):
                    found[number] = text
    finally:
        model.train(was_training)
    return found


def media_input(tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], device: torch.device) -> MediaInput | None:
    """The pictures of prompts of one length, laid out as a batch."""
    media = merge_media([item for prompt in prompts for item in prompt.media])
    if not media.grids:
        return None
    positions = pad_positions([token for prompt in prompts for token in prompt.tokens], tokenizer)
    return MediaInput(
        positions=torch.from_numpy(positions).to(device),
        pixels=torch.from_numpy(media.pixels).to(device),
        grids=media.grids,
    )


def _answer_batch(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[MediaPrompt], max_new_tokens: int
) -> list[str]:
    device = model.embed_tokens.weight.device
    forbidden = torch.tensor(forbidden_tokens(model, tokenizer), device=device)
    media = media_input(tokenizer, prompts, device)
    feed = torch.tensor([prompt.tokens for prompt in prompts], device=device)
    cache = model.new_cache()
    going = torch.ones(len(prompts), dtype=torch.bool, device=device)
    written: list[torch.Tensor] = []
    for _ in range(max_new_tokens):
        hidden = model.hidden(feed, cache=cache, media=media)[:, -1]
        logits = model.logits(hidden)
        logits[:, forbidden] = float("-inf")
        token = torch.where(going, logits.argmax(-1), tokenizer.eos_id)
        going = going & (token != tokenizer.eos_id)
        written.append(token)
        if not going.any():
            break
        feed, media = token[:, None], None
    rows = torch.stack(written, dim=1).tolist() if written else [[] for _ in prompts]
    return [tokenizer.decode(token for token in row if token != tokenizer.eos_id) for row in rows]
