"""Documents of a folder: what is taken, how it is found, and how it is cited."""

import asyncio
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.sandbox import open_sandbox
from perilune.swarm.sandbox.contract import Completed
from perilune.swarm.tools import extract, ingest
from perilune.swarm.tools.documents import (
    DocumentIndex,
    build_index,
    citation,
    document_tools,
    match_expression,
    open_index,
    passages,
)
from perilune.swarm.tools.ingest import IngestLimits
from perilune.swarm.tools.tool import ToolError
from tests.swarm.tools import office
from tests.swarm.tools.calling import FakeSandbox, call, context_in


def indexed(folder: Path, database: Path, **options) -> DocumentIndex:
    return asyncio.run(build_index(folder, database, **options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    papers = tmp_path / "papers"
    (papers / "deep").mkdir(parents=True)
    (papers / "moon.md").write_text("# The Moon\n\nIt orbits the Earth every 27 days.\n\n" + "Filler words. " * 200)
    (papers / "deep" / "sun.html").write_text("<title>The Sun</title><p>A star. <script>moon()</script>")
    (papers / "mars.txt").write_text("Mars has two moons, Phobos and Deimos. Café.")
    (papers / "月.txt").write_text("月球绕地球公转的周期约为二十七天")
    return papers


def search(index: DocumentIndex, query: str, limit: int = 10) -> list[str]:
    return [hit.path for hit in index.search(query, limit)]


def test_words_are_found_in_any_form_and_any_script(folder: Path, tmp_path: Path) -> None:
    index = indexed(folder, tmp_path / "documents.db")
    assert index.report.documents == 4
    assert search(index, "orbiting") == ["moon.md"]
    assert search(index, "PHOBOS cafe") == ["mars.txt"]
    assert search(index, "地球") == ["月.txt"]
    assert search(index, "moon")[0] == "moon.md" and set(search(index, "moon")) == {"moon.md", "mars.txt"}
    assert search(index, '"two moons"') == ["mars.txt"] and search(index, '"moons two"') == []
    assert search(index, "script") == []


def test_a_citation_gives_back_exactly_the_text_it_names(folder: Path, tmp_path: Path) -> None:
    index = indexed(folder, tmp_path / "documents.db")
    find, read = document_tools(index)

    async def scene() -> None:
        found = (await call(find, context_in(tmp_path), query="orbits Earth")).text
        address = re.findall(r"\[(doc:[0-9a-f]{12}#\d+-\d+)\]", found)[0]
        name, start, end = citation(address)
        text = (folder / "moon.md").read_text()
        assert (await call(read, context_in(tmp_path), id=address)).text.endswith(text[start:end])
        part = (await call(read, context_in(tmp_path), id=f"doc:{name}", start=2, end=10)).text
        assert part == f"[doc:{name}#2-10] The Moon (moon.md)\n[{len(text)} characters in all]\nThe Moon"

    asyncio.run(scene())
    assert find.untrusted and read.untrusted and find.effects == read.effects == "none"


def test_reading_is_bounded_and_wrong_ids_are_explained(folder: Path, tmp_path: Path) -> None:
    (folder / "long.txt").write_text("x" * 100_000)
    index = indexed(folder, tmp_path / "documents.db")
    names = {path: name for name, path, _ in index.documents()}
    read = document_tools(index)[1]

    async def text(**arguments) -> str:
        return (await call(read, context_in(tmp_path), **arguments)).text

    assert len(asyncio.run(text(id=names["long.txt"]))) < 21_000
    assert "#100000-100000]" in asyncio.run(text(id=names["long.txt"], start=200_000))
    for wrong, complaint in (
        ("../etc/passwd", "is no document"),
        ("doc:zzz", "is no document"),
        ("doc:0123456789ab", "there is no document"),
    ):
        with pytest.raises(ToolError, match=complaint):
            asyncio.run(text(id=wrong))
    with pytest.raises(ToolError, match="before start"):
        asyncio.run(text(id=names["long.txt"], start=5, end=2))


def test_ids_and_order_depend_on_the_files_alone(folder: Path, tmp_path: Path) -> None:
    for number in range(30):
        (folder / f"same{number:02}.txt").write_text("identical words about tides")
    first = indexed(folder, tmp_path / "a.db")
    second = indexed(folder, tmp_path / "b.db")
    assert first.documents() == second.documents()
    hits = [(hit.citation, hit.score) for hit in first.search("tides identical", 50)]
    assert hits == [(hit.citation, hit.score) for hit in second.search("tides identical", 50)]
    assert len(hits) == 30


def test_equal_scores_are_ordered_by_id(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    for name in "zebra", "apple", "mango":
        (folder / name).write_text("tide tide")
    hits = indexed(folder, tmp_path / "a.db").search("tide")
    assert len({hit.score for hit in hits}) == 1
    assert [hit.document for hit in hits] == sorted(hit.document for hit in hits)


def test_a_changed_file_gets_another_id_and_a_resumed_run_keeps_the_old_index(folder: Path, tmp_path: Path) -> None:
    before = indexed(folder, tmp_path / "a.db").documents()
    (folder / "mars.txt").write_text("Mars is red.")
    assert indexed(folder, tmp_path / "a.db").documents() == before
    after = dict((path, name) for name, path, _ in indexed(folder, tmp_path / "b.db").documents())
    changed = [path for name, path, _ in before if after[path] != name]
    assert changed == ["mars.txt"]
    assert open_index(tmp_path / "a.db").report.documents == 4


SECRETS = [
    ".env",
    ".env.local",
    "prod.env",
    "server.key",
    "id_rsa",
    "id_ed25519.pub",
    "cert.pem",
    ".netrc",
    "SECRETS.yaml",
]


def test_secrets_links_and_pipes_stay_out_and_are_counted(folder: Path, tmp_path: Path) -> None:
    for name in SECRETS:
        (folder / name).write_text("CANARY")
    for name in (".git", ".ssh", "deep/.aws"):
        (folder / name).mkdir()
        (folder / name / "config").write_text("CANARY")
    (folder / "innocent.txt").write_text("x\n-----BEGIN OPENSSH PRIVATE KEY-----\nCANARY")
    (tmp_path / "outside.txt").write_text("CANARY")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "linked_folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    (folder / "empty.txt").touch()
    index = indexed(folder, tmp_path / "documents.db")
    assert index.report.documents == 4
    assert search(index, "CANARY") == []
    assert b"CANARY" not in (tmp_path / "documents.db").read_bytes()
    assert dict(index.report.left_out) == {
        "may hold secrets or no documents": len(SECRETS) + 3,
        "holds a private key": 1,
        "symbolic links are not followed": 2,
        "not a regular file": 1,
        "not text": 1,
        "no text in it": 1,
    }
    assert "1 left out: not text (first: image.png)" in index.report.lines()
    assert open_index(tmp_path / "documents.db").report == index.report


def test_a_link_put_in_place_after_the_look_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.txt").write_text("CANARY")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "linked_folder").symlink_to(tmp_path)
    look = os.stat
    with monkeypatch.context() as patch:
        # What the walk saw was a file and a folder; what it opens are links.
        patch.setattr("os.stat", lambda path, **options: look(path, **options | {"follow_symlinks": True}))
        report = indexed(folder, tmp_path / "documents.db").report
    assert dict(report.left_out) == {"cannot be opened": 2} and report.documents == 4


def test_size_number_and_depth_have_limits(folder: Path, tmp_path: Path) -> None:
    (folder / "big.txt").write_text("x" * 2_000)
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "deep.txt").write_text("deep")
    limits = IngestLimits(file_bytes=1_000, files=2, depth=2)
    report = indexed(folder, tmp_path / "documents.db", limits=limits).report
    assert report.documents == 2
    reasons = " ".join(report.left_out)
    assert "larger than 1000 bytes" in reasons and "beyond 2 files" in reasons and "deeper than 2" in reasons


def test_beyond_the_limits_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("words")
    opened = []
    true_open = ingest._opened
    monkeypatch.setattr(ingest, "_opened", lambda name, *rest: opened.append(name) or true_open(name, *rest))
    report = ingest.IngestReport()
    found = list(ingest.found_files(tmp_path, report, IngestLimits(files=2)))
    assert [each.path for each in found] == opened == ["0.txt", "1.txt"]
    assert sum(report.left_out.values()) == 3


def test_a_folder_that_changes_while_it_is_read_costs_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "changing"
    (folder / "b").mkdir(parents=True)
    for name in ("a.txt", "b/1.txt", "c.txt"):
        (folder / name).write_text(f"words of {name}")
    true_list = os.listdir

    def listed_then_gone(place: int) -> list[str]:
        names = true_list(place)
        if "c.txt" in names:
            (folder / "c.txt").unlink()
        return names

    monkeypatch.setattr(os, "listdir", listed_then_gone)
    index = indexed(folder, tmp_path / "index.db")
    assert [path for _, path, _ in index.documents()] == ["a.txt", "b/1.txt"]
    assert index.report.left_out == {"cannot be opened": 1}


def test_two_files_made_to_share_an_id_are_one_document_and_one_reason(tmp_path: Path) -> None:
    folder = tmp_path / "twins"
    folder.mkdir()
    # Found in a minute by trying: twelve digits are few. The first keeps the id, so a citation means one text.
    (folder / "a.txt").write_text("note 15953294")
    (folder / "b.txt").write_text("note 25249403")
    (folder / "c.txt").write_text("note 3")
    index = indexed(folder, tmp_path / "index.db")
    assert [(id, path) for id, path, _ in index.documents() if path != "c.txt"] == [("22bba1eacaf2", "a.txt")]
    assert index.report.documents == 2
    assert [reason for reason in index.report.left_out if "id of another" in reason]
    assert {hit.path for hit in index.search("note")} == {"a.txt", "c.txt"}


def test_names_made_to_deceive_are_shown_as_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "a\nb\u202e.txt").write_text("# tide <script>alert(1)</script>\x1b[31m")
    os.close(os.open(os.fsencode(folder) + b"/\xff.txt", os.O_CREAT | os.O_WRONLY))
    index = indexed(folder, tmp_path / "documents.db")
    (hit,) = index.search("tide")
    assert hit.path == "a\\nb\\u202e.txt" and "\x1b" not in hit.title


def test_a_folder_that_is_not_there_is_one_clear_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="documents folder .* cannot be read"):
        indexed(tmp_path / "nothing", tmp_path / "documents.db")
    assert not (tmp_path / "documents.db").exists()
    (tmp_path / "other.db").write_text("no database")
    with pytest.raises(ValueError, match="is no index of documents"):
        open_index(tmp_path / "other.db")


