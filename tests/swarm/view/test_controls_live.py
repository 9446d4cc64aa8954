"""A person at the page of a real run: allows one call, denies another, steers and cancels; the journal tells of it."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from perilune.cli import main
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.scripted import Call, Reply, ThreadedServer, Turn
from perilune.swarm.session import Settings, conduct
from perilune.swarm.swarm import SwarmResult
from perilune.swarm.tools.tool import Tool, ToolContext, tool
from tests.swarm.view.serving import SECONDS
from tests.swarm.view.watching import Watched

pytestmark = pytest.mark.needs_tool("chromium")
LETTER = "Only the bright ones."
ALLOWED, DENIED = {"to": "alice", "text": "yes \u202e no"}, {"to": "bob", "text": "no"}


def script(turn: Turn) -> Reply:
    """Sends two notes and lets somebody rest, all at once; then tells what came of it."""
    if "rest" in turn.task:
        return Reply(calls=(Call("rest", {}),))
    if turn.step == 0:
        resting = {"name": "sleeper", "system_prompt": "You rest."}
        return Reply(calls=(Call("create_subagent", resting),))
    if turn.step == 1:
        calls = Call("send_note", ALLOWED), Call("send_note", DENIED)
        return Reply(calls=(*calls, Call("assign_task", {"agent": "sleeper", "prompt": "Please rest."})))
    letters = [str(each["content"]) for each in turn.since_task if each["role"] == "user"]
    return Reply(json.dumps({"letters": letters, "results": [result for _, _, result in turn.exchanges]}))


def tools(sent: list[dict[str, str]]) -> tuple[Tool, ...]:
    @tool(effects="outside")
    async def send_note(to: str, text: str) -> str:
        """Send a note to a person."""
        sent.append({"to": to, "text": text})
        return f"sent to {to}"

    @tool(effects="none")
    async def rest(context: ToolContext) -> str:
        """Rest until somebody ends it."""
        await asyncio.sleep(3600)
        return "rested"

    return send_note, rest


def begun(folder: Path, base_url: str, sent: list[dict[str, str]]) -> tuple[str, "Future[SwarmResult]"]:
    """The address of the view, and the run, which goes on in a thread of its own."""
    address: Future[str] = Future()
    ended: Future[SwarmResult] = Future()
    settings = Settings(model="scripted", base_url=base_url, api_key_env=None, tools=("send_note", "rest"))

    def work() -> None:
        try:
            said = {"view": True, "quiet": True, "more_tools": tools(sent)}
            say = lambda text: address.done() or address.set_result(text.partition("watch it at ")[2])  # noqa: E731
            ended.set_result(asyncio.run(conduct("Tell two people.", folder, settings, say=say, **said)))
        except BaseException as error:
            ended.set_exception(error)
            if not address.done():
                address.set_exception(error)

    threading.Thread(target=work, name="run", daemon=True).start()
    return address.result(SECONDS), ended


def card(page: Any, who: str) -> Any:
    return page.locator(".approval", has_text=who)


def test_what_a_person_decides_at_the_page_happens_and_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, sent = tmp_path / "run", []
    with ThreadedServer(script) as server:
        address, ended = begun(folder, server.base_url, sent)
        watched = watch(address)
        page = watched.page
        assert card(page, "alice").locator(".arguments").text_content() == '{"text":"yes <U+202E> no","to":"alice"}'
        assert sent == []  # nobody has decided yet
        card(page, "bob").get_by_role("button", name="Deny").click()
        card(page, "alice").get_by_role("button", name="Allow").click()
        page.wait_for_selector("#approvals", state="hidden")
        page.click("#agent-0")
        page.fill("textarea", LETTER)
        page.get_by_role("button", name="Steer").click()
        page.wait_for_selector(".said >> text=sent")
        page.click("#agent-1")
        page.get_by_role("button", name="Cancel agent").click()
        page.get_by_role("button", name="Really cancel").click()
        result = ended.result(SECONDS)
        page.wait_for_selector("#connection >> text=view closed")
        watched.check()
    assert result.status == "done"
    assert sent == [ALLOWED]  # exactly what was shown, and nothing of what was denied
    told = json.loads(result.answer)
    assert LETTER in told["letters"][0]
    assert [text for text in told["results"] if "sent to alice" in text]
    assert [text for text in told["results"] if "refused by web view" in text]
    with SQLiteReader(folder / "journal.sqlite") as reader:
        events = list(reader.events())
    check_journal(events)
    main(["swarm", "audit", str(folder), "--out", str(tmp_path / "audit.jsonl")])  # ends with 1 where it is not intact
    assert "intact" in capsys.readouterr().err


def check_journal(events: list[Any]) -> None:
    decided = {
        (body["arguments_sha256"], body["decision"], body["by"], body["tool"])
        for body in (event.read() for event in events if event.kind == "approval")
    }
    assert decided == {
        (digest(ALLOWED), "allow", "web view", "send_note"),
        (digest(DENIED), "deny", "web view", "send_note"),
    }
    began = [event.read() for event in events if event.kind == "call_started"]
    assert [body["arguments_sha256"] for body in began if body["tool"] == "send_note"] == [digest(ALLOWED)]
    # The verdict stands in the journal before the call that it allows.
    order = [event.kind for event in events if event.kind in ("approval", "call_started")]
    assert order.index("approval") < order.index("call_started")
    outcomes = [event.read() for event in events if event.kind == "outcome"]
    assert sorted(body["status"] for body in outcomes if body["tool"] == "send_note") == ["denied", "ok"]
    controls = [event.read() for event in events if event.kind == "control"]
    sleeper = next(event.chain for event in events if "sleeper" in event.chain)
    assert [(body["action"], body["agent"]) for body in controls] == [("steer", "main"), ("cancel", sleeper)]
    assert controls[0]["text"] == LETTER
    ends = {event.chain: event.read()["status"] for event in events if event.kind == "finished"}
    assert ends == {"main": "done", sleeper: "cancelled"}


def digest(arguments: dict[str, str]) -> str:
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
