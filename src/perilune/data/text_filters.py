"""What is not worth reading: judgements of a single text, each with a reason in words.

Kept are texts that a person wrote for people. Left out are data (tables of numbers, encoded blobs), what a program
wrote (minified, generated), licences and lists of names, and texts too short to learn from. A licence at the head of a
source file goes, the file stays.
"""

import re
from pathlib import PurePosixPath

MIN_BYTES = 200
MAX_BYTES = 1_000_000

DOMAINS: dict[str, str] = {
    **dict.fromkeys((".py", ".pyi", ".pyx", ".pxd", ".pxi"), "python"),
    **dict.fromkeys((".md", ".rst", ".txt", ".mdx", ".adoc", ".tex", ".org"), "prose"),
    **dict.fromkeys((".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".inl", ".cu", ".cuh"), "c"),
    **dict.fromkeys((".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".vue", ".css", ".scss"), "web"),
    **dict.fromkeys((".rs", ".go", ".java", ".kt", ".swift", ".cs", ".rb", ".lua", ".jl", ".r", ".f90", ".f"), "code"),
    **dict.fromkeys((".sh", ".bash", ".zsh", ".ps1", ".bat", ".cmake", ".sql", ".pl", ".tcl", ".el", ".vim"), "code"),
}
"""Kind of text by suffix; files with another suffix are not looked at."""

_SKIPPED_NAMES = re.compile(
    r"^(licen[cs]es?|copying|copyright|notice|authors|contributors|credits|patents|third.?party.*|mailmap"
    r"|top_level|sources|entry_points|requires|dependency_links|installed-files|record)\b",
    re.IGNORECASE,
)
_SKIPPED_SUFFIXES = (".min.js", ".min.css", ".bundle.js", ".map", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "-lock.txt")
_GENERATED = re.compile(
    r"(generated (by|from|with|automatically)|automatically generated|auto-?generated|do not edit|@generated)",
    re.IGNORECASE,
)
_RIGHTS = re.compile(r"copyright|licen[cs]e|spdx-|all rights reserved|warrant", re.IGNORECASE)
_BLOB = re.compile(r"[A-Za-z0-9+/=_\\-]{200,}")
_HEADER = re.compile(
    r"\A(?P<start>(?:\#!.*\n)?)(?P<head>(?:[ \t]*\n|(?:\#|//|;|--|\.\.[ ]|%).*\n|/\*(?:.|\n)*?\*/[ \t]*\n)+)",
)


def domain_of(path: str) -> str | None:
    """The kind of a file by its name; None when it is not to be read at all."""
    name = PurePosixPath(path)
    if _SKIPPED_NAMES.match(name.name) or path.lower().endswith(_SKIPPED_SUFFIXES):
        return None
    return DOMAINS.get(name.suffix.lower())


def why_not(text: str, *, domain: str) -> str | None:
    """Why a text is left out, in a few words; None when it is kept."""
    size = len(text.encode())
    if size < MIN_BYTES:
        return "too short"
    if size > MAX_BYTES:
        return "too long"
    lines = text.splitlines()
    longest = max(map(len, lines))
    if domain != "prose" and (longest > 2000 or size / len(lines) > 150):
        return "minified"
    if longest > 50_000:
        return "minified"
    sample = text[:20_000]
    letters = sum(map(str.isalpha, sample))
    visible = len(sample) - sum(map(str.isspace, sample))
    if letters < 0.5 * visible:
        return "mostly no letters"
    if sum(len(blob) for blob in _BLOB.findall(text)) > 0.2 * size:
        return "encoded data"
    if domain != "prose" and _GENERATED.search("\n".join(lines[:10])):
        return "generated"
    if len(set(lines)) < 0.3 * len(lines):
        return "repeats itself"
    if size < 20_000 and len(_RIGHTS.findall(text)) * 250 > size:
        return "licence"
    return None


def without_licence_header(text: str) -> str:
    """A source text without the comment about rights at its top; any other comment there stays."""
    found = _HEADER.match(text)
    if found is None or not _RIGHTS.search(found["head"]):
        return text
    # Only the paragraphs of the comment that speak of rights: what follows often says what the file is.
    head = "" if "/*" in found["head"] else found["head"]
    paragraphs = re.split(r"(?<=\n)(?:[ \t]*(?:\#|//|;|--|%)?[ \t]*\n)+", head)
    return found["start"] + "".join(part for part in paragraphs if not _RIGHTS.search(part)) + text[found.end() :]
