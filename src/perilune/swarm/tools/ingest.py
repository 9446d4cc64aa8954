"""A folder of documents as text: which files are taken, how each is read, and what was left out, counted by reason.

    text, Markdown, source      read as they are
    HTML                        readable text (`html_text`)
    PDF, DOCX                   by `extract.py` inside the sandbox; without a sandbox they are left out

Symbolic links are never followed: every folder and file is opened beneath the folder that was granted, by descriptor.
Secrets stay where they are: `.env`, `.git`, `.ssh`, key files, and any file that holds a private key are skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from perilune.swarm.sandbox.contract import Limits
from perilune.swarm.sandbox.interpreter import python_argv
from perilune.swarm.tools.html_text import page_text
from perilune.swarm.tools.shown import is_binary, one_line

if TYPE_CHECKING:
    from perilune.swarm.sandbox.contract import Sandbox

SKIPPED_FOLDERS = frozenset(
    {".git", ".hg", ".svn", ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config", ".cache", ".venv"}
    | {"__pycache__", "node_modules", ".password-store", ".terraform"}
)
SECRET_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc", "*.gpg"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.*", "secrets.*", ".htpasswd"),
    *("*.tfstate", "*.tfstate.*", ".bash_history", ".zsh_history", ".python_history", "shadow", "*.ovpn"),
)
_PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY")
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})


@dataclass(frozen=True, kw_only=True)
class IngestLimits:
    file_bytes: int = 25_000_000
    html_bytes: int = 5_000_000
    total_bytes: int = 2_000_000_000
    files: int = 50_000
    depth: int = 32
    document_characters: int = 5_000_000
    extract_seconds: float = 60.0
    extract_memory: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Document:
    id: str
    """Twelve hex digits from path and content: the same file has the same id in every run, a changed one another."""
    path: str
    title: str
    sha256: str
    text: str


@dataclass(kw_only=True)
class IngestReport:
    """What became of the files of a folder."""

    documents: int = 0
    characters: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of files or folders."""
    examples: dict[str, str] = field(default_factory=dict)
    """Reason -> the first path it happened to."""

    def leave_out(self, reason: str, path: str) -> None:
        self.left_out[reason] += 1
        self.examples.setdefault(reason, one_line(path))

    def lines(self) -> list[str]:
        """For people: one line for the whole and one for each reason."""
        left = [
            f"{count} left out: {reason} (first: {self.examples[reason]})"
            for reason, count in sorted(self.left_out.items())
        ]
        return [f"{self.documents} documents, {self.characters} characters", *left]


@dataclass(frozen=True, kw_only=True)
class Found:
    path: str
    """Relative to the folder, with '/'; undecodable bytes as surrogates."""
    data: bytes


def found_files(folder: Path, report: IngestReport, limits: IngestLimits) -> Iterator[Found]:
    """Regular files beneath the folder in the order of their paths, without following a link."""
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"documents folder {str(folder)!r} cannot be read: {error.strerror}") from None
    room = [limits.files, limits.total_bytes]
    yield from _walk(root, "", report, limits, room)


def _walk(descriptor: int, prefix: str, report: IngestReport, limits: IngestLimits, room: list[int]) -> Iterator[Found]:
    try:
        for name in sorted(os.listdir(descriptor)):
            path = prefix + name
            try:
                mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            except OSError:  # gone since it was listed, or in a folder that may be listed but not entered
                report.leave_out("cannot be opened", path)
                continue
            if stat.S_ISLNK(mode):
                report.leave_out("symbolic links are not followed", path)
            elif name.lower() in SKIPPED_FOLDERS:
                report.leave_out("may hold secrets or no documents", path)
            elif stat.S_ISDIR(mode):
                if path.count("/") >= limits.depth:
                    report.leave_out(f"deeper than {limits.depth} folders", path)
                    continue
                inner = _opened(name, descriptor, os.O_DIRECTORY)
                if inner is None:
                    report.leave_out("cannot be opened", path)
                else:
                    yield from _walk(inner, path + "/", report, limits, room)
            elif not stat.S_ISREG(mode):
                report.leave_out("not a regular file", path)
            elif any(fnmatch(name.lower(), pattern) for pattern in SECRET_NAMES):
                report.leave_out("may hold secrets or no documents", path)
            elif (data := _read(name, descriptor, path, report, limits, room)) is not None:
                yield Found(path=path, data=data)
    finally:
        os.close(descriptor)


