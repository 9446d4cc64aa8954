"""A browser for pages that need one: open, read, click, type, and take a picture.

    async with open_browser(policy) as browser:
        tools = browser_tools(browser)

Debian's Chromium, driven by playwright, in the room of `browser_room`; its only network is the `door`, so the policy of
`web_fetch` holds for every request of every page. It starts with the first call. Each agent has a context of its own:
no cookies, storage or pages are shared. Clicking and typing can send things, hence effects "outside".
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.public_web import NetworkPolicy, PublicResolver, Refused, Resolver, checked
from perilune.swarm.sandbox.contract import Limits
from perilune.swarm.sandbox.process import parent_of
from perilune.swarm.sandbox.supervisor import Watch, start_watching, stop_watching
from perilune.swarm.tools.browser_room import FLAGS, PROXY, room_missing, write_launcher
from perilune.swarm.tools.door import Door
from perilune.swarm.tools.room import write_within
from perilune.swarm.tools.shown import OUTPUT_LIMIT, clipped, one_line
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult, tool
from perilune.swarm.tools.web import web_effects

if TYPE_CHECKING:
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import Page

PAGES_LIMIT = 16
ROOM_LIMITS = Limits(memory_bytes=4 << 30, processes=256, disk_bytes=1 << 30)
"""Of the browser with all its pages: one of them may be made to take the machine's memory."""
ELEMENTS_LIMIT = 100
ACTION_SECONDS = 10.0

# Numbers what can be clicked or filled, and gives the text that a person would see. It runs beside the page's scripts,
# where they cannot replace what it calls; methods are taken from prototypes, since elements can hide those by name.
_SNAPSHOT = """limit => {
  const wanted = 'a[href], button, input, textarea, select, [role=button], [role=link], [onclick]';
  const { getAttribute, setAttribute, removeAttribute, getBoundingClientRect } = Element.prototype;
  const all = selector => [...Document.prototype.querySelectorAll.call(document, selector)];
  const shown = each => { const box = getBoundingClientRect.call(each); return box.width > 0 && box.height > 0; };
  all('[data-number]').forEach(each => removeAttribute.call(each, 'data-number'));
  const elements = all(wanted).filter(shown).slice(0, limit).map((each, index) => {
    setAttribute.call(each, 'data-number', index + 1);
    const label = getAttribute.call(each, 'aria-label') || each.placeholder;
    const words = each.innerText || label || each.name || each.value || '';
    const kind = each.tagName.toLowerCase() + (each.type && each.tagName === 'INPUT' ? ' ' + each.type : '');
    return [kind, String(words).slice(0, 200), String(each.href || '').slice(0, 500)];
  });
  const text = document.body ? String(document.body.innerText).slice(0, 400000) : '';
  return {title: String(document.title).slice(0, 500), text, elements};
}"""


