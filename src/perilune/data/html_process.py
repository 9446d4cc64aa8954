"""The program of the process that draws HTML pages: Chromium driven by playwright, nothing of this package.

Started by `perilune.data.render_worker` as `python -I html_process.py DESCRIPTOR MEMORY SECONDS CLOCK`; messages are
those of svg_process.py with {"html": source} in the place of the SVG. A page may use SECONDS of processor time and
MEMORY more than the browser had before it, all processes of the browser together, and take CLOCK seconds, longer
because the machine may be busy. Starting the browser and a first empty page do not count. A browser that passed a
limit, or gave no picture for any other reason, is ended with this process: what it has not finished would hold up the
next page. Where there is no /proc, CLOCK is SECONDS and memory is not bounded.

The page is the answer to one invented address; every other request is refused, scripts are off, the browser is
offline, knows no host names and keeps nothing. It uses its own sandbox unless it runs as root, which Chromium refuses.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # an isolated interpreter does not know the folder of its program
from svg_process import receive, send  # type: ignore[import-not-found]

ADDRESS = "http://page.invalid/"
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}
FLAGS = [
    *(
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-pings",
        "--mute-audio",
        "--disable-extensions",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--dns-prefetch-disable", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars"),
    *(
        "--force-color-profile=srgb",
        "--font-render-hinting=none",
        "--disable-lcd-text",
        "--force-device-scale-factor=1",
    ),
]


EMPTY = "<!doctype html><html><body></body></html>"
PROC = Path("/proc")
LOOKS = 0.05
"""Seconds between two looks at what the browser uses."""


def main(descriptor: int, memory: int, seconds: float, clock: float) -> None:
    parent = socket.socket(fileno=descriptor)
    # Whoever starts a program passes its own descriptors on; the browser must not get this one.
    os.set_inheritable(descriptor, False)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        send(parent, b"F" + b"drawing HTML needs playwright: pip install 'perilune[swarm-browser]'")
        return
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        send(parent, b"F" + b"drawing HTML needs the program chromium: apt install chromium")
        return
    with sync_playwright() as playwright:
        flags = FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=flags, timeout=50_000)
            page = Page(browser, clock)
            page.draw(EMPTY, 8, 8)  # whatever loads late loads now
        except Error as error:
            send(parent, b"F" + f"chromium does not start: {str(error).splitlines()[0]}".encode())
            return
        watch = Watch(memory, seconds, clock)
        send(parent, b"P")
        while (message := receive(parent)) is not None:
            picture, words = b"", ""
            watch.begin()
            try:
                picture = page.draw(**json.loads(message))
            except Error as error:
                words = f"chromium gave no picture: {str(error).splitlines()[0]}"
            words = watch.end() or words
            if words:
                send(parent, b"E" + words[:500].encode("utf-8", "replace"))
                return  # whoever reads this ends what is left of the browser with this process
            send(parent, b"P" + picture)
        browser.close()


class Watch:
    """Ends the browser when the page that it draws has used up its limits."""

    def __init__(self, memory: int, seconds: float, clock: float) -> None:
        self._memory, self._seconds, self._clock = memory, seconds, clock
        if not (PROC / "self" / "stat").exists():
            self._clock = min(seconds, clock)
        self._lock = threading.Lock()
        self._began: float | None = None
        self._before: dict[int, Used] = {}
        self._memory_before = 0
        self._latest: dict[int, float] = {}
        self._passed = ""
        threading.Thread(target=self._look_on, daemon=True).start()

    def begin(self) -> None:
        used = processes_below(os.getpid())
        with self._lock:
            self._before, self._memory_before = used, sum(each.memory for each in used.values())
            self._latest = {pid: each.seconds for pid, each in used.items()}
            self._began = time.monotonic()

    def end(self) -> str:
        """Which limit was passed; empty when none was."""
        with self._lock:
            self._began = None
            return self._passed

    def _look_on(self) -> None:
        while True:
            time.sleep(LOOKS)
            with self._lock:
                if self._began is not None and not self._passed:
                    self._look(self._began)

    def _look(self, began: float) -> None:
        used = processes_below(os.getpid())
        self._latest |= {pid: each.seconds for pid, each in used.items()}  # one that has ended counts too
        seconds = sum(at - self._before[pid].seconds if pid in self._before else at for pid, at in self._latest.items())
        memory = sum(each.memory for each in used.values()) - self._memory_before
        if seconds > self._seconds or time.monotonic() - began > self._clock:
            self._passed = f"the page takes more than {self._seconds:g} s to draw"
        elif memory > self._memory:
            self._passed = f"the page takes more than {self._memory:,} bytes to draw"
        if self._passed:
            for pid, each in used.items():
                if each.parent != os.getpid():  # playwright's driver is left to say that the browser is gone
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)


class Used:
    """What a process has used, by the line that the kernel keeps of it (proc_pid_stat(5))."""

    def __init__(self, line: bytes) -> None:
        fields = line[line.rindex(b")") + 2 :].split()  # its name, in brackets, may hold anything
        self.parent = int(fields[1])
        self.seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def processes_below(ancestor: int) -> dict[int, Used]:
    """Children, their children and so on; none where there is no /proc."""
    found: dict[int, Used] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                found[int(entry.name)] = Used((entry / "stat").read_bytes())

    def is_below(pid: int) -> bool:
        while pid in found:
            pid = found[pid].parent
            if pid == ancestor:
                return True
        return False

    return {pid: each for pid, each in found.items() if is_below(pid)}


class Page:
    """One window for all pages: without scripts and storage nothing of one is left for the next."""

    def __init__(self, browser: Any, clock: float) -> None:
        context = browser.new_context(
            java_script_enabled=False,
            offline=True,
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
            color_scheme="light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(clock * 1000)
        context.route("**/*", self._answer)
        self._page = context.new_page()
        self._source: str | None = None

    def draw(self, html: str, width: int, height: int) -> bytes:
        self._page.set_viewport_size({"width": width, "height": height})
        self._source = html
        self._page.goto(ADDRESS, wait_until="load")
        return self._page.screenshot(animations="disabled", caret="hide", scale="css")

    def _answer(self, route: Any) -> None:
        source, self._source = self._source, None
        if route.request.url == ADDRESS and source is not None:
            route.fulfill(status=200, headers=HEADERS, body=source)
        else:
            route.abort()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
