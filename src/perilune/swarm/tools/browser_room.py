"""The room that the browser runs in: Chromium under bubblewrap, with no network but the door.

Inside there is a read-only system, a temporary folder in memory, an unprivileged user and a network of its own that
leads nowhere. A small program in front of Chromium listens there and passes connections to the door's Unix socket. So
whatever a page makes Chromium do, by HTTP, WebSocket, WebRTC or DNS, the guard sees it or it does not leave.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from perilune.swarm.sandbox.interpreter import find_interpreter

PROXY = "http://127.0.0.1:3128"
ROOM_SOCKET = "/run/door"
# Runs inside, with nothing but the standard library. Descriptors 3 and 4 are the pipe that commands the browser.
FORWARD = f"""
import asyncio, subprocess, sys
async def pump(source, sink):
    try:
        while chunk := await source.read(65536):
            sink.write(chunk)
            await sink.drain()
    except OSError:
        pass
    sink.close()
async def serve(reader, writer):
    try:
        theirs, ours = await asyncio.open_unix_connection({ROOM_SOCKET!r})
    except OSError:
        return writer.close()
    await asyncio.gather(pump(reader, ours), pump(theirs, writer))
async def main():
    await asyncio.start_server(serve, "127.0.0.1", 3128)
    browser = await asyncio.create_subprocess_exec(*sys.argv[1:], pass_fds=(3, 4))
    sys.exit(await browser.wait())
asyncio.run(main())
"""
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--no-pings"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--metrics-recording-only", "--dns-prefetch-disable", "--mute-audio"),
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--proxy-bypass-list=<-loopback>",
)
"""--no-sandbox: the room is the sandbox, and Chromium's own cannot be made inside of it."""


def room_missing() -> str | None:
    """Why there can be no browser here, or None."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt install bubblewrap); a browser does not run outside of a sandbox"
    if chromium_path() is None:
        return "chromium is not installed (apt install chromium)"
    try:
        import playwright.async_api  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install 'perilune[swarm-browser]')"
    return None


def chromium_path() -> str | None:
    # Debian's wrapper script reads settings that the room does not have; the program itself lies beside its files.
    for path in ("/usr/lib/chromium/chromium", "/usr/lib64/chromium-browser/chromium-browser"):
        if os.access(path, os.X_OK):
            return path
    return shutil.which("chromium") or shutil.which("google-chrome")


def write_launcher(script: Path, socket: Path) -> None:
    """An executable file that starts Chromium in the room; arguments and the pipe's descriptors pass through."""
    chromium = chromium_path()
    assert chromium is not None
    interpreter = find_interpreter()
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "browser"]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for name in ("fonts", "ssl/certs", "ca-certificates", "alternatives", "ld.so.cache", "localtime", "mime.types"):
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for source, target in interpreter.binds:
        words += ["--ro-bind", str(source), target]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        words += ["--perms", "1777", "--size", str(512 << 20), "--tmpfs", folder]
    words += ["--ro-bind", str(socket), ROOM_SOCKET, "--remount-ro", "/"]
    words += ["--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"]
    words += ["--", interpreter.base_executable, "-I", "-S", "-c", FORWARD, chromium]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o700)
