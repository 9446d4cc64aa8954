"""A run in the terminal: fits the screen, tells the truth, obeys nobody."""

import io
import re
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from perilune.swarm.terminal import PlainLines, Screen, TerminalView, clock, harmless, rows, short, summary
from perilune.swarm.view.controls import ApprovalRequest, Approvals
from perilune.swarm.view.state import RunState
from tests.swarm.view.example_run import BEGAN, MemoryJournal, MemoryReader, Told, ended, started, tell_example


def tell(told: Told) -> RunState:
    journal, state = MemoryJournal(), RunState()
    state.apply([journal.add(chain, kind, body, note, at=at) for at, chain, kind, body, note in told.rows])
    return state


def drawn(state: RunState, width: int = 100, height: int = 24, now: int = 9000) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=False, legacy_windows=False)
    console.print(Screen(state, now))
    text = console.file.getvalue()  # pyrefly: ignore[missing-attribute]
    return text.rstrip("\n").split("\n")


@given(
    parents=st.lists(st.integers(0, 40), max_size=60),
    endings=st.lists(st.sampled_from(["done", "failed", "cancelled", None, None]), min_size=61, max_size=61),
    height=st.integers(1, 50),
)
def test_the_tree_fits_and_every_agent_is_shown_or_counted(
    parents: list[int], endings: list[str | None], height: int
) -> None:
    told = Told()
    told.add(0, "0", "started", started("0", None, 0))
    for number, parent in enumerate(parents, 1):
        told.add(1, str(number), "started", started(str(number), str(parent % number), 1))
    for number, status in enumerate(endings[: len(parents) + 1]):
        if status:
            told.add(2, str(number), "finished", ended(status))
    state = tell(told)
    shown = rows(state, height)
    assert len(shown) <= height
    agents = [agent for agent, _, _ in shown if agent is not None]
    assert len({agent.number for agent in agents}) == len(agents)
    counts = sum((group for _, _, group in shown), Counter(agent.status for agent in agents))
    assert counts == Counter(agent.status for agent in state.agents)
    if height >= len(state.agents):
        assert len(agents) == len(state.agents)


def test_those_at_work_come_first_where_there_is_no_room_for_all() -> None:
    events = tell_example(MemoryJournal(), agents=300, steps=6)
    state = RunState()
    state.apply([event for event in events if event.time - BEGAN < 10])
    assert state.counts["done"] > 20 and state.counts["running"] > 20
    shown = rows(state, 20)
    statuses = [agent.status for agent, _, _ in shown if agent]
    assert statuses[0] == "waiting" and set(statuses[1:]) == {"running"}
    assert sum(shown[-1][2].values()) == 301 - 19


def test_a_screen_has_its_width_its_height_and_the_numbers() -> None:
    events = tell_example(MemoryJournal(), agents=300, steps=6)
    state = RunState(cost=lambda model, prompt, completion: 0.001)
    state.apply([event for event in events if event.time - BEGAN < 9])
    request = ApprovalRequest(id="1", agent="main", call="0.0", tool="send_mail", arguments='{"to": "x"}')
    state.set_approvals([request])
    for width, height in ((100, 24), (60, 10), (200, 60)):
        lines = drawn(state, width, height)
        assert len(lines) <= height and all(len(line) <= width for line in lines)
    text = "\n".join(drawn(state, 160, 30))
    for part in ("width ", "agents ", "steps ", "critical ", "tokens ", "cost ", "time 9.0 s", "send_mail", "running"):
        assert part in text


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J\x1b[H",
        "\x9b31m",
        "a\rb\nc",
        "\x1b]52;c;ZXZpbA==\x07",
        "\u202eexe.txt",
        "\u2066x",
        "a\u2028b",
        "\x00\x08",
        "\U000e0041\U000e007f",
        "soft\xadhyphen",
    ],
)
def test_nothing_an_agent_writes_reaches_the_terminal_as_a_command(text: str) -> None:
    told = Told()
    told.add(0, "run", "run_started", {"task": text, "limits": {}})
    told.add(0, "main", "started", started(f"n{text}", None, 0, text))
    told.reply(1, "main", 0, text, [(f"t{text}", text)])
    state = tell(told)
    state.set_approvals([ApprovalRequest(id="1", agent="main", call="0.0", tool=text, arguments=text)])
    lines = [*drawn(state), *PlainLines().since_last(state, 20_000)]
    state = tell(told)
    told.add(2, "main", "finished", ended("failed", error=text))
    told.add(2, "run", "run_finished", {"status": "failed", "answer": None, "error": text})
    lines += [*drawn(tell(told)), *PlainLines().since_last(tell(told), 20_000), *summary(tell(told))]
    assert not re.search(
        r"[\x00-\x1f\x7f-\x9f\xad\u2028\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]", "".join(lines)
    )
    assert harmless("half \ud800") == "half  "
    assert harmless("Größe 数 ✓") == "Größe 数 ✓"


def watch(journal: MemoryJournal, console: Console, approvals: Approvals | None = None) -> TerminalView:
    return TerminalView(reader=MemoryReader(journal), journal=journal, console=console, approvals=approvals)


def test_without_a_terminal_there_are_plain_lines_and_a_summary() -> None:
    journal = MemoryJournal(clock=time.time)
    out = io.StringIO()
    with watch(journal, Console(file=out, width=80)):
        journal.publish([journal.add("main", "started", started("main", None, 0, "Count the stars"))])
        journal.publish([journal.add("main", "finished", ended("failed", error="no stars"))])
        journal.publish([journal.add("run", "run_finished", {"status": "failed", "answer": None, "error": "no stars"})])
    text = out.getvalue()
    assert "\x1b" not in text and "failed" in text and "no stars" in text
    assert text.splitlines()[-3].startswith("failed in ") and "1 agent (" in text


def test_many_changes_at_once_are_one_line() -> None:
    state = RunState()
    lines = PlainLines()
    events = tell_example(MemoryJournal(), agents=50)
    state.apply(events[: len(events) // 2])
    first = lines.since_last(state, 5000)
    assert len(first) == 1 and "started" in first[0]
    assert lines.since_last(state, 5000) == []
    state.apply(events)
    second = lines.since_last(state, 15_000)
    assert "done" in second[0] and "width" in second[1] and len(second) == 2


def test_on_a_terminal_the_tree_is_drawn_and_leaves_the_summary_behind() -> None:
    journal = MemoryJournal(clock=time.time)
    out = io.StringIO()
    approvals = Approvals()
    approvals.add(ApprovalRequest(id="1", agent="main", call="0.0", tool="send_mail", arguments="{}"))
    console = Console(file=out, width=100, height=20, force_terminal=True, color_system=None)
    with watch(journal, console, approvals) as view:
        journal.publish([journal.add("main", "started", started("star counter", None, 0))])
        deadline = time.monotonic() + 30
        while "star counter" not in out.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        journal.publish([journal.add("main", "finished", ended())])
        journal.publish([journal.add("run", "run_finished", {"status": "done", "answer": None, "error": None})])
    assert "waits for approval: star counter: send_mail {}" in out.getvalue()
    assert view.state.status == "done" and out.getvalue().rstrip().splitlines()[-1].endswith("0 tokens")
    assert journal._receivers == []


def test_numbers_are_short() -> None:
    assert [short(n) for n in (0, 9999, 10_000, 1_234_567, 2_500_000_000)] == ["0", "9999", "10.0k", "1.2M", "2.5G"]
    assert [clock(ms) for ms in (0, 9949, 61_000, 3_720_000)] == ["0.0 s", "9.9 s", "1:01 min", "1:02 h"]
