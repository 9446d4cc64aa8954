"""Approvals: one person, one call, exactly these arguments; silence is a refusal."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perilune.swarm.approvals import ApprovalDesk, ApprovalError, ApprovalRequest, Verdict

ARGUMENTS = {"to": "a@example.org", "body": "hello"}


def ask(desk: ApprovalDesk, *, agent: str = "main", call: str = "3.0", tool: str = "mail", **changed: Any) -> Coroutine:
    return desk.ask(agent=agent, call=call, tool=tool, arguments=ARGUMENTS | changed, reason="goes outside")


async def shown(desk: ApprovalDesk) -> ApprovalRequest:
    while not desk.pending():
        await asyncio.sleep(0)
    return desk.pending()[0]


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


def test_with_nobody_there_a_request_is_refused_at_once() -> None:
    verdict = asyncio.run(asyncio.wait_for(ask(ApprovalDesk()), 20))
    assert (verdict.is_allowed, verdict.by, verdict.reason) == (False, "nobody", "nobody is there to approve it")


def test_an_approval_is_recorded_with_the_hash_of_what_was_shown() -> None:
    async def scene() -> None:
        desk = ApprovalDesk()
        desk.attach("web")
        asking = asyncio.create_task(ask(desk))
        request = await shown(desk)
        assert request.arguments == '{"body":"hello","to":"a@example.org"}'
        assert (request.agent, request.call, request.tool, request.reason) == ("main", "3.0", "mail", "goes outside")
        desk.approve(request.id, by="web", seen=request.arguments_sha256)
        verdict = await asking
        assert verdict.record() == {
            "agent": "main",
            "call": "3.0",
            "tool": "mail",
            "arguments_sha256": hashlib.sha256(request.arguments.encode()).hexdigest(),
            "decision": "allow",
            "by": "web",
            "scope": "call",
            "reason": "",
        }
        assert verdict.covers("main", "3.0", "mail", dict(reversed(ARGUMENTS.items())))
        assert not verdict.covers("main", "3.0", "mail", ARGUMENTS | {"body": "hello "})
        assert not verdict.covers("main", "3.1", "mail", ARGUMENTS)
        assert not verdict.covers("main/a-0.0", "3.0", "mail", ARGUMENTS)
        assert desk.pending() == ()

    run(scene)


def test_a_decision_on_other_arguments_than_shown_does_not_count() -> None:
    async def scene() -> None:
        desk = ApprovalDesk()
        desk.attach("terminal")
        asking = asyncio.create_task(ask(desk))
        request = await shown(desk)
        with pytest.raises(ApprovalError, match="has other arguments than those shown"):
            desk.approve(request.id, by="terminal", seen="0" * 64)
        assert desk.pending() == (request,)
        desk.deny(request.id, by="terminal", reason="not today")
        verdict = await asking
        assert (verdict.is_allowed, verdict.reason, verdict.record()["decision"]) == (False, "not today", "deny")
        assert not verdict.covers("main", "3.0", "mail", ARGUMENTS)

    run(scene)


def test_the_first_decision_counts_and_a_second_is_told_so() -> None:
    async def scene() -> None:
        desk = ApprovalDesk()
        desk.attach("web")
        desk.attach("terminal")
        asking = asyncio.create_task(ask(desk))
        request = await shown(desk)
        desk.deny(request.id, by="web")
        with pytest.raises(ApprovalError, match="it is decided, or its agent has ended"):
            desk.approve(request.id, by="terminal", seen=request.arguments_sha256)
        assert not (await asking).is_allowed
        with pytest.raises(ApprovalError, match="no request 'unknown' waits"):
            desk.deny("unknown", by="web")

    run(scene)


def test_an_approval_is_used_once_and_one_for_the_run_only_for_the_same_agent_tool_and_arguments() -> None:
    async def scene() -> None:
        desk = ApprovalDesk(seconds=0.01)
        leave = desk.attach("web")

        async def decided(scope: str, **what: Any) -> Verdict:
            desk.seconds = None
            asking = asyncio.create_task(ask(desk, **what))
            request = await shown(desk)
            desk.approve(request.id, by="web", seen=request.arguments_sha256, scope=scope)
            return await asking

        assert (await decided("call")).is_allowed
        leave()
        assert not (await ask(desk, call="4.0")).is_allowed, "the same call again asks again"
        leave = desk.attach("web")
        assert (await decided("run")).record()["scope"] == "run"
        leave()
        again = await ask(desk, call="5.0")
        assert again.is_allowed and again.by == "web" and again.covers("main", "5.0", "mail", ARGUMENTS)
        for other in ({"body": "hello!"}, {"agent": "main/a-0.0"}, {"tool": "post"}):
            assert not (await ask(desk, call="6.0", **other)).is_allowed

    run(scene)


def test_time_and_departure_are_refusals() -> None:
    async def scene() -> None:
        desk = ApprovalDesk(seconds=0.01)
        first, second = desk.attach("web"), desk.attach("terminal")
        verdict = await ask(desk)
        assert verdict.reason == "nobody decided within 0.01 seconds" and not verdict.is_allowed
        desk.seconds = None
        asking = asyncio.create_task(ask(desk))
        await shown(desk)
        first()
        first()
        await asyncio.sleep(0)
        assert desk.pending()
        late = desk.attach("late")
        second()
        assert desk.pending(), "the one who came late may still decide"
        late()
        verdict = await asking
        assert verdict.reason == "nobody is left to approve it" and not verdict.is_allowed

    run(scene)


def test_an_agent_that_ends_takes_its_request_along() -> None:
    async def scene() -> None:
        changes: list[int] = []
        desk = ApprovalDesk(on_change=lambda requests: changes.append(len(requests)))
        desk.attach("web")
        asking = asyncio.create_task(ask(desk))
        await shown(desk)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert desk.pending() == () and changes == [1, 0]

    run(scene)


@pytest.mark.parametrize("answer, allowed", [(True, True), (False, False), ("yes", False), (1, False)])
@pytest.mark.parametrize("waits", [False, True])
def test_a_callback_decides_with_true_and_nothing_else_allows(answer: object, allowed: bool, waits: bool) -> None:
    async def slowly(request: ApprovalRequest) -> Any:
        await asyncio.sleep(0)
        return answer

    async def scene() -> None:
        desk = ApprovalDesk()
        desk.attach("callback", slowly if waits else lambda request: answer)
        verdict = await ask(desk)
        assert (verdict.is_allowed, verdict.by) == (allowed, "callback")

    run(scene)


def test_a_callback_that_fails_refuses_and_one_that_passes_leaves_it_to_others() -> None:
    async def scene() -> None:
        desk = ApprovalDesk()
        leave = desk.attach("broken", lambda request: 1 / 0)
        verdict = await ask(desk)
        assert not verdict.is_allowed and verdict.reason == "broken failed: ZeroDivisionError: division by zero"
        leave()
        desk.attach("passes", lambda request: None)
        assert (await ask(desk)).reason == "nobody is left to approve it"
        desk.attach("web")
        desk.attach("late callback", lambda request: None)
        asking = asyncio.create_task(ask(desk))
        request = await shown(desk)
        for _ in range(5):
            await asyncio.sleep(0)
        desk.approve(request.id, by="web", seen=request.arguments_sha256)
        assert (await asking).is_allowed

    run(scene)


def test_a_resumed_run_takes_verdicts_from_the_journal_once() -> None:
    async def scene() -> None:
        before = ApprovalDesk()
        before.attach("callback", lambda request: True)
        record = (await ask(before)).record()
        desk = ApprovalDesk()
        desk.restore(record)
        assert not (await ask(desk, call="3.1")).is_allowed, "another call"
        assert not (await ask(desk, body="other")).is_allowed, "other arguments"
        verdict = await ask(desk)
        assert verdict.is_allowed and verdict.is_recorded and verdict.by == "callback"
        assert not (await ask(desk)).is_allowed, "it is used up"
        desk.restore(record | {"decision": "deny"})
        assert (await ask(desk)).is_recorded
        desk.restore(record | {"scope": "run"})
        assert (await ask(desk, call="9.9")).is_allowed

    run(scene)
