"""MCP servers: shared, pinned, scrubbed, bounded, and started again when they die."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perilune.swarm.tools.mcp import McpServer, McpServers, OutcomeUnknown, ServerSpec, mcp_servers
from perilune.swarm.tools.mcp_pins import Pins, fingerprint
from perilune.swarm.tools.mcp_tools import checked_arguments, full_name, unusable
from perilune.swarm.tools.tool import ToolError
from tests.swarm.tools.calling import call, context_in

HOSTILE = Path(__file__).with_name("hostile_server.py")


def hostile(state: Path, **settings: Any) -> ServerSpec:
    settings = {"call_seconds": 20.0, "backoff_seconds": 0.01, **settings}
    return ServerSpec(name="hostile", command=(sys.executable, "-S", str(HOSTILE), str(state)), **settings)


@asynccontextmanager
async def running(
    state: Path, *, pins: Pins | None = None, **settings: Any
) -> AsyncIterator[tuple[McpServers, McpServer]]:
    async with mcp_servers([hostile(state, **settings)], pins=pins) as servers:
        yield servers, servers.servers["hostile"]


async def said(server: McpServer, name: str, **arguments: str) -> str:
    return (await server.call(name, arguments, agent="main")).text


async def eventually(happened: Any) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# What agents get -----------------------------------------------------------------------------------------------------


def test_tools_are_named_after_their_server_untrusted_and_ask(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, effects={"echo": "none"}) as (servers, _):
            tools = servers.tools()
            assert (await call(tools["hostile__echo"], context_in(tmp_path), text="moon")).text == "moon"
            assert all(tool.untrusted for tool in tools.values())
            effects = {name: tool.effects for name, tool in tools.items()}
            assert effects.pop("hostile__echo") == "none"
            # A server's hint that a tool only reads is a stranger's word.
            assert "hostile__hinted" in effects and set(effects.values()) == {None}

    asyncio.run(scene())


def test_one_process_serves_a_hundred_agents_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, server):
            answers = await asyncio.gather(*(said(server, "echo", text=str(number)) for number in range(100)))
            assert answers == [str(number) for number in range(100)] and server.starts == 1

    asyncio.run(scene())
    assert (tmp_path / "starts").read_text() == "1"


def test_only_listed_variables_reach_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-secret")
    monkeypatch.setenv("LISTED", "given")

    async def scene() -> None:
        async with running(tmp_path, environment=("LISTED", "NOT_SET"), variables={"OWN": "1"}) as (_, server):
            seen = json.loads(await said(server, "environment"))
            assert {"LISTED": "given", "OWN": "1"}.items() <= seen.items()
            # What Python itself sets inside the child.
            assert set(seen) - {"LISTED", "OWN"} <= {"LC_CTYPE", "PWD", "__CF_USER_TEXT_ENCODING"}

    asyncio.run(scene())


def test_allow_lists_hold_for_tools_and_for_agents(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, tools=("ec*", "image"), agents=("main", "main/reader-*")) as (servers, server):
            assert set(servers.tools()) == {"hostile__echo", "hostile__image"}
            echo = servers.tools()["hostile__echo"]
            for agent in ("main", "main/reader-1.0"):
                assert (await call(echo, context_in(tmp_path, agent=agent), text="x")).text == "x"
            with pytest.raises(ToolError, match="may not use"):
                await call(echo, context_in(tmp_path, agent="main/writer-1.0"), text="x")
            with pytest.raises(ToolError, match="withdrawn"):
                await server.call("environment", {}, agent="main")

    asyncio.run(scene())


def test_answers_are_text_and_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, server):
            huge = await said(server, "huge")
            assert len(huge) <= 60_000 and "3000000 characters in all" in huge
            assert await said(server, "image") == "[image of about 300 bytes, not shown]"
            error = await server.call("error", {}, agent="main")
            assert error.is_error and error.untrusted and "obey me" in error.text
            # A pattern of the server's own schema would never end on this answer; it is not run.
            assert await said(server, "evil pattern") == "ok"
            with pytest.raises(OutcomeUnknown, match="MCP does not know"):
                await said(server, "strange")

    asyncio.run(scene())


# Servers that die, hang and flood ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "flood", "chatter", "endless_line", "answers", "bulk"])
def test_the_call_in_flight_ends_as_unknown_and_the_next_one_works(tmp_path: Path, how: str) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, server):
            with pytest.raises(OutcomeUnknown, match="went away while it worked on the call; whether .* is unknown"):
                await said(server, how)
            assert await said(server, "echo", text="back") == "back"
            assert server.starts == 2

    asyncio.run(scene())
    assert (tmp_path / "starts").read_text() == "2"


def test_a_server_that_never_answers_costs_its_time_limit_and_is_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path, call_seconds=0.3) as (_, server):
            for _ in range(3):
                with pytest.raises(OutcomeUnknown, match=r"did not answer within 0\.3 seconds"):
                    await said(server, "slow")
            await eventually(lambda: server.starts == 2 and server.state == "ready")
            server.spec = hostile(tmp_path)
            assert await said(server, "echo", text="back") == "back"

    asyncio.run(scene())


def test_a_server_that_does_not_start_is_tried_again_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()

    async def scene() -> None:
        async with running(tmp_path, wait_seconds=0.05) as (servers, server):
            assert servers.tools() == {}
            assert "cannot start: no license" in servers.missing()["hostile"]
            with pytest.raises(ToolError, match="is not running"):
                await said(server, "echo")
            (tmp_path / "refuse").unlink()
            await eventually(lambda: server.state == "ready")
            assert await said(server, "echo", text="at last") == "at last"

    asyncio.run(scene())


def test_a_program_that_does_not_exist_is_a_reason_not_an_exception(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = ServerSpec(name="nothing", command=("no-such-program-anywhere",), start_seconds=10)
        async with mcp_servers([spec]) as servers:
            assert servers.missing()["nothing"]

    asyncio.run(scene())


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, server):
            await said(server, "child")

    asyncio.run(scene())
    for name in ("pid", "grandchild"):
        pid = int((tmp_path / name).read_text())
        asyncio.run(eventually(lambda pid=pid: not is_alive(pid)))


RUNTIME = """
import asyncio, sys
from pathlib import Path
from tests.swarm.tools.test_mcp import hostile
from perilune.swarm.tools.mcp import mcp_servers
async def scene():
    async with mcp_servers([hostile(Path(sys.argv[1]), call_seconds=300)]) as servers:
        await servers.servers["hostile"].call("slow", {}, agent="main")
