"""Files into records: text and code, .jsonl, .jsonl.zst and parquet, in a fixed order and with errors that say where.

A reader yields `Record`s one by one and never holds a whole file of records. What is wrong with the data itself (a line
that is not JSON, a missing column, a broken archive) is a `CorpusError` that names file and line; what is merely not
text (a picture among sources) is skipped and counted.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (stage, done, total): called now and then during long work; total is None when unknown
Progress = Callable[[str, int, int | None], None]

TEXT_SUFFIXES: tuple[str, ...] = (
    *(".txt", ".md", ".rst", ".tex", ".org", ".html", ".htm", ".xml", ".css", ".json", ".yaml", ".yml"),
    *(".toml", ".ini", ".cfg", ".csv", ".tsv", ".sql", ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp"),
    *(".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".m", ".cs", ".fs"),
    *(".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml"),
    *(".mli", ".ex", ".exs", ".erl", ".clj", ".lisp", ".el", ".vim", ".sh", ".bash", ".zsh", ".ps1"),
    *(".bat", ".cmake", ".proto", ".graphql", ".v", ".sv", ".vhd", ".asm", ".s", ".zig", ".nim", ".dart"),
    *(".tcl", ".f90", ".pas"),
)
RECORD_SUFFIXES: tuple[str, ...] = (".jsonl", ".jsonl.zst", ".parquet")
CHUNK_BYTES = 1 << 20


class CorpusError(ValueError):
    """A corpus that cannot be read, with the file (and line) and the fix."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One text as it stands in its file. `declared_split` is the value of the record's own split field.

    `domain` says what kind of text it is: the field "domain" or "source" of a JSON record; of a text file the folder
    it lies in, or its suffix.
    """

    id: str
    text: str
    declared_split: str | None = None
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which fields of a JSON record or columns of a parquet file hold what."""

    text: str = "text"
    id: str | None = None
    split: str | None = None

    def record(self, values: Any, *, default_id: str, where: str) -> Record:
        if not isinstance(values, dict):
            raise CorpusError(f"{where}: expected a JSON object, got {type(values).__name__}")
        for name in filter(None, (self.text, self.id, self.split)):
            if name not in values:
                raise CorpusError(f"{where}: no field {name!r}; the record has {sorted(values)!r}")
        text = values[self.text]
        if not isinstance(text, str):
            raise CorpusError(f"{where}: field {self.text!r} must be a string, got {type(text).__name__}")
        return Record(
            id=str(values[self.id]) if self.id else default_id,
            text=text,
            declared_split=None if self.split is None else str(values[self.split]),
            domain=str(values.get("domain") or values.get("source") or ""),
        )


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus and the name under which its documents are known on every machine."""

    path: Path
    name: str
    size: int


def record_suffix(path: Path) -> str | None:
    """The suffix that decides the reader; None means text."""
    name = path.name.lower()
    return next((suffix for suffix in RECORD_SUFFIXES if name.endswith(suffix)), None)


def list_files(
    roots: tuple[Path, ...],
    *,
    wanted: Callable[[Path], bool],
    skip_folder: Callable[[str], bool],
) -> list[SourceFile]:
    """All wanted files below the roots, sorted by name; a root that is a file is taken as it is.

    One root: names are relative to it. Several: prefixed with the root's own name (numbered when two are equal), so
    that a corpus keeps its ids when the folder moves.
    """
    seen: Counter[str] = Counter()
    files: list[SourceFile] = []
    for root in roots:
        seen[root.name] += 1
        prefix = root.name if seen[root.name] == 1 else f"{root.name}~{seen[root.name]}"
        try:
            if root.is_file():
                files.append(SourceFile(root, prefix, root.stat().st_size))
                continue
            if not root.is_dir():
                raise CorpusError(f"corpus path {str(root)!r} does not exist; give a file or a folder")
            for path in _walk(root, skip_folder):
                relative = path.relative_to(root)
                if wanted(relative):
                    name = relative.as_posix() if len(roots) == 1 else f"{prefix}/{relative.as_posix()}"
                    files.append(SourceFile(path, name, path.stat().st_size))
        except OSError as error:
            raise CorpusError(f"cannot read {error.filename or str(root)!r}: {error.strerror or error}") from error
    return sorted(files, key=lambda file: file.name)


def _walk(root: Path, skip_folder: Callable[[str], bool]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folder_names, file_names in os.walk(root, onerror=fail):
        folder_names[:] = [name for name in folder_names if not skip_folder(name)]
        for name in file_names:
            path = Path(folder) / name
            if path.is_file():  # not a socket, a pipe or a dangling link
                yield path


def read_file(
    file: SourceFile, fields: Fields, *, skipped: Counter[str], on_bytes: Callable[[int], None]
) -> Iterator[Record]:
    """The records of one file. `skipped` counts what is not text, by reason; `on_bytes` hears of bytes read."""
    suffix = record_suffix(file.path)
    try:
        if suffix == ".parquet":
            records = _read_parquet(file, fields, on_bytes)
        elif suffix is not None:
            records = _read_json_lines(file, fields, _json_chunks(file, on_bytes))
        else:
            records = _read_text(file, skipped, on_bytes)
        for record in records:
            if _is_utf8(record.text):
                yield record
            else:
                skipped["lone surrogates"] += 1
    except OSError as error:
        raise CorpusError(f"cannot read {str(file.path)!r}: {error.strerror or error}") from error


def _read_text(file: SourceFile, skipped: Counter[str], on_bytes: Callable[[int], None]) -> Iterator[Record]:
    content = file.path.read_bytes()
    on_bytes(len(content))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
        return
    if "\0" in text:
        skipped["binary"] += 1
        return
    top, nested, _ = file.name.partition("/")
    yield Record(id=file.name, text=text, domain=top if nested else file.path.suffix.lstrip("."))


def json_records(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, all fields) of every record of a .jsonl or .jsonl.zst file."""
    for number, values in _json_lines(file, _json_chunks(file, lambda _: None)):
        if not isinstance(values, dict):
            raise CorpusError(f"{str(file.path)!r} line {number}: expected a JSON object, got {type(values).__name__}")
        yield number, values


