"""What reports show of swarms: timelines along the critical path, numbers by kind, and model text as text only."""

import asyncio
import json
import math
from dataclasses import asdict, replace

from tests.rl.swarm_talk import ANSWER, CREATE, TOOLS, SwarmTalk, assign, settings

from perilune.recipes.parl import parl
from perilune.report.lanes import lanes_svg, timeline
from perilune.report.page import Page, render_page
from perilune.report.parl import paid_text, swarm_notes, swarm_sections, write_arms_page
from perilune.report.rl import read_rl_run, rl_page
from perilune.rl.critical_steps import steps_of
from perilune.rl.parl import arm
from perilune.rl.swarm_episode import swarm_episode


def events(*replies, worker=lambda _: ([("search", {"query": "q"})], [("open", {"page": "p"})], "a: b"), **more):
    talk = SwarmTalk(*replies, worker=worker)
    asyncio.run(swarm_episode("find it", talk, tools=TOOLS, settings=settings(**more)))
    return talk.events


def kinds(spawn: float, **more) -> dict:
    return {"wide": {"episodes": 8.0, "spawn": spawn, "outcome": 0.5, "width": 3.0, "critical_steps": 4.0, **more},
            "narrow": {"episodes": 4.0, "spawn": 0.0, "outcome": 1.0}}  # fmt: skip


def iterations(count: int, spawn: float) -> list[dict]:
    return [{"iteration": n + 1, "reward": 0.5, "kinds": kinds(spawn * n / count), "failures": {}, "seconds": 1.0,
             "parl": {"share": 1.0 - n / count, "finish_rate": None, "began": 0}} for n in range(count)]  # fmt: skip


def evaluation(number: int, spawn: float, noted: list) -> dict:
    sample = {
        "environment": "e",
        "task": "t",
        "kind": "wide",
        "events": noted,
        "facets": {"outcome": 0.5},
        "reward": 0.5,
    }
    return {"iteration": number, "environments": {"e": {"count": 12, "kinds": kinds(spawn)}}, "samples": [sample],
            "failures": {}, "examples": []}  # fmt: skip


def test_a_timeline_is_as_long_as_the_critical_path():
    noted = events([CREATE], assign("t0", "t1"), [("search", {"query": "x"})], ANSWER, critical_steps=9)
    drawn = timeline("after", noted)
    assert drawn.length == steps_of(noted).critical == 5 and drawn.cap == 9
    assert [lane.name for lane in drawn.lanes] == ["main", "r-1.0", "r-1.1"]
    main, first, second = drawn.lanes
    assert [(block.start, block.steps, block.colour) for block in main.blocks] == [
        (0, 1, "spawn"), (1, 1, "spawn"), (4, 1, "direct"), (5, 0, "answer"),
    ]  # fmt: skip
    assert (
        [(block.start, block.steps) for block in first.blocks]
        == [(2, 1), (3, 1), (4, 0)]
        == [(block.start, block.steps) for block in second.blocks]
    )


def test_workers_are_in_the_order_of_their_calls_and_many_are_counted():
    noted = events([CREATE], assign(*map(str, range(30))), ANSWER)
    drawn = timeline("wide", noted)
    assert [lane.task for lane in drawn.lanes[1:12]] == [str(number) for number in range(11)]
    assert "7 more" in lanes_svg(drawn)


def test_what_a_model_wrote_is_text():
    hostile = "<script>alert(1)</script>"
    noted = events([CREATE], assign(hostile), [("search", {"query": hostile})], ANSWER, worker=lambda _: (hostile,))
    page = render_page(Page(title="t", sections=swarm_sections(iterations(3, 0.5), [evaluation(0, 0.1, noted)])))
    assert "<script" not in page and "&lt;script" in page


def test_sections_show_before_and_after_by_kind():
    before = evaluation(0, 0.1, events([("search", {"query": "q"})], ANSWER))
    after = evaluation(9, 0.9, events([CREATE], assign("t"), ANSWER))
    table, plots, timelines = swarm_sections(iterations(4, 0.8), [before, after])
    assert [row[:2] for row in table.rows] == [
        ["narrow (4), before", "0%"], ["narrow (4), after 9", "0%"], ["wide (8), before", "10%"],
        ["wide (8), after 9", "90%"],
    ]  # fmt: skip
    assert plots.plots[0].title == "Spawn rate" and "Fading rewards" in [p.title for p in plots.plots]
    assert [plot.title for plot in timelines.plots] == ["wide, before", "wide, after 9 iterations"]
    assert swarm_sections([{"iteration": 1}], []) == []


