"""Text of a PDF or DOCX file. Runs as a program inside the sandbox and imports nothing of this package.

    python -c EXTRACT pdf|docx CHARACTERS < file > result.json

The result is `{"title", "text", "warnings"}`, or `{"error"}`. The sandbox bounds time and memory; the limits here make
a bomb end as one clear sentence instead of a killed process.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from typing import IO
from xml.parsers import expat

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
MEMBER_LIMIT = 64 * 1024 * 1024
"""Bytes of one part of a DOCX file once unpacked."""
RATIO_LIMIT = 200
"""Unpacked bytes for one packed byte; text rarely reaches 20."""
MEMBERS_LIMIT = 10_000
PAGES_LIMIT = 5_000


class Refused(Exception):
    """The file is not what it says, or is made to exhaust its reader."""


class Enough(Exception):
    """As much text as was asked for."""


class DocxText:
    """Collects the text of `word/document.xml` as expat reports it; entities and document types are refused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.length = 0
        self.lines: list[str] = []
        self.line: list[str] = []
        self.in_text = False
        self.heading = 0
        self.cells = 0
        self.parser = expat.ParserCreate(namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.characters
        self.parser.StartDoctypeDeclHandler = self.doctype

    def doctype(self, *_: object) -> None:
        raise Refused("its XML declares a document type, which Word never writes")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == f"{WORD} t":
            self.in_text = True
        elif name == f"{WORD} tab":
            self.characters_now("\t")
        elif name in (f"{WORD} br", f"{WORD} cr"):
            self.characters_now("\n")
        elif name == f"{WORD} pStyle":
            style = attributes.get(f"{WORD} val", "").lower()
            if style.startswith("heading") and style[7:8].isdigit():
                self.heading = min(6, int(style[7]) or 1)
        elif name == f"{WORD} tc":
            self.cells += 1
            if self.line:
                self.characters_now(" | ")

    def end(self, name: str) -> None:
        if name == f"{WORD} t":
            self.in_text = False
        elif name == f"{WORD} tc":
            self.cells -= 1
        elif name == f"{WORD} p" and self.cells:
            self.characters_now(" ")
        elif name in (f"{WORD} p", f"{WORD} tr"):
            text = "".join(self.line).strip()
            self.lines.append(f"{'#' * self.heading} {text}" if text and self.heading else text)
            self.line, self.heading = [], 0

    def characters(self, text: str) -> None:
        if self.in_text:
            self.characters_now(text)

    def characters_now(self, text: str) -> None:
        self.line.append(text)
        self.length += len(text)
        if self.length > self.limit:
            raise Enough


def member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise Refused(f"it has no {name}, so it is no DOCX file") from None
    if info.flag_bits & 1:
        raise Refused("it is encrypted")
    if info.file_size > MEMBER_LIMIT or info.file_size > RATIO_LIMIT * max(info.compress_size, 1_000):
        raise Refused(f"{name} would unpack to {info.file_size} bytes from {info.compress_size}")
    return archive.open(info)


def docx(data: bytes, limit: int) -> dict[str, object]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if len(archive.infolist()) > MEMBERS_LIMIT:
            raise Refused(f"it has {len(archive.infolist())} parts, more than {MEMBERS_LIMIT}")
        reader, warnings = DocxText(limit), []
        with member(archive, "word/document.xml") as part:
            try:
                # Not more than the directory claims is unpacked, and that was checked.
                while chunk := part.read(65_536):
                    reader.parser.Parse(chunk, False)
                reader.parser.Parse(b"", True)
            except Enough:
                warnings.append(f"only the first {limit} characters")
    return {"title": "", "text": "\n".join([*reader.lines, "".join(reader.line)])[:limit], "warnings": warnings}


def pdf(data: bytes, limit: int) -> dict[str, object]:
    try:
        import pypdf
    except ImportError:
        raise Refused("reading PDF needs pypdf (pip install pypdf)") from None
    document = pypdf.PdfReader(io.BytesIO(data), strict=False)
    if document.is_encrypted and not document.decrypt(""):
        raise Refused("it is encrypted")
    pieces: list[str] = []
    warnings: list[str] = []
    length = unreadable = 0
    for number, page in enumerate(document.pages, 1):
        if number > PAGES_LIMIT or length > limit:
            warnings.append(f"only the first {number - 1} pages")
            break
        try:
            text = page.extract_text()
        except (RecursionError, MemoryError):
            raise
        except Exception:  # one damaged page must not lose the others, and the library raises anything
            unreadable += 1
            continue
        pieces.append(f"[page {number}]\n{text.strip()}\n")
        length += len(text)
    if unreadable:
        warnings.append(f"{unreadable} pages could not be read")
    title = document.metadata.title if document.metadata else ""
    return {"title": str(title or "")[:300], "text": "\n".join(pieces)[:limit], "warnings": warnings}


def main() -> None:
    kind, limit = sys.argv[1], int(sys.argv[2])
    data = sys.stdin.buffer.read()
    try:
        result = {"pdf": pdf, "docx": docx}[kind](data, limit)
    except Refused as error:
        result = {"error": str(error)}
    except MemoryError:
        result = {"error": "it needs more memory than is allowed"}
    except Exception as error:  # a hostile file may break its reader in any way; all of them mean "skip it"
        result = {"error": f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
