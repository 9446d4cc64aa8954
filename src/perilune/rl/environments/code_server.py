"""The program inside the sandbox: it loads a solution and calls its function with one input after the other.

    outside -> here    {"to": TICKET, "source": TEXT, "function": NAME}          once
    outside -> here    {"to": TICKET, "arguments": [...]}                        for each input
    here -> outside    {"to": TICKET, "answer": VALUE} or {"to": TICKET, "failed": true}

One JSON value per line, through two named pipes that were opened outside before anything began. The first line to the
outside is "up". Nothing here is secret and nothing here judges: a solution may take this program apart, and has gained
the right to answer the questions itself. What it is not told, no trick can find: the next inputs, and what is expected.

Before the solution is loaded, Landlock (where the kernel has it) closes every file but Python's own: nothing can be
written, no program started, and no installed package read, this one with its references least of all.

Runs as `python -s -S -P -c SOURCE`, so it imports nothing of this package.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

ASK, ANSWER = "/workspace/ask", "/workspace/answer"

# Landlock, as in its kernel documentation; the numbers of the calls are the same on every processor.
CREATE, ADD, RESTRICT = 444, 445, 446
READ_FILE, READ_FOLDER, TRUNCATE = 1 << 2, 1 << 3, 1 << 14
FIRST_RIGHTS = (1 << 13) - 1
PACKAGES = ("site-packages", "dist-packages")
LIBRARIES = ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
OTHERS = ("/dev", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/nix/store")


def readable() -> Iterator[str]:
    """Python's own files and the shared libraries they need, no package beside them."""
    standard = os.path.dirname(os.__file__)
    for name in os.listdir(standard):
        if name not in PACKAGES:
            yield os.path.join(standard, name)
    for folder in {os.path.realpath(each) for each in (*LIBRARIES, os.path.dirname(standard))}:
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if not name.startswith("python"):
                    yield os.path.join(folder, name)
    yield from OTHERS


def close_files() -> None:
    """Reading what is `readable`, and nothing else, from now on; without Landlock nothing changes."""
    call = ctypes.CDLL(None).syscall
    version = call(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    handled = FIRST_RIGHTS | (TRUNCATE if version >= 3 else 0)
    rules = call(CREATE, ctypes.byref(ctypes.c_uint64(handled)), ctypes.c_size_t(8), ctypes.c_uint32(0))

    def allow(path: str, rights: int) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        if not os.path.isdir(path):
            rights &= ~READ_FOLDER
        rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        call(ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(place)

    for path in readable():
        allow(path, READ_FILE | READ_FOLDER)
    for folder in sys.path:  # imports begin with a listing
        allow(folder, READ_FOLDER)
    if call(RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)) != 0:
        os._exit(1)
    os.close(rules)


def plain(value: Any) -> Any:
    """The value if it is JSON through and through, by exact types: what a subclass pretends to be does not count."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return value
    if kind is list or kind is tuple:
        return [plain(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise TypeError("not a JSON value")


def load(source: str, name: str) -> Any:
    space: dict[str, Any] = {"__name__": "solution"}
    exec(compile(source, "<solution>", "exec", dont_inherit=True), space)
    if not callable(space.get(name)):
        raise NameError("no such function")
    return space[name]


def say(answer: int, line: str) -> None:
    rest = line.encode() + b"\n"
    while rest:
        rest = rest[os.write(answer, rest) :]


def main() -> None:
    # Both stay open outside for reading and writing, so neither waits here.
    ask = open(ASK, "rb")  # noqa: SIM115  open as long as this program lives
    answer = os.open(ANSWER, os.O_WRONLY | os.O_CLOEXEC)
    close_files()
    say(answer, '"up"')
    function: Any = None
    for line in ask:
        message = json.loads(line)
        try:
            if "source" in message:
                function, value = load(message["source"], message["function"]), True
            else:
                value = function(*message["arguments"])
            text = json.dumps({"to": message["to"], "answer": plain(value)}, allow_nan=False)
        except BaseException:  # SystemExit and KeyboardInterrupt are failures of this input, like any other
            text = json.dumps({"to": message["to"], "failed": True})
        say(answer, text)


if __name__ == "__main__":
    main()
