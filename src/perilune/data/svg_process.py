"""The program of the process that draws SVG: resvg and the standard library, nothing of this package.

Started by `perilune.data.render_worker` as `python -I svg_process.py DESCRIPTOR MEMORY SECONDS`. It reads requests and
writes answers on the socket DESCRIPTOR until the socket closes. A message is its length in four bytes, then its bytes:

    request  JSON {"svg": source, "width": pixels, "height": pixels}
    answer   b"P" + PNG file, or b"F" + why there is none; the first answer of all is b"P", or b"F" + what is missing;
             b"E" + why there is none, where the next picture needs another process (html_process.py)

MODULES in the environment names folders with packages that lie where an isolated interpreter does not look.

Before the first request it gives up what drawing does not need: address space beyond MEMORY, files and sockets (no
descriptor can be opened any more), writing, core dumps. Each drawing has SECONDS of processor time; then the kernel
ends the process, wherever it is. Processor time, because a busy machine is no fault of the picture.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

MODULES = "PERILUNE_MODULES"
BLANK = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'


def main(descriptor: int, memory: int, seconds: float) -> None:
    parent = socket.socket(fileno=descriptor)
    find_packages()
    try:
        import resvg_py
    except ImportError:
        send(parent, b"F" + b"drawing SVG needs resvg-py: pip install 'perilune[train]'")
        return
    draw(resvg_py, {"svg": BLANK, "width": 1, "height": 1})  # whatever loads late loads now
    give_up_privileges(memory)
    send(parent, b"P")
    while (message := receive(parent)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = b"P" + draw(resvg_py, json.loads(message))
        except (ValueError, KeyError, TypeError, MemoryError) as error:
            answer = b"F" + f"resvg refused the source ({error})"[:500].encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(parent, answer)


def find_packages() -> None:
    """Those of the process that started this one, after all others."""
    folders = os.environ.get(MODULES, "").split(os.pathsep)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]


def draw(resvg: Any, request: dict[str, Any]) -> bytes:
    return bytes(
        resvg.svg_to_bytes(
            svg_string=request["svg"],
            background="#ffffff",
            skip_system_fonts=True,
            width=request["width"],
            height=request["height"],
        )
    )


def give_up_privileges(memory: int) -> None:
    try:
        import resource
    except ImportError:  # not on this system; the limits of time remain
        return
    wanted = {"RLIMIT_AS": memory, "RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, limit in wanted.items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def send(to: socket.socket, message: bytes) -> None:
    to.sendall(len(message).to_bytes(4, "big") + message)


def receive(source: socket.socket) -> bytes | None:
    """One message; None when the other side has closed."""
    length = _exactly(source, 4)
    return None if length is None else _exactly(source, int.from_bytes(length, "big"))


def _exactly(source: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = source.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
