"""Files for agents: read, write, edit, list and search in the workspace and in the folders that were granted to read.

Names are those of the sandbox, so that `shell` and these tools speak of the same file: `notes.md` and
`/workspace/notes.md` lie in the workspace; `/papers/a.txt` lies in the folder granted as `/papers`. Granted folders
are in `context.extras["folders"]`, a mapping from such a name to the folder's path on the machine, and cannot be
written.

Every name is opened beneath its folder by `sandbox.files`, which no link, `..` or race leads out of. A search for text
runs here; one for a regular expression runs in the sandbox, because a pattern can be made to never end.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field

from perilune.swarm.sandbox import files
from perilune.swarm.sandbox.contract import WORKSPACE, Limits
from perilune.swarm.sandbox.paths import PathRefused
from perilune.swarm.tools.programs import missing_sandbox
from perilune.swarm.tools.room import write_within
from perilune.swarm.tools.shown import OUTPUT_LIMIT, clipped, decoded, is_binary, one_line
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, tool

READ_LIMIT = 8 << 20
WRITE_LIMIT = 2 << 20
LIST_LIMIT = 500
MATCH_LIMIT = 200
SEARCH_SECONDS = 20.0

Name = Annotated[
    str, Field(min_length=1, max_length=4096, description="Relative to the workspace, or below a granted folder.")
]


@tool(effects="none", untrusted=True)
async def read_file(
    context: ToolContext,
    path: Name,
    start: Annotated[int, Field(ge=1, description="First line.")] = 1,
    end: Annotated[int | None, Field(ge=1, description="Last line; by default as many as fit.")] = None,
) -> str:
    """Read a text file, or some of its lines."""
    content = await _text(context, path)
    lines = content.splitlines(keepends=True)
    last = min(len(lines), end or len(lines))
    if lines and start > len(lines):
        raise ToolError(f"start is {start}, but {path!r} has {len(lines)} lines")
    if last < start and lines:
        raise ToolError(f"end is {end}, before start, which is {start}")
    shown, length = [], 0
    for line in lines[start - 1 : last]:
        if length + len(line) > OUTPUT_LIMIT - 500 and shown:
            break
        shown.append(line)
        length += len(line)
    stop = start - 1 + len(shown)
    head = f"[{path}: lines {min(start, stop)}-{stop} of {len(lines)}]\n" if len(shown) < len(lines) else ""
    return head + clipped("".join(shown), OUTPUT_LIMIT) or "[the file is empty]"


@tool(effects="workspace")
async def write_file(
    context: ToolContext,
    path: Name,
    content: Annotated[str, Field(description="The whole new content.")],
) -> str:
    """Create a text file in your workspace, or replace one."""
    data = _encoded(content)
    root, name = _place(context, path, writing=True)
    with _told(path):
        size = await asyncio.to_thread(write_within, root, name, data)
    return f"wrote {size} bytes to {path}"


@tool(effects="workspace")
async def edit_file(
    context: ToolContext,
    path: Name,
    old: Annotated[str, Field(min_length=1, description="Text to replace, exactly as it stands in the file.")],
    new: Annotated[str, Field(description="Text to put in its place.")],
    all: Annotated[bool, Field(description="Replace every occurrence, not just one.")] = False,
) -> str:
    """Replace text in a file of your workspace. The old text must occur exactly once unless all is true."""
    root, name = _place(context, path, writing=True)
    content = await _text(context, path)
    if "\ufffd" in content:
        raise ToolError(f"{path!r} is not all UTF-8, and an edit would harm the rest of it; use python for it")
    count = content.count(old)
    if count == 0:
        raise ToolError(f"old does not occur in {path!r}; read the file and copy the text exactly, with its spaces")
    if count > 1 and not all:
        raise ToolError(f"old occurs {count} times in {path!r}; give more of the text around it, or set all to true")
    # Before it is made: a short text put into millions of places would take more memory than the machine has.
    _check_length(len(content) + count * (len(new) - len(old)))
    data = _encoded(content.replace(old, new))
    with _told(path):
        await asyncio.to_thread(write_within, root, name, data)
    return f"replaced {count} in {path}"


@tool(effects="none", untrusted=True)
async def list_files(
    context: ToolContext,
    pattern: Annotated[str, Field(max_length=500, description="Such as *.md or src/*.py; * also matches '/'.")] = "*",
    folder: Name = ".",
) -> str:
    """List files with their sizes. Links are shown but never followed."""
    root, name = _place(context, folder)
    with _told(folder):
        entries = await asyncio.to_thread(files.list_files, root, name, limit=20 * LIST_LIMIT)
    kept = [
        each for each in entries if fnmatchcase(each.path, pattern) or fnmatchcase(each.path.split("/")[-1], pattern)
    ]
    marks = {"folder": "/", "link": " (link)", "other": " (no plain file)"}
    prefix = _prefix(context, folder)
    lines = [
        f"{prefix}{one_line(each.path, 1000)}{marks.get(each.kind, f'  {each.size}')}" for each in kept[:LIST_LIMIT]
    ]
    if len(kept) > LIST_LIMIT or len(entries) == 20 * LIST_LIMIT:
        lines.append(f"[only the first {len(lines)}; give a narrower pattern or folder]")
    granted = ", ".join(sorted(_folders(context))) if folder == "." else ""
    if granted:
        lines.append(f"[folders you may also read: {granted}]")
    return "\n".join(lines) or "[nothing matches]"


@tool(effects="none", untrusted=True)
async def search_files(
    context: ToolContext,
    text: Annotated[str, Field(min_length=1, max_length=1000, description="What lines must contain.")],
    folder: Name = ".",
    names: Annotated[str, Field(max_length=200, description="Only in files with such names, such as *.py.")] = "*",
    regex: Annotated[bool, Field(description="text is an extended regular expression (needs the sandbox).")] = False,
    ignore_case: bool = False,
) -> str:
    """Find lines in files. Returns file:line: text."""
    root, name = _place(context, folder)
    if regex:
        return await _grep(context, text, folder, names, ignore_case)
    with _told(folder):
        found = await asyncio.to_thread(
            files.search_files, root, text, name, names=names, ignore_case=ignore_case, limit=MATCH_LIMIT
        )
    prefix = _prefix(context, folder)
    lines = [f"{prefix}{one_line(each.path, 1000)}:{each.line}: {one_line(each.text, 500)}" for each in found]
    if len(found) == MATCH_LIMIT:
        lines.append(f"[only the first {MATCH_LIMIT}; search for something rarer or in a narrower folder]")
    return "\n".join(lines) or "[no line matches]"


async def _grep(context: ToolContext, pattern: str, folder: str, names: str, ignore_case: bool) -> str:
    if context.sandbox is None:
        raise ToolError(
            f"regex needs the sandbox, which is not there ({missing_sandbox(context)}); search for plain text"
        )
    inside = posixpath.normpath(folder if folder.startswith("/") else f"{WORKSPACE}/{folder}")
    flags = ["-rnIE", "-m", str(MATCH_LIMIT), *(["-i"] if ignore_case else [])]
    # -r takes links only from the command line, and the name there was checked above.
    done = await context.sandbox.run(
        ["grep", *flags, f"--include={names}", "-e", pattern, "--", inside],
        env={"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
        limits=Limits(wall_seconds=SEARCH_SECONDS, processes=16, output_bytes=256_000),
    )
    if done.stopped:
        raise ToolError(f"the search was stopped ({done.stopped}); use a simpler expression or a narrower folder")
    if done.exit_code == 2 and not done.stdout:
        raise ToolError(f"grep refused the expression {pattern[:200]!r}; it takes POSIX extended syntax")
    lines = [one_line(line.removeprefix(WORKSPACE + "/"), 1500) for line in decoded(done.stdout).splitlines()]
    if len(lines) > MATCH_LIMIT or done.truncated:
        lines = [*lines[:MATCH_LIMIT], f"[only the first {MATCH_LIMIT}; search for something rarer]"]
    return "\n".join(lines) or "[no line matches]"


def _folders(context: ToolContext) -> dict[str, Path]:
    return dict(context.extras.get("folders", {}))


def _place(context: ToolContext, path: str, *, writing: bool = False) -> tuple[Path, str]:
    """The folder that a name lies in, and the rest of the name."""
    if path == WORKSPACE or path.startswith(WORKSPACE + "/"):
        return context.workspace, path[len(WORKSPACE) + 1 :].lstrip("/") or "."
    for target, source in sorted(_folders(context).items(), key=lambda item: -len(item[0])):
        if path == target or path.startswith(target.rstrip("/") + "/"):
            if writing:
                raise ToolError(f"{path!r} lies in {target!r}, which you may only read; write to the workspace instead")
            return source, path[len(target) :].lstrip("/") or "."
    if path.startswith("/"):
        known = ", ".join([WORKSPACE, *sorted(_folders(context))])
        raise ToolError(f"path is {path!r}, outside of what you may use ({known}); names in the workspace are relative")
    return context.workspace, path


def _prefix(context: ToolContext, folder: str) -> str:
    """What to put before names of a granted folder, so that they can be given back to these tools."""
    if not folder.startswith("/") or folder == WORKSPACE or folder.startswith(WORKSPACE + "/"):
        return ""
    target = max((each for each in _folders(context) if folder.startswith(each)), key=len)
    return target.rstrip("/") + "/"


async def _text(context: ToolContext, path: str) -> str:
    root, name = _place(context, path)
    with _told(path):
        content = await asyncio.to_thread(files.read_file, root, name, READ_LIMIT)
    if content.truncated:
        raise ToolError(
            f"{path!r} has {content.size} bytes, more than {READ_LIMIT}; use shell (head, tail, grep) for it"
        )
    if is_binary(content.data):
        raise ToolError(f"{path!r} is no text file ({content.size} bytes); use python or shell for it")
    return content.data.decode("utf-8", "replace")


def _encoded(content: str) -> bytes:
    try:
        data = content.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"the text holds half a character at position {error.start}; write it again") from None
    _check_length(len(data))
    return data


def _check_length(size: int) -> None:
    if size > WRITE_LIMIT:
        raise ToolError(f"the file would have {size} bytes, more than {WRITE_LIMIT}; write it in parts")


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What the file system said, as an error that the model can act on."""
    try:
        yield
    except FileNotFoundError:
        raise ToolError(f"there is no {path!r}; list_files shows what there is") from None
    except IsADirectoryError:
        raise ToolError(f"{path!r} is a folder; expected a file") from None
    except NotADirectoryError:
        raise ToolError(f"{path!r} is a file, or lies below one; expected a folder") from None
    except PathRefused as error:
        raise ToolError(str(error)) from None
    except OSError as error:
        raise ToolError(f"{path!r} cannot be used: {error.strerror}") from None
    except ValueError as error:
        raise ToolError(str(error)) from None


FILE_TOOLS: tuple[Tool, ...] = (read_file, write_file, edit_file, list_files, search_files)
