"""What of `perilune-nano` travels between machines: data prepared before a GPU is there, and what it trained. No script
of its own.

    bundle(folder)             dialogues and their tokens in one file, which `unbundle` lays out again
    pack(folder, pieces)       what was trained, in few files of at most 15 MiB
    unpack(pieces, folder)     run folders of them

Pieces are the weights of the last stage that is done, in bfloat16 (rl_base.py), and perilune-nano.json: config,
metrics, machine and seconds of every stage, what the text was, and a checksum of each piece. So a model card that is
written elsewhere says what was done, and a piece that is missing or damaged is named.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rl_base

from perilune.recipes.nano_card import STAGE
from perilune.recipes.nano_release import NAME
from perilune.train.run_folder import CONFIG, ENVIRONMENT, METRICS

STAGES = ("pretrain", "sft")
RECORD = f"{NAME}.json"
"""Among the pieces."""
TEXTS = "texts.json"
"""What the text of a release was, as its card says it; in its folder."""
UNPACKED = "unpacked.json"
"""Which pieces a folder was unpacked from."""
STAGE_FILES = (CONFIG, ENVIRONMENT, METRICS, STAGE)  # the last one says that a stage is there
MOST_FILES = 6
BUNDLE = "prepared.tar.zst"
BUNDLED = ("dialogues/*.jsonl", "cache/tokenizer*", "cache/dialogues-*")
"""Tokens of the corpus are not among them: they are made in seconds, and are larger than it is."""


# Data -----------------------------------------------------------------------------------------------------------------


def bundle(folder: Path) -> Path:
    import zstandard

    path, partial = folder / BUNDLE, folder / f".{BUNDLE}.{os.getpid()}"
    files = sorted(file for pattern in BUNDLED for file in folder.glob(pattern))
    with partial.open("wb") as raw, zstandard.ZstdCompressor(level=12, threads=-1).stream_writer(raw) as stream:
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for file in files:
                archive.add(file, arcname=str(file.relative_to(folder)))
    os.replace(partial, path)
    return path


def unbundle(folder: Path) -> bool:
    """False where there is no bundle, or where something is in its place already."""
    import zstandard

    path = folder / BUNDLE
    if not path.exists() or (folder / "dialogues").exists():
        return False
    with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(folder, filter="data")
    return True


# Stages ---------------------------------------------------------------------------------------------------------------


def stage_folder(folder: Path, stage: str) -> Path:
    return folder / f"{NAME}-{stage}"


def read_stage(run: Path) -> dict[str, Any]:
    """Steps and seconds of a stage, and whether it is done; nothing before it is planned."""
    path = run / STAGE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_stage(run: Path, **facts: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / STAGE, read_stage(run) | facts)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def done_stages(folder: Path) -> list[Path]:
    runs = [stage_folder(folder, stage) for stage in STAGES]
    return [run for run in runs if read_stage(run).get("done")]


# Pieces ---------------------------------------------------------------------------------------------------------------


def pack(folder: Path, pieces: Path) -> list[Path]:
    """The files that were written. What an earlier call left there is replaced."""
    runs = done_stages(folder)
    if not runs:
        raise SystemExit(f"no stage in {str(folder)!r} is done: give `nano_release.py train` until one is")
    for old in (pieces / RECORD, *pieces.glob(f"{NAME}-*.[0-9][0-9]")):
        old.unlink(missing_ok=True)
    weights = rl_base.pack(runs[-1], pieces)
    record = {
        "weights": runs[-1].name,
        "pieces": {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in weights},
        **json.loads((folder / TEXTS).read_text(encoding="utf-8")),
        "stages": {run.name: {name: (run / name).read_text(encoding="utf-8") for name in STAGE_FILES} for run in runs},
    }
    write_json(pieces / RECORD, record)
    written = [*weights, pieces / RECORD]
    if len(written) > MOST_FILES or max(path.stat().st_size for path in written) > rl_base.PIECE_BYTES:
        sizes = ", ".join(f"{path.name} {path.stat().st_size:,}" for path in written)
        raise SystemExit(
            f"expected at most {MOST_FILES} files of at most {rl_base.PIECE_BYTES:,} bytes, but wrote {sizes}"
        )
    return written


def unpack(pieces: Path, folder: Path) -> list[Path]:
    """The folders of all stages; weights are in the last one. Nothing is done where they are unpacked already."""
    path = pieces / RECORD
    if not path.exists():
        raise SystemExit(f"--pieces {str(pieces)!r} holds no {RECORD}: give the folder that `pack` wrote to")
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, known in record["pieces"].items():
        piece = pieces / name
        if not piece.exists() or _digest(piece) != known["sha256"]:
            problem = "is damaged" if piece.exists() else "is missing"
            raise SystemExit(f"{str(piece)!r} {problem}: expected {known['bytes']:,} bytes; copy it again")
    runs = [folder / name for name in record["stages"]]
    mark = folder / UNPACKED
    if mark.exists() and json.loads(mark.read_text()) == record["pieces"]:
        return runs
    others = [run for run in runs if run.exists()]
    if others:
        raise SystemExit(f"{str(others[0])!r} is not of these pieces: give another --folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    rl_base.unpack(pieces, record["weights"], folder)
    for run in runs:
        run.mkdir(exist_ok=True)
        for name in STAGE_FILES:
            (run / name).write_text(record["stages"][run.name][name], encoding="utf-8")
    write_json(folder / TEXTS, {"texts": record["texts"]})
    write_json(mark, record["pieces"])
    return runs


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