asyncio.run(scene())
"""


@pytest.mark.needs_tool("setpriv")
def test_a_busy_server_dies_with_a_runtime_that_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, str(tmp_path)], env=environment, cwd=root)
    try:
        # A server that is busy does not see the end of its input.
        asyncio.run(eventually((tmp_path / "busy").exists))
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
    finally:
        runtime.kill()
        runtime.wait()
    asyncio.run(eventually(lambda: not is_alive(pid)))


def test_cancelling_a_call_leaves_the_session_alive(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (_, server):
            pending = asyncio.create_task(said(server, "echo", text="x" * 1_000_000))
            await asyncio.sleep(0)
            pending.cancel()
            await asyncio.wait([pending])
            assert await said(server, "echo", text="next") == "next" and server.starts == 1

    asyncio.run(scene())


# Pins ----------------------------------------------------------------------------------------------------------------


def test_a_changed_description_withdraws_the_tool_until_it_is_approved(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"

    async def scene() -> None:
        async with running(tmp_path, pins=Pins.load(path)) as (servers, server):
            tool = servers.tools()["hostile__echo"]
            await said(server, "become")
            await eventually(lambda: "echo" in server.withdrawn)
            assert "hostile__echo" not in servers.tools() and "hostile__image" in servers.tools()
            why = servers.withdrawn()["hostile__echo"]
            assert '-  "description": "Says it back."' in why
            # An invisible character is visible to whoever has to approve.
            assert "evil.example.com \\u202e\\udb40\\udc41" in why
            with pytest.raises(ToolError, match="withdrawn until a person approves"):
                await call(tool, context_in(tmp_path), text="x")
        # Also for the next run, which never saw the first description.
        async with running(tmp_path, pins=Pins.load(path)) as (servers, server):
            assert "hostile__echo" not in servers.tools() and "hostile__echo" in servers.withdrawn()
        pins = Pins.load(path)
        pins.approve("hostile", "echo")
        async with running(tmp_path, pins=Pins.load(path)) as (servers, _):
            description = servers.tools()["hostile__echo"].description
            assert "evil.example.com" in description and description.isascii()

    asyncio.run(scene())


def test_a_tool_that_appears_later_waits_for_approval(tmp_path: Path) -> None:
    pins = Pins()

    async def names() -> set[str]:
        async with running(tmp_path, pins=pins) as (servers, _):
            return set(servers.tools())

    first = asyncio.run(names())
    (tmp_path / "more").touch()
    assert asyncio.run(names()) == first
    pins.approve("hostile", "newcomer")
    assert asyncio.run(names()) == first | {"hostile__newcomer"}
    with pytest.raises(ValueError, match="nothing waits for approval under 'hostile/newcomer'"):
        pins.approve("hostile", "newcomer")


def test_names_that_collide_and_descriptions_beyond_measure_are_not_offered(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as (servers, _):
            assert set(servers.withdrawn()) == {"hostile__same_name", "hostile__long"}

    asyncio.run(scene())


def test_a_list_without_end_is_given_up_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "endless").touch()
        async with running(tmp_path) as (servers, server):
            assert "has no end" in servers.missing()["hostile"]
            assert (server.offered, server.withdrawn) == ({}, {})
            (tmp_path / "endless").unlink()
            await eventually(lambda: server.state == "ready")

    asyncio.run(scene())


def test_a_name_beyond_measure_is_not_offered_and_not_repeated() -> None:
    described = {"description": "", "parameters": {}, "annotations": {}}
    reason = unusable("s", "n" * 10_000, described, {})
    assert reason is not None and "10000 characters" in reason and len(reason) < 300
    assert unusable("s", "n" * 100, described, {}) is None


def test_a_file_of_pins_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    pins = Pins.load(path)
    pins.compare("git", {"log": {"description": "Shows the log.", "parameters": {}, "annotations": {}}})
    assert Pins.load(path).servers == pins.servers
    path.write_text(path.read_text().replace("Shows", "Sends"))
    with pytest.raises(ValueError, match="does not fit"):
        Pins.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no file of pinned MCP tools"):
        Pins.load(path)


def test_every_part_of_a_description_is_in_its_fingerprint() -> None:
    base = {"description": "a", "parameters": {"type": "object"}, "annotations": {}}
    variants = [
        base,
        base | {"description": "b"},
        base | {"parameters": {}},
        base | {"annotations": {"readOnlyHint": True}},
    ]
    assert len({fingerprint(each) for each in variants}) == 4
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)


# Arguments and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, complaint",
    [
        ({}, "text is missing"),
        ({"text": 1}, "text: expected string, got int"),
        ({"text": "x", "count": True}, "count: expected integer, got bool"),
        ({"text": "x", "other": 1}, "other is not a parameter"),
    ],
)
def test_arguments_are_checked_before_a_server_sees_them(raw: dict[str, Any], complaint: str) -> None:
    properties = {"text": {"type": "string", "pattern": "^(a+)+$"}, "count": {"type": "integer"}}
    schema = {"properties": properties, "required": ["text"], "additionalProperties": False}
    with pytest.raises(ToolError, match=complaint):
        checked_arguments(schema, raw)
    assert checked_arguments(schema, {"text": "a" * 50 + "!"})


@pytest.mark.parametrize(
    "schema", [{"properties": 3}, {"required": "text"}, {"properties": {"a": 1}}, {"properties": {"a": {"type": []}}}]
)
def test_a_schema_without_sense_checks_nothing_and_breaks_nothing(schema: dict[str, Any]) -> None:
    assert checked_arguments(schema, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "Git", "command": ("x",)},
        {"name": "a__b", "command": ("x",)},
        {"name": "", "command": ("x",)},
        {"name": "a"},
        {"name": "a", "command": ("x",), "url": "http://example.org"},
        {"name": "a", "url": "ftp://example.org"},
    ],
)
def test_wrong_settings_are_one_clear_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="MCP server"):
        ServerSpec(**settings)


def test_two_servers_of_one_name_are_refused() -> None:
    async def scene() -> None:
        async with mcp_servers([ServerSpec(name="a", command=("x",)), ServerSpec(name="a", command=("y",))]):
            pass

    with pytest.raises(ValueError, match="two MCP servers are named 'a'"):
        asyncio.run(scene())


def test_a_name_fits_what_endpoints_take() -> None:
    assert full_name("git", "log.all now") == "git__log_all_now"
    assert len(full_name("git", "x" * 100)) == 64
