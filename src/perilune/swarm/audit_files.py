"""Which files a call names, and whether it would change them: what an auditor can tell from the arguments alone.

    file_uses("write_file", '{"path": "../x", "content": "..."}')       [FileUse(path="/x", writes=True)]
    file_uses("shell", '{"command": "cat a.txt > /etc/motd"}')          a.txt read, /etc/motd written
    file_uses("python", '{"code": "open(\\'/etc/motd\\', \\'w\\')"}')       /etc/motd written

Names are those of the sandbox, resolved from /workspace as text: no file system is asked, since an audit comes later
and elsewhere. Commands are read by the shell's rules of words, programs by Python's grammar. What is only known when it
runs (a variable, a name that is put together, a link) is not seen: no flag here does not mean that nothing happened.
The sandbox confines; this reads what was tried.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from perilune.swarm.arguments import repaired
from perilune.swarm.sandbox.contract import WORKSPACE

PATH_KEYS = frozenset(
    [
        "path",
        "paths",
        "file",
        "files",
        "filename",
        "file_name",
        "file_path",
        "filepath",
        "folder",
        "directory",
        "dir",
        "source",
        "destination",
        "src",
        "dst",
        "target",
        "output_path",
        "input_path",
    ]
)
WRITTEN_KEYS = frozenset({"destination", "dst", "target", "output_path"})
READ_KEYS = frozenset({"source", "src", "input_path"})
WRITING_WORDS = frozenset(
    [
        "append",
        "copy",
        "create",
        "delete",
        "download",
        "edit",
        "mkdir",
        "move",
        "overwrite",
        "patch",
        "put",
        "remove",
        "rename",
        "replace",
        "save",
        "touch",
        "unlink",
        "update",
        "upload",
        "write",
    ]
)
"""A tool with one of these words in its name writes to the path it is given."""
COMMAND_KEYS = frozenset({"command", "cmd", "commands"})
CODE_KEYS = frozenset({"code", "program"})

WRITING_PROGRAMS = frozenset(
    ["chmod", "chown", "mkdir", "mv", "rm", "rmdir", "shred", "tee", "touch", "truncate", "unlink"]
)
COPYING_PROGRAMS = frozenset({"cp", "install", "ln", "rsync", "scp"})
"""Only the last word is written."""
TALKING_PROGRAMS = frozenset({"echo", "printf", "export", "exit", "test", "[", "true", "false", "sleep"})
"""Their words are no files."""
SEARCHING_PROGRAMS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "awk", "gawk", "sed", "perl", "jq"})
"""Their first word is what they look for, or what they do with it; or it stands behind -e."""
TEXT_OPTIONS = frozenset({"-m", "-am", "--message", "--grep", "-k"})
"""Of git and pytest: the word behind them is no file."""
STARTING_PROGRAMS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(["time", "nohup", "command", "setsid", "busybox", "do", "then", "else", "elif", "if"], frozenset()),
    **dict.fromkeys(["while", "until", "{", "builtin"], frozenset()),
    "sudo": frozenset({"-u", "-g", "-C", "-D"}), "env": frozenset({"-u", "-C"}), "exec": frozenset({"-a"}),
    "xargs": frozenset({"-n", "-I", "-P", "-L", "-d", "-E", "-s", "-a"}), "nice": frozenset({"-n"}),
    "timeout": frozenset({"-k", "-s"}), "stdbuf": frozenset({"-i", "-o", "-e"}),
}  # fmt: skip
"""And words of the shell: what follows them and their options is the program. Of each the options with a value."""
OUTPUT_OPTIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(["cp", "mv", "ln", "install"], frozenset({"-t", "--target-directory"})),
    "curl": frozenset({"-o", "--output", "--output-dir"}), "sort": frozenset({"-o", "--output"}),
    "wget": frozenset({"-O", "--output-document", "-P", "--directory-prefix"}),
}  # fmt: skip
"""Options whose value is written."""
SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
SCRATCH = (WORKSPACE, "/tmp", "/var/tmp", "/dev/shm", "/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "/dev/fd")
"""Writable in every sandbox; but for the workspace nothing of it stays."""
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n")
"""Its first line; the last is one with its word alone."""
LONG_COMMAND = 1 << 16
"""Characters from which on words are found by a plain rule: the shell's take time that grows with the square."""
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
DEEPEST = 4
"""Shells inside shells."""