def _json_chunks(file: SourceFile, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    chunks = _chunks(file.path, on_bytes)
    return _decompress(file, chunks) if file.path.name.lower().endswith(".zst") else chunks


def _read_json_lines(file: SourceFile, fields: Fields, chunks: Iterator[bytes]) -> Iterator[Record]:
    for number, values in _json_lines(file, chunks):
        where = f"{str(file.path)!r} line {number}"
        yield fields.record(values, default_id=f"{file.name}:{number}", where=where)


def _json_lines(file: SourceFile, chunks: Iterator[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(chunks), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
                raise CorpusError(f"{str(file.path)!r} line {number} is not JSON: {error}") from error


def _chunks(path: Path, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            on_bytes(len(chunk))
            yield chunk


def _decompress(file: SourceFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The bytes of a .zst file of one or more frames; unlike a stream reader, this notices a frame that breaks off."""
    try:
        import zstandard
    except ImportError as error:
        raise CorpusError(f"reading {str(file.path)!r} needs zstandard: pip install 'perilune[train]'") from error
    frame = None
    try:
        for chunk in chunks:
            while chunk:
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = b""
                if frame.eof:
                    chunk, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise CorpusError(f"{str(file.path)!r} is not intact zstd data: {error}") from error
    if frame is not None:
        raise CorpusError(f"{str(file.path)!r} breaks off inside a zstd frame; copy or download it again")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            yield b"".join([*pending, line])
            pending.clear()
        pending.append(rest)
    yield b"".join(pending)


def _read_parquet(file: SourceFile, fields: Fields, on_bytes: Callable[[int], None]) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CorpusError(f"reading {str(file.path)!r} needs pyarrow: pip install 'perilune[parquet]'") from error
    columns = [name for name in (fields.text, fields.id, fields.split) if name is not None]
    try:
        with parquet.ParquetFile(file.path) as table:
            missing = [name for name in columns if name not in table.schema_arrow.names]
            if missing:
                raise CorpusError(f"{str(file.path)!r}: no column {missing[0]!r}; it has {table.schema_arrow.names!r}")
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for values in batch.to_pylist():
                    yield fields.record(values, default_id=f"{file.name}:{row}", where=f"{str(file.path)!r} row {row}")
                    row += 1
        on_bytes(file.size)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{str(file.path)!r} is not intact parquet: {error}") from error


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
