"""The audit export holds every event, says whether the journal was changed, and flags what deserves a look."""

import base64
import sqlite3

import orjson
import pytest

from perilune.swarm.audit import Flags, audit_lines
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import verify
from tests.swarm.journal.appending import KEY
from tests.swarm.small_runs import Writer, written_run


def flags_of(tmp_path, write) -> list[tuple[str, str]]:
    with SQLiteReader(written_run(tmp_path, write)) as reader:
        flags = Flags()
        for event in reader.events():
            flags.apply(event)
        return [(flag.flag, flag.agent) for flag in flags.finish()]


def exported(path, **options) -> list[dict]:
    with SQLiteReader(path) as reader:
        return [orjson.loads(line) for line in audit_lines(reader, verify(path, KEY), **options)]


def test_the_export_begins_with_the_verification_and_holds_every_event_decoded(tmp_path):
    path = written_run(tmp_path)
    verification, summary, *events = exported(path)
    assert verification["record"] == "verification" and verification["intact"] and verification["sealed"]
    assert summary["record"] == "summary" and summary["flags"] == [] and summary["flag_counts"] == {}
    assert (summary["events"], summary["agents"], summary["kinds"]["reply"]) == (12, 2, 4)
    assert [event["index"] for event in events] == list(range(12)) and {event["record"] for event in events} == {
        "event"
    }
    assert events[1]["body"]["task"] == "write" and events[2]["note"]["prompt_tokens"] == 7
    with SQLiteReader(path) as reader:
        assert [bytes.fromhex(event["hash"]) for event in events] == [event.hash for event in reader.events()]


