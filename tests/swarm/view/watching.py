"""A page of the view in a real browser, and everything about it that should not happen."""

import time
from typing import Any

from tests.swarm.view.serving import SECONDS

MS = SECONDS * 1000


class Watched:
    """A page, and everything about it that should not happen."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        self.context.set_default_timeout(MS)
        self.page = self.context.new_page()
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("request", lambda request: self._note(request.url, url))
        self.page.add_init_script(
            "window.violations = [];"
            "addEventListener('securitypolicyviolation', (e) => window.violations.push(e.violatedDirective));"
        )
        self.page.goto(url)

    def _note(self, requested: str, url: str) -> None:
        if not requested.startswith((url.partition("#")[0], "blob:")):
            self.foreign.append(requested)

    def check(self) -> None:
        """Nothing foreign ran, was loaded or was even tried."""
        seen = (self.dialogs, self.errors, self.foreign)
        assert seen == ([], [], []), seen
        assert self.page.evaluate("[window.hacked ?? null, window.violations]") == [None, []]


def expect(page: Any, script: str) -> None:
    """Wait until a JavaScript expression is true. Playwright's own way needs eval, which the page's policy forbids."""
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(script):
        assert time.monotonic() < deadline, script
        page.wait_for_timeout(30)
