"""A person on the chat page: what they do, what they see, and everything about the page that should not happen."""

import base64
import io
import time
from typing import Any

from PIL import Image

from tests.serve.web.scripted_chat import SECONDS


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 28), (200, 90, 40)).save(file, "PNG")
    return file.getvalue()


PICTURE = _picture()
"""A PNG of 56 x 28 pixels."""

DROP = """
async ([target, kind, files]) => {
  const transfer = new DataTransfer();
  for (const [name, type, base64, size] of files) {
    const bytes = size ? new Uint8Array(size) : Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type }));
  }
  const element = document.querySelector(target);
  const options = { bubbles: true, cancelable: true };
  if (kind === "paste") element.dispatchEvent(new ClipboardEvent("paste", { ...options, clipboardData: transfer }));
  else element.dispatchEvent(new DragEvent(kind, { ...options, dataTransfer: transfer }));
}
"""


class Visit:
    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        self.context.set_default_timeout(SECONDS * 1000)
        self.page = self.context.new_page()
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self._error(message.text))
        self.page.on("request", lambda request: self._request(request.url, url))
        self.page.add_init_script(
            "window.violations = [];"
            "addEventListener('securitypolicyviolation', (e) => window.violations.push(e.violatedDirective));"
        )
        self.page.goto(url)

    def _error(self, text: str) -> None:
        if not text.startswith("Failed to load resource"):  # an answer that is not 200: the tests cause those
            self.errors.append(text)

    def _request(self, requested: str, url: str) -> None:
        if not requested.startswith((url, "data:image/")):
            self.foreign.append(requested)

    def check(self) -> None:
        """Nothing foreign ran, was loaded or was even tried."""
        seen = (self.dialogs, self.errors, self.foreign)
        assert seen == ([], [], []), seen
        assert self.page.evaluate("[window.hacked ?? null, window.violations]") == [None, []]

    def expect(self, script: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own way needs eval, which the policy forbids."""
        deadline = time.monotonic() + SECONDS
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, f"{script}\n{self.page.inner_text('body')}"
            self.page.wait_for_timeout(20)

    def greeted(self) -> "Visit":
        """Once the page knows the server's model."""
        self.expect("document.getElementById('model').textContent !== ''")
        return self

    def say(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def answered(self, count: int = 1) -> None:
        """Once so many answers have come to their end."""
        self.expect(f"document.querySelectorAll('.turn.assistant:not([aria-busy])').length === {count}")

    def give_files(self, kind: str, target: str, *files: tuple[str, str, bytes | int]) -> None:
        """Drop or paste files: their bytes, or how many zeros."""
        encoded = [
            [name, type, "", data] if isinstance(data, int) else [name, type, base64.b64encode(data).decode(), 0]
            for name, type, data in files
        ]
        self.page.evaluate(DROP, [target, kind, encoded])

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()
