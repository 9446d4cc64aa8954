"""Search over a folder of documents: an index in SQLite (FTS5, BM25) and the two tools that use it.

    index = await build_index(folder, run_folder / "documents.db", sandbox=sandbox)
    tools = document_tools(index)

Documents are cut into passages of about a thousand characters at paragraphs. A passage has an address that can be
cited, `doc:ID#START-END`, in characters of the document's text; `citation` resolves one. The index is built once for a
run and kept: a resumed run sees the same documents under the same ids. The order of results is determined: by score,
then by id and place.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
from pydantic import Field

from perilune.swarm.tools.ingest import Document, IngestLimits, IngestReport, found_files, read_document
from perilune.swarm.tools.tool import Tool, ToolError, tool

if TYPE_CHECKING:
    from perilune.swarm.sandbox.contract import Sandbox

PASSAGE = 1_000
READ_LIMIT = 20_000
QUERY_TERMS = 32

_SCHEMA = """
CREATE TABLE documents (id TEXT PRIMARY KEY, path TEXT, title TEXT, sha256 TEXT, characters INTEGER, text TEXT);
CREATE TABLE passages (number INTEGER PRIMARY KEY, document TEXT, start INTEGER, stop INTEGER);
CREATE VIRTUAL TABLE words USING fts5(title, body, content='', tokenize='porter unicode61 remove_diacritics 2');
CREATE TABLE report (body TEXT);
"""
# FTS5 cuts words at spaces, which Chinese, Japanese and Korean do not write: each of their characters is a word.
_IDEOGRAPH = re.compile(r"([\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f])")
_TERM = re.compile(r'"([^"]+)"|([^\s"]+)')
_ADDRESS = re.compile(r"^(?:doc:)?([0-9a-f]{12})(?:#(\d{1,9})-(\d{1,9}))?$")


@dataclass(frozen=True, kw_only=True)
class Hit:
    document: str
    path: str
    title: str
    start: int
    end: int
    score: float
    text: str

    @property
    def citation(self) -> str:
        return f"doc:{self.document}#{self.start}-{self.end}"


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    document: str
    path: str
    title: str
    characters: int
    """Of the whole document."""
    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class DocumentIndex:
    database: Path
    report: IngestReport

    def search(self, query: str, limit: int = 10) -> list[Hit]:
        """The best passages, at most two of a document, best first."""
        expression = match_expression(query)
        if not expression:
            return []
        with closing(self._connect()) as connection:
            rows = connection.execute(
                "SELECT d.id, d.path, d.title, p.start, p.stop, bm25(words, 2.0, 1.0) AS score,"
                " substr(d.text, p.start + 1, p.stop - p.start)"
                " FROM words JOIN passages p ON p.number = words.rowid JOIN documents d ON d.id = p.document"
                " WHERE words MATCH ? ORDER BY score, d.id, p.start LIMIT ?",
                (expression, 20 * limit),
            ).fetchall()
        hits: list[Hit] = []
        taken: dict[str, int] = {}
        for name, path, title, start, stop, score, text in rows:
            if taken.get(name, 0) < 2 and len(hits) < limit:
                taken[name] = taken.get(name, 0) + 1
                hits.append(Hit(document=name, path=path, title=title, start=start, end=stop, score=-score, text=text))
        return hits

    def read(self, name: str, start: int, end: int) -> Excerpt | None:
        with closing(self._connect()) as connection:
            row = connection.execute(
                "SELECT id, path, title, characters, substr(text, ?, ?) FROM documents WHERE id = ?",
                (start + 1, max(0, end - start), name),
            ).fetchone()
        if row is None:
            return None
        name, path, title, characters, text = row
        start = min(start, characters)
        return Excerpt(
            document=name, path=path, title=title, characters=characters, start=start, end=start + len(text), text=text
        )

    def documents(self) -> list[tuple[str, str, str]]:
        """(id, path, title) of every document, by path."""
        with closing(self._connect()) as connection:
            return connection.execute("SELECT id, path, title FROM documents ORDER BY path, id").fetchall()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{self.database.absolute().as_uri()}?mode=ro", uri=True)


def fts5_missing() -> str | None:
    """Why documents cannot be indexed here, or None."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE probe USING fts5(text)")
        except sqlite3.OperationalError as error:
            return f"this Python's SQLite has no FTS5 ({error})"
    return None


async def build_index(
    folder: Path, database: Path, *, sandbox: Sandbox | None = None, limits: IngestLimits | None = None
) -> DocumentIndex:
    """Read the folder into a new index, or open the one that an earlier life of the run built."""
    if database.exists():
        return open_index(database)
    if reason := fts5_missing():
        raise ValueError(f"documents in {str(folder)!r} cannot be searched: {reason}")
    limits = limits or IngestLimits()
    report = IngestReport()
    database.parent.mkdir(parents=True, exist_ok=True)
    unfinished = database.with_name(database.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished, check_same_thread=False)) as connection:
        connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _SCHEMA)
        files = found_files(folder, report, limits)
        while (found := await asyncio.to_thread(next, files, None)) is not None:
            document = await read_document(found, report, sandbox=sandbox, limits=limits)
            if document is None:
                continue
            if await asyncio.to_thread(_insert, connection, document):
                report.documents += 1
                report.characters += len(document.text)
            else:
                report.leave_out("has the id of another document, which two files can be made to share", found.path)
        body = {
            "documents": report.documents,
            "characters": report.characters,
            "left_out": dict(report.left_out),
            "examples": report.examples,
        }
        connection.execute("INSERT INTO report VALUES (?)", (orjson.dumps(body).decode(),))
        connection.execute("INSERT INTO words(words) VALUES ('optimize')")
        connection.commit()
    unfinished.replace(database)
    return DocumentIndex(database=database, report=report)