def test_what_is_paid_for_is_said_in_a_sentence():
    def told(config) -> str:
        return paid_text(json.loads(json.dumps(asdict(config))))

    assert told(parl().rl.parl) == (
        "Paid: 1 for the outcome; on wide tasks also 0.5 for workers that are started and 0.5 for tasks that end with "
        "a result; fading over 16 iterations, once 80% of enough tasks end with a result. Workers are frozen."
    )
    assert told(arm("outcome")) == "Paid: 1 for the outcome. Workers are frozen."
    alone = told(replace(arm("instantiation"), kinds=(), workers="joint"))
    assert alone == (
        "Paid: 0 for the outcome; on all tasks also 0.5 for workers that are started. Workers are the policy itself."
    )
    clock = told(replace(arm("economy"), anneal="clock", start=7, over=9))
    assert "0.1 for few steps of everybody; on wide" in clock and "over 9 iterations from iteration 7 on" in clock
    assert "the outcome counts for the rest of 1" in told(arm("blog"))
    assert paid_text({}) == paid_text({"form": "other", "outcome": 1.0}) == ""


def test_a_curve_has_gaps_where_an_iteration_says_nothing(tmp_path):
    records = [{"iteration": n, "kinds": kinds(0.5, **({"unused": 0.2} if n in (1, 2, 4) else {}))} for n in range(6)]
    (plots,) = swarm_sections(records, [])
    (unused,) = [plot for plot in plots.plots if plot.title == "Unused workers"]
    narrow, wide = unused.series
    assert [math.isnan(value) for value in wide.y] == [True, False, False, True, False, True] and wide.points
    assert all(math.isnan(value) for value in narrow.y)
    (spawn,) = [plot for plot in plots.plots if plot.title == "Spawn rate"]
    assert not any(series.points for series in spawn.series)


def test_rewards_that_fade_are_said_to_compare_nothing(tmp_path):
    def page(shares, parallel=0.5) -> str:
        lines = [{"iteration": n, "reward": 0.5, "parl": {"share": share}} for n, share in enumerate(shares)]
        config = {"start_from": "models/a-start", "rl": {"iterations": 3, "parl": {"parallel": parallel}}}
        (tmp_path / "rl.json").write_text(json.dumps(config))
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return render_page(rl_page(read_rl_run(tmp_path)))

    assert "faded since" in page([1.0, 1.0, 0.5]) and "Rewards for parallel work fade" in page([1.0, 0.5, 0.0])
    assert "faded since" not in page([1.0, 0.5, 0.0], parallel=0.0)  # with the outcome alone nothing does
    assert "faded since" not in page([1.0, 1.0, 1.0]) and ", from a-start" in page([1.0])


def test_notes_say_how_a_swarm_has_failed_of_late():
    def run(*spawn: float, **last) -> list[dict]:
        return [{"iteration": n, "kinds": kinds(each, **last)} for n, each in enumerate(spawn)]

    fine = run(0.1, 0.2, 0.5, 0.9, 1.0, width=11.0, unused=0.1, finished=0.98)
    assert swarm_notes(fine, ("wide",)) == []
    (collapsed,) = swarm_notes(run(0.1, 0.3, 0.1, 0.0, 0.0), ("wide",))
    assert collapsed == "Serial collapse on wide tasks: of late 0% of the episodes have a worker, 30% once had."
    # Half of the episodes, each with one worker at a time, have half a worker on average.
    (single,) = swarm_notes(run(0.1, 0.2, 0.4, 0.4, 0.5, width=0.5), ("wide",))
    assert "One worker after another on wide tasks: 50% of the episodes have workers, 1.0 at a time" in single
    assert swarm_notes(run(0.1, 0.2, 0.4, 0.4, 0.5, width=1.0), ("wide",)) == []  # two at a time, in half of them
    hollow, lost = swarm_notes(run(0.1, 0.2, 0.4, 0.8, 0.9, width=3.0, unused=0.4, finished=0.6), ("wide",))
    assert "for show on wide tasks: 40% of them left nothing" in hollow and "60% of the assigned tasks end" in lost
    assert swarm_notes(run(0.0, 0.0, 0.0, 0.0, 0.0)) == [
        "No episode on narrow tasks had a worker.", "No episode on wide tasks had a worker.",
    ]  # fmt: skip
    assert swarm_notes(fine[:4]) == [] and swarm_notes(run(*[0.0] * 5), ("chain",)) == []
    assert swarm_notes([{"iteration": n, "reward": 0.5} for n in range(9)]) == []  # a run without swarms


def test_a_run_with_a_swarm_has_them_in_its_report_and_arms_stand_beside_each_other(tmp_path):
    for name, spawn in (("full", 0.9), ("outcome", 0.0)):
        folder = tmp_path / name
        folder.mkdir()
        config = {"name": name, "rl": {"iterations": 5, "parl": {"kinds": ["wide"]}}}
        (folder / "rl.json").write_text(json.dumps(config))
        (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in iterations(5, spawn)))
    page = rl_page(read_rl_run(tmp_path / "full"))
    assert "The swarm in training" in [section.title for section in page.sections]
    assert "Worth knowing" not in [section.title for section in page.sections]
    assert "No episode on wide tasks had a worker." in render_page(rl_page(read_rl_run(tmp_path / "outcome")))
    page = write_arms_page({"full": tmp_path / "full", "outcome": tmp_path / "outcome"}, tmp_path / "arms.html")
    text = page.read_text()
    assert "Arms beside each other" in text and ">72%<" in text.replace("\n", "").replace("  ", "")
