"""Contracts of a resumed run: killed after any event, once or twice, it does what is missing and nothing else."""

import asyncio
import random

import pytest

from perilune.swarm.budget import Limits
from perilune.swarm.critical_path import critical_path
from perilune.swarm.journal.event import Event, JournalError
from perilune.swarm.swarm import Live, Swarm
from perilune.swarm.tools.tool import tool
from tests.swarm.core_runs import MemoryJournal, check, config, drawn, is_step, live, longest_path, no_patience, note
from tests.swarm.models import FunctionModel, call, results, say, scripted, turn
from tests.swarm.virtual_time import run_virtually


def heads(events: list[Event]) -> dict[str, bytes]:
    """Of all chains but the run's own, which counts its lives."""
    return {event.chain: event.hash for event in events if event.chain != "run"}


def kill_everywhere(seed: int, folder, *, racy: bool) -> None:
    behaviour = drawn(seed, racy=racy)
    whole, journal, _, _ = live(behaviour, folder, seed=seed)
    check(journal.all, whole)
    for keep in range(1, len(journal.all)):
        result, second, model, written = live(behaviour, folder, seed=1000 + keep, past=journal, keep=keep)
        check(second.all, result)
        assert critical_path(second.all).critical_steps == longest_path(second.all)
        began = {event.chain for event in journal.all[:keep] if event.kind == "call_started"}
        assert began.isdisjoint(written)
        made = sum(map(is_step, second.all[keep:]))
        if racy:
            assert made <= len(model.requests)  # calls of agents that were cancelled meanwhile came to nothing
            cut = random.Random(keep).randrange(keep, len(second.all))
            third_result, third, _, _ = live(behaviour, folder, seed=keep, past=second, keep=cut)
            check(third.all, third_result)
            continue
        assert made == len(model.requests), keep
        if all(event.kind != "outcome" or event.read()["status"] != "unknown" for event in second.all):
            assert result.answer == whole.answer
            assert heads(second.all) == heads(journal.all), keep


@pytest.mark.parametrize("seed", [2, 7])
def test_killed_after_every_event_a_run_makes_exactly_the_missing_calls_and_gives_the_same_answer(seed, tmp_path):
    kill_everywhere(seed, tmp_path, racy=False)


@pytest.mark.parametrize("seed", [2, 6])
def test_killed_twice_with_every_tool_in_use_a_run_ends_with_sound_records(seed, tmp_path):
    kill_everywhere(seed, tmp_path, racy=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 40))
@pytest.mark.parametrize("racy", [False, True])
def test_killed_after_every_event_of_many_runs(seed, racy, tmp_path):
    kill_everywhere(seed, tmp_path, racy=racy)


# Scenes with a person ------------------------------------------------------------------------------------------------


def scene(
    behaviour, folder, act, *, past: MemoryJournal | None = None, keep: int | None = None, tools=(note,), **changes
):
    """A run with someone at its side; `act` gets the handle on it once it has begun."""
    journal = past.cut(keep) if past is not None else MemoryJournal()
    model = FunctionModel(behaviour, seed=1)

    async def opened() -> MemoryJournal:
        return journal

    async def play():
        swarm = Swarm(config(**changes), client=model, tools=tools, open_journal=opened)
        async with swarm.start(None if past is not None else "Do it.", folder=folder) as run:
            await run.begin()
            await act(run)
            await run.ended()
            return await run._result()

    with no_patience():
        return run_virtually(play()), journal, model


async def watch(run: Live) -> None:
    """Do nothing."""


def find(journal: MemoryJournal, kind: str, chain: str) -> int:
    return next(event.index for event in journal.all if event.kind == kind and event.chain == chain)


def boss(*turns):
    return lambda request: turns[turn(request)] if turn(request) < len(turns) else say(" | ".join(results(request)))


TEAM = call(("create_subagent", {"name": "w", "system_prompt": "s"}))
BUSY = call(("note", {"text": "busy"}))


def busy_worker(request):
    heard = [message.text for message in request.messages if message.role == "user"]
    return say(heard[-1]) if len(heard) > 1 or request.tools == b"[]" else BUSY


def test_a_cancellation_that_was_written_down_is_carried_out_after_a_resume(tmp_path):
    behaviour = scripted(
        {"main": boss(TEAM, call(("assign_task", {"agent": "w", "prompt": "p"}))), "main/*": busy_worker}
    )

    async def act(run: Live) -> None:
        while "main/w-1.0" not in run.run.agents:
            await asyncio.sleep(0.01)
        await run.cancel("main/w-1.0")

    result, journal, _ = scene(behaviour, tmp_path, act, subagent_steps=None)
    assert "cancelled" in result.answer
    asked = find(journal, "control", "run")
    again, second, model = scene(behaviour, tmp_path, watch, past=journal, keep=asked + 1, subagent_steps=None)
    assert again.answer == result.answer
    assert all(request.agent == "main" for request in model.requests)
    check(second.all, again)