@dataclass(kw_only=True)
class Browser:
    policy: NetworkPolicy
    folder: Path
    door: Door
    pages: dict[str, Page] = field(default_factory=dict)
    """Agent -> its page."""
    _chromium: Chromium | None = None
    _playwright: Any = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _watch: Watch | None = None

    async def page(self, agent: str) -> Page:
        """The agent's page; the browser is started, or started again, when there is none."""
        async with self._starting:
            if self._chromium is None or not self._chromium.is_connected():
                self.pages.clear()
                await self._start()
            if agent not in self.pages:
                if len(self.pages) >= PAGES_LIMIT:
                    raise ToolError(f"{PAGES_LIMIT} agents use the browser already; use web_fetch, or try later")
                self.pages[agent] = await self._new_page()
        return self.pages[agent]

    async def _start(self) -> None:
        from playwright.async_api import Error, async_playwright

        self._stop_watching()
        self.door.on_caller = self._watch_room
        if self._playwright is None:
            await self.door.open(self.folder / "door")
            write_launcher(self.folder / "chromium", self.folder / "door")
            self._playwright = await async_playwright().start()
        try:
            self._chromium = await self._playwright.chromium.launch(
                executable_path=str(self.folder / "chromium"),
                args=list(FLAGS),
                proxy={"server": PROXY},
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                timeout=60_000,
            )
        except Error as error:
            raise ToolError(f"the browser cannot start in its sandbox ({_first_line(error)})") from None

    async def _new_page(self) -> Page:
        assert self._chromium is not None
        context = await self._chromium.new_context(accept_downloads=False, service_workers="block", locale="en-US")
        context.set_default_timeout(ACTION_SECONDS * 1000)
        context.set_default_navigation_timeout(self.policy.seconds * 1000)
        page = await context.new_page()
        # Windows that a page opens by itself are closed: nobody would look at them.
        context.on("page", lambda other: asyncio.ensure_future(other.close()))
        return page

    def _watch_room(self, caller: int) -> None:
        """The program in front of Chromium has connected for the first time: from now on the room has its limits."""
        self.door.on_caller = None
        first = parent_of(caller)
        if first is None:
            return
        try:
            descriptor = os.pidfd_open(first)
        except OSError:
            return

        def end(limit: str) -> None:
            self.door.refused.append(f"the browser took too much ({limit}) and was ended with all its pages")
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)

        self._watch = Watch(
            root=first, limits=ROOM_LIMITS, folders=(self.folder,), most_disk_bytes=ROOM_LIMITS.disk_bytes, exceeded=end
        )
        weakref.finalize(self._watch, os.close, descriptor)
        start_watching(self._watch)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            stop_watching(self._watch)
            self._watch = None

    async def close(self) -> None:
        self._stop_watching()
        # Each may have died before, in any way; the room dies with its parent.
        if self._chromium is not None:
            with suppress(Exception):
                await self._chromium.close()
        if self._playwright is not None:
            with suppress(Exception):
                await self._playwright.stop()
        await self.door.close()


@asynccontextmanager
async def open_browser(policy: NetworkPolicy, *, resolver: Resolver | None = None) -> AsyncIterator[Browser]:
    """A browser that starts when it is first used; raises `ValueError` with the reason where it cannot."""
    if reason := room_missing():
        raise ValueError(f"there is no browser: {reason}")
    with tempfile.TemporaryDirectory(prefix="perilune-browser-") as folder:
        browser = Browser(
            policy=policy, folder=Path(folder), door=Door(policy=policy, resolver=resolver or PublicResolver())
        )
        try:
            yield browser
        finally:
            await browser.close()


def browser_tools(browser: Browser) -> list[Tool]:
    effects = web_effects(browser.policy)

    @tool(effects=effects, untrusted=True)
    async def browser_open(
        context: ToolContext, url: Annotated[str, Field(max_length=8_000, description="Full URL of a public page.")]
    ) -> ToolResult:
        """Open a page in the browser and read it. Use web_fetch first; this is for pages that need scripts."""
        _needs_all_hosts(browser, context)
        try:
            target = checked(url.strip(), browser.policy)
        except Refused as error:
            raise ToolError(f"not opened: {error}") from None
        page = await browser.page(context.agent)
        with _told():
            answer = await page.goto(target.url, wait_until="domcontentloaded")
        shown = await _shown(browser, page)
        bad = answer is not None and answer.status >= 400
        return ToolResult(text=f"[HTTP {answer.status}]\n{shown}" if answer and bad else shown, is_error=bad)

    @tool(effects="none", untrusted=True)
    async def browser_read(context: ToolContext) -> str:
        """Read the page that is open: its text, and numbered elements to click or fill."""
        return await _shown(browser, _opened(browser, context))

    @tool(effects="outside", untrusted=True)
    async def browser_click(context: ToolContext, number: Annotated[int, Field(ge=1, le=ELEMENTS_LIMIT)]) -> str:
        """Click the element with this number, then read the page."""
        page = _opened(browser, context)
        with _told():
            await page.locator(f'[data-number="{number}"]').first.click()
            await _settled(page)
        return await _shown(browser, page)

    @tool(effects="outside", untrusted=True)
    async def browser_type(
        context: ToolContext,
        number: Annotated[int, Field(ge=1, le=ELEMENTS_LIMIT)],
        text: Annotated[str, Field(max_length=10_000)],
        submit: Annotated[bool, Field(description="Press Enter afterwards.")] = False,
    ) -> str:
        """Fill the field with this number, then read the page."""
        page = _opened(browser, context)
        with _told():
            field_ = page.locator(f'[data-number="{number}"]').first
            await field_.fill(text)
            if submit:
                await field_.press("Enter")
                await _settled(page)
        return await _shown(browser, page)

    @tool(effects="workspace", untrusted=True)
    async def browser_screenshot(
        context: ToolContext,
        path: Annotated[str, Field(max_length=500, description="File in the workspace to write.")] = "screenshot.png",
    ) -> str:
        """Save a picture of the page that is open as a PNG file in the workspace."""
        page = _opened(browser, context)
        with _told():
            picture = await page.screenshot(type="png", timeout=ACTION_SECONDS * 1000)
        try:
            await asyncio.to_thread(write_within, context.workspace, path, picture)
        except (OSError, ValueError) as error:
            raise ToolError(f"path is {path!r}: {error}") from None
        return f"wrote {len(picture)} bytes to {path}"

    return [browser_open, browser_read, browser_click, browser_type, browser_screenshot]


