"""The program of the process that draws HTML pages: Chromium driven by playwright, nothing of this package.

Started by `perilune.data.render_worker` as `python -I html_process.py DESCRIPTOR MEMORY SECONDS`; messages are those of
svg_process.py with {"html": source} in the place of the SVG. MEMORY is not used: Chromium reserves far more address
space than it uses. SECONDS is the time of one page on the clock.

The page is the answer to one invented address; every other request is refused, scripts are off, the browser is
offline, knows no host names and keeps nothing. It uses its own sandbox unless it runs as root, which Chromium refuses.
"""

import json
import os
import shutil
import socket
import sys
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


def main(descriptor: int, seconds: float) -> None:
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
        except Error as error:
            send(parent, b"F" + f"chromium does not start: {str(error).splitlines()[0]}".encode())
            return
        page = Page(browser, seconds)
        send(parent, b"P")
        while (message := receive(parent)) is not None:
            try:
                answer = b"P" + page.draw(**json.loads(message))
            except Error as error:
                words = f"chromium gave no picture: {str(error).splitlines()[0]}"
                answer = b"F" + words[:500].encode("utf-8", "replace")
            send(parent, answer)
        browser.close()


class Page:
    """One window for all pages: without scripts and storage nothing of one is left for the next."""

    def __init__(self, browser: Any, seconds: float) -> None:
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
        context.set_default_timeout(seconds * 1000)
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
    main(int(sys.argv[1]), float(sys.argv[3]))
