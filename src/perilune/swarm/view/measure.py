"""How long an event takes from the journal to a real screen, and what watching costs the swarm.

`measure_view` commits made-up events of many agents to a real journal at a given rate, with the page open in Chromium.
Latency counts from the moment the journal published a batch to the first frame the browser drew that includes it. The
swarm's loop is watched by a coroutine that sleeps 5 ms and sees how late it wakes, with and without a view.
"""

from __future__ import annotations

import asyncio
import bisect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from perilune.swarm.journal.event import Event
from perilune.swarm.journal.sqlite import SQLiteJournal
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.view.server import View

TICK = 0.005
WATCH = """
window.drawn = [];
new MutationObserver(() => {
  const index = Number(document.body.dataset.index);
  requestAnimationFrame(() => setTimeout(() => window.drawn.push([index, Date.now() / 1000])));
}).observe(document, {subtree: true, attributes: true, attributeFilter: ["data-index"]});
"""


def measure_view(agents: int = 100, events_per_second: int = 5000, seconds: float = 5.0) -> dict[str, Any]:
    """Numbers in milliseconds, except those whose names say otherwise. Needs playwright and the program chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("the program chromium is missing: make system-deps installs it")
    alone = asyncio.run(_publish(agents, events_per_second, seconds, None))
    watched = asyncio.run(_publish(agents, events_per_second, seconds, lambda url: _Browser(url, chromium)))
    latencies = watched.pop("latencies")
    return {
        "agents": agents,
        "events": watched["events"],
        "events_per_second": round(watched["events"] / seconds),
        "frames_drawn": watched["frames_drawn"],
        "latency_p50": _share(latencies, 0.5),
        "latency_p95": _share(latencies, 0.95),
        "latency_max": _share(latencies, 1.0),
        "loop_late_p95": watched["late_p95"],
        "loop_late_max": watched["late_max"],
        "loop_late_p95_without_view": alone["late_p95"],
        "loop_late_max_without_view": alone["late_max"],
        "view_cpu_percent": watched["view_cpu_percent"],
    }


class _Browser:
    """Chromium on the page, driven from a thread of its own so that the swarm's loop has nothing to do with it."""

    def __init__(self, url: str, chromium: str) -> None:
        self._url = url
        self._chromium = chromium
        self.ready = threading.Event()
        self.finish = threading.Event()
        self.drawn: list[tuple[int, float]] = []
        self.problem: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self.problem = error
        finally:
            self.ready.set()

    def _watch(self) -> None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=self._chromium, args=arguments)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.add_init_script(WATCH)
            page.goto(self._url)
            page.wait_for_selector("#connection.live")
            self.ready.set()
            self.finish.wait()
            page.wait_for_timeout(1000)
            self.drawn = [(index, at) for index, at in page.evaluate("window.drawn")]
            browser.close()


async def _publish(
    agents: int, events_per_second: int, seconds: float, watch: Callable[[str], _Browser] | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = SQLiteJournal.open(path, key=None)
        published: list[tuple[int, float]] = []
        journal.subscribe(lambda batch: published.append((batch[-1].index, time.time())))
        first = await _begin(journal, agents)
        view = View(reader=SQLiteReader(path), journal=journal) if watch else None
        browser = watch(view.start()) if view and watch else None
        if browser:
            await asyncio.to_thread(browser.ready.wait)
            if browser.problem:
                raise browser.problem
        published.clear()
        late: list[float] = []
        ticker = asyncio.create_task(_tick(late))
        cpu = _cpu_of(view)
        pace = agents / events_per_second
        await asyncio.gather(*[_work(journal, number, pace, seconds) for number in range(agents)])
        cpu_percent = 100 * (_cpu_of(view) - cpu) / seconds
        ticker.cancel()
        with suppress(asyncio.CancelledError):
            await ticker
        found: dict[str, Any] = {
            "events": published[-1][0] - first,
            "late_p95": _share(sorted(late), 0.95),
            "late_max": _share(sorted(late), 1.0),
        }
        if browser and view:
            browser.finish.set()
            await asyncio.to_thread(browser.thread.join)
            if browser.problem:
                raise browser.problem
            found |= {
                "latencies": _latencies(published, browser.drawn),
                "frames_drawn": len(browser.drawn),
                "view_cpu_percent": round(cpu_percent, 1),
            }
            view.stop()
        await journal.close()
        return found


async def _begin(journal: SQLiteJournal, agents: int) -> int:
    await journal.append("run", "run_started", {"task": "measure the view", "model": "none", "limits": {}})
    body = {"parent": None, "call": None, "name": "main", "depth": 0, "model": "none", "task": "", "budget": {}}
    await journal.append("main", "started", body)
    calls = [{"id": f"c{n}", "function": {"name": "assign_task", "arguments": "{}"}} for n in range(agents)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    await journal.append("main", "reply", {"step": 0, "message": message, "finish": "stop", "reads": []})
    events: list[Event] = await asyncio.gather(
        *[
            journal.append(f"main/a-{n}", "started", body | {"parent": "main", "call": f"0.{n}", "name": f"agent {n}"})
            for n in range(agents)
        ]
    )
    return events[-1].index


async def _work(journal: SQLiteJournal, number: int, pace: float, seconds: float) -> None:
    """Steps with one tool call each; two events, paced."""
    agent, text = f"main/a-{number}", "Some words about the matter. " * 20
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"query": "moon"}'}}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    note = {"seconds": pace, "attempts": 1, "prompt_tokens": 900, "completion_tokens": 100}
    outcome = {"tool": "search", "status": "ok", "text": text, "result": None, "spawned": [], "joined": []}
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    due = loop.time() + pace * (number % 10) / 10
    step = 0
    while due < end:
        await asyncio.sleep(max(0.0, due - loop.time()))
        await journal.append(agent, "reply", {"step": step, "message": message, "finish": "stop", "reads": []}, note)
        await journal.append(f"{agent}#{step}.0", "outcome", outcome, {"seconds": pace})
        step += 1
        due += 2 * pace


async def _tick(late: list[float]) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + TICK
        await asyncio.sleep(TICK)
        late.append(max(0.0, (clock() - due) * 1000))


def _cpu_of(view: View | None) -> float:
    """Seconds of processor time the view's thread has used."""
    if view is None or view._thread is None or view._thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(view._thread.ident))


def _latencies(published: list[tuple[int, float]], drawn: list[tuple[int, float]]) -> list[float]:
    """For each batch the time until the first drawn frame that includes it, in order of size."""
    indices = [index for index, _ in drawn]
    found = []
    for index, at in published:
        position = bisect.bisect_left(indices, index)
        if position == len(indices):
            raise RuntimeError(f"the page never showed event {index}; its last was {indices[-1] if indices else None}")
        found.append(max(0.0, (drawn[position][1] - at) * 1000))
    return sorted(found)


def _share(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