def test_a_changed_journal_is_exported_with_its_problems_at_the_top(tmp_path):
    path = written_run(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE events SET note = CAST(replace(note, '0.5', '0.9') AS BLOB) WHERE idx = 2")
    verification, *_ = exported(path)
    assert not verification["intact"]
    assert verification["problems"][0]["index"] == 2 and verification["problems"][0]["chain"] == "main"


def test_contents_follow_the_first_event_that_names_them(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.started("main", "write")
        picture = await writer.journal.put(b"\xff\xd8 picture")
        await writer.outcome("main#0.0", "look", result=picture.plain())
        await writer.outcome("main#0.1", "look", result=picture.plain())
        await writer.outcome("main#0.2", "look", result={"sha256": "ab" * 32, "size": 3})
        await writer.finished("main")

    records = exported(written_run(tmp_path, write), contents=True)[2:]
    assert [each["record"] for each in records] == [
        "event",
        "event",
        "artefact",
        "event",
        "event",
        "artefact",
        "event",
        "artefact",
    ]
    assert base64.b64decode(records[2]["base64"]) == b"\xff\xd8 picture"
    assert "there is no artefact" in records[5]["error"] and records[7]["text"] == "found"


async def spawning_child(writer: Writer) -> None:
    await writer.started("main", "write")
    await writer.started("main/r-0.0", "find", depth=1)
    await writer.reply("main/r-0.0", 0, "", ("create_subagent", "{}"))
    await writer.outcome("main/r-0.0#0.0", "create_subagent", "error")
    await writer.finished("main/r-0.0", text=None)
    await writer.finished("main")


async def denied_call(writer: Writer) -> None:
    await writer.reply("main", 0, "", ("shell", "{}"))
    await writer.outcome("main#0.0", "shell", "denied")
    await writer.finished("main")


async def unknown_outcome(writer: Writer) -> None:
    await writer.reply("main", 0, "", ("shell", "{}"))
    await writer.call_started("main#0.0", "shell")
    await writer.outcome("main#0.0", "shell", "unknown")
    await writer.finished("main")


async def call_without_outcome(writer: Writer) -> None:
    await writer.reply("main", 0, "", ("shell", "{}"))
    await writer.call_started("main#0.0", "shell")
    await writer.finished("main")


async def other_arguments_than_approved(writer: Writer) -> None:
    approval = {"agent": "main", "tool": "shell", "arguments_sha256": "aa", "decision": "allow", "by": "person"}
    await writer.journal.append("run", "approval", approval | {"call": "0.0"})
    await writer.journal.append("run", "approval", approval | {"call": "0.1"})
    await writer.reply("main", 0, "", ("shell", "{}"), ("shell", "{}"))
    for index, sha256 in enumerate(("aa", "bb")):
        await writer.call_started(f"main#0.{index}", "shell", sha256)
        await writer.outcome(f"main#0.{index}", "shell")
    await writer.finished("main")
    await writer.journal.append("run", "run_finished", {"status": "done"})


async def effect_after_untrusted(writer: Writer) -> None:
    await writer.reply("main", 0, "", ("fetch", "{}"))
    await writer.outcome("main#0.0", "fetch", untrusted=True)
    await writer.reply("main", 1, "", ("send", "{}"))
    await writer.call_started("main#1.0", "send")
    await writer.outcome("main#1.0", "send")
    await writer.finished("main")


async def effect_after_tainted_message(writer: Writer) -> None:
    await writer.journal.append("main", "message", {"id": "1", "sender": "x", "step": 0, "text": "do", "tainted": True})
    await writer.reply("main", 0, "", ("send", "{}"))
    await writer.call_started("main#0.0", "send")
    await writer.outcome("main#0.0", "send")
    await writer.finished("main")


async def tasks_twice_and_empty(writer: Writer) -> None:
    await writer.started("a", "find the  Moon")
    await writer.started("b", " find the moon ")
    await writer.started("c", "  ")
    await writer.started("d", None)
    for number, text in enumerate(("one", "two", "one")):
        await writer.journal.append("d", "task", {"number": number, "text": text})
    for agent in "abcd":
        await writer.finished(agent)


async def result_nobody_read(writer: Writer) -> None:
    await writer.started("main/r-0.0", "find", depth=1)
    await writer.finished("main/r-0.0")


async def claim_without_call(writer: Writer) -> None:
    await writer.started("main", "write")
    await writer.reply("main", 0, "I have searched the web and verified it.")
    await writer.finished("main")


async def secrets_in_arguments(writer: Writer) -> None:
    await writer.reply("main", 0, "", ("read", '{"path":"/home/me/.ssh/id_rsa"}'), ("read", '{"path":"notes.txt"}'))
    await writer.outcome("main#0.0", "read")
    await writer.outcome("main#0.1", "read")
    await writer.finished("main")


async def run_broken_off(writer: Writer) -> None:
    await writer.run_started()
    await writer.started("main", "write")
    await writer.reply("main", 0, "", ("search", "{}"))


async def calls_of_a_last_step(writer: Writer) -> None:
    """They are asked for and never begun."""
    await writer.reply("main", 0, "", ("search", "{}"))
    await writer.finished("main")


async def agent_failed(writer: Writer) -> None:
    await writer.finished("main", "budget", None)


@pytest.mark.parametrize(
    "write, expected",
    [
        (spawning_child, [("spawn_by_subagent", "main/r-0.0")]),
        (denied_call, [("denied_call", "main")]),
        (unknown_outcome, [("unknown_outcome", "main")]),
        (call_without_outcome, [("unknown_outcome", "main")]),
        (other_arguments_than_approved, [("approval_mismatch", "main")]),
        (effect_after_untrusted, [("effect_after_untrusted", "main")]),
        (effect_after_tainted_message, [("effect_after_untrusted", "main")]),
        (tasks_twice_and_empty, [("duplicate_task", "b"), ("empty_task", "c"), ("duplicate_task", "d")]),
        (result_nobody_read, [("result_never_read", "main/r-0.0")]),
        (claim_without_call, [("claim_without_call", "main")]),
        (secrets_in_arguments, [("sensitive_argument", "main")]),
        (run_broken_off, [("unfinished", "run"), ("unfinished", "main"), ("unknown_outcome", "main")]),
        (calls_of_a_last_step, []),
        (agent_failed, [("ended_badly", "main")]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_happened_is_flagged_and_nothing_else(tmp_path, write, expected):
    assert flags_of(tmp_path, write) == expected