@given(st.text(max_size=80))
def test_no_query_is_an_error_in_the_index(query: str) -> None:
    import sqlite3

    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE words USING fts5(title, body, tokenize='porter unicode61')")
    if expression := match_expression(query):
        connection.execute("SELECT * FROM words WHERE words MATCH ?", (expression,)).fetchall()
    connection.close()


@given(st.text(alphabet="ab \n.", max_size=300), st.integers(2, 40))
def test_passages_cover_the_text_in_order_and_never_exceed_their_size(text: str, size: int) -> None:
    borders = list(passages(text, size))
    assert all(0 < stop - start <= size for start, stop in borders)
    assert all(before[1] == after[0] for before, after in zip(borders, borders[1:]))
    covered = borders[-1][1] if borders else 0
    assert not text[covered:].strip()


# PDF and DOCX --------------------------------------------------------------------------------------------------------


def test_without_a_sandbox_pdf_and_docx_are_left_out_with_the_reason(folder: Path, tmp_path: Path) -> None:
    (folder / "a.pdf").write_bytes(office.pdf("tide"))
    (folder / "b.docx").write_bytes(office.docx("tide"))
    report = indexed(folder, tmp_path / "documents.db").report
    assert report.documents == 4
    assert sum("only read inside the sandbox" in reason for reason in report.left_out) == 2


