"""One corpus from many places: files of records and the texts of Python packages, filtered and without copies.

    found = collect(CollectConfig(docs=("docs.jsonl.zst",), packages=("site-packages",)), "corpus.jsonl.zst")

Each line of the result is {"id", "source", "domain", "licence", "split", "text"}: a corpus for `--data.corpus.source`,
with `--data.corpus.split-field split`. Records come first and keep their own source, licence and split; then come the
packages in the order of their folders and names. Of copies the first stays, so train and valid share no near-copies.
The same inputs give the same bytes.
"""

import hashlib
import json
import math
import os
import secrets
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.data.duplicates import Duplicates
from perilune.data.package_files import package_files
from perilune.data.readers import CorpusError, Progress, json_records, list_files, record_suffix
from perilune.data.text_filters import domain_of, why_not, without_licence_header

INSTALLED = "site-packages"
"""As a folder of packages: that of the running Python."""
PACKAGE = "pypi/"
"""How the source of a package's text begins."""
WINDOW_LOG = 27
"""Copies up to 128 MB back are found; every zstd reads such a file without being told."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    docs: tuple[str, ...] = ()
    """Files of records (.jsonl, .jsonl.zst) with a field "text", and maybe source, licence, path and split."""
    packages: tuple[str, ...] = ()
    """Folders of packages; "site-packages" is that of the running Python."""
    valid_fraction: float = 0.01
    """Share of documents held out, of those that do not say where they belong."""
    near_duplicate: float = 0.6
    """Share of a text's lines, by threes, that were there before from which on it counts as a copy."""
    max_megabytes: float | None = None
    """Size of all texts together at which to stop taking new ones; None takes all."""
    max_package_megabytes: float | None = None
    """The same for a single package: none should speak for all."""
    level: int = 19
    """Of zstd."""

    def __post_init__(self) -> None:
        for name in ("docs", "packages"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.docs and not self.packages:
            raise ValueError("nothing to collect: give files of records (--docs) or folders of packages (--packages)")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction={self.valid_fraction!r} must be in [0, 1)")
        if not 1 <= self.level <= 22:
            raise ValueError(f"level={self.level!r} must be between 1 and 22")
        for name in ("max_megabytes", "max_package_megabytes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive, or None for all")


@dataclass(kw_only=True)
class Collected:
    """What a collection found. Bytes are those of texts in UTF-8."""

    read_documents: int = 0
    read_bytes: int = 0
    """What looked like text by its name and its bytes."""
    sound_bytes: int = 0
    """What passed the filters, copies included."""
    documents: Counter[str] = field(default_factory=Counter)
    """Kept, by split."""
    bytes: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    """Bytes kept, by domain."""
    licences: Counter[str] = field(default_factory=Counter)
    """Bytes kept, by licence."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Bytes, by reason."""
    compressed_bytes: int = 0

    def to_plain(self) -> dict[str, Any]:
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {**plain, "unique_bytes": sum(self.bytes.values())}


def collect(config: CollectConfig, out: str | Path, *, progress: Progress | None = None) -> Collected:
    """Write the corpus to `out`; the file appears complete or not at all."""
    path, found = Path(out), Collected()
    if not path.name.endswith(".jsonl.zst"):
        raise ValueError(f"the corpus is written as .jsonl.zst, got the name {str(out)!r}")
    try:
        import zstandard
    except ImportError as error:
        raise CorpusError(f"writing {str(out)!r} needs zstandard: pip install 'perilune[train]'") from error
    # With workers the result does not depend on how many there are; without any it is another.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        config.level, window_log=WINDOW_LOG, enable_ldm=True, threads=os.cpu_count() or 1
    )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            temporary.open("wb") as file,
            zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file) as stream,
        ):
            for record in records(config, found, progress=progress):
                stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        found.compressed_bytes = temporary.stat().st_size
        if not found.documents:
            raise CorpusError(f"nothing is left to collect: {_reasons(found)}")
        os.replace(temporary, path)
    except OSError as error:
        raise CorpusError(f"cannot collect into {str(path)!r}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found


def records(config: CollectConfig, found: Collected, *, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """The lines of the corpus; `found` counts along."""
    copies = Duplicates(threshold=config.near_duplicate)
    limit = math.inf if config.max_megabytes is None else config.max_megabytes * 1e6
    package_limit = math.inf if config.max_package_megabytes is None else config.max_package_megabytes * 1e6
    size, package_sizes = 0, Counter[str]()
    for candidate in _candidates(config, found):
        text_bytes = len(candidate["text"].encode())
        found.read_documents += 1
        found.read_bytes += text_bytes
        if progress is not None and found.read_documents % 256 == 0:
            progress("collecting", found.read_documents, None)
        source, kind = candidate["source"], candidate.pop("kind")
        if source.startswith(PACKAGE) and package_sizes[source] + text_bytes > package_limit:
            reason = "beyond max_package_megabytes"
        elif size + text_bytes > limit:
            reason = "beyond max_megabytes"
        else:
            reason = why_not(candidate["text"], domain=kind)
            if reason is None:
                found.sound_bytes += text_bytes
                reason = copies.why_not(candidate["text"])
        if reason is not None:
            found.left_out[reason] += text_bytes
            continue
        size += text_bytes
        package_sizes[source] += text_bytes
        if candidate["split"] is None:
            candidate["split"] = _split(candidate["text"], config.valid_fraction)
        found.documents[candidate["split"]] += 1
        found.bytes[candidate["split"]] += text_bytes
        found.domains[candidate["domain"]] += text_bytes
        found.licences[candidate["licence"] or "unknown"] += text_bytes
        yield candidate


def _candidates(config: CollectConfig, found: Collected) -> Iterator[dict[str, Any]]:
    """Records of documents with one more field, `kind`: how the filters read the text."""
    for name in config.docs:
        path = Path(name).expanduser()
        if record_suffix(path) not in (".jsonl", ".jsonl.zst"):
            raise CorpusError(f"{str(path)!r} is not a file of records: expected .jsonl or .jsonl.zst")
        (file,) = list_files((path,), wanted=lambda _: True, skip_folder=lambda _: False)
        for number, values in json_records(file):
            if not isinstance(values.get("text"), str):
                raise CorpusError(f"{str(path)!r} line {number}: no text in the field 'text'")
            source = str(values.get("source") or file.name)
            yield {
                "id": f"{source}/{values.get('path') or values.get('id') or number}",
                "source": source,
                "domain": str(values.get("domain") or source),
                "licence": values.get("licence") or values.get("license"),
                "split": values.get("split"),
                "kind": "prose",
                "text": values["text"],
            }
    for name in config.packages:
        root = Path(sysconfig.get_path("purelib")) if name == INSTALLED else Path(name).expanduser()
        for file in package_files(root):
            if (domain := domain_of(file.name)) is None:
                continue
            text = _read(file.path)
            if text is None:
                found.left_out["not text"] += file.path.stat().st_size
                continue
            yield {
                "id": f"{file.package.name}/{file.name}",
                "source": f"{PACKAGE}{file.package.name}",
                "domain": domain,
                "licence": file.package.licence,
                "split": None,
                "kind": domain,
                "text": text if domain == "prose" else without_licence_header(text),
            }


def _read(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def _split(text: str, valid_fraction: float) -> str:
    """By the text itself: a document keeps its place whatever else is collected."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "valid" if place < valid_fraction * 2**64 else "train"


def _reasons(found: Collected) -> str:
    return ", ".join(f"{size:,} bytes {reason}" for reason, size in sorted(found.left_out.items())) or "no text found"
