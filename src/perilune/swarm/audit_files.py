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
from perilune.swarm.audit_python import is_program, named_in
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
        "write",
    ]
)
"""A tool with one of these words in its name writes to the path it is given."""
COPYING_WORDS = frozenset({"copy", "upload"})
"""One with these reads that path, unless what it should hold is given too."""
CONTENT_KEYS = frozenset({"content", "contents", "data", "text"})
FILE_WORDS = frozenset({"file", "files", "folder"})
WEB_WORDS = frozenset({"browse", "browser", "click", "goto", "navigate", "url", "visit", "web"})
"""For a tool with one of these, and none of the words above, a path is that of a page."""
COMMAND_KEYS = frozenset({"command", "cmd", "commands", "argv"})
CODE_KEYS = frozenset({"code", "program"})
SCRIPT_KEYS = frozenset({"script"})
"""Of a shell, or of Python where it reads as a program that calls something."""
PAGE_WORDS = frozenset({"browser", "evaluate", "javascript", "js", "node", "page"})
"""A script of a tool with one of these words in its name is of neither."""

WRITING_PROGRAMS = frozenset(
    ["chmod", "chown", "mkdir", "mv", "rm", "rmdir", "shred", "tee", "touch", "truncate", "unlink"]
)
COPYING_PROGRAMS = frozenset({"cp", "install", "ln", "rsync", "scp"})
"""Only the last word is written."""
TALKING_PROGRAMS = frozenset({"echo", "printf", "export", "exit", "test", "[", "true", "false", "sleep"})
"""Their words are no files."""
SEARCHING_PROGRAMS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "awk", "gawk", "sed", "perl", "jq"})
"""Their first word is what they look for, or what they do with it; or it stands behind -e."""
GIT_FOLDER_OPTIONS = frozenset({"-C", "--work-tree"})
GIT_CHANGES = frozenset(
    [
        *("add", "am", "apply", "checkout", "cherry-pick", "clean", "clone", "commit", "init", "merge", "mv", "pull"),
        *("rebase", "reset", "restore", "revert", "rm", "switch"),
    ]
)
"""What changes the folder that -C leads to."""
GIT_CHANGED_FROM: Mapping[str, int] = {"checkout": 1, "clean": 0, "clone": 1, "init": 0, "mv": 0, "restore": 0, "rm": 0}
"""From which word on these change the files that are named; the words before it are branches and addresses."""
GIT_KEEPS_FILES = frozenset({"-b", "-B", "--orphan", "--cached", "--staged", "-n", "--dry-run"})
"""Options with which git names branches, or changes its index alone."""
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
    "unzip": frozenset({"-d"}), "patch": frozenset({"-o", "--output", "-d", "--directory"}),
}  # fmt: skip
"""Options whose value is written."""
READ_OPTIONS: Mapping[str, frozenset[str]] = {
    "patch": frozenset({"-i", "--input"}), "touch": frozenset({"-r", "--reference"}),
    "truncate": frozenset({"-r", "--reference"}), **dict.fromkeys(["chmod", "chown"], frozenset({"--reference"})),
}  # fmt: skip
"""Options of programs that write whose value is only read."""
SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
SCRATCH = (WORKSPACE, "/tmp", "/var/tmp", "/dev/shm", "/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "/dev/fd")
"""Writable in every sandbox; but for the workspace nothing of it stays."""
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n")
"""Its first line; the last is one with its word alone."""
QUOTED_OR_COMMENT = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.#*|(?<![^\s;&|(])#[^\n'"`(){}]*""",
    re.DOTALL,
)
"""A comment begins with a # that begins a word, outside of quotes. One with quotes or brackets in it may be none."""
BEGINS_COMMENT = re.compile(r"(?:^|[\s;&|(])#")
LONG_COMMAND = 1 << 16
"""Characters from which on words are found by a plain rule: the shell's take time that grows with the square."""
LONGEST_PATH = 4096
"""Characters: no system opens a file by a longer name, and names that grow with every `cd` take time."""
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
    words, fields = set(words_of(tool)), list(_fields(given_of(arguments)))
    is_given = any(name in CONTENT_KEYS for name, _ in fields)
    tool_writes = bool(words & WRITING_WORDS) or (is_given and bool(words & COPYING_WORDS))
    is_web = bool(words & WEB_WORDS) and words.isdisjoint(WRITING_WORDS | COPYING_WORDS | FILE_WORDS)
    found: list[FileUse] = []
    for name, text in fields:
        if isinstance(text, list):
            found += _simple(text, WORKSPACE, 0)
        elif name in PATH_KEYS and not is_web and "\n" not in text.strip():
            writes = (tool_writes and name not in READ_KEYS) or name in WRITTEN_KEYS
            found += _named(text, WORKSPACE, writes=writes)
        elif name in COMMAND_KEYS:
            found += _shell(text, WORKSPACE, 0)
        elif name in CODE_KEYS or (name in SCRIPT_KEYS and is_program(text)):
            found += _python(text, 0)
        elif name in SCRIPT_KEYS and PAGE_WORDS.isdisjoint(words):
            found += _shell(text, WORKSPACE, 0)
    return list(dict.fromkeys(found))