def _needs_all_hosts(browser: Browser, context: ToolContext) -> None:
    """All agents share the door, which knows the run's policy alone: narrower rights mean no browser."""
    rights = context.extras.get("rights")
    if rights is None or "*" in rights.network:
        return
    if browser.policy.allow is None or not set(browser.policy.allow) <= set(rights.network):
        raise ToolError("your rights to the network are narrower than those of the browser; use web_fetch")


def _opened(browser: Browser, context: ToolContext) -> Page:
    page = browser.pages.get(context.agent)
    if page is None or page.is_closed():
        browser.pages.pop(context.agent, None)
        raise ToolError("no page is open; use browser_open first")
    return page


async def _settled(page: Page) -> None:
    """Give a click the time to load the page that it leads to, if any."""
    await asyncio.sleep(0.2)
    await page.wait_for_load_state("domcontentloaded")


async def _shown(browser: Browser, page: Page) -> str:
    with _told():
        snapshot = await _snapshot(page)
    elements = [
        f"[{number}] {one_line(str(kind), 40)}: {one_line(str(words), 200)}"
        + (f" -> {one_line(str(link), 500)}" if link else "")
        for number, (kind, words, link) in enumerate(_rows(snapshot), 1)
    ]
    refused = [f"[refused: {each}]" for each in dict.fromkeys(browser.door.refused)]
    browser.door.refused.clear()
    head = [f"[{one_line(page.url, 2_000)}]", f"[title: {one_line(str(snapshot.get('title', '')))}]", *refused[:5]]
    text = clipped(str(snapshot.get("text", "")), OUTPUT_LIMIT // 2)
    return "\n".join([*head, text, "", *elements])


async def _snapshot(page: Page) -> dict[str, Any]:
    """What `_SNAPSHOT` finds, in a world of its own: in the page's, its scripts would decide what is sent to us."""
    session = await page.context.new_cdp_session(page)
    try:
        tree = await session.send("Page.getFrameTree")
        place = {"frameId": tree["frameTree"]["frame"]["id"], "worldName": "reader"}
        world = await session.send("Page.createIsolatedWorld", place)
        answer = await session.send(
            "Runtime.evaluate",
            {
                "expression": f"({_SNAPSHOT})({ELEMENTS_LIMIT})",
                "contextId": world["executionContextId"],
                "returnByValue": True,
                "timeout": ACTION_SECONDS * 1000,
            },
        )
    finally:
        with suppress(Exception):  # the page may be gone, with its session
            await session.detach()
    value = answer["result"].get("value")
    if not isinstance(value, dict):
        raise ToolError("the page cannot be read as it is now; read it again")
    return value


def _rows(snapshot: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """The page wrote this: only rows of the expected form count."""
    rows = snapshot.get("elements", [])
    return [tuple(row) for row in rows[:ELEMENTS_LIMIT] if isinstance(row, list) and len(row) == 3]


@contextmanager
def _told() -> Iterator[None]:
    from playwright.async_api import Error, TimeoutError

    try:
        yield
    except TimeoutError:
        raise ToolError("the page did not answer in time; read it again, or use another element") from None
    except Error as error:
        raise ToolError(f"the browser could not do it ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return one_line(str(error).strip().split("\n")[0], 200)
