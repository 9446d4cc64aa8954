"""Collecting a corpus: what is kept, what is not and why, and the same bytes from the same inputs."""

import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.cli import main
from perilune.data import Corpus, CorpusConfig, CorpusError
from perilune.data.collect import CollectConfig, collect
from perilune.data.duplicates import MIN_SKETCH, Duplicates, sketch_of
from perilune.data.package_files import package_files, read_metadata
from perilune.data.text_filters import domain_of, why_not, without_licence_header


def prose(topic: str, lines: int = 40) -> str:
    """Lines that differ from each other and from those of another topic."""
    return (
        "\n".join(f"The {topic} of chapter {line} tells how {topic}{line % 7} works." for line in range(lines)) + "\n"
    )


def read(path: Path) -> list[dict]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return [json.loads(line) for line in stream.read().splitlines()]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """An installed package, one that vendors it, and unpacked sources."""
    root = tmp_path / "packages"

    def write(name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    write("moon/orbit.py", "# Copyright 2020 Somebody\n# Licensed under MIT\n\n" + prose("orbit"))
    write("moon/table.py", "\n".join(f"    {n}, {n * n}, {n * n * n}," for n in range(200)))
    write("moon/LICENSE.txt", prose("licence"))
    write("moon/app.min.js", prose("script"))
    write("moon/short.py", "x = 1\n")
    write("moon/picture.py", "\0" * 300)
    write("moon-1.0.dist-info/METADATA", "Name: Moon_Base\nLicense-Expression: MIT\n\ntext")
    write("moon-1.0.dist-info/RECORD", "moon/orbit.py,,\nmoon/table.py,,\n")
    write("sun/_vendor/orbit.py", prose("orbit").replace("chapter 3 ", "chapter three "))
    write("sun/README.md", prose("corona"))
    write("star-2.0/PKG-INFO", "Name: star\nClassifier: License :: OSI Approved :: BSD License\n")
    write("star-2.0/docs/guide.rst", prose("supernova"))
    return root


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    records = [
        {"source": "web/one", "licence": "CC0-1.0", "path": "a.md", "split": "valid", "text": prose("valley")},
        {"source": "web/one", "path": "copy.md", "split": "train", "text": prose("valley").replace("\n", "  \n")},
        {"text": prose("mountain")},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_records_and_packages_become_one_corpus_with_sources_licences_and_splits(
    packages: Path, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "corpus.jsonl.zst"
    found = collect(CollectConfig(docs=(str(docs),), packages=(str(packages),), valid_fraction=0.0, level=3), out)
    records = {record["id"]: record for record in read(out)}
    assert {name: (record["source"], record["domain"], record["licence"], record["split"])
            for name, record in records.items()} == {
        "web/one/a.md": ("web/one", "web/one", "CC0-1.0", "valid"),
        "docs.jsonl/3": ("docs.jsonl", "docs.jsonl", None, "train"),
        "moon-base/moon/orbit.py": ("pypi/moon-base", "python", "MIT", "train"),
        "star/star-2.0/docs/guide.rst": ("pypi/star", "prose", "BSD License", "train"),
        "sun/sun/README.md": ("pypi/sun", "prose", None, "train"),
    }  # fmt: skip
    assert records["moon-base/moon/orbit.py"]["text"] == prose("orbit")
    assert set(found.left_out) == {"duplicate", "near duplicate", "too short", "mostly no letters", "not text"}
    kept = sum(len(record["text"].encode()) for record in records.values())
    assert found.to_plain()["unique_bytes"] == kept < found.sound_bytes < found.read_bytes
    assert found.compressed_bytes == out.stat().st_size

    corpus = Corpus(CorpusConfig(source=str(out), split_field="split", id_field="id"))
    assert corpus.summary.num_documents == {"train": 4, "valid": 1}


def test_the_same_inputs_give_the_same_bytes(packages: Path, docs: Path, tmp_path: Path) -> None:
    config = CollectConfig(docs=(str(docs),), packages=(str(packages),), level=3)
    for name in ("one", "two"):
        collect(config, tmp_path / f"{name}.jsonl.zst")
    assert (tmp_path / "one.jsonl.zst").read_bytes() == (tmp_path / "two.jsonl.zst").read_bytes()


def test_a_limit_on_the_size_is_kept(packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl.zst"
    limit = (len(prose("supernova")) + 50) / 1e6
    found = collect(CollectConfig(packages=(str(packages),), max_megabytes=limit, level=3), out)
    assert sum(found.bytes.values()) <= limit * 1e6 and len(read(out)) == 1
    assert "beyond max_megabytes" in found.left_out
    (packages / "sun/MORE.md").write_text(prose("flare"))
    found = collect(CollectConfig(packages=(str(packages),), max_package_megabytes=limit, level=3), out)
    assert sorted(record["source"] for record in read(out)) == ["pypi/moon-base", "pypi/star", "pypi/sun"]


def test_a_text_keeps_its_split_whatever_else_is_collected(packages: Path, docs: Path, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone.jsonl.zst", tmp_path / "both.jsonl.zst"
    (packages / "more").mkdir()
    for number in range(8):
        (packages / f"more/t{number}.md").write_text(prose(f"planet{number}"))
    collect(CollectConfig(packages=(str(packages),), valid_fraction=0.5, level=3), alone)
    collect(CollectConfig(docs=(str(docs),), packages=(str(packages),), valid_fraction=0.5, level=3), both)
    splits = {record["id"]: record["split"] for record in read(both)}
    found = {record["id"]: record["split"] for record in read(alone)}
    assert found.items() <= splits.items() and set(found.values()) == {"train", "valid"}


@settings(max_examples=30)
@given(lines=st.integers(40, 80), changed=st.integers(0, 79), blank=st.booleans())
def test_a_copy_with_one_line_changed_is_a_near_duplicate_and_another_text_is_not(
    lines: int, changed: int, blank: bool
) -> None:
    text = prose("comet", lines).splitlines()
    copy = [*text]
    copy[changed % lines] = "Something else."
    seen = Duplicates()
    assert seen.why_not("\n".join(text)) is None
    assert seen.why_not(("\n\n" if blank else "\n").join(f"  {line}" for line in copy)) == "near duplicate"
    assert seen.why_not("\n".join(text)) == "duplicate"
    assert seen.why_not(prose("asteroid", lines)) is None


def test_texts_too_short_to_compare_are_only_compared_exactly() -> None:
    seen = Duplicates()
    lines = ["one line that says something", "and another one", "and a third", "and the last"]
    assert len(sketch_of(lines)) < MIN_SKETCH
    assert seen.why_not("\n".join(lines)) is None
    assert seen.why_not("\n".join([*lines[:3], "another end"])) is None


@pytest.mark.parametrize(("text", "domain", "reason"), [
    ("x = 1\n", "python", "too short"),
    (prose("long", 40_000), "prose", "too long"),
    ("var " + "a=function(b){return b};" * 100 + "\n", "web", "minified"),
    ("key = '" + "QUJDRA" * 60 + "'\n", "prose", "encoded data"),
    ("# This file is automatically generated by a tool\n" + prose("tool"), "python", "generated"),
    ("the same line again and again\n" * 50, "prose", "repeats itself"),
    ("Copyright of the licence\n" + "This licence warrants the copyright of this licence, number {}.\n" * 8, "prose",
     "repeats itself"),
    (prose("good"), "python", None),
])  # fmt: skip
def test_filters_give_a_reason(text: str, domain: str, reason: str | None) -> None:
    assert why_not(text, domain=domain) == reason


def test_licences_are_known_by_what_they_say() -> None:
    grant = "Permission is granted under this License to use article {} without warranty, see the copyright notice."
    assert why_not("\n".join(grant.format(n) for n in range(20)), domain="prose") == "licence"


@pytest.mark.parametrize(("text", "kept"), [
    ("# Copyright me\n# Licensed to you\n\nimport os\n", "import os\n"),
    ("#!/bin/sh\n# Copyright me\n\nls\n", "#!/bin/sh\nls\n"),
    ("/* Copyright me\n * License: MIT\n */\nint x;\n", "int x;\n"),
    ("# What this does\nimport os\n", "# What this does\nimport os\n"),
    ("# Copyright me\n#\n# What this does\nimport os\n", "# What this does\nimport os\n"),
    ("import os\n# Copyright in the middle\n", "import os\n# Copyright in the middle\n"),
])  # fmt: skip
def test_only_the_header_about_rights_goes(text: str, kept: str) -> None:
    assert without_licence_header(text) == kept


def test_names_decide_what_is_looked_at() -> None:
    assert domain_of("a/b.py") == "python" and domain_of("docs/Guide.RST") == "prose" and domain_of("x/y.cu") == "c"
    for name in ("LICENSE", "LICENSE.txt", "COPYING.rst", "a.min.js", "x_pb2.py", "data.json", "a.so", "SOURCES.txt"):
        assert domain_of(name) is None


def test_package_metadata_says_name_and_licence(tmp_path: Path) -> None:
    path = tmp_path / "METADATA"
    path.write_text("Name: A.b_C\nLicense: The MIT License\n  Permission is\n\nbody")
    assert (read_metadata(path).name, read_metadata(path).licence) == ("a-b-c", "The MIT License")
    path.write_text("Version: 1\n")
    assert read_metadata(path) is None and read_metadata(tmp_path / "absent") is None


def test_files_come_in_one_order_without_links_and_caches(packages: Path) -> None:
    (packages / "moon/__pycache__").mkdir()
    (packages / "moon/__pycache__/a.py").write_text(prose("cache"))
    (packages / "moon/link.py").symlink_to(packages / "moon/orbit.py")
    names = [file.name for file in package_files(packages)]
    assert names == sorted(names) and not any("cache" in name or "link" in name for name in names)


@pytest.mark.parametrize(("arguments", "text"), [
    (["c.jsonl.zst"], "nothing to collect"),
    (["c.txt", "--packages", "."], "written as .jsonl.zst"),
    (["c.jsonl.zst", "--packages", "nowhere"], "'nowhere' does not exist"),
    (["c.jsonl.zst", "--docs", "absent.jsonl"], "absent.jsonl"),
    (["c.jsonl.zst", "--docs", "a.txt"], "expected .jsonl or .jsonl.zst"),
    (["c.jsonl.zst", "--docs", "bad.jsonl"], "no text in the field 'text'"),
    (["c.jsonl.zst", "--packages", ".", "--level", "99"], "level=99"),
    (["c.jsonl.zst", "--packages", "empty"], "nothing is left"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_leaves_no_file(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"body": 1}\n')
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["data", "collect", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 1 and text in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty"]


def test_the_verb_prints_what_is_unique(packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "collect", str(tmp_path / "c.jsonl.zst"), "--packages", str(packages), "--level", "3"]
    main(arguments)
    assert "are unique" in capsys.readouterr().out
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["unique_bytes"] > 0


def test_damaged_records_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(CorpusError, match="line 2 is not JSON"):
        collect(CollectConfig(docs=(str(tmp_path / "d.jsonl"),)), tmp_path / "c.jsonl.zst")