def _fields(given: dict[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """Every text with the name of its field, in order and however deep; one list where a command is given as words."""
    waiting: list[tuple[str, Any]] = [("", given)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(key.lower(), each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            texts = [each for each in value if isinstance(each, str) and each]
            if name in COMMAND_KEYS - {"commands"} and texts and not re.search(r"\s", texts[0]):
                yield name, texts
            else:
                waiting += [(name, each) for each in reversed(value)]
        elif isinstance(value, str) and value:
            yield name, value


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
    found = posixpath.join(folder, path)
    return "/" + posixpath.normpath(found).lstrip("/") if len(found) <= LONGEST_PATH else None


def _named(path: str, folder: str, *, writes: bool) -> Iterator[FileUse]:
    found = resolved(path, folder)
    if found is not None:
        yield FileUse(path=found, writes=writes)


# Commands ------------------------------------------------------------------------------------------------------------


def _shell(command: str, folder: str, depth: int) -> Iterator[FileUse]:
    if depth > DEEPEST:
        return
    command, inside = _without_heredocs(command)
    command = _without_comments(command)
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


def _without_comments(command: str) -> str:
    def kept(found: re.Match[str]) -> str:
        is_comment = found.group().startswith("#") and command[found.end() : found.end() + 1] in ("", "\n")
        return "" if is_comment else found.group()

    return QUOTED_OR_COMMENT.sub(kept, command)


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
        before = command[max(at, command.rfind("\n", 0, match.start()) + 1) : match.start()]
        if place == len(last) or BEGINS_COMMENT.search(before):
            kept.append(command[at : match.end()])
            at = match.end()
            continue
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
    elif program == "find":
        yield from _find(rest, folder, depth)
    elif program == "git":
        yield from _git(rest, folder)
    elif program == "tar":
        yield from _tar(rest, folder)
    elif program not in TALKING_PROGRAMS:
        options = [word for word in rest if word.startswith("-")]
        words, reading = _without_texts(program, rest), READ_OPTIONS.get(program, frozenset())
        named = [word for before, word in zip(["", *words], words) if word[:1] != "-" and before not in reading]
        in_place = program in ("sed", "perl") and any(re.match(r"-[a-z]*i|--in-place", word) for word in options)
        for option, value in zip(rest, rest[1:]):
            if option in reading or option in OUTPUT_OPTIONS.get(program, ()):
                yield from _named(value, folder, writes=option not in reading)
        for option in options:
            if option.partition("=")[0] in OUTPUT_OPTIONS.get(program, ()):
                yield from _named(option.partition("=")[2], folder, writes=True)
        for position, word in enumerate(named):
            is_last = position == len(named) - 1 and len(named) > 1
            writes = program in WRITING_PROGRAMS or (program in COPYING_PROGRAMS and is_last)
            writes |= program == "patch" and position == 0
            yield from _named(word, folder, writes=writes or in_place)


def _find(words: list[str], folder: str, depth: int) -> Iterator[FileUse]:
    """Where it looks, which -delete removes, and the first program that it starts with what it found."""
    first = next((place for place, word in enumerate(words) if word[:1] in ("-", "(", "!")), len(words))
    starts, tests = words[:first] or ["."], words[first:]
    for word in starts:
        yield from _named(word, folder, writes="-delete" in tests)
    for word in tests:
        if not word.startswith("-"):
            yield from _named(word, folder, writes=False)
    at = next((place for place, word in enumerate(tests) if re.fullmatch("-(exec|ok)(dir)?", word)), len(tests))
    started = tests[at + 1 :]
    if "{}" in started:
        place = started.index("{}")
        started[place : place + 1] = starts
    if depth <= DEEPEST:
        yield from _simple(started, folder, depth + 1)


def _git(words: list[str], folder: str) -> Iterator[FileUse]:
    """Files that are named, and the folder that -C leads to."""
    at, is_led = 0, False
    while at < len(words) and words[at].startswith("-"):
        option, _, value = words[at].partition("=")
        if option in GIT_FOLDER_OPTIONS:
            folder, is_led = resolved(value or "".join(words[at + 1 : at + 2]), folder) or folder, True
        at += 2 if words[at] in GIT_FOLDER_OPTIONS | {"-c", "--git-dir"} else 1
    program, rest = "".join(words[at : at + 1]), words[at + 1 :]
    if is_led and program in GIT_CHANGES:
        yield FileUse(path=folder, writes=True)
    first = GIT_CHANGED_FROM.get(program, len(rest)) if GIT_KEEPS_FILES.isdisjoint(rest) else len(rest)
    if program == "checkout" and "--" in rest:
        first = sum(not word.startswith("-") for word in rest[: rest.index("--")])
    named = [word for word in _without_texts("git", rest) if not word.startswith("-")]
    for position, word in enumerate(named):
        yield from _named(word, folder, writes=position >= first)


def _tar(words: list[str], folder: str) -> Iterator[FileUse]:
    """Where it unpacks to, the archive that it makes, and what it reads."""
    short = [word for place, word in enumerate(words) if re.fullmatch(r"-[A-Za-z]+" if place else r"-?[A-Za-z]+", word)]
    letters = set("".join(short))
    unpacks = "x" in letters or not {"--extract", "--get"}.isdisjoint(words)
    makes = not letters.isdisjoint("cru") or "--create" in words
    target, is_short = "." if unpacks else "", set(short)
    for before, word in zip(["", *words], words):
        option, _, value = word.partition("=")
        if option in ("--directory", "--file") and value:
            before, word = option, value
        elif word.startswith("-C/"):
            before, word = "--directory", word[2:]
        if before == "--directory" or (before in is_short and before.endswith("C")):
            target = word
        elif word not in is_short and not word.startswith("-"):
            is_archive = before == "--file" or (before in is_short and before.endswith("f"))
            yield from _named(word, folder, writes=makes and is_archive)
    yield from _named(target, folder, writes=unpacks)


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


def _python(code: str, depth: int) -> Iterator[FileUse]:
    for each in named_in(code) if depth <= DEEPEST else ():
        if each.words:
            yield from _simple(list(each.words), WORKSPACE, depth + 1)
        elif each.is_command:
            yield from _shell(each.text, WORKSPACE, depth + 1)
        else:
            yield from _named(each.text, WORKSPACE, writes=each.writes)


__all__ = ["FileUse", "file_uses", "given_of", "resolved", "words_of"]