@pytest.mark.needs_tool("bwrap")
def test_pdf_and_docx_are_read_in_the_sandbox_and_bombs_are_left_out(tmp_path: Path) -> None:
    folder, workspace = tmp_path / "papers", tmp_path / "workspace"
    folder.mkdir()
    workspace.mkdir()
    (workspace / "json.py").write_text("raise SystemExit('hijacked')")  # must not be imported by the extractor
    (folder / "a.pdf").write_bytes(office.pdf("High tide at noon", "Low tide at six"))
    (folder / "b.docx").write_bytes(office.docx("Neap tide", heading="Tides"))
    (folder / "laughs.docx").write_bytes(office.billion_laughs())
    (folder / "broken.pdf").write_bytes(office.pdf("x")[:200])
    index = indexed(folder, tmp_path / "documents.db", sandbox=open_sandbox(workspace))
    assert {path: title for _, path, title in index.documents()} == {"a.pdf": "a.pdf", "b.docx": "Tides"}
    assert search(index, "noon") == ["a.pdf"] and search(index, "neap") == ["b.docx"]
    assert "[page 2]\nLow tide at six" in index.search("six")[0].text
    assert sum(index.report.left_out.values()) == 2


def test_an_extractor_that_is_stopped_or_lies_is_not_believed(folder: Path, tmp_path: Path) -> None:
    (folder / "a.pdf").write_bytes(office.pdf("tide"))
    answers = [
        Completed(exit_code=None, stdout=b"", stderr=b"", truncated=False, stopped="memory"),
        *(
            Completed(exit_code=0, stdout=out, stderr=b"", truncated=False, stopped=None)
            for out in (b"", b"[]", b'{"text": 3, "title": ""}', b'{"title": "x"}', b'"x"', b"\xff")
        ),
    ]
    for number, answer in enumerate(answers):
        report = indexed(folder, tmp_path / f"{number}.db", sandbox=FakeSandbox(answer=answer)).report
        assert report.documents == 4 and sum(report.left_out.values()) == 1


