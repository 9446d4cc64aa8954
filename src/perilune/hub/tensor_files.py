"""Safetensors files, one tensor at a time: reading and writing never hold more than that in memory.

A file is 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, place), then the numbers. A
folder has one file, or several and an index that says which tensor is where.

What this module promises: nothing but numbers is read (no pickle), a name in an index cannot lead out of the folder,
and a file that is truncated or wrong is one FormatError that names the tensor. Files are read, not mapped, so that what
was read once does not stay in memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from perilune.hub.entries import FormatError

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 2**30
MAX_HEADER_BYTES = 100 * 2**20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorKind:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorPlace(TensorKind):
    file: Path
    begin: int
    """In bytes, from the start of the file"""


class TensorFolder(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = _places(folder)

    def __getitem__(self, name: str) -> Tensor:
        return read_tensor(name, self.places[name])

    def kind(self, name: str) -> TensorKind:
        """What reading `name` will give."""
        return self.places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places


def read_tensor(name: str, place: TensorPlace) -> Tensor:
    tensor = torch.empty(place.shape, dtype=place.dtype)
    if not tensor.numel():
        return tensor
    numbers = _bytes_of(tensor)
    try:
        with place.file.open("rb") as file:
            file.seek(place.begin)
            read = file.readinto(numbers)
    except OSError as error:
        raise FormatError(f"{name!r} cannot be read from {place.file}: {error.strerror or error}") from error
    if read != len(numbers):
        raise FormatError(f"{name!r} is cut off: {place.file} ends before it; fetch the file again")
    return tensor


def _places(folder: Path) -> dict[str, TensorPlace]:
    if (folder / INDEX).exists():
        return _indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FormatError(_without_safetensors(folder))
    places: dict[str, TensorPlace] = {}
    for file in files:
        for name, place in read_header(file).items():
            if name in places:
                raise FormatError(f"{name!r} is in {places[name].file} and in {file}: remove the older file")
            places[name] = place
    return places


def _without_safetensors(folder: Path) -> str:
    others = [file.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in sorted(folder.glob(kind))]
    if not others:
        return f"{folder} holds no .safetensors file"
    return (
        f"{folder} holds {others[0]!r} and no .safetensors file: files of that kind can run code when they are opened, "
        "so only safetensors are read; ask for weights in that format, or convert them where you trust them"
    )


def _indexed(folder: Path) -> dict[str, TensorPlace]:
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder / INDEX} is not an index of tensors: {error}") from None
    headers = {file: read_header(_inside(folder, file)) for file in sorted(set(listed.values()))}
    for name, file in listed.items():
        if name not in headers[file]:
            raise FormatError(f"{INDEX} says that {name!r} is in {file!r}, which does not hold it")
    return {name: headers[file][name] for name, file in listed.items()}


def _inside(folder: Path, name: str) -> Path:
    """A file that an index names; links of the folder's owner are followed, ways out of it are not."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise FormatError(f"{INDEX} names the file {name!r}, expected a .safetensors file inside the folder")
    if not (folder / path).is_file():
        raise FormatError(f"{INDEX} names {name!r}, but {folder} does not hold it: fetch the missing file")
    return folder / path


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Where each tensor of a file is; FormatError names the one that does not fit."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise FormatError(f"{file} cannot be read: it is {size} bytes, too short for its header of {length}")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{file} cannot be read: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise FormatError(f"{file} cannot be read: its header is not a table of tensors")
    header.pop("__metadata__", None)
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    for name, place in sorted(places.items(), key=lambda item: item[1].begin):
        end = place.begin + place.num_bytes
        if end > size:
            raise FormatError(
                f"{name!r} is cut off: it ends at byte {end:,} but {file} has {size:,}; fetch the file again"
            )
    return places


def _place(file: Path, name: str, entry: Any, start: int) -> TensorPlace:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise FormatError(
            f"{name!r} has the header {entry!r} in {file}, expected dtype ({', '.join(DTYPES)}), shape and data_offsets"
        ) from None
    if not whole or end - begin != math.prod(shape) * dtype.itemsize:
        raise FormatError(
            f"{name!r} in {file} is said to be {entry['dtype']} {list(shape)} in the bytes {begin} to {end}: they do "
            "not agree; fetch the file again"
        )
    return TensorPlace(file=file, dtype=dtype, shape=shape, begin=start + begin)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_shards(
    folder: Path,
    kinds: Mapping[str, TensorKind],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tensors that `read` gives by name as model*.safetensors, with an index when there are several files."""
    shards: list[dict[str, TensorKind]] = [{}]
    size = 0
    for name, kind in kinds.items():
        if shards[-1] and size + kind.num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = kind
        size += kind.num_bytes
    total, done, weight_map = sum(kind.num_bytes for kind in kinds.values()), 0, {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        # Wide numbers first: then each tensor begins at a multiple of its own width.
        ordered = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
        with (folder / file).open("wb") as opened:
            opened.write(_header(ordered))
            for name, kind in ordered.items():
                opened.write(_bytes(name, read(name), kind))
                done += kind.num_bytes
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(kinds: Mapping[str, TensorKind]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        begin, end = end, end + kind.num_bytes
        header[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor, kind: TensorKind) -> memoryview:
    assert tensor.dtype == kind.dtype and tuple(tensor.shape) == kind.shape, f"{name} is not what was announced"
    return _bytes_of(tensor.detach().cpu().contiguous())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Its memory, to be read or written."""
    return tensor.view(-1).view(torch.uint8).numpy().data