def test_a_cancellation_that_came_too_late_changes_nothing_after_a_resume(tmp_path):
    turns = [TEAM, call(("assign_task", {"agent": "w", "prompt": "p"}))]
    behaviour = scripted({"main": boss(*turns), "main/*": boss(BUSY)})
    result, journal, _ = scene(behaviour, tmp_path, watch)
    late = journal.cut(find(journal, "finished", "main/w-1.0") + 1)
    late.blobs = journal.blobs
    body = {"action": "cancel", "agent": "main/w-1.0", "text": "", "id": "control-0"}
    run_virtually(late.append("run", "control", body))
    again, _, _ = scene(behaviour, tmp_path, watch, past=late)
    assert again.answer == result.answer != ""


def test_what_a_person_wrote_is_read_once_whenever_the_run_dies(tmp_path):
    behaviour = scripted(
        {"main": boss(TEAM, call(("assign_task", {"agent": "w", "prompt": "p"}))), "main/*": busy_worker}
    )

    async def act(run: Live) -> None:
        while "main/w-1.0" not in run.run.agents:
            await asyncio.sleep(0.01)
        await run.steer("main/w-1.0", "stop now")

    result, journal, _ = scene(behaviour, tmp_path, act, subagent_steps=None)
    assert result.answer == "stop now"
    for keep in range(find(journal, "control", "run") + 1, len(journal.all)):
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep, subagent_steps=None)
        assert again.answer == "stop now"
        assert [event.kind for event in second.all if event.chain == "main/w-1.0"].count("message") == 1


def test_a_message_sent_and_not_read_before_the_end_of_a_process_is_read_after_it(tmp_path):
    turns = [
        TEAM,
        call(("start_task", {"agent": "w", "prompt": "p"})),
        call(("send", {"to": "w-1.0", "text": "stop now"})),
        call(("wait", {})),
    ]
    behaviour = scripted({"main": boss(*turns), "main/*": busy_worker})
    result, journal, _ = scene(behaviour, tmp_path, watch, subagent_steps=None)
    for keep in range(find(journal, "outcome", "main#2.0") + 1, len(journal.all)):
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep, subagent_steps=None)
        assert again.answer == result.answer
        assert [event.kind for event in second.all if event.chain == "main/w-1.0"].count("message") == 1


def test_an_approval_is_asked_for_once_and_its_words_are_the_same_after_a_resume(tmp_path):
    sent = []

    @tool(effects="outside")
    def mail(to: str) -> str:
        """Send."""
        sent.append(to)
        return f"sent to {to}"

    behaviour = scripted({"main": boss(call(("mail", {"to": "a"}), ("mail", {"to": "b"})))})

    async def act(run: Live) -> None:
        run.run.desk.attach("person")
        while len(run.run.desk.pending()) < 2:
            await asyncio.sleep(0.01)
        first, second = run.run.desk.pending()
        run.run.desk.approve(first.id, by="person", seen=first.arguments_sha256)
        run.run.desk.deny(second.id, by="person", reason="not b")

    result, journal, _ = scene(behaviour, tmp_path, act, tools=(mail,))
    assert sent == ["a"] and "not b" in result.answer
    decided = max(event.index for event in journal.all if event.kind == "approval")
    for keep in range(decided + 1, len(journal.all)):
        sent.clear()
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep, tools=(mail,))
        if "unknown" not in again.answer:
            assert again.answer == result.answer
            assert heads(second.all) == heads(journal.all)
        began = any(event.kind == "call_started" for event in journal.all[:keep])
        assert sent == ([] if began else ["a"])