@pytest.mark.parametrize(
    "bomb, complaint",
    [
        (lambda: office.zip_bomb(30_000_000), "would unpack to"),
        (lambda: office.lying_zip(30_000_000), "Bad CRC|Overlapped"),
        (office.billion_laughs, "declares a document type"),
        (lambda: b"PK\x03\x04 no zip", "cannot be read|not a zip"),
        (lambda: office.docx(xml=b"<a>" * 100 + b"</b>"), "cannot be read|mismatched"),
    ],
    ids=["ratio", "lying directory", "entities", "no zip", "broken xml"],
)
def test_a_bomb_is_one_sentence(bomb, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        extract.docx(bomb(), 1_000_000)


def test_tables_tabs_and_length_of_a_docx() -> None:
    word = office.WORD
    cell = "<w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc>"
    xml = f'<w:document xmlns:w="{word}"><w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/></w:r></w:p>'
    xml += f"<w:tbl><w:tr>{cell.format('one')}{cell.format('two')}</w:tr></w:tbl></w:document>"
    assert extract.docx(office.docx(xml=xml.encode()), 1_000)["text"] == "a\tb\none  | two\n"
    cut = extract.docx(office.docx("x" * 500, "y" * 500), 600)
    assert len(str(cut["text"])) <= 600 and cut["warnings"] == ["only the first 600 characters"]


@pytest.mark.needs_tool("bwrap")
def test_a_pdf_bomb_ends_as_a_count(tmp_path: Path) -> None:
    folder, workspace = tmp_path / "papers", tmp_path / "workspace"
    folder.mkdir()
    workspace.mkdir()
    (folder / "bomb.pdf").write_bytes(office.pdf("x", padding=80_000_000))
    limits = IngestLimits(extract_seconds=20, extract_memory=400 << 20)
    report = indexed(folder, tmp_path / "documents.db", sandbox=open_sandbox(workspace), limits=limits).report
    assert report.documents == 0 and report.left_out
