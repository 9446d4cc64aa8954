"""The momentum of a replicated parameter, of which every rank keeps only the matrices it owns (ZeRO-1).

torch.distributed.checkpoint sees one tensor of the parameter's shape, cut into chunks that lie on different ranks. So a
checkpoint of four ranks loads on any other number of them, or into the plain momentum of one process, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from perilune.optim.shards import Box, cut, shape_of, whole_box

aten = torch.ops.aten
BLOCKWISE = (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default)


class OwnedMomentum(Tensor):
    """Has the shape of the parameter and holds some `blocks` of it, by their boxes; those of other ranks are absent.

    A tensor only as far as checkpoints need: it can be copied and moved, not computed with. Compute with its blocks.
    """

    blocks: dict[Box, Tensor]

    @classmethod
    def holding(
        cls, shape: Sequence[int], blocks: Mapping[Box, Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> OwnedMomentum:
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        self.blocks = dict(blocks)
        return self

    @classmethod
    def zeros(
        cls, shape: Sequence[int], boxes: Sequence[Box], *, dtype: torch.dtype, device: torch.device
    ) -> OwnedMomentum:
        blocks = {box: torch.zeros(shape_of(box), dtype=dtype, device=device) for box in boxes}
        return cls.holding(shape, blocks, dtype=dtype, device=device)

    def take_from(self, whole: Tensor) -> OwnedMomentum:
        """Fill the own blocks from a tensor of the full shape."""
        for box, block in self.blocks.items():
            block.copy_(cut(whole, box, whole_box(self.shape)))
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OwnedMomentum(shape={tuple(self.shape)}, {len(self.blocks)} blocks on this rank)"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is aten.copy_.default and all(isinstance(each, OwnedMomentum) for each in args[:2]):
            target, source = args[:2]
            for box, block in target.blocks.items():
                block.copy_(source.blocks[box])
            return target
        if func not in BLOCKWISE:
            raise NotImplementedError(
                f"{func} on an OwnedMomentum: this rank has only its own blocks; compute with `blocks`, or save and "
                "load it by torch.distributed.checkpoint"
            )
        source = args[0]
        blocks = {box: func(block, *args[1:], **options) for box, block in source.blocks.items()}
        dtype, device = options.get("dtype") or source.dtype, options.get("device") or source.device
        return cls.holding(source.shape, blocks, dtype=dtype, device=torch.device(device))

    # The protocol by which torch.distributed.checkpoint asks tensors for their chunks.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(block), size=self.shape
                ),
            )
            for chunk, block in zip(self.__create_chunk_list__(), self.blocks.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([start for start, _ in box]), sizes=torch.Size(shape_of(box)))
            for box in self.blocks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, block in self.blocks.items():
            if index.offset is not None and tuple(index.offset) == tuple(start for start, _ in box):
                return block
        raise ValueError(f"{index!r} asks for a block that this rank does not own; it owns {list(self.blocks)!r}")
