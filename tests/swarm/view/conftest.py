"""A browser for the tests of a module, and pages of it that are closed at the end of a test."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.swarm.view.watching import Watched


@pytest.fixture(scope="module")
def browser(tool_path: Callable[[str], str]) -> Iterator[Any]:
    reason = "needs playwright (pip install 'perilune[test]')"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=tool_path("chromium"), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Watched]]:
    opened: list[Watched] = []

    def open(url: str, **options: Any) -> Watched:
        opened.append(Watched(browser, url, **options))
        return opened[-1]

    yield open
    for each in opened:
        each.context.close()
