"""Forward and backward of one optimizer step, on one process or on this rank's share of the rows.

    gradient = sum_m d(sum of cross entropy in m) / V     over the micro-batches m of all ranks, V their valid targets

Losses are summed over the ranks that have different tokens, counts over those that have different rows; gradients are
summed where parameters are spread (parallel_data.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from perilune.model import Decoder
from perilune.train.batches import MicroBatch, uncounted
from perilune.train.decoupled import decoupled_backward
from perilune.train.evaluate import bits_per_byte
from perilune.train.parallel import Parallel
from perilune.train.parallel_pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Valid targets of the whole global batch, over all ranks, and the bytes of text they stand for."""

    text_targets: int
    text_bytes: int
    vision_targets: int

    @property
    def targets(self) -> int:
        return self.text_targets + self.vision_targets

    def losses(self, text_nats: float, vision_nats: float) -> dict[str, float]:
        """For the record. Bits per byte are those of text rows; a step without text has the loss of its pictures."""
        found = {"loss": text_nats / self.text_targets if self.text_targets else vision_nats / max(1, self.targets)}
        if self.text_targets:
            found["bits_per_byte"] = bits_per_byte(text_nats, self.text_bytes)
        if self.vision_targets:
            found["vision_loss"] = vision_nats / self.vision_targets
        return found


def totals(batches: Sequence[MicroBatch], device: torch.device, parallel: Parallel | None = None) -> Totals:
    own = [0, 0, 0]
    for batch in batches:
        if batch.media is None:
            own[0] += batch.num_targets
            own[1] += batch.num_bytes
        else:
            own[2] += batch.num_targets
    if parallel is not None:
        own = parallel.summed_by_rows(torch.tensor(own, device=device)).tolist()
    return Totals(text_targets=own[0], text_bytes=own[1], vision_targets=own[2])


def forward_backward(
    model: Decoder,
    batches: Sequence[MicroBatch],
    num_targets: int,
    *,
    decoupled: bool = False,
    parallel: Parallel | None = None,
    graphed: Callable[[Sequence[MicroBatch], int], Iterable[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Gradients of the loss per target of the global batch into .grad.

    Returns the summed losses in nats of text rows and of rows with pictures, float64 [2]. `decoupled` runs the vision
    tower apart from the language model. `graphed` (graphed.py) takes the place of `backward`, on one process.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens_BT.device)
    if parallel is not None and parallel.pipeline is not None:
        sums[0] = pipelined_backward(parallel, parallel.pipeline, batches, num_targets)
        return parallel.summed_by_tokens(sums)
    losses: Iterable[torch.Tensor]
    if graphed is not None and parallel is None and not decoupled:
        losses = graphed(batches, num_targets)
    elif decoupled:
        losses = decoupled_backward(model, batches, num_targets)
    else:
        losses = (backward(model, batch, num_targets, parallel) for batch in batches)
    for batch, loss in zip(batches, losses, strict=True):
        sums[0 if batch.media is None else 1] += loss
    return sums if parallel is None else parallel.summed_by_tokens(sums)


def backward(model: Decoder, batch: MicroBatch, num_targets: int, parallel: Parallel | None = None) -> torch.Tensor:
    tokens_BT, targets_BT = batch.tokens_BT, batch.targets_BT
    if parallel is not None:
        tokens_BT, targets_BT = parallel.own_tokens(tokens_BT, targets_BT)
    with uncounted(model, batch.filler):
        loss = model.loss(tokens_BT, targets_BT, batch.cu_seqlens, media=batch.media)
    (loss / max(1, num_targets)).backward()
    return loss.detach()


def pipelined_backward(
    parallel: Parallel, pipeline: Pipeline, batches: Sequence[MicroBatch], num_targets: int
) -> torch.Tensor:
    """All micro-batches of this rank through the stages; their summed loss. They are of one length, and text."""
    own = [parallel.own_tokens(batch.tokens_BT, batch.targets_BT) for batch in batches]
    return pipeline.forward_backward(
        torch.cat([tokens for tokens, _ in own]),
        torch.cat([targets for _, targets in own]),
        [batch.cu_seqlens for batch in batches],
        scale=1.0 / max(1, num_targets),
    )