@dataclass(frozen=True, kw_only=True)
class FileUse:
    path: str
    """Absolute, as the sandbox names it."""
    writes: bool

    def is_outside(self, also: Iterable[str] = ()) -> bool:
        """Whether it lies outside of what the sandbox lets an agent write; `also` are folders it may write besides."""
        return not any(self.path == root or self.path.startswith(f"{root.rstrip('/')}/") for root in (*SCRATCH, *also))


def file_uses(tool: str, arguments: str) -> list[FileUse]:
    """The files that a call names, each once, in order."""
    given = given_of(arguments)
    tool_writes = not WRITING_WORDS.isdisjoint(words_of(tool))
    found: list[FileUse] = []
    for key, value in given.items():
        texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str) and each]
        name = key.lower()
        for text in texts:
            if name in PATH_KEYS and "\n" not in text.strip():
                writes = (tool_writes and name not in READ_KEYS) or name in WRITTEN_KEYS
                found += _named(text, WORKSPACE, writes=writes)
            elif name in COMMAND_KEYS:
                found += _shell(text, WORKSPACE, 0)
            elif name in CODE_KEYS:
                found += _python(text, 0)
    return list(dict.fromkeys(found))


def given_of(arguments: str) -> dict[str, Any]:
    """The arguments as the runtime reads them, also where it repairs them first; {} for what is no object."""
    for text in (arguments or "{}", repaired(arguments or "{}")):
        try:
            given = orjson.loads(text or "")
        except orjson.JSONDecodeError:
            continue
        return given if isinstance(given, dict) else {}
    return {}


def words_of(name: str) -> list[str]:
    """The words of a name, whatever joins them: `writeFile`, `fs__write_file` -> write, file."""
    return [word.lower() for word in WORDS.findall(name)]


def resolved(path: str, folder: str = WORKSPACE) -> str | None:
    """The absolute name in the sandbox; None where it is only known at run time, or is no file."""
    for home in ("~/", "$HOME/", "${HOME}/", "$PWD/", "${PWD}/"):
        if path.startswith(home):
            path = f"{WORKSPACE}/{path[len(home) :]}"
    path = unicodedata.normalize("NFKC", path)  # what looks like dots and separators counts as such
    if not path or "\0" in path or "$" in path or "`" in path or "://" in path:
        return None
    found = posixpath.normpath(posixpath.join(folder, path))
    return "/" + found.lstrip("/")


def _named(path: str, folder: str, *, writes: bool) -> Iterator[FileUse]:
    found = resolved(path, folder)
    if found is not None:
        yield FileUse(path=found, writes=writes)


# Commands ------------------------------------------------------------------------------------------------------------


def _shell(command: str, folder: str, depth: int) -> Iterator[FileUse]:
    if depth > DEEPEST:
        return
    command, inside = _without_heredocs(command)
    for before, text in inside:
        if "python" in before:
            yield from _python(text, depth + 1)
        elif SHELLS & set(words_of(before)):
            yield from _shell(text, folder, depth + 1)
    for text in _substituted(command):
        yield from _shell(text, folder, depth + 1)
    words: list[str] = []
    before, outer = folder, list[str]()
    """Where it was before the last cd; where shells in brackets go back to."""
    for token in [*_tokens(command), ";"]:
        if set(token) <= set(";&|()\n") and ">" not in token:
            if words[:1] in (["cd"], ["pushd"]):
                before, folder = folder, _changed(words[1:], folder, before)
            elif words[:1] == ["popd"]:
                before, folder = folder, before
            else:
                yield from _simple(words, folder, depth)
            for sign in token:
                if sign == "(":
                    outer.append(folder)
                elif sign == ")" and outer:
                    folder = outer.pop()
            words = []
        else:
            words.append(token)


def _changed(words: list[str], folder: str, before: str) -> str:
    """Where `cd` leads to."""
    named = [word for word in words if word == "-" or not word.startswith("-")]
    if not named or named[0] == "~":
        return WORKSPACE
    return before if named[0] == "-" else resolved(named[0], folder) or folder


def _substituted(command: str) -> Iterator[str]:
    """What runs inside of double quotes or backticks; elsewhere brackets are words of their own."""
    at, end, is_quoted = 0, len(command), False
    while at < end:
        sign = command[at]
        if sign == "\\":
            at += 1
        elif sign == "'" and not is_quoted:
            at = command.find("'", at + 1)
            if at < 0:
                return
        elif sign == '"':
            is_quoted = not is_quoted
        elif sign == "`" or (is_quoted and command.startswith("$(", at)):
            start = at + (1 if sign == "`" else 2)
            at = command.find("`", start) if sign == "`" else _closing(command, start)
            if at < 0:
                return
            yield command[start:at]
        at += 1


