"""What a model is worth at a step: bits per byte on held-out text, answers of a probe, continuations of a few prompts.

    bits per byte = sum over targets of -log2 p(target) / bytes of text the targets stand for

It does not depend on the vocabulary, so models with different tokenizers compare. All functions leave the model in the
mode they found it, and touch neither attention statistics nor router biases: those only move in training mode.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from perilune.data.packing import IGNORED
from perilune.data.probes import ProbeRows
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, SamplingConfig, generate
from perilune.train.batches import ValidRows, micro_batches
from perilune.train.parallel import Parallel
from perilune.train.ranks import Part


def bits_per_byte(nats: float, num_bytes: float) -> float:
    return nats / math.log(2) / num_bytes if num_bytes else math.nan


@torch.no_grad()
def validate(
    model: Decoder,
    valid: ValidRows,
    *,
    rows: int,
    micro_batch_rows: int,
    device: torch.device,
    parallel: Parallel | None = None,
) -> dict[str, float]:
    """Loss per token and bits per byte over the first `rows` rows of the validation set (or all it has).

    A model that is spread over ranks (`parallel`) is asked by all of them, each with its part of the rows.
    """
    part = Part() if parallel is None else parallel.part
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in micro_batches(
            valid,
            first_row=0,
            rows=min(rows, valid.num_rows),
            micro_batch_rows=micro_batch_rows,
            device=device,
            part=part,
        ):
            tokens_BT, targets_BT = batch.tokens_BT, batch.targets_BT
            if parallel is not None:
                tokens_BT, targets_BT = parallel.own_tokens(tokens_BT, targets_BT)
            if parallel is not None and parallel.pipeline is not None:
                nats = parallel.pipeline.loss(tokens_BT, targets_BT, [batch.cu_seqlens])
            else:
                nats = model.loss(tokens_BT, targets_BT, batch.cu_seqlens, media=batch.media)
            sums += torch.stack([nats.double(), sums.new_tensor(batch.num_targets), sums.new_tensor(batch.num_bytes)])
    finally:
        model.train(was_training)
    if parallel is not None:
        parallel.reshard()
        parallel.summed_by_tokens(sums[:1])
        parallel.summed_by_rows(sums[1:])
    nats_total, num_targets, num_bytes = sums.tolist()
    return {"loss": nats_total / max(1.0, num_targets), "bits_per_byte": bits_per_byte(nats_total, num_bytes)}


@torch.no_grad()
def answer_accuracy(
    model: Decoder, valid: ProbeRows, *, rows: int, micro_batch_rows: int, device: torch.device
) -> dict[str, float]:
    """Share of answers that are the most likely token, and of rows in which all of them are.

    Every answer is given with the right ones before it in view, as in training. The model is whole: on many ranks each
    asks its own copy about all rows.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in micro_batches(valid, first_row=0, rows=rows, micro_batch_rows=micro_batch_rows, device=device):
            asked = batch.targets_BT[0] != IGNORED
            hidden = model.hidden(batch.tokens_BT, cu_seqlens=batch.cu_seqlens)[0, asked]
            right = model.logits(hidden).argmax(-1) == batch.targets_BT[0, asked]
            row = torch.arange(len(asked), device=device)[asked] // valid.seq_len
            wrong_in_row = torch.zeros(len(asked) // valid.seq_len, device=device).index_add_(0, row, (~right).float())
            counts = [right.sum(), right.numel(), (wrong_in_row == 0).sum(), wrong_in_row.numel()]
            sums += torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])
    finally:
        model.train(was_training)
    num_right, num_asked, num_whole, num_rows = sums.tolist()
    return {"accuracy": num_right / max(1.0, num_asked), "exact_match": num_whole / max(1.0, num_rows)}


def continuations(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], sampling: SamplingConfig
) -> Iterator[tuple[str, str]]:
    """(prompt, text) for every prompt, each a document of its own."""
    forbidden = forbidden_tokens(model, tokenizer)
    for prompt in prompts:
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        new = generate(model, ids, sampling, stop=frozenset({tokenizer.eos_id}), forbidden=forbidden)
        yield prompt, tokenizer.decode(new)


def forbidden_tokens(model: Decoder, tokenizer: Tokenizer) -> list[int]:
    """What plain text never holds: special tokens other than the end, and ids past the tokenizer's vocabulary."""
    special = [token for token, size in enumerate(tokenizer.bytes_per_token) if not size and token != tokenizer.eos_id]
    return [*special, *range(tokenizer.vocab_size, model.config.vocab_size)]