def test_a_call_of_a_cancelled_agent_is_not_made_again(tmp_path):
    """It was in the middle of a call when it was cancelled."""
    ran = []

    @tool(effects="none")
    async def slow(text: str) -> str:
        """Take a while."""
        ran.append(text)
        await asyncio.sleep(60)
        return text

    turns = [
        TEAM,
        call(("start_task", {"agent": "w", "prompt": "p"})),
        call(("note", {"text": "a"})),
        call(("note", {"text": "b"})),
        call(("cancel", {"handle": "w-1.0"})),
        call(("wait", {"handles": ["w-1.0"]})),
    ]
    worker = boss(call(("slow", {"text": "x"})))
    behaviour = scripted({"main": boss(*turns), "main/*": worker})
    result, journal, _ = scene(behaviour, tmp_path, watch, tools=(note, slow))
    assert ran == ["x"] and "cancelled" in result.answer
    ran.clear()
    for keep in range(find(journal, "finished", "main/w-1.0") + 1, len(journal.all)):
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep, tools=(note, slow))
        assert again.answer == result.answer and ran == []
        assert heads(second.all) == heads(journal.all)


def test_tasks_that_ended_can_be_read_right_after_a_resume_the_failed_ones_too(tmp_path):
    schema = {"type": "object"}
    turns = [
        call(
            ("create_subagent", {"name": "w", "system_prompt": "s"}),
            ("create_subagent", {"name": "f", "system_prompt": "s", "output_schema": schema}),
        ),
        call(("start_task", {"agent": "w", "prompt": "p"}), ("assign_task", {"agent": "f", "prompt": "p"})),
        call(("wait", {"handles": ["w-1.0"]})),
        call(("read_result", {"handle": "w-1.0"}), ("read_result", {"handle": "f-1.1"}), ("list_agents", {})),
    ]
    behaviour = scripted({"main": boss(*turns), "main/*": boss(BUSY, BUSY)})
    result, journal, _ = scene(behaviour, tmp_path, watch)
    assert "noted" in result.answer and "failed" in result.answer and "f-1.1: done" in result.answer
    for keep in range(4, len(journal.all)):
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep)
        assert again.answer == result.answer, keep
        assert heads(second.all) == heads(journal.all)


def test_records_that_do_not_fit_end_the_run_with_one_error_also_in_a_sub_agent(tmp_path):
    turns = [TEAM, call(("assign_task", {"agent": "w", "prompt": "p"}))]
    behaviour = scripted({"main": boss(*turns), "main/*": boss(BUSY)})
    _, journal, _ = scene(behaviour, tmp_path, watch)
    at = find(journal, "started", "main/w-1.0")
    body = journal.all[at].read() | {"tools": ["other"]}
    wrong = MemoryJournal()
    for event in journal.all[: at + 1]:
        told = body if event.index == at else event.read()
        run_virtually(wrong.append(event.chain, event.kind, told, event.read_note()))
    with pytest.raises(JournalError, match="cannot be resumed"):
        scene(behaviour, tmp_path, watch, past=wrong)


def test_a_budget_is_not_overshot_by_agents_that_go_on_before_others_have_counted(tmp_path):
    turns = [TEAM, call(*(("start_task", {"agent": "w", "prompt": str(n)}) for n in range(6))), call(("wait", {}))]
    behaviour = scripted({"main": boss(*turns), "main/*": lambda request: BUSY})
    limits = Limits(steps=24, calls=40, agents=10)
    _, journal, _ = scene(behaviour, tmp_path, watch, limits=limits, subagent_steps=None)
    assert sum(map(is_step, journal.all)) == 24
    for keep in range(20, len(journal.all), 3):
        again, second, _ = scene(
            behaviour, tmp_path, watch, past=journal, keep=keep, limits=limits, subagent_steps=None
        )
        assert sum(map(is_step, second.all)) <= 24
        assert again.spent["steps"]["spent"] == sum(map(is_step, second.all))


def test_what_a_child_gave_back_can_be_given_away_again_after_a_resume(tmp_path):
    """The second child's share is only there because the first one has ended."""
    kinds = call(
        ("create_subagent", {"name": "w", "system_prompt": "s", "budget": {"steps": 12}}),
        ("create_subagent", {"name": "v", "system_prompt": "s", "budget": {"steps": 14}}),
    )
    turns = [
        kinds,
        call(("start_task", {"agent": "w", "prompt": "p"})),
        *[call(("note", {"text": str(n)})) for n in range(4)],
        call(("start_task", {"agent": "v", "prompt": "p"})),
        call(("wait", {})),
    ]
    behaviour = scripted({"main": boss(*turns), "main/*": lambda request: say("ok")})
    limits = Limits(steps=25, agents=5)
    result, journal, _ = scene(behaviour, tmp_path, watch, limits=limits)
    assert result.answer.count("ok") == 2
    for keep in range(5, len(journal.all)):
        again, second, _ = scene(behaviour, tmp_path, watch, past=journal, keep=keep, limits=limits)
        assert again.answer == result.answer
        assert heads(second.all) == heads(journal.all)
