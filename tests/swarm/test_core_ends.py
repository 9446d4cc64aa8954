"""Contracts of how agents end: by time, by cancellation, by errors nobody expected, with their owner; and what they
leave behind."""

import asyncio

import pytest

from perilune.swarm.budget import Budget, Limits
from perilune.swarm.journal.event import JournalError
from perilune.swarm.swarm import Live, Swarm
from perilune.swarm.tools.tool import tool
from tests.swarm.core_runs import TOOLS, MemoryJournal, check, config, drawn, live, note
from tests.swarm.models import FunctionModel, call, results, say, scripted, turn
from tests.swarm.virtual_time import run_virtually

KINDS = call(("create_subagent", {"name": "w", "system_prompt": "s"}))
ASSIGN = call(("assign_task", {"agent": "w", "prompt": "p"}))
START = call(("start_task", {"agent": "w", "prompt": "p"}))
BUSY = call(("note", {"text": "busy"}))


@tool(effects="none")
async def forever() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return "never"


@tool(effects="outside")
def mail(to: str) -> str:
    """Needs approval."""
    return "sent"


def play(script, folder, act=None, *, tools=(note, forever, mail), model=None, **changes):
    journal = MemoryJournal()

    async def opened() -> MemoryJournal:
        return journal

    async def scene():
        swarm = Swarm(
            config(**changes), client=model or FunctionModel(scripted(script), seed=1), tools=tools, open_journal=opened
        )
        async with swarm.start("Do it.", folder=folder) as run:
            await run.begin()
            if act is not None:
                await act(run)
            await run.ended()
            return await run._result()

    return run_virtually(scene()), journal


def ends(journal: MemoryJournal) -> dict[str, str]:
    return {event.chain: event.read()["status"] for event in journal.all if event.kind == "finished"}


def then_tell(*turns):
    return lambda r: turns[turn(r)] if turn(r) < len(turns) else say(" | ".join(results(r)))


@pytest.fixture
def virtual_budgets(monkeypatch):
    """Budgets look at the clock of the loop, which jumps."""

    def root(limits: Limits) -> Budget:
        return Budget(limits, None, "run", lambda: asyncio.get_running_loop().time())

    monkeypatch.setattr(Budget, "root", root)


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocked",
    [
        [KINDS, ASSIGN],
        [KINDS, START, call(("wait", {}))],
        [call(("forever", {}))],
        [call(("mail", {"to": "x"}))],
        [call(("forever", {}), ("note", {"text": "n"}))],
    ],
    ids=["assign_task", "wait", "tool", "approval", "turn"],
)
def test_when_time_is_over_an_agent_ends_whatever_it_waits_for(blocked, tmp_path, virtual_budgets):
    async def act(run: Live) -> None:
        run.run.desk.attach("person who never decides")

    behaviour = {"main": then_tell(*blocked), "main/*": lambda r: call(("forever", {}))}
    result, journal = play(behaviour, tmp_path, act, limits=Limits(seconds=30, agents=5), tool_seconds=10**6)
    assert result.status == "budget" and "seconds" in (result.error or "")
    assert ends(journal)["main"] == "budget"
    assert set(ends(journal)) == {event.chain for event in journal.all if event.kind == "started"}


def test_a_child_whose_time_is_over_leaves_its_parent_at_work(tmp_path):
    kinds = call(("create_subagent", {"name": "w", "system_prompt": "s", "budget": {"seconds": 3}}))
    behaviour = {"main": then_tell(kinds, ASSIGN), "main/*": lambda r: call(("forever", {}))}
    result, journal = play(behaviour, tmp_path, tool_seconds=10**6)
    assert result.status == "done" and "(budget)" in result.answer
    assert ends(journal) == {"main": "done", "main/w-1.0": "budget"}


# Cancellation --------------------------------------------------------------------------------------------------------


def test_an_agent_cancelled_at_any_moment_ends_once_and_everything_comes_back(tmp_path):
    """The moments are those of the virtual clock, in steps smaller than any latency."""
    script = {
        "main": then_tell(KINDS, ASSIGN),
        "main/w-1.0": then_tell(
            KINDS, call(("assign_task", {"agent": "w", "prompt": "q"}), ("note", {"text": "12345"}))
        ),
        "main/w-1.0/*": then_tell(BUSY),
    }
    seen = set()
    for moment in range(0, 120):

        async def act(run: Live, moment=moment) -> None:
            while "main/w-1.0" not in run.run.agents:
                await asyncio.sleep(0.0005)
            await asyncio.sleep(moment * 0.0007)
            if not run.run.agents["main/w-1.0"].has_ended:
                await run.cancel("main/w-1.0")

        result, journal = play(script, tmp_path, act)
        check(journal.all, result)
        seen.add(ends(journal)["main/w-1.0"])
        assert result.status == "done"
    assert seen == {"done", "cancelled"}


