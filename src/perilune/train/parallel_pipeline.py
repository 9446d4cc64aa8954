"""Pipeline parallel: consecutive layers on different ranks, micro-batches following one another through them.

What a stage sends on is the residual stream: on the plain path one sum; with Attention Residuals every closed block and
the sum of the open one, because later layers read them again. Gradients come back along the same way, so the result is
exact under any schedule. A stage that begins inside a block repeats the first pass of its own queries over the blocks.

    blocks on the wire before sublayer s, blocks of S sublayers:   ceil(s / S) + 1 tensors [1, T, hidden]

There is one stage a rank, where no block reaches the same rank twice. Interleaved schedules (several chunks of layers a
rank) are left out. They send the stream once more for every chunk, and only a cache of the blocks that a rank has seen
in its earlier chunks brings that down again; `interleaved_wire` counts both. 48 layers in blocks of 12 sublayers on 4
ranks: 15 tensors a micro-batch with one chunk a rank, 35 with two, 25 of them with the cache. In return the bubble,
(ranks - 1) / micro-batches of a step, is halved: with 16 micro-batches 19% becomes 9%, with 64 of them 5% becomes 2%.
More micro-batches a step do the same without more traffic, so a run that has them does not need the second schedule.

Engine: torch.distributed.pipelining. Micro-batches are packed rows; their document borders are padded to one length, as
empty documents at the end of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from perilune.kernels.attnres import phase1
from perilune.kernels.norm import takes_triton
from perilune.model import Decoder, ModelConfig
from perilune.model.documents import Packing, positions_of
from perilune.model.head import cross_entropy_sum
from perilune.model.residual import Stream
from perilune.optim.matrices import Layout
from perilune.train.parallel_tensor import become

Schedule = Literal["1f1b", "gpipe"]
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of every stage: as equal as can be, the first and the last ones, which have a vocabulary, not longer."""
    short, rest = divmod(num_layers, stages)
    sizes = [short] * stages
    for index in sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))[:rest]:
        sizes[index] += 1
    starts = [sum(sizes[:index]) for index in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def keep_stage(model: Decoder, stage: int, stages: int) -> None:
    """Remove from `model` what other stages have, in place. Names of what stays, stay."""
    layers = stage_layers(model.config.num_hidden_layers, stages)[stage]
    kept = nn.ModuleList()
    kept._modules.update({str(index): model.layers[index] for index in layers})
    last = stage == stages - 1
    # The sites of other stages have no use here; their places in the reading order are kept.
    own = {id(module) for layer in kept for module in layer.modules()}
    if last and hasattr(model, "out_res"):
        own.add(id(model.out_res))
    model._sites = [site if id(site) in own else None for site in model._sites]  # type: ignore[misc]
    model.layers = kept
    become(model, StageDecoder, first_layer=layers.start, is_first=stage == 0, is_last=last)
    if stage > 0:
        model.embed_tokens = None  # type: ignore[assignment]
    if not last:
        model.norm = model.lm_head = None  # type: ignore[assignment]
        if hasattr(model, "out_res"):
            del model.out_res


class StageDecoder:
    """Some layers of a decoder. (tokens, or the tensors of a stream) -> the tensors of a stream, or the loss [1]."""

    first_layer: int
    is_first: bool
    is_last: bool

    def forward(self, *given: Tensor, targets: Tensor | None = None, borders: Tensor | None = None) -> Any:
        assert isinstance(self, Decoder)
        borders = None if borders is None else borders[0]
        positions = None
        if self.config.mla.rope is not None:
            positions = positions_of(given[0][..., 0] if given[0].ndim == 3 else given[0], borders, 0)
        packing = Packing(cu_seqlens=borders, positions=positions)
        stream = self._stream(self._embedded(given[0]) if self.is_first else None, given)
        for layer in self.layers:
            stream = layer(stream, packing)
        if not self.is_last:
            stream = stream._added()
            assert stream.running is not None
            again = () if stream.embedding is None else (stream.embedding,)
            return (*stream.bank, stream.running, *again)
        hidden, _ = stream.read(self.norm)
        assert targets is not None, "the last stage is given the targets"
        # Stacked, not viewed as [1]: FSDP puts its hook on what a module returns, and a view may lose it.
        return torch.stack([cross_entropy_sum(hidden.flatten(0, 1), self.head_weight(), targets.flatten())])

    def logical_matrices(self) -> Mapping[str, Layout]:
        """Of what this stage has."""
        present = dict(self.named_parameters())  # type: ignore[attr-defined]
        declared = super().logical_matrices()  # type: ignore[misc]
        return {name: layout for name, layout in declared.items() if name in present}

    def _stream(self, embedding: Tensor | None, given: Sequence[Tensor]) -> Stream:
        assert isinstance(self, Decoder)
        kind = self.config.residual
        if kind in ("plain", "scalars"):
            running = given[0] if embedding is None else embedding
            again = None
            if kind == "scalars":
                again = embedding if embedding is not None else given[1]
            return Stream(bank=(), running=running, queries=(), embedding=again, fused=takes_triton(running))
        block = 1 if kind == "attnres" else self.config.block_sublayers
        *bank, running = given if embedding is None else (embedding,)
        absent = running.new_zeros(running.shape[-1])
        queries = tuple(absent if site is None else site.folded() for site in self._sites)
        eps = self.config.rms_norm_eps
        site, ahead = 2 * self.first_layer, None
        if block > 1 and site % block:
            opened = site - site % block
            outputs, log_sums = phase1(
                tuple(bank), torch.stack(queries[opened : min(opened + block, len(queries) - 1)]), eps=eps
            )
            ahead = (outputs.unbind(0), log_sums.unbind(0))
        return Stream(bank=tuple(bank), running=running, queries=queries, block=block, site=site, ahead=ahead, eps=eps)


def wire_tensors(config: ModelConfig, layer: int) -> int:
    """How many tensors travel to the stage that begins with `layer`."""
    kind = config.residual
    if kind in ("plain", "scalars"):
        return 1 if kind == "plain" else 2
    block = 1 if kind == "attnres" else config.block_sublayers
    return -(-2 * layer // block) + 1


def interleaved_wire(config: ModelConfig, ranks: int, chunks: int) -> tuple[int, int]:
    """Tensors that cross between ranks for a micro-batch with `chunks` chunks of layers a rank: (all, with a cache).

    Chunk c runs on rank c mod ranks. With a cache a rank is sent the open sum and those closed blocks that came after
    its chunk before.
    """
    cuts = stage_layers(config.num_hidden_layers, ranks * chunks)
    sent = [wire_tensors(config, cut.start) for cut in cuts[1:]]
    seen = [wire_tensors(config, cut.stop) - 1 for cut in cuts[:-ranks]]
    return sum(sent), sum(sent) - sum(seen)


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """The stage of this rank, and one training step (or look) through all stages."""

    model: Decoder
    """What `keep_stage` left, spread or not."""
    mesh: DeviceMesh
    """1-D, over the stages"""
    device: torch.device
    schedule: Schedule = "1f1b"
    _scale: float = 1.0
    """Of the loss of the step at work."""
    _schedules: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """By kind, number of micro-batches and length of their rows."""

    def forward_backward(
        self, tokens_MT: Tensor, targets_MT: Tensor, borders: Sequence[Tensor], scale: float
    ) -> Tensor:
        """Gradients of `scale` times the loss of M micro-batches into .grad; returns the loss, the same on all stages.

        borders: of each micro-batch, its documents.
        """
        if len(tokens_MT) < self.mesh.size():
            raise ValueError(
                f"a step has {len(tokens_MT)} micro-batches a rank, fewer than parallel.pp={self.mesh.size()} stages: "
                "raise trainer.global_batch_rows or lower trainer.micro_batch_rows"
            )
        self._scale = scale
        return self._through("step", self.schedule, tokens_MT, targets_MT, borders) / scale

    @torch.no_grad()
    def loss(self, tokens_MT: Tensor, targets_MT: Tensor, borders: Sequence[Tensor]) -> Tensor:
        """The loss of any number of micro-batches, the same on all stages; no gradients."""
        self._scale = 1.0
        return self._through("eval", "gpipe", tokens_MT, targets_MT, borders)

    def _through(
        self, do: str, kind: Schedule, tokens_MT: Tensor, targets_MT: Tensor, borders: Sequence[Tensor]
    ) -> Tensor:
        """All micro-batches through all stages; the sum of their scaled losses."""
        schedule = self._scheduled(kind, *tokens_MT.shape, keeps=do == "step")
        first, last = self.mesh.get_local_rank() == 0, self.mesh.get_local_rank() == self.mesh.size() - 1
        targets: dict[str, Any] = {"targets": targets_MT} if last else {}
        losses: list[Tensor] = []
        getattr(schedule, do)(
            *([tokens_MT] if first else []),
            target=targets_MT if last else None,
            losses=losses,
            borders=padded_borders(borders),
            **targets,
        )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if last:
            total = torch.stack([loss.detach() for loss in losses]).double().sum()
        dist.broadcast(total, group=self.mesh.get_group(), group_src=self.mesh.size() - 1)
        return total

    def _scheduled(self, kind: Schedule, micro_batches: int, num_tokens: int, *, keeps: bool) -> Any:
        key = (kind, micro_batches, num_tokens, keeps)
        if key not in self._schedules:
            self._schedules[key] = SCHEDULES[kind](
                self._stage(num_tokens),
                n_microbatches=micro_batches,
                loss_fn=lambda loss, _: loss.sum() * self._scale,
                scale_grads=False,
            )
        return self._schedules[key]

    def _stage(self, num_tokens: int) -> PipelineStage:
        config, rank, stages = self.model.config, self.mesh.get_local_rank(), self.mesh.size()
        cuts = stage_layers(config.num_hidden_layers, stages)

        def wire(layer: int) -> tuple[Tensor, ...]:
            shape = (1, num_tokens, config.hidden_size)
            return tuple(
                torch.empty(shape, dtype=config.dtype(), device="meta", requires_grad=True)
                for _ in range(wire_tensors(config, layer))
            )

        tokens = (torch.empty(1, num_tokens, dtype=torch.int64, device="meta"),)
        loss = torch.float64 if config.dtype() == torch.float64 else torch.float32
        last = (torch.empty(1, dtype=loss, device="meta", requires_grad=True),)
        return PipelineStage(
            self.model,
            rank,
            stages,
            self.device,
            input_args=tokens if rank == 0 else wire(cuts[rank].start),
            output_args=last if rank == stages - 1 else wire(cuts[rank + 1].start),
            group=self.mesh.get_group(),
        )


def padded_borders(borders: Sequence[Tensor]) -> Tensor:
    """[M, N + 1]: all as long as the longest; the documents that are added are empty."""
    longest = max(len(each) for each in borders)
    return torch.stack([torch.cat([each, each[-1:].expand(longest - len(each))]) for each in borders])