def open_index(database: Path) -> DocumentIndex:
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            body = orjson.loads(connection.execute("SELECT body FROM report").fetchone()[0])
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ValueError(f"{str(database)!r} is no index of documents: {error}") from None
    report = IngestReport(documents=body["documents"], characters=body["characters"], examples=body["examples"])
    report.left_out.update(body["left_out"])
    return DocumentIndex(database=database, report=report)


def _insert(connection: sqlite3.Connection, document: Document) -> bool:
    """False where the id is taken: the first one keeps it, so that a citation means one document."""
    inserted = connection.execute(
        "INSERT OR IGNORE INTO documents VALUES (?, ?, ?, ?, ?, ?)",
        (document.id, document.path, document.title, document.sha256, len(document.text), document.text),
    )
    if not inserted.rowcount:
        return False
    title = _spaced(f"{document.title} {document.path}")
    for start, stop in passages(document.text):
        row = connection.execute(
            "INSERT INTO passages(document, start, stop) VALUES (?, ?, ?)", (document.id, start, stop)
        )
        body = _spaced(document.text[start:stop])
        connection.execute("INSERT INTO words(rowid, title, body) VALUES (?, ?, ?)", (row.lastrowid, title, body))
    return True


def passages(text: str, size: int = PASSAGE) -> Iterator[tuple[int, int]]:
    """Borders that cover the text: cut at a blank line, else a line, else a space, in the second half of each piece."""
    start = 0
    while len(text) - start > size:
        stop = start + size
        for mark in ("\n\n", "\n", ". ", " "):
            cut = text.rfind(mark, start + size // 2, stop)
            if cut >= 0:
                stop = cut + len(mark)
                break
        yield start, stop
        start = stop
    if text[start:].strip():
        yield start, len(text)


def _spaced(text: str) -> str:
    return _IDEOGRAPH.sub(r" \1 ", text)


def match_expression(query: str) -> str:
    """FTS5's form of a query: words joined by OR, "quoted words" as a phrase. Nothing in it is read as an operator."""
    terms = []
    for phrase, word in _TERM.findall(query)[:QUERY_TERMS]:
        cleaned = " ".join(re.findall(r"\w+", _spaced(phrase or word)))
        if cleaned:
            terms.append(f'"{cleaned}"')
    return " OR ".join(dict.fromkeys(terms))


def citation(address: str) -> tuple[str, int | None, int | None]:
    """Id, start and end of `doc:ID#START-END`; raises `ToolError`."""
    match = _ADDRESS.match(address.strip())
    if match is None:
        raise ToolError(f"{address[:80]!r} is no document: expected doc:ID or doc:ID#START-END from search_documents")
    if match[2] is None:
        return match[1], None, None
    return match[1], int(match[2]), int(match[3])


def document_tools(index: DocumentIndex) -> list[Tool]:
    """`search_documents` and `read_document` over one index. Documents come from outside: their text is untrusted."""

    @tool(effects="none", untrusted=True)
    async def search_documents(
        query: Annotated[
            str, Field(description='Words to look for; "quoted words" must stand together.', max_length=1000)
        ],
        limit: Annotated[int, Field(ge=1, le=50)] = 10,
    ) -> str:
        """Search the documents of this run. Returns passages, best first, each with an address to cite."""
        if not match_expression(query):
            raise ToolError(f"query {query[:80]!r} has no word in it; give words that the documents may contain")
        hits = await asyncio.to_thread(index.search, query, limit)
        if not hits:
            return f"No passage of the {index.report.documents} documents has any of these words. Try other words."
        return "\n\n".join(f"[{hit.citation}] {hit.title} ({hit.path})\n{hit.text.strip()}" for hit in hits)

    @tool(effects="none", untrusted=True)
    async def read_document(
        id: Annotated[
            str, Field(description="doc:ID, or doc:ID#START-END for the text around a passage.", max_length=80)
        ],
        start: Annotated[int | None, Field(ge=0, description="First character.")] = None,
        end: Annotated[int | None, Field(ge=0, description="Up to this character, not included.")] = None,
    ) -> str:
        """Read a part of a document by characters (at most 20000 at a time). Cite what you use as doc:ID#START-END."""
        name, cited_start, cited_end = citation(id)
        first = start if start is not None else (cited_start or 0)
        last = (
            end if end is not None else (cited_end if start is None and cited_end is not None else first + READ_LIMIT)
        )
        if last < first:
            raise ToolError(f"end is {last}, before start, which is {first}")
        excerpt = await asyncio.to_thread(index.read, name, first, min(last, first + READ_LIMIT))
        if excerpt is None:
            raise ToolError(f"there is no document {name!r}; ids come from search_documents")
        head = f"[doc:{name}#{excerpt.start}-{excerpt.end}] {excerpt.title} ({excerpt.path})"
        rest = (
            f"\n[{excerpt.characters} characters in all]" if excerpt.end < excerpt.characters or excerpt.start else ""
        )
        return f"{head}{rest}\n{excerpt.text}"

    return [search_documents, read_document]
