"""Readers, splits, fingerprints and the errors of a corpus."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from perilune.data import generated
from perilune.data.corpus import Corpus, CorpusConfig, CorpusError, _cut

# sha256 of the first 200 generated documents with seed 0
GENERATED_SHA256 = "e7257874bf5eabfcba0c17287bd07e4ce4cc5bfce2f7ed810b8befda4adce415"


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def corpus_of(path: Path | tuple[Path, ...], **options: Any) -> Corpus:
    source = tuple(map(str, path)) if isinstance(path, tuple) else str(path)
    return Corpus(CorpusConfig(source=source, **options))


def contents(corpus: Corpus) -> dict[str, str]:
    return {document.id: document.text for document in corpus.documents()}


def json_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_folder_is_read_in_sorted_order_with_relative_ids(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"b.py": "b", "a/z.md": "z", "a.txt": "a", ".git/x.py": "no", "a/__pycache__/y.py": "no", "p.png": "no"},
    )
    assert [document.id for document in corpus_of(tmp_path).documents()] == ["a.txt", "a/z.md", "b.py"]


def test_suffixes_and_folders_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "a", "b.min.js": "b", "c.js": "c", "node_modules/d.js": "d", "e.ODD": "e"})
    assert list(contents(corpus_of(tmp_path, include_suffixes=(".odd", ".py")))) == ["a.py", "e.ODD"]
    assert list(contents(corpus_of(tmp_path, exclude=(".min.js", "node_modules")))) == ["a.py", "c.js"]


def test_undecodable_binary_and_blank_files_are_skipped_and_counted(tmp_path: Path) -> None:
    write(
        tmp_path, {"a.txt": "good", "b.txt": b"\xff\xfe", "c.txt": b"a\0b", "d.txt": " \n", "e.txt": b"\xef\xbb\xbfbom"}
    )
    corpus = corpus_of(tmp_path)
    assert contents(corpus) == {"a.txt": "good", "e.txt": "bom"}
    assert corpus.summary.skipped == {"not UTF-8": 1, "binary": 1, "too short": 1}


def test_text_is_not_changed_by_reading(tmp_path: Path) -> None:
    text = "tab\t\r\nline\rend  \n\n"
    write(tmp_path, {"a.txt": text})
    assert contents(corpus_of(tmp_path)) == {"a.txt": text}


def test_several_roots_keep_their_documents_apart(tmp_path: Path) -> None:
    write(tmp_path, {"x/src/a.py": "1", "y/src/a.py": "2", "single.rst": "3"})
    roots = (tmp_path / "x/src", tmp_path / "y/src", tmp_path / "single.rst")
    assert contents(corpus_of(roots)) == {"single.rst": "3", "src/a.py": "1", "src~2/a.py": "2"}


RECORDS = [{"text": f"text {n} é", "name": f"n{n}", "part": "validation" if n % 3 == 0 else "train"} for n in range(9)]


def as_jsonl(path: Path) -> Path:
    (path / "data.jsonl").write_bytes(json_lines(RECORDS) + b"\n  \n")
    return path / "data.jsonl"


def as_zst(path: Path) -> Path:
    compress = zstandard.ZstdCompressor().compress
    lines = json_lines(RECORDS)
    # two frames, cut inside a line
    (path / "data.jsonl.zst").write_bytes(compress(lines[:100]) + compress(lines[100:]))
    return path / "data.jsonl.zst"


def as_parquet(path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path / "data.parquet", row_group_size=4)
    return path / "data.parquet"


@pytest.mark.parametrize("store", [as_jsonl, as_zst, as_parquet])
def test_record_formats_give_the_same_documents(tmp_path: Path, store: Callable[[Path], Path]) -> None:
    corpus = corpus_of(store(tmp_path), id_field="name", split_field="part")
    assert contents(corpus) == {record["name"]: record["text"] for record in RECORDS}
    assert [document.id for document in corpus.documents("valid")] == ["n0", "n3", "n6"]
    assert corpus.fingerprint == corpus_of(as_jsonl(tmp_path), id_field="name", split_field="part").fingerprint
    default_ids = contents(corpus_of(store(tmp_path)))
    assert list(default_ids.values()) == [record["text"] for record in RECORDS]
    assert len(default_ids) == len(RECORDS)


def test_other_splits_of_records_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": json_lines([{"text": "a", "split": "train"}, {"text": "b", "split": "test"}])})
    corpus = corpus_of(tmp_path, split_field="split")
    assert list(contents(corpus).values()) == ["a"]
    assert corpus.summary.skipped == {"split 'test'": 1}


def test_split_field_does_not_go_with_plain_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a"})
    with pytest.raises(CorpusError, match=r"split_field='split' needs records, but .*a\.txt"):
        corpus_of(tmp_path, split_field="split").summary  # noqa: B018


GOOD_ZST = zstandard.ZstdCompressor().compress(b'{"text": "a"}\n')


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl' line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\xff\n', r"a\.jsonl' line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl' line 1 is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1: no field 'text'; the record has \['body'\]"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: field 'text' must be a string, got int"),
        ("a.jsonl", b"7\n", r"line 1: expected a JSON object, got int"),
        ("a.jsonl.zst", b"not zstd at all", r"a\.jsonl\.zst' is not intact zstd data"),
        ("a.jsonl.zst", GOOD_ZST[:-1], r"breaks off inside a zstd frame"),
        ("a.jsonl.zst", GOOD_ZST + GOOD_ZST[:6], r"breaks off inside a zstd frame"),
        ("a.parquet", b"PAR1 nothing", r"a\.parquet' is not intact parquet"),
        ("a.txt", b"", r"has no documents \(1 too short\)"),
        ("a.unknown", b"text", r"has no documents \(no matching file\)"),
    ],
)
def test_damaged_corpus_is_one_error_that_says_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write(tmp_path, {name: content})
    with pytest.raises(CorpusError, match=message):
        corpus_of(tmp_path).fingerprint  # noqa: B018


def test_missing_parquet_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no column 'body'; it has \['text', 'name', 'part'\]"):
        corpus_of(as_parquet(tmp_path), text_field="body").fingerprint  # noqa: B018


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"corpus path '.*nowhere' does not exist"):
        corpus_of(tmp_path / "nowhere").fingerprint  # noqa: B018


def test_unreadable_file_and_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": "a"})

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:  # the tests may run as root, who may read everything
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(CorpusError, match=r"cannot read '.*a\.txt': Permission denied"):
            corpus_of(tmp_path).fingerprint  # noqa: B018
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda path: refuse(Path(path)))
        with pytest.raises(CorpusError, match="cannot read .*: Permission denied"):
            corpus_of(tmp_path).fingerprint  # noqa: B018


def test_missing_optional_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match=r"pip install 'perilune\[parquet\]'"):
        corpus_of(path).fingerprint  # noqa: B018
    path = as_zst(tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CorpusError, match=r"pip install 'perilune\[train\]'"):
        corpus_of(path).fingerprint  # noqa: B018


def test_json_text_that_utf8_cannot_hold_is_skipped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"text": "a"}\n{"text": "\\ud800"}\n'})
    corpus = corpus_of(tmp_path)
    assert list(contents(corpus).values()) == ["a"]
    assert corpus.summary.skipped == {"lone surrogates": 1}


@given(st.text(alphabet="ab\n", max_size=200), st.integers(16, 40))
def test_cutting_long_documents_loses_nothing(text: str, limit: int) -> None:
    pieces = list(_cut(text, limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces) or text == ""
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or "\n" not in piece


def test_long_documents_become_numbered_pieces_in_one_split(tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.txt": f"line {n}\n" * 20 for n in range(30)})
    corpus = corpus_of(tmp_path, max_characters=50, valid_fraction=0.3)
    splits = {split: {d.id.split("#")[0] for d in corpus.documents(split)} for split in ("train", "valid")}
    assert splits["valid"]
    assert not splits["train"] & splits["valid"]
    assert "".join(d.text for d in corpus.documents() if d.id.startswith("7.txt#")) == "line 7\n" * 20


def test_a_single_long_file_still_gives_both_splits(tmp_path: Path) -> None:
    write(tmp_path, {"shakespeare.txt": "to be or not to be\n" * 400})
    corpus = corpus_of(tmp_path / "shakespeare.txt", max_characters=200)
    assert corpus.summary.num_documents["train"] > corpus.summary.num_documents["valid"] > 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.999])
def test_splits_partition_the_documents_and_match_the_summary(tmp_path: Path, count: int, fraction: float) -> None:
    write(tmp_path, {f"{n}.txt": f"text {n}" for n in range(count)})
    corpus = corpus_of(tmp_path, valid_fraction=fraction)
    train, valid = list(corpus.documents("train")), list(corpus.documents("valid"))
    assert sorted(d.id for d in train + valid) == sorted(d.id for d in corpus.documents())
    assert corpus.summary.num_documents == {"train": len(train), "valid": len(valid)}
    for split, documents in (("train", train), ("valid", valid)):
        assert corpus.summary.num_bytes[split] == sum(len(d.text.encode()) for d in documents)
    if count > 1:
        assert train and bool(valid) == (fraction > 0)


def test_split_of_a_document_does_not_depend_on_the_others(tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.txt": "text" for n in range(60)})
    before = {d.id for d in corpus_of(tmp_path, valid_fraction=0.3).documents("valid")}
    write(tmp_path, {f"new{n}.txt": "text" for n in range(60)})
    after = {d.id for d in corpus_of(tmp_path, valid_fraction=0.3).documents("valid")}
    assert before == {name for name in after if not name.startswith("new")}


def test_fingerprint_follows_content_names_and_split_but_not_the_place(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.txt": "one", "b.txt": "two"}
    first = corpus_of(write(tmp_path / "here", files)).fingerprint
    assert corpus_of(write(tmp_path / "there", files)).fingerprint == first
    others = [
        corpus_of(write(tmp_path / "content", files | {"b.txt": "twO"})).fingerprint,
        corpus_of(write(tmp_path / "name", {"a.txt": "one", "c.txt": "two"})).fingerprint,
        corpus_of(write(tmp_path / "swapped", {"a.txt": "two", "b.txt": "one"})).fingerprint,
        corpus_of(write(tmp_path / "more", files | {"c.txt": "three"})).fingerprint,
        corpus_of(tmp_path / "here", valid_fraction=0.5).fingerprint,
    ]
    assert len({first, *others}) == 6


def test_files_that_change_during_the_run_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "b.txt": "two"})
    corpus = corpus_of(tmp_path)
    corpus.fingerprint  # noqa: B018
    write(tmp_path, {"b.txt": "changed"})
    with pytest.raises(CorpusError, match="changed while they were read"):
        list(corpus.documents())


def test_standard_library_is_a_corpus() -> None:
    corpus = Corpus(CorpusConfig())
    ids = [document.id for document in corpus.documents()]
    # json is in every installation, also where a distribution splits the library
    assert any(name.startswith("json/decoder.py") for name in ids)
    assert not [name for name in ids if "site-packages" in name or "/test/" in f"/{name}" or "_sysconfigdata" in name]
    assert corpus.summary.num_bytes["train"] > 2_000_000
    assert corpus.summary.num_documents["valid"] >= 5


def test_python_without_library_sources_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib" / "python311.zip"))
    with pytest.raises(CorpusError, match="has no library sources"):
        Corpus(CorpusConfig()).summary  # noqa: B018


def test_generated_corpus_is_pinned() -> None:
    """Golden training losses rest on these bytes: whoever changes them raises generated.VERSION and this hash."""
    content = "\x1e".join(f"{name}\n{text}" for name, text in generated.generate(seed=0, num_documents=200))
    assert hashlib.sha256(content.encode()).hexdigest() == GENERATED_SHA256


def test_generated_corpus_is_a_function_of_the_seed() -> None:
    def corpus(seed: int) -> Corpus:
        return Corpus(CorpusConfig(source="generated", seed=seed, num_documents=30))

    assert contents(corpus(1)) == contents(corpus(1))
    assert corpus(1).fingerprint != corpus(2).fingerprint
    # a longer corpus begins with the shorter one
    longer = dict(generated.generate(seed=1, num_documents=60))
    assert contents(corpus(1)).items() <= longer.items()


def test_generated_programs_are_true() -> None:
    programs = [text for name, text in generated.generate(seed=3, num_documents=50) if name.startswith("program")]
    assert programs
    for program in programs:
        exec(program, {})  # their asserts must hold


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "b.jsonl": json_lines(RECORDS)})
    as_zst(tmp_path)
    as_parquet(tmp_path)
    calls: list[tuple[str, int, int | None]] = []
    corpus = Corpus(CorpusConfig(source=str(tmp_path)), progress=lambda *call: calls.append(call))
    list(corpus.documents())
    for stage in ("surveying", "reading"):
        done = [call[1:] for call in calls if call[0] == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": ""}, "source=''"),
        ({"source": ()}, r"source=\(\)"),
        ({"valid_fraction": 1.0}, "valid_fraction=1.0"),
        ({"min_characters": 0}, "min_characters=0"),
        ({"max_characters": 3}, "max_characters=3"),
        ({"num_documents": 0}, "num_documents=0"),
        ({"include_suffixes": ("py",)}, "'py' must begin with a dot"),
    ],
)
def test_wrong_settings_name_the_field_and_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**options)


def test_config_survives_json() -> None:
    config = CorpusConfig(source=("a", "b"), include_suffixes=(".py",))
    assert CorpusConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
