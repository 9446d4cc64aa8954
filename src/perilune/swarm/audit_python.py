"""What a program in Python names: files that it reads or writes, and commands that it starts.

    list(named_in("open('a', 'w')"))                   [Named(text="a", writes=True)]
    list(named_in("os.system('rm a')"))                [Named(text="rm a", is_command=True)]
    list(named_in("subprocess.run(['rm', 'a'])"))      [Named(words=("rm", "a"), is_command=True)]

By Python's grammar, without running anything: names that were imported are followed, constants that are joined are put
together, variables are not. The half of `audit_files` that reads programs.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

WRITING_METHODS = frozenset(
    ["write_text", "write_bytes", "unlink", "touch", "mkdir", "rmdir", "rename", "replace", "chmod", "symlink_to"]
)
WRITING_CALLS = frozenset(
    [
        "os.remove",
        "os.unlink",
        "os.mkdir",
        "os.makedirs",
        "os.rmdir",
        "os.chmod",
        "os.truncate",
        "shutil.rmtree",
    ]
)
MOVING_CALLS = frozenset({"shutil.move", "os.rename", "os.replace"})
COPYING_CALLS = MOVING_CALLS | {"shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "os.link"}
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
WRITING_FLAGS = frozenset({"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"})
PATH_LIKE = re.compile(r"(?=[^\s'\"]+\Z).*?(?:/|\.\w).*")
"""A word with a separator or an ending; a point at its end is that of a sentence."""

@dataclass(frozen=True, kw_only=True)
class Named:
    text: str = ""
    """A path, or a command for a shell."""
    words: tuple[str, ...] = ()
    """A command that no shell reads: the program and what it is given."""
    writes: bool = False
    is_command: bool = False


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_program(text: str) -> bool:
    """Whether it reads as Python that does something: `rm /etc/motd` reads as Python too, as a division."""
    tree = _parsed(text)
    return tree is not None and any(isinstance(node, ast.Call | ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def named_in(code: str) -> Iterator[Named]:
    """Nothing for what is no Python."""
    tree = _parsed(code)
    if tree is None:
        return
    _with_full_names(tree)
    taken: set[int] = set()
    """Constants that are accounted for."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name in SHELL_CALLS and (command := _argument(node, 0, "args", "command", "cmd")):
            taken |= {id(part) for part in ast.walk(command)}
            yield from _started(command)
        elif name in ("open", "io.open", "os.open") or name in WRITING_CALLS:
            argument = _argument(node, 0, "file", "path")
            path = _constant(argument)
            if argument is not None and path is not None:
                taken |= {id(part) for part in ast.walk(argument)}
                opens = _has_writing_flags(node) if name == "os.open" else _opens_to_write(node)
                yield Named(text=path, writes=name in WRITING_CALLS or opens)
        elif name in COPYING_CALLS:
            for at, key in enumerate(("src", "dst")):
                if (argument := _argument(node, at, key)) is not None:
                    taken |= {id(part) for part in ast.walk(argument)}
                    yield Named(text=_constant(argument) or "", writes=at == 1 or name in MOVING_CALLS)
        elif isinstance(node.func, ast.Attribute) and _is_path(node.func.value):
            path = _constant(node.func.value)
            writes = node.func.attr in WRITING_METHODS or (node.func.attr == "open" and _opens_to_write(node, at=0))
            if path is not None:
                taken |= {id(part) for part in ast.walk(node.func.value)}
                yield Named(text=path, writes=writes)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in taken
        if is_text and PATH_LIKE.fullmatch(node.value):  # pyrefly: ignore
            yield Named(text=node.value)  # pyrefly: ignore


def _with_full_names(tree: ast.Module) -> None:
    """Puts what was imported in place of its names: after `from os import remove as r` of `r` comes `os.remove`."""
    meant: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            meant |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = meant.get(node.id, node.id)


def _started(argument: ast.expr) -> Iterator[Named]:
    if isinstance(argument, ast.List | ast.Tuple):
        words = [_constant(part) for part in argument.elts]
        yield Named(words=tuple(word for word in words if word), is_command=True)
    elif (command := _constant(argument)) is not None:
        yield Named(text=command, is_command=True)


def _argument(node: ast.Call, at: int, *names: str) -> ast.expr | None:
    """What a call is given at this place, or by one of these names."""
    if len(node.args) > at:
        return node.args[at]
    return next((each.value for each in node.keywords if each.arg in names), None)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def _constant(node: ast.expr | None) -> str | None:
    """The path that a constant, `Path("a")`, `Path("a") / "b"` or `"a" + "b"` names."""
    rest: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
        rest.append(node)
        node = node.left
    found = None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = node.value
    elif isinstance(node, ast.Call) and _dotted(node.func).endswith(("Path", "path.join")):
        found = _joined([_constant(part) for part in node.args])
    for each in reversed(rest):
        right = None if found is None else _constant(each.right)
        if found is None or right is None:
            return None
        found = posixpath.join(found, right) if isinstance(each.op, ast.Div) else found + right
    return found


def _joined(parts: list[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return posixpath.join(*known) if known and len(known) == len(parts) else None


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))


def _opens_to_write(node: ast.Call, at: int = 1) -> bool:
    mode = _argument(node, at, "mode")
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and not set("wax+").isdisjoint(mode.value)


def _has_writing_flags(node: ast.Call) -> bool:
    flags = _argument(node, 1, "flags")
    parts = [] if flags is None else list(ast.walk(flags))
    named = {part.attr for part in parts if isinstance(part, ast.Attribute)}
    named |= {part.id.rpartition(".")[2] for part in parts if isinstance(part, ast.Name)}
    return not WRITING_FLAGS.isdisjoint(named)


__all__ = ["Named", "is_program", "named_in"]