def test_children_end_with_a_parent_that_does_not_wait_for_them(tmp_path):
    starts = call(*(("start_task", {"agent": "w", "prompt": str(n)}) for n in range(20)))
    script = {"main": then_tell(KINDS, starts, BUSY, say("end")), "main/*": lambda r: BUSY}
    result, journal = play(script, tmp_path, subagent_steps=None, max_active=3)
    assert result.answer == "end"
    check(journal.all, result)
    assert {status for chain, status in ends(journal).items() if chain != "main"} == {"cancelled"}


def test_a_task_cancelled_in_the_queue_has_not_started_and_gives_back_its_budget(tmp_path):
    kinds = call(("create_subagent", {"name": "w", "system_prompt": "s", "budget": {"steps": 20}}))
    turns = [
        kinds,
        call(("start_task", {"agent": "w", "prompt": "1"}), ("start_task", {"agent": "w", "prompt": "2"})),
        call(("cancel", {"handle": "w-1.1"})),
        call(("wait", {"handles": ["w-1.1"]})),
        call(("start_task", {"agent": "w", "prompt": "3"})),
        call(("cancel", {"handle": "w-1.0"}), ("cancel", {"handle": "w-4.0"})),
    ]
    script = {"main": then_tell(*turns), "main/*": lambda r: call(("forever", {}))}
    result, journal = play(script, tmp_path, max_active=1, limits=Limits(steps=50, agents=5))
    check(journal.all, result)
    assert "main/w-1.1" not in ends(journal) and result.parallelism.total_steps == 8
    assert result.answer == "w-1.0 is cancelled. | w-4.0 is cancelled."


def test_a_person_cancels_a_task_that_is_still_in_the_queue(tmp_path):
    async def act(run: Live) -> None:
        while "main/w-1.1" not in run.run.agents:
            await asyncio.sleep(0.001)
        await run.cancel("main/w-1.1")

    tasks = call(("assign_task", {"agent": "w", "prompt": "1"}), ("assign_task", {"agent": "w", "prompt": "2"}))
    script = {"main": then_tell(KINDS, tasks), "main/*": then_tell(BUSY, BUSY, say("did it"))}
    result, journal = play(script, tmp_path, act, max_active=1)
    assert result.answer.startswith("did it | Ended without an answer (cancelled)")
    assert not any(event.kind == "reply" for event in journal.all if event.chain == "main/w-1.1")


def test_a_merge_that_fails_gives_back_what_later_levels_would_have_used(tmp_path):
    kinds = call(
        ("create_subagent", {"name": "w", "system_prompt": "s"}),
        (
            "create_subagent",
            {"name": "m", "system_prompt": "s", "budget": {"steps": 5}, "output_schema": {"type": "object"}},
        ),
    )
    turns = [
        kinds,
        call(("map_task", {"agent": "w", "template": "{item}", "items": ["1", "2", "3"]})),
        call(("wait", {})),
        call(("reduce_task", {"agent": "m", "template": "{parts}", "handles": ["w-1.0"], "fan_in": 2})),
        call(("wait", {})),
    ]
    result, journal = play({"main": then_tell(*turns), "main/*": lambda r: say("no object")}, tmp_path)
    assert "merges failed" in result.answer
    check(journal.all, result)


def test_leaving_a_run_writes_no_end_and_it_can_be_resumed(tmp_path):
    behaviour = drawn(4, racy=False)
    whole, uncut, _, _ = live(behaviour, tmp_path, seed=1)
    for seconds in (0.001, 0.02, 0.05, 0.1, 0.15):
        journal = MemoryJournal()

        async def opened(journal=journal) -> MemoryJournal:
            return journal

        async def leave(seconds=seconds, opened=opened) -> None:
            swarm = Swarm(
                config(),
                client=FunctionModel(behaviour, seed=2),
                tools=TOOLS,
                open_journal=opened,
                extras={"written": []},
            )
            async with swarm.start("Do it.", folder=tmp_path) as run:
                await run.begin()
                await asyncio.sleep(seconds)

        run_virtually(leave())
        assert "cancelled" not in ends(journal).values()
        result, second, _, _ = live(behaviour, tmp_path, seed=3, past=journal)
        check(second.all, result)
        if not any(event.kind == "outcome" and event.read()["status"] == "unknown" for event in second.all):
            assert result.answer == whole.answer