def _closing(command: str, at: int) -> int:
    """The place of the bracket that closes one before `at`; -1 where none does."""
    depth = 1
    while at < len(command):
        depth += (command[at] == "(") - (command[at] == ")")
        if not depth:
            return at
        at += 1
    return -1


def _without_heredocs(command: str) -> tuple[str, list[tuple[str, str]]]:
    """The command without its here-documents, and of each the line before it and its text. In time that grows with the
    length, whatever an agent wrote."""
    ends: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for line in command.split("\n"):
        ends.setdefault(line.strip(), []).append((start, start + len(line)))
        start += len(line) + 1
    kept, inside, at = list[str](), list[tuple[str, str]](), 0
    while (match := HEREDOC.search(command, at)) is not None:
        last = ends.get(match.group(2), [])
        place = bisect_left(last, (match.end(), 0))
        if place == len(last):
            kept.append(command[at : match.end()])
            at = match.end()
            continue
        before = command[command.rfind("\n", 0, match.start()) + 1 : match.start()]
        inside.append((before, command[match.end() : last[place][0]]))
        kept.append(command[at : match.start()] + match.group(3) + "\n")
        at = last[place][1]
    return "".join([*kept, command[at:]]), inside


def _tokens(command: str) -> list[str]:
    if len(command) > LONG_COMMAND:
        return _plain_tokens(command)
    lexer = shlex.shlex(command.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # quotes that do not close
        return _plain_tokens(command)


def _plain_tokens(command: str) -> list[str]:
    return re.findall(r"[;&|()\n]+|[<>&]+|[^\s;&|()<>]+", command)


def _simple(words: list[str], folder: str, depth: int) -> Iterator[FileUse]:
    """One program with its words and redirections."""
    plain: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word.strip("<>&|") == "" and ("<" in word or ">" in word):
            if plain and plain[-1].isdigit():
                plain.pop()  # the number of a descriptor
            target = words[at + 1] if at + 1 < len(words) else ""
            if not target.isdigit():
                yield from _named(target, folder, writes=">" in word)
            at += 2
            continue
        plain.append(word)
        at += 1
    plain = _without_starters(plain)
    if not plain:
        return
    program, rest = posixpath.basename(plain[0]), plain[1:]
    commands = [each for option, each in zip(rest, rest[1:]) if re.fullmatch(r"-[A-Za-z]*c", option)]
    if program in SHELLS and commands:
        yield from _shell(commands[0], folder, depth + 1)
    elif program == "eval":
        yield from _shell(" ".join(rest), folder, depth + 1)
    elif program.startswith("python") and commands:
        yield from _python(commands[0], depth + 1)
    elif program == "dd":
        for word in rest:
            if word.startswith(("if=", "of=")):
                yield from _named(word[3:], folder, writes=word.startswith("of="))
    elif program not in TALKING_PROGRAMS:
        options = [word for word in rest if word.startswith("-")]
        named = [word for word in _without_texts(program, rest) if not word.startswith("-")]
        in_place = program in ("sed", "perl") and any(re.match(r"-[a-z]*i|--in-place", word) for word in options)
        for option, value in zip(rest, rest[1:]):
            if option in OUTPUT_OPTIONS.get(program, ()):
                yield from _named(value, folder, writes=True)
        for option in options:
            if option.partition("=")[0] in OUTPUT_OPTIONS.get(program, ()):
                yield from _named(option.partition("=")[2], folder, writes=True)
        for position, word in enumerate(named):
            is_last = position == len(named) - 1 and len(named) > 1
            writes = program in WRITING_PROGRAMS or (program in COPYING_PROGRAMS and is_last)
            yield from _named(word, folder, writes=writes or in_place)


def _without_starters(words: list[str]) -> list[str]:
    """The words from the program on that others start: of `timeout -k 5 60 rm x` from rm on."""
    at = 0
    while at < len(words):
        starter = posixpath.basename(words[at])
        if "=" in words[at].split("/")[0] or words[at] == "!":
            at += 1
            continue
        if starter not in STARTING_PROGRAMS:
            break
        at += 1
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in STARTING_PROGRAMS[starter] else 1
        at += starter == "timeout"  # how long
    return words[at:]


def _without_texts(program: str, words: list[str]) -> list[str]:
    """The words of a program but for those that are no files: what is searched for, messages of a commit."""
    taken = {"-e", "--regexp", "--expression"} if program in SEARCHING_PROGRAMS else set[str]()
    if program in ("git", "pytest", "py.test"):
        taken = set(TEXT_OPTIONS)
    kept = [word for before, word in zip(["", *words], words) if before not in taken]
    if program in SEARCHING_PROGRAMS and (taken | {"-f", "--file"}).isdisjoint(words):
        first = next((place for place, word in enumerate(kept) if not word.startswith("-")), len(kept))
        kept = kept[:first] + kept[first + 1 :]
    return kept


# Programs in Python --------------------------------------------------------------------------------------------------

WRITING_METHODS = frozenset(
    ["write_text", "write_bytes", "unlink", "touch", "mkdir", "rmdir", "rename", "replace", "chmod", "symlink_to"]
)
WRITING_CALLS = frozenset(
    [
        "os.remove",
        "os.unlink",
        "os.rename",
        "os.replace",
        "os.mkdir",
        "os.makedirs",
        "os.rmdir",
        "os.chmod",
        "os.truncate",
        "shutil.rmtree",
    ]
)
COPYING_CALLS = frozenset(
    ["shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.link"]
)
SHELL_CALLS = frozenset(
    [
        "os.system",
        "os.popen",
        "subprocess.run",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
        "subprocess.Popen",
    ]
)
PATH_LIKE = re.compile(r"[^\s'\"]*[/.][^\s'\"]*")


def _python(code: str, depth: int) -> Iterator[FileUse]:
    if depth > DEEPEST:
        return
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    taken: set[int] = set()
    """Constants that are accounted for."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        first = _constant(node.args[0]) if node.args else None
        if name in SHELL_CALLS and node.args:
            taken |= {id(part) for part in ast.walk(node.args[0])}
            yield from _started(node.args[0], depth)
        elif name in ("open", "io.open") and first is not None:
            taken |= {id(part) for part in ast.walk(node.args[0])}
            yield from _named(first, WORKSPACE, writes=_opens_to_write(node))
        elif name in WRITING_CALLS and first is not None:
            taken |= {id(part) for part in ast.walk(node.args[0])}
            yield from _named(first, WORKSPACE, writes=True)
        elif name in COPYING_CALLS and len(node.args) > 1:
            taken |= {id(part) for argument in node.args[:2] for part in ast.walk(argument)}
            for argument, writes in zip(node.args[:2], (name == "shutil.move", True)):
                yield from _named(_constant(argument) or "", WORKSPACE, writes=writes)
        elif isinstance(node.func, ast.Attribute):
            path = _constant(node.func.value)
            writes = node.func.attr in WRITING_METHODS or (node.func.attr == "open" and _opens_to_write(node, at=0))
            if path is not None and isinstance(node.func.value, ast.Call | ast.BinOp):
                taken |= {id(part) for part in ast.walk(node.func.value)}
                yield from _named(path, WORKSPACE, writes=writes)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in taken
        if is_text and PATH_LIKE.fullmatch(node.value):  # pyrefly: ignore
            yield from _named(node.value, WORKSPACE, writes=False)  # pyrefly: ignore


def _started(argument: ast.expr, depth: int) -> Iterator[FileUse]:
    if isinstance(argument, ast.List | ast.Tuple):
        words = [_constant(part) for part in argument.elts]
        yield from _simple([word for word in words if word], WORKSPACE, depth + 1)
    elif (command := _constant(argument)) is not None:
        yield from _shell(command, WORKSPACE, depth + 1)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _constant(node: ast.expr) -> str | None:
    """The path that a constant, `Path("a")` or `Path("a") / "b"` names."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in ("Path", "PosixPath") and node.args:
        parts = [_constant(part) for part in node.args]
        return None if None in parts else posixpath.join(*(part for part in parts if part is not None))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = _constant(node.left), _constant(node.right)
        return None if left is None or right is None else posixpath.join(left, right)
    return None


def _opens_to_write(node: ast.Call, at: int = 1) -> bool:
    mode = node.args[at] if len(node.args) > at else None
    for keyword in node.keywords:
        mode = keyword.value if keyword.arg == "mode" else mode
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and not set("wax+").isdisjoint(mode.value)


__all__ = ["FileUse", "file_uses", "given_of", "resolved", "words_of"]
