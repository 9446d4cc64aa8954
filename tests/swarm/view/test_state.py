"""The projection of a journal to what a view shows."""

import random
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.critical_path import critical_path
from perilune.swarm.journal.event import Event
from perilune.swarm.view.agent_state import MAX_BARS, MODEL, TOOL, WAIT
from perilune.swarm.view.controls import ApprovalRequest
from perilune.swarm.view.state import RunState, encode
from perilune.swarm.view.width_history import MAX_POINTS, WidthHistory
from tests.swarm.view.example_run import MemoryJournal, Told, ended, started, tell_example


def project(events: list[Event]) -> RunState:
    state = RunState()
    state.apply(events)
    return state


def tell(told: Told) -> list[Event]:
    journal = MemoryJournal()
    return [journal.add(chain, kind, body, note, at=at) for at, chain, kind, body, note in told.rows]


class Viewer:
    """What the page keeps: a snapshot and the deltas that follow (the twin of static/store.js)."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.held: dict[str, Any] = {"born": {}, "agents": {}, "all_bars": {}, "labels": [], "points": []}
        self.merge(snapshot)

    def merge(self, data: dict[str, Any]) -> None:
        held = self.held
        for plain in ("run", "totals", "approvals", "index", "critical"):
            if plain in data:
                held[plain] = data[plain]
        for each in ("born", "agents"):
            held[each].update({row["number"]: row for row in data.get(each, ())})
        for number, bars in data.get("all_bars", {}).items():
            held["all_bars"][int(number)] = list(bars)
        for number, *bar in data.get("bars", ()):
            held["all_bars"].setdefault(number, []).append(bar)
        if "labels" in data:
            held["labels"][data.get("labels_from", 0) :] = data["labels"]
        if "width" in data:
            held["resolution"] = data["width"]["resolution"]
            held["points"][data["width"]["from"] :] = data["width"]["points"]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 400), max_size=12), join=st.integers(0, 12))
def test_deltas_in_any_batches_give_the_state_of_the_finished_journal(seed: int, cuts: list[int], join: int) -> None:
    events = tell_example(MemoryJournal(), agents=7, steps=4, seed=seed)
    borders = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    state, viewer = RunState(), None
    for number, (start, end) in enumerate(zip(borders, borders[1:])):
        state.apply(events[start:end])
        delta = state.take_delta()
        if viewer is None and number >= min(join, len(borders) - 2):
            viewer = Viewer(orjson.loads(encode(state.snapshot())))
        elif viewer is not None and delta is not None:
            viewer.merge(orjson.loads(encode(delta)))
    assert viewer is not None
    assert viewer.held == Viewer(orjson.loads(encode(project(events).snapshot()))).held
    assert state.take_delta() is None


def test_events_that_were_taken_before_change_nothing() -> None:
    events = tell_example(MemoryJournal(), agents=5)
    state = project(events)
    before = encode(state.snapshot())
    state.apply(events[10:50])
    assert encode(state.snapshot()) == before


def test_an_agent_is_queued_then_thinks_then_calls_then_waits_then_is_done() -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    told.reply(1, "main", 0, "", [("start_task", "{}"), ("read_file", "{}")], seconds=0.9)
    told.outcome(1.1, "main#0.0", "start_task", "Started.", spawned=["main/b-0.0"])
    told.outcome(1.3, "main#0.1", "read_file", "text", seconds=0.3, untrusted=True)
    told.reply(2, "main", 1, "", [("wait", "{}")], seconds=0.7)
    told.add(3, "main/b-0.0", "started", started("b", "main", 1))
    told.add(4, "main", "finished", ended("budget", error="no steps left"))
    events = tell(told)
    seen = []
    state = RunState()
    for event in events:
        state.apply([event])
        main, child = state.by_id["main"], state.by_id.get("main/b-0.0")
        seen.append((main.status, main.activity(), main.tainted, child and child.status))
    assert seen == [
        ("running", "model", False, None),
        ("running", "2 × start_task, read_file", False, None),
        ("running", "read_file", False, "queued"),
        ("running", "model", True, "queued"),
        ("waiting", "wait", True, "queued"),
        ("waiting", "wait", True, "running"),
        ("budget", "", True, "running"),
    ]
    kinds = [(kind, start, end, step) for kind, start, end, step, _, _ in state.by_id["main"].bars]
    assert kinds == [(MODEL, 100, 1000, 0), (TOOL, 1000, 1100, 0), (TOOL, 1000, 1300, 0), (MODEL, 1300, 2000, 1)]
    assert state.by_id["main/b-0.0"].parent == state.by_id["main"].number
    assert state.totals()["counts"] | {"running": 1, "budget": 1} == state.totals()["counts"]


def test_a_call_that_waits_for_agents_is_a_bar_of_its_kind() -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    told.reply(1, "main", 0, "", [("assign_task", "{}")])
    told.outcome(5, "main#0.0", "assign_task", "done", seconds=4.0, joined=["main/a"])
    assert [bar[:3] for bar in project(tell(told)).by_id["main"].bars][1] == (WAIT, 1000, 5000)


def test_a_summary_of_the_context_counts_as_a_step_with_its_tokens() -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    told.add(
        2, "main", "compacted", {"step": 0, "how": "summary", "summary": "s"}, prompt_tokens=50, completion_tokens=7
    )
    told.add(3, "main", "compacted", {"step": 0, "how": "hidden", "positions": [1], "handles": ["x"]})
    state = project(tell(told))
    assert (state.steps, state.prompt_tokens, state.completion_tokens, len(state.agents[0].bars)) == (1, 50, 7, 1)


def test_the_critical_path_is_that_of_the_whole_journal() -> None:
    events = tell_example(MemoryJournal(), agents=9)
    state, path = project(events), critical_path(events)
    assert state.critical_steps == path.critical_steps == len(state.critical_path()) > 4
    names = {f"{state.by_id[step.agent].number}.{step.number}" for step in path.path()}
    assert set(state.critical_path()) == names
    bars = {f"{agent.number}.{bar[3]}" for agent in state.agents for bar in agent.bars if bar[0] == MODEL}
    assert names <= bars


def test_cost_follows_the_prices() -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    told.reply(1, "main", 0, "done", prompt_tokens=1000, completion_tokens=10)
    state = RunState(cost=lambda model, prompt, completion: (model == "kimi-k2.5") * (prompt + 100 * completion) / 1000)
    state.apply(tell(told))
    assert state.agents[0].cost == state.cost == 2.0


def test_a_pending_approval_makes_the_agent_wait_until_it_is_gone() -> None:
    told = Told()
    told.add(0, "main", "started", started("main", None, 0))
    told.reply(1, "main", 0, "", [("send_mail", '{"to": "x"}')])
    state = project(tell(told))
    assert state.agents[0].status == "running"
    request = ApprovalRequest(id="r", agent="main", call="0.0", tool="send_mail", arguments='{"to": "x"}' + " " * 5000)
    state.set_approvals([request])
    delta = state.take_delta()
    assert delta and (state.agents[0].status, state.agents[0].activity()) == ("waiting", "approval")
    assert delta["approvals"][0]["whole"] is False and len(delta["approvals"][0]["arguments"]) == 4000
    state.set_approvals([])
    delta = state.take_delta()
    assert delta and delta["approvals"] == [] and state.agents[0].status == "running"


def test_memory_per_agent_is_bounded_and_merged_bars_replace_those_of_a_viewer() -> None:
    told = Told()
    told.add(0, "main", "started", started("n" * 10_000, None, 0, "t" * 100_000))
    for step in range(4 * MAX_BARS):
        told.reply(step + 1, "main", step, "x" * 1000, [("tool", "{}")], seconds=0.5)
        told.outcome(step + 1.4, f"main#{step}.0", "tool", "y" * 1000)
    events = tell(told)
    state = RunState()
    viewer = Viewer(orjson.loads(encode(state.snapshot())))
    for start in range(0, len(events), 333):
        state.apply(events[start : start + 333])
        viewer.merge(orjson.loads(encode(state.take_delta() or {})))
    main = state.agents[0]
    assert viewer.held["all_bars"][0] == [list(bar) for bar in main.bars]
    assert len(main.bars) <= MAX_BARS
    assert main.steps == 4 * MAX_BARS and main.bars[0][1] == 500 and main.bars[-1][2] == state.last
    assert len(encode(state.snapshot())) < 40 * MAX_BARS + 20_000


def test_width_keeps_its_peak_in_bounded_room() -> None:
    width, draw, widest = WidthHistory(), random.Random(3), 0
    for time in range(0, 400_000, 37):
        value = draw.randint(0, 90) if time != 200_022 else 300
        widest = max(widest, value)
        width.change(time, value)
    assert len(width.points) <= MAX_POINTS
    assert max(value for _, value in width.points) == width.peak == widest
    buckets = [bucket for bucket, _ in width.points]
    assert buckets == sorted(set(buckets)) and buckets[-1] * width.resolution <= 400_000


def test_strange_bodies_do_not_stop_the_projection() -> None:
    told = Told()
    told.add(0, "main#7.1", "outcome", {"tool": None, "status": None})
    told.add(1, "main", "reply", {"message": {"tool_calls": [{}]}})
    told.add(2, "other", "finished", {"status": "exploded"})
    told.add(3, "other", "from the future", {})
    told.add(3, "self", "started", {"parent": "self", "name": 5, "depth": 0})
    told.add(2.5, "run", "run_finished", {"status": "done"})
    state = project(tell(told))
    assert [agent.status for agent in state.agents] == ["queued", "failed", "running"]
    assert state.ended == 3000 and state.agents[2].parent is None
    assert state.critical_steps is None and state.critical_path() == []