# Errors --------------------------------------------------------------------------------------------------------------


def test_an_error_nobody_expected_ends_a_sub_agent_with_its_words_and_not_the_run(tmp_path):
    def broken(request):
        raise ZeroDivisionError("by the model's client")

    result, journal = play({"main": then_tell(KINDS, ASSIGN), "main/*": broken}, tmp_path)
    assert "ZeroDivisionError: by the model's client" in result.answer
    assert ends(journal)["main/w-1.0"] == "failed"


def test_an_error_nobody_expected_in_the_orchestrator_ends_the_process_and_the_run_goes_on_later(tmp_path):
    fails = [True]

    def behaviour(request):
        if turn(request) == 1 and fails:
            raise ZeroDivisionError("once")
        return BUSY if turn(request) < 3 else say("end")

    journal = MemoryJournal()

    async def opened() -> MemoryJournal:
        return journal

    with pytest.raises(ZeroDivisionError):
        run_virtually(
            Swarm(config(), client=FunctionModel(behaviour), tools=[note], open_journal=opened).run(
                "t", folder=tmp_path
            )
        )
    fails.clear()
    assert "finished" not in {event.kind for event in journal.all}
    model = FunctionModel(behaviour)
    result = run_virtually(Swarm(config(), client=model, tools=[note], open_journal=opened).resume(tmp_path))
    assert result.answer == "end" and len(model.requests) == 3


@pytest.mark.parametrize(
    "error", [KeyError("k"), RuntimeError(""), RecursionError(), TimeoutError(), ExceptionGroup("g", [ValueError()])]
)
def test_whatever_a_tool_raises_is_an_outcome_the_model_can_read(error, tmp_path):
    @tool(effects="none")
    def breaks() -> str:
        """Breaks."""
        raise error

    result, _ = play({"main": then_tell(call(("breaks", {})))}, tmp_path, tools=(breaks,))
    assert result.status == "done" and result.answer.startswith("Error: breaks")


def test_a_journal_that_cannot_be_written_ends_the_run_with_its_error_and_no_hang(tmp_path):
    whole, journal, _, _ = live(drawn(2, racy=True), tmp_path, seed=2)
    for limit in range(1, len(journal.all)):
        with pytest.raises(JournalError, match="disk is full"):
            live(drawn(2, racy=True), tmp_path, seed=2, refuses_after=limit)


# Places --------------------------------------------------------------------------------------------------------------


def test_one_place_is_enough_for_three_levels(tmp_path):
    deep = then_tell(KINDS, call(*(("assign_task", {"agent": "w", "prompt": str(n)}) for n in range(3))))
    script = {"main": deep, "main/*": lambda r: deep(r) if r.agent.count("/") < 3 else say("leaf")}
    result, journal = play(script, tmp_path, max_active=1, max_depth=3, context_tokens=30_000)
    assert result.answer.count("leaf") == 27
    check(journal.all, result)


def test_a_thousand_children_at_once(tmp_path):
    items = [str(n) for n in range(1000)]
    turns = [KINDS, call(("map_task", {"agent": "w", "template": "{item}", "items": items})), call(("wait", {}))]
    script = {"main": then_tell(*turns), "main/*": lambda r: say(r.messages[1].text)}
    result, journal = play(script, tmp_path, limits=Limits(agents=1000), context_tokens=30_000)
    assert "1,000 of 1,000 items done" in result.answer
    check(journal.all, result)


def test_items_of_a_worker_that_was_cancelled_are_kept_as_far_as_it_came(tmp_path):
    items = {"agent": "w", "template": "{item}", "items": ["a", "b", "stop", "d"], "agents": 1}

    async def act(run: Live) -> None:
        while "main/w-1.0.0" not in run.run.agents or len(run.run.agents["main/w-1.0.0"].answers) < 2:
            await asyncio.sleep(0.001)
        await run.cancel("main/w-1.0.0")

    def worker(request):
        return call(("forever", {})) if request.messages[1].text == "stop" else say(f"did {request.messages[1].text}")

    turns = [KINDS, call(("map_task", items)), call(("wait", {}))]
    result, _ = play({"main": then_tell(*turns), "main/*": worker}, tmp_path, act)
    assert "2 of 4 items done" in result.answer and "did b" in result.answer and "(cancelled)" in result.answer
