"""A browser for the tests of a module, pages of it, and a scripted server."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.web.scripted_chat import ScriptedChat, serving
from tests.serve.web.visiting import Visit


@pytest.fixture(scope="module")
def browser(tool_path: Callable[[str], str]) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install 'perilune[test]')")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=tool_path("chromium"), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """`visit(url)` opens a page that is closed at the end of the test."""
    opened: list[Visit] = []

    def open(url: str, **options: Any) -> Visit:
        opened.append(Visit(browser, url, **options))
        return opened[-1]

    yield open
    for each in opened:
        each.context.close()


@pytest.fixture
def chat() -> ScriptedChat:
    return ScriptedChat()


@pytest.fixture
def url(chat: ScriptedChat) -> Iterator[str]:
    with serving(chat.app()) as url:
        yield url
