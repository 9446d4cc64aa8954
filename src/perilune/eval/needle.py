"""Retrieval from a long text (data/probes/needle.py): how often the value of a key is found, by length and depth."""

from typing import Any

import torch

from perilune.data.probes.needle import needle_row
from perilune.data.tokenizer import Tokenizer
from perilune.eval.held_out import HeldOut
from perilune.model import Decoder
from perilune.train.scores import evaluating

DEPTHS = 4


def needle_accuracy(
    model: Decoder,
    tokenizer: Tokenizer,
    held_out: HeldOut,
    *,
    length: int,
    needles: int,
    rows: int,
    device: torch.device,
    seed: int = 0,
) -> dict[str, Any]:
    """Shares of questions: right value first among the needles' values (`ranked`), and among all tokens (`exact`)."""
    ranked, exact, nats, depths = [], [], [], []
    with evaluating(model):
        for number in range(rows):
            row = needle_row(held_out.text, tokenizer, length=length, needles=needles, number=number, seed=seed)
            answers = torch.from_numpy(row.answers).to(device)
            hidden = model.hidden(torch.from_numpy(row.tokens).to(device)[None])[0]
            logits = model.logits(hidden[torch.from_numpy(row.asked_at).to(device)]).float()
            right = torch.arange(needles, device=device)
            ranked.append(logits[:, answers].argmax(-1) == right)
            exact.append(logits.argmax(-1) == answers)
            nats.append(torch.nn.functional.cross_entropy(logits, answers, reduction="none"))
            depths.append(torch.from_numpy(row.depths))
    all_ranked, all_exact = torch.cat(ranked).cpu().double(), torch.cat(exact).cpu().double()
    bucket = (torch.cat(depths) * DEPTHS).long().clamp(max=DEPTHS - 1)
    by_depth = [all_ranked[bucket == each] for each in range(DEPTHS)]
    return {
        "length": length,
        "needles": needles,
        "questions": len(all_ranked),
        "ranked": float(all_ranked.mean()),
        "exact": float(all_exact.mean()),
        "nats": float(torch.cat(nats).double().mean()),
        "chance": 1.0 / needles,
        "ranked_by_depth": [float(part.mean()) if len(part) else None for part in by_depth],
    }