def _opened(name: str, descriptor: int, flags: int) -> int | None:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=descriptor)
    except OSError:
        return None


def _read(
    name: str, descriptor: int, path: str, report: IngestReport, limits: IngestLimits, room: list[int]
) -> bytes | None:
    beyond = f"beyond {limits.files} files or {limits.total_bytes} bytes in all"
    if room[0] < 1 or room[1] < 1:  # before it is read: a folder may hold terabytes more
        report.leave_out(beyond, path)
        return None
    opened = _opened(name, descriptor, 0)
    if opened is None:
        report.leave_out("cannot be opened", path)
        return None
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # changed since it was listed
            report.leave_out("not a regular file", path)
            return None
        limit = limits.html_bytes if Path(name).suffix.lower() in HTML_SUFFIXES else limits.file_bytes
        try:
            data = file.read(limit + 1)
        except OSError:
            report.leave_out("cannot be read", path)
            return None
    if len(data) > limit:
        report.leave_out(f"larger than {limit} bytes", path)
    elif room[1] < len(data):
        report.leave_out(beyond, path)
    elif _PRIVATE_KEY.search(data):
        report.leave_out("holds a private key", path)
    else:
        room[0] -= 1
        room[1] -= len(data)
        return data
    return None


async def read_document(
    found: Found, report: IngestReport, *, sandbox: Sandbox | None, limits: IngestLimits
) -> Document | None:
    """The file as a document, or None with a reason in the report."""
    suffix = Path(found.path).suffix.lower()
    title = ""
    if suffix in (".pdf", ".docx"):
        if sandbox is None:
            report.leave_out(f"{suffix[1:].upper()} is only read inside the sandbox, which is not there", found.path)
            return None
        result = await extracted(found.data, suffix[1:], sandbox=sandbox, limits=limits)
        if "error" in result:
            report.leave_out(f"{suffix[1:].upper()} could not be read: {one_line(str(result['error']))}", found.path)
            return None
        title, text = result["title"], result["text"]
        for warning in result["warnings"]:
            report.leave_out(f"in part: {one_line(str(warning))}", found.path)
    elif is_binary(found.data):
        report.leave_out("not text", found.path)
        return None
    elif suffix in HTML_SUFFIXES:
        page = page_text(found.data.decode("utf-8", "replace"))
        title, text = page.title, page.text
    else:
        text = found.data.decode("utf-8-sig", "replace")
    text = text.replace("\r\n", "\n").replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(text) > limits.document_characters:
        report.leave_out(f"in part: only the first {limits.document_characters} characters", found.path)
        text = text[: limits.document_characters]
    if not text.strip():
        report.leave_out("no text in it", found.path)
        return None
    sha256 = hashlib.sha256(found.data).hexdigest()
    name = hashlib.sha256(os.fsencode(found.path) + b"\0" + sha256.encode()).hexdigest()[:12]
    title = one_line(title.strip() or _heading(text) or Path(found.path).name, 200)
    return Document(id=name, path=one_line(found.path), title=title, sha256=sha256, text=text)


def _heading(text: str) -> str:
    for line in text[:2_000].splitlines():
        if line.startswith("#") and (heading := line.lstrip("#").strip()):
            return heading
    return ""


async def extracted(data: bytes, kind: str, *, sandbox: Sandbox, limits: IngestLimits) -> dict[str, Any]:
    """`{"title", "text", "warnings"}` or `{"error"}` from `extract.py` in the sandbox, checked: the file made it."""
    source = resources.files("perilune.swarm.tools").joinpath("extract.py").read_text(encoding="utf-8")
    done = await sandbox.run(
        [*python_argv(), "-I", "-c", source, kind, str(limits.document_characters)],
        stdin=data,
        limits=Limits(wall_seconds=limits.extract_seconds, memory_bytes=limits.extract_memory, output_bytes=64_000_000),
    )
    if done.stopped:
        return {"error": f"stopped by the sandbox: {done.stopped}"}
    try:
        result = orjson.loads(done.stdout)
        if isinstance(result["error"] if "error" in result else result["title"] + result["text"], str):
            return {"warnings": [], **result}
    except (ValueError, KeyError, TypeError):
        pass
    return {"error": f"its reader ended with {done.exit_code}"}
