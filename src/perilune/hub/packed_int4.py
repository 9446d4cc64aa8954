"""Weights of four bits as Kimi K2.5 stores its experts: compressed-tensors, "pack-quantized", groups, symmetric.

A weight [O, I] is three tensors:

    weight_packed [O, I / 8]  int32     eight numbers a word, the first in the lowest bits, each stored as w + 8
    weight_scale  [O, I / g]            one scale for g neighbours of a row
    weight_shape  [2]                   O and I

    weight[o, i] = (((packed[o, i // 8] >> 4 (i % 8)) & 15) - 8) * scale[o, i // g]

The result has the dtype of the scales.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from perilune.hub.entries import FormatError
from perilune.hub.tensor_files import TensorFolder, TensorKind

PER_WORD = 8
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


def group_size_of(public: Mapping[str, Any]) -> int | None:
    """Neighbours that share a scale, from `quantization_config`; None where nothing is quantised.

    FormatError for any other quantisation.
    """
    text = public.get("text_config")
    found = public.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    if not isinstance(found, dict):
        raise FormatError(f"quantization_config is {found!r}, expected an object")
    for key, value in (("quant_method", "compressed-tensors"), ("format", "pack-quantized")):
        if found.get(key) != value:
            raise FormatError(
                f"quantization_config.{key}={found.get(key)!r} is not supported: expected {value!r}, as Kimi K2.5 is "
                "released; give weights in bfloat16"
            )
    groups = [group.get("weights") for group in (found.get("config_groups") or {}).values()]
    if len(groups) != 1 or not isinstance(groups[0], dict):
        raise FormatError(f"quantization_config has {len(groups)} config_groups, expected one, with its weights")
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    for key, value in expected.items():
        if groups[0].get(key, value) != value:
            raise FormatError(
                f"quantization_config weights.{key}={groups[0][key]!r} is not supported: expected {value!r}"
            )
    size = groups[0].get("group_size")
    if not isinstance(size, int) or size < 1:
        raise FormatError(f"quantization_config weights.group_size={size!r}, expected a whole number as 32")
    return size


def unpack(packed_OW: Tensor, scale_OG: Tensor, shape: tuple[int, int], group_size: int) -> Tensor:
    """[O, I] in the dtype of the scales."""
    rows, columns = shape
    words = -(-columns // PER_WORD)
    groups = -(-columns // group_size)
    if packed_OW.dtype != torch.int32 or tuple(packed_OW.shape) != (rows, words):
        raise FormatError(f"packed as {packed_OW.dtype} {tuple(packed_OW.shape)}, expected int32 {(rows, words)}")
    if tuple(scale_OG.shape) != (rows, groups) or not scale_OG.is_floating_point():
        raise FormatError(f"scaled by {scale_OG.dtype} {tuple(scale_OG.shape)}, expected numbers {(rows, groups)}")
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32)
    numbers = ((packed_OW[:, :, None] >> shifts) & 15).flatten(1)[:, :columns] - PER_WORD
    scales = scale_OG.repeat_interleave(group_size, dim=1)[:, :columns]
    return numbers.to(scale_OG.dtype) * scales


class UnpackedFolder(Mapping[str, Tensor]):
    """The tensors of a folder with packed weights under the names they had before; unpacked when they are read."""

    def __init__(self, folder: TensorFolder, group_size: int) -> None:
        self.folder, self.group_size = folder, group_size
        self.packed = {name.removesuffix(PACKED) for name in folder if name.endswith(PACKED)}
        for name in sorted(self.packed):
            for part in (SCALE, SHAPE):
                if name + part not in folder:
                    raise FormatError(
                        f"the weights lack {name + part!r}, without which {name + PACKED!r} means nothing"
                    )
        parts = {name + part for name in self.packed for part in (PACKED, SCALE, SHAPE)}
        self.names = [name for name in folder if name not in parts] + [f"{name}.weight" for name in self.packed]
        self._known = set(self.names)

    def __getitem__(self, name: str) -> Tensor:
        base = name.removesuffix(".weight")
        if base not in self.packed:
            return self.folder[name]
        packed, scale, shape = (self.folder[base + part] for part in (PACKED, SCALE, SHAPE))
        try:
            return unpack(packed, scale, _pair(shape), self.group_size)
        except FormatError as error:
            raise FormatError(f"{base + PACKED!r} cannot be unpacked: {error}") from None

    def kind(self, name: str) -> TensorKind:
        """What reading `name` will give; of a packed weight only its scales and its shape are looked at."""
        base = name.removesuffix(".weight")
        if base not in self.packed:
            return self.folder.kind(name)
        return TensorKind(dtype=self.folder.kind(base + SCALE).dtype, shape=_pair(self.folder[base + SHAPE]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._known


def _pair(shape: Tensor) -> tuple[int, int]:
    if shape.numel() != 2 or shape.is_floating_point():
        raise FormatError(f"its shape is {shape.tolist()!r}, expected two whole numbers")
    rows, columns = (int(side) for side in shape.flatten())
    return rows, columns
