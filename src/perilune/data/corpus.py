"""Where text comes from: the standard library's sources, a generated corpus, or files and folders.

`Corpus` yields `Document(id, text)` in a fixed order. A document belongs to the validation split when the sha256 of its
id, read as a fraction of 2**64, is below `valid_fraction`: adding files moves no other document. When the records carry
their own split, `split_field` names it instead.

Documents longer than `max_characters` are cut at line ends into pieces "id#0", "id#1", ...; nothing is dropped. The
pieces of one document stay in one split, unless that would leave a split empty (a corpus of one long file).
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from perilune.data import generated
from perilune.data.readers import (
    TEXT_SUFFIXES,
    CorpusError,
    Fields,
    Progress,
    Record,
    SourceFile,
    list_files,
    read_file,
    record_suffix,
)

__all__ = ["Corpus", "CorpusConfig", "CorpusError", "CorpusSummary", "Document", "Progress", "Split"]

VERSION = 1  # part of the fingerprint: raise it when the same files give other documents
Split = Literal["train", "valid"]

_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
}

# Folders of the standard library that are tests, generated tables, bundled wheels or examples; Debian moves some of
# them into other packages, so leaving them out also makes installations more alike.
_STDLIB_SKIPPED = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"),
        *("lib2to3", "encodings", "ensurepip", "turtledemo", "pydoc_data"),
    )
)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """What to read.

    source: "stdlib" (the running Python's library), "generated", or paths of files and folders.
    include_suffixes: which files of a folder count; empty means known text and code suffixes and all record formats.
    exclude: suffixes (".min.js") or folder names ("node_modules") to leave out.
    text_field, id_field, split_field: names in jsonl records or parquet columns.
    min_characters: shorter documents are skipped; max_characters: longer ones are cut into pieces.
    join_characters: join neighbouring records of one domain and split, with an empty line between them, up to so many
        characters: long documents for long contexts. Needs split_field, so that nothing held out is trained on.
    valid_fraction: expected share of documents held out for validation (ignored with split_field).
    seed, num_documents: for source "generated".
    """

    source: str | tuple[str, ...] = "stdlib"
    include_suffixes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    text_field: str = "text"
    id_field: str | None = None
    split_field: str | None = None
    min_characters: int = 1
    max_characters: int = 100_000
    join_characters: int = 0
    valid_fraction: float = 0.05
    seed: int = 0
    num_documents: int = 1000

    def __post_init__(self) -> None:
        for name in ("include_suffixes", "exclude"):  # JSON has no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.source, str):
            object.__setattr__(self, "source", tuple(map(str, self.source)))
        if not self.source or not all(self.source):
            raise ValueError(f"source={self.source!r}: give 'stdlib', 'generated' or at least one path")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction={self.valid_fraction!r} must be in [0, 1)")
        if self.min_characters < 1:
            raise ValueError(f"min_characters={self.min_characters!r} must be at least 1")
        if self.max_characters < max(self.min_characters, 16):
            raise ValueError(f"max_characters={self.max_characters!r} must be at least 16 and at least min_characters")
        if self.join_characters and self.split_field is None:
            raise ValueError(
                f"join_characters={self.join_characters!r} needs split_field: records of both splits must not be joined"
            )
        if not 0 <= self.join_characters <= self.max_characters:
            raise ValueError(
                f"join_characters={self.join_characters!r} must be between 0 and max_characters={self.max_characters}"
            )
        if self.num_documents < 1:
            raise ValueError(f"num_documents={self.num_documents!r} must be at least 1")
        for suffix in self.include_suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"include_suffixes: {suffix!r} must begin with a dot, as in '.py'")

    @property
    def paths(self) -> tuple[Path, ...]:
        sources = (self.source,) if isinstance(self.source, str) else self.source
        return tuple(Path(os.path.expanduser(source)) for source in sources)


@dataclass(frozen=True)
class Document:
    """One text and its name, which is the same on every machine; and what kind of text it is, where that is known."""

    id: str
    text: str
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class CorpusSummary:
    """What one pass over the corpus found. `skipped` counts files or records left out, by reason."""

    num_documents: dict[str, int]
    num_bytes: dict[str, int]
    skipped: dict[str, int] = field(default_factory=dict)
    fingerprint: str


class Corpus:
    """The documents of a config. Reading is lazy; the first use of `summary` or `documents` passes over everything."""

    def __init__(self, config: CorpusConfig, *, progress: Progress | None = None) -> None:
        self.config = config
        self._progress = progress

    @property
    def fingerprint(self) -> str:
        """sha256 over the reader's version, the split rule, and every document's id and content."""
        return self.summary.fingerprint

    @cached_property
    def summary(self) -> CorpusSummary:
        return self._survey[0]

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """All documents of a split (None: of both), in the corpus' order."""
        for document, document_split in self.documents_with_split():
            if split in (None, document_split):
                yield document

    def documents_with_split(self) -> Iterator[tuple[Document, Split]]:
        """Every document with its split. Raises at the end if the files changed since the survey."""
        summary, rule = self._survey
        content = _ContentHash(self.config)
        for piece in self._pieces("reading", Counter()):
            content.add(piece)
            yield Document(piece.id, piece.text, piece.domain), rule.split(piece)
        if content.hexdigest() != summary.fingerprint:
            raise CorpusError(f"the files of {self.config.source!r} changed while they were read; start again")

    @cached_property
    def _survey(self) -> tuple[CorpusSummary, "_SplitRule"]:
        skipped: Counter[str] = Counter()
        content = _ContentHash(self.config)
        rules = _SplitRules(self.config)
        for piece in self._pieces("surveying", skipped):
            content.add(piece)
            rules.add(piece)
        if not rules.num_pieces:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no matching file"
            raise CorpusError(
                f"corpus {self.config.source!r} has no documents ({reasons}); check the path, include_suffixes and"
                f" min_characters={self.config.min_characters}"
            )
        rule, documents, num_bytes = rules.decide()
        summary = CorpusSummary(
            num_documents=documents, num_bytes=num_bytes, skipped=dict(skipped), fingerprint=content.hexdigest()
        )
        return summary, rule

    def _pieces(self, stage: str, skipped: Counter[str]) -> Iterator["_Piece"]:
        config = self.config
        for record in _joined(self._records(stage, skipped), config.join_characters):
            if len(record.text.strip()) < config.min_characters:
                skipped["too short"] += 1
                continue
            if record.declared_split is not None and record.declared_split.lower() not in _SPLIT_NAMES:
                skipped[f"split {record.declared_split!r}"] += 1
                continue
            texts = list(_cut(record.text, config.max_characters))
            for number, text in enumerate(texts):
                name = record.id if len(texts) == 1 else f"{record.id}#{number}"
                yield _Piece(name, record.id, text, record.declared_split, record.domain)

    def _records(self, stage: str, skipped: Counter[str]) -> Iterator[Record]:
        config = self.config
        if config.source == "generated":
            for number, (name, text) in enumerate(generated.generate(config.seed, config.num_documents)):
                if self._progress is not None and number % 256 == 0:
                    self._progress(stage, number, config.num_documents)
                yield Record(id=name, text=text, domain=name.partition("-")[0])
            return
        files = stdlib_files() if config.source == "stdlib" else self._files()
        total = sum(file.size for file in files)
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if self._progress is not None:
                self._progress(stage, done, total)

        names = Fields(text=config.text_field, id=config.id_field, split=config.split_field)
        for file in files:
            if config.split_field is not None and record_suffix(file.path) is None:
                raise CorpusError(f"split_field={config.split_field!r} needs records, but {str(file.path)!r} is text")
            yield from read_file(file, names, skipped=skipped, on_bytes=on_bytes)

    def _files(self) -> list[SourceFile]:
        config = self.config
        included = tuple(suffix.lower() for suffix in config.include_suffixes)
        excluded = tuple(suffix.lower() for suffix in config.exclude if suffix.startswith("."))

        def wanted(relative: Path) -> bool:
            name = relative.name.lower()
            if name.startswith(".") or name.endswith(excluded):
                return False
            if included:
                return name.endswith(included)
            return record_suffix(relative) is not None or relative.suffix.lower() in TEXT_SUFFIXES

        def skip_folder(name: str) -> bool:
            return name.startswith(".") or name == "__pycache__" or name in config.exclude

        return list_files(config.paths, wanted=wanted, skip_folder=skip_folder)


def stdlib_files() -> list[SourceFile]:
    """The .py files of the running Python's standard library, without tests, tables and what belongs to the machine."""
    root = Path(sysconfig.get_path("stdlib"))

    def wanted(relative: Path) -> bool:
        # build settings and site hooks hold paths of this installation
        machine = relative.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        return relative.suffix == ".py" and not machine

    def skip_folder(name: str) -> bool:
        return name in _STDLIB_SKIPPED or name == "__pycache__" or name.startswith("config-")

    files = list_files((root,), wanted=wanted, skip_folder=skip_folder) if root.is_dir() else []
    if not files:
        raise CorpusError(
            f"this Python has no library sources in {str(root)!r}; install them"
            " (Debian: apt-get install libpython3-stdlib) or give a path as source"
        )
    return files


@dataclass(frozen=True)
class _Piece:
    id: str
    parent: str
    text: str
    declared_split: str | None
    domain: str


def _joined(records: Iterator[Record], limit: int) -> Iterator[Record]:
    """Neighbours of one domain and split as one record, as long as it has at most `limit` characters."""
    held: list[Record] = []
    size = 0

    def whole() -> Record:
        more = f"+{len(held) - 1}" if len(held) > 1 else ""
        return replace(held[0], id=held[0].id + more, text="\n\n".join(record.text for record in held))

    for record in records:
        alike = held and (record.domain, record.declared_split) == (held[0].domain, held[0].declared_split)
        if held and not (alike and size + 2 + len(record.text) <= limit):
            yield whole()
            held, size = [], 0
        held.append(record)
        size += len(record.text) + (2 if len(held) > 1 else 0)
    if held:
        yield whole()


def _cut(text: str, limit: int) -> Iterator[str]:
    """`text` in pieces of at most `limit` characters, after line breaks where there are any; they add up to `text`."""
    start = 0
    while len(text) - start > limit:
        end = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield text[start:end]
        start = end
    yield text[start:]


class _ContentHash:
    def __init__(self, config: CorpusConfig) -> None:
        rule = config.split_field if config.split_field is not None else config.valid_fraction
        self._hash = hashlib.sha256(f"corpus {VERSION} split {rule!r}\n".encode())

    def add(self, piece: _Piece) -> None:
        name = f"{piece.id}\0{piece.declared_split}".encode("utf-8", "surrogateescape")
        self._hash.update(hashlib.sha256(name).digest() + hashlib.sha256(piece.text.encode()).digest())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _place(name: str) -> int:
    """A stable place in [0, 2**64) for a document id."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


@dataclass(frozen=True)
class _SplitRule:
    """Valid if the place of the parent's id (or of the piece's own) lies below the threshold."""

    threshold: int
    by_piece: bool

    def split(self, piece: _Piece) -> Split:
        if piece.declared_split is not None:
            return _SPLIT_NAMES[piece.declared_split.lower()]
        return "valid" if _place(piece.id if self.by_piece else piece.parent) < self.threshold else "train"


class _SplitRules:
    """Counts under both rules in one pass, then takes the first that leaves no split empty."""

    def __init__(self, config: CorpusConfig) -> None:
        self._holds_out = config.split_field is None and config.valid_fraction > 0
        threshold = int(config.valid_fraction * 2**64)
        self._rules = (_SplitRule(threshold, by_piece=False), _SplitRule(threshold, by_piece=True))
        self._documents = [Counter(train=0, valid=0) for _ in self._rules]
        self._bytes = [Counter(train=0, valid=0) for _ in self._rules]
        # (place, bytes) of the pieces with the lowest and the highest place
        self._lowest: tuple[int, int] = (2**64, 0)
        self._highest: tuple[int, int] = (-1, 0)
        self.num_pieces = 0

    def add(self, piece: _Piece) -> None:
        self.num_pieces += 1
        size = len(piece.text.encode())
        for rule, documents, num_bytes in zip(self._rules, self._documents, self._bytes, strict=True):
            split = rule.split(piece)
            documents[split] += 1
            num_bytes[split] += size
        place = (_place(piece.id), size)
        self._lowest = min(self._lowest, place)
        self._highest = max(self._highest, place)

    def decide(self) -> tuple[_SplitRule, dict[str, int], dict[str, int]]:
        for rule, documents, num_bytes in zip(self._rules, self._documents, self._bytes, strict=True):
            if all(documents.values()) or not self._holds_out or self.num_pieces < 2:
                return rule, dict(documents), dict(num_bytes)
        # Too few documents for the fraction: the lowest place alone is valid, or the highest alone is train.
        total = sum(self._bytes[0].values())
        if self._documents[0]["train"]:
            (place, size), valid = self._lowest, 1
            return self._one_apart(place + 1, valid, size, total)
        (place, size), valid = self._highest, self.num_pieces - 1
        return self._one_apart(place, valid, total - size, total)

    def _one_apart(
        self, threshold: int, valid: int, valid_bytes: int, total_bytes: int
    ) -> tuple[_SplitRule, dict[str, int], dict[str, int]]:
        documents = {"train": self.num_pieces - valid, "valid": valid}
        num_bytes = {"train": total_bytes - valid_bytes, "valid": valid_bytes}
        return _SplitRule(threshold, by_piece=True), documents, num_bytes
