"""Contracts of what a model is shown: never more than its context, whatever tools, children and models write."""

import json

import pytest

from perilune.swarm.client import ModelReply, Usage
from perilune.swarm.messages import Message, ToolCall, clean
from perilune.swarm.results import MOST_REFERENCES, Results, wire_size
from perilune.swarm.settings import prompt
from perilune.swarm.swarm import Swarm
from perilune.swarm.tools.tool import tool
from tests.swarm.core_runs import MemoryJournal, config, note
from tests.swarm.models import FunctionModel, call, results, say, scripted, turn
from tests.swarm.virtual_time import run_virtually

TEAM = call(("create_subagent", {"name": "w", "system_prompt": "s"}))


def play(behaviour, folder, *, tools=(note,), task="Do it.", client=None, **changes):
    journal = MemoryJournal()
    model = client or FunctionModel(behaviour)

    async def opened() -> MemoryJournal:
        return journal

    swarm = Swarm(config(**changes), client=model, tools=tools, open_journal=opened)
    return run_virtually(swarm.run(task, folder=folder)), journal, model


def sizes(model: FunctionModel) -> list[int]:
    return [sum(len(message.wire) for message in request.messages) for request in model.requests]


def outcome(journal: MemoryJournal, chain: str) -> dict:
    return next(event.read() for event in journal.all if event.chain == chain and event.kind == "outcome")


ODD_TEXTS = {
    "plain": "word " * 8000,
    "control characters": "\x00\x01\x1f" * 13_000,
    "quotes": '"\\' * 20_000,
    "lone surrogates": "\ud800" * 40_000,
    "emoji": "\U0001f600" * 10_000,
    "combining": "e\u0301\u200d" * 9000,
}


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
@pytest.mark.parametrize("children", [1, 100])
def test_a_prompt_stays_below_its_context_whatever_children_return(text, children, tmp_path):
    tasks = call(*(("assign_task", {"agent": "w", "prompt": str(n)}) for n in range(children)))
    turns = iter([TEAM, tasks, tasks, tasks, say("end")])

    def lead(request):
        return say(text) if request.messages[-1].text == prompt("compact") else next(turns)

    behaviour = scripted({"main": lead, "main/*": lambda r: say(text)})
    result, _, model = play(behaviour, tmp_path, context_tokens=16_000)
    assert result.status == "done"
    assert max(sizes(model)) <= 48_000


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_a_prompt_stays_below_its_context_whatever_tools_return(text, tmp_path):
    @tool(effects="none")
    def odd(n: int) -> str:
        """Odd."""
        return text

    def behaviour(request):
        if "nearly full" in request.messages[-1].text:
            return say(text)
        return say("end") if request.tools == b"[]" else call(*(("odd", {"n": n}) for n in range(30)))

    result, _, model = play(behaviour, tmp_path, tools=(odd,), context_tokens=8000, main_steps=12)
    assert result.status == "done"
    assert max(sizes(model)) <= 24_000


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
@pytest.mark.parametrize("limit", [200, 5000])
def test_a_digest_takes_no_more_of_a_message_than_its_limit(text, limit):
    shown, artefact = run_virtually(Results(MemoryJournal()).digest(text, limit, tainted=False))
    assert artefact is not None and artefact.size == len(clean(text).encode())
    assert limit // 2 < wire_size(shown) <= limit


def test_a_text_whose_escapes_do_not_fit_is_a_digest_though_its_characters_would():
    shown, artefact = run_virtually(Results(MemoryJournal()).digest("\x00" * 3000, 5000, tainted=False))
    assert artefact is not None and wire_size(shown) <= 5000


def test_one_result_of_50_million_bytes_is_a_digest_and_all_of_it_is_stored(tmp_path):
    @tool(effects="none")
    def huge() -> str:
        """Huge."""
        return "0123456789" * 5_000_000

    behaviour = scripted({"main": lambda r: call(("huge", {})) if turn(r) == 0 else say("end")})
    _, journal, model = play(behaviour, tmp_path, tools=(huge,), context_tokens=4000)
    assert max(sizes(model)) <= 12_000
    assert outcome(journal, "main#0.0")["result"]["size"] == 50_000_000


def test_300_calls_in_one_turn_fit_into_a_small_context(tmp_path):
    def behaviour(request):
        if any("too long for your context" in message.text for message in request.messages):
            return say("dropped")
        return call(*(("note", {"text": "x" * 50}) for _ in range(300)))

    result, journal, model = play(behaviour, tmp_path, context_tokens=4000)
    assert result.answer == "dropped" and max(sizes(model)) <= 12_000
    [dropped] = [
        event.read() for event in journal.all if event.kind == "compacted" and event.read()["how"] == "dropped"
    ]
    stored = next(data for sha, data in journal.blobs.items() if sha.startswith(dropped["handle"][4:]))
    assert len(stored.splitlines()) == 301


def test_arguments_of_a_million_bytes_do_not_stay_in_the_context(tmp_path):
    def behaviour(request):
        if any("too long for your context" in message.text for message in request.messages):
            return say("went on")
        return call(("note", {"text": "y" * 1_000_000}))

    result, _, model = play(behaviour, tmp_path, context_tokens=30_000)
    assert result.answer == "went on" and max(sizes(model)) <= 90_000


@pytest.mark.parametrize("where", ["task", "system_prompt"])
def test_a_task_that_leaves_no_room_ends_at_once_with_the_reason(where, tmp_path):
    long = "long " * 4000
    changes = {"task": long} if where == "task" else {"system_prompt": long}
    result, _, model = play(lambda r: say("never"), tmp_path, context_tokens=4000, **changes)
    assert result.status == "failed" and model.requests == []
    assert "raise context_tokens" in (result.error or "")


def test_a_summary_that_makes_no_room_is_cut_and_the_run_ends(tmp_path):
    def behaviour(request):
        if request.messages[-1].text == prompt("compact"):
            return say("blah " * 20_000)
        return say("end") if request.tools == b"[]" else call(("note", {"text": "z" * 3000}))

    result, journal, model = play(behaviour, tmp_path, context_tokens=4000, task="t" * 4000, main_steps=15)
    assert result.answer == "end" and max(sizes(model)) <= 12_000
    assert sum(event.kind == "compacted" for event in journal.all) <= 30


def test_references_that_multiply_end_as_an_error_and_not_as_a_hang(tmp_path):
    """Each level includes the one below forty times."""
    handles = ["art:0000000000000000"]

    def laughs(request):
        if turn(request) and results(request):
            handles.append(results(request)[0].split("the rest is ")[1][:20])
        if len(handles) == 9:
            return say("{{" + handles[-1] + "}}")
        return call(("compose_nothing", {"inside": handles[-1]}))

    @tool(effects="none")
    def compose_nothing(inside: str) -> str:
        """References and nothing else, too long to be shown whole."""
        return ("{{" + inside + "}}") * 40

    result, _, _ = play(laughs, tmp_path, tools=(compose_nothing,), context_tokens=1000, main_steps=20)
    assert result.status == "failed"
    assert f"{MOST_REFERENCES:,} references" in str(result.error) or "bytes" in str(result.error)


def test_a_handle_that_nobody_made_stays_as_it_is_written(tmp_path):
    result, _, _ = play(lambda r: say("see {{art:0000000000000000}} and art:1111111111111111"), tmp_path)
    assert result.answer == "see {{art:0000000000000000}} and art:1111111111111111"


def test_every_byte_of_a_result_can_be_read_by_handle_in_a_small_context(tmp_path):
    text = "".join(f"{n:05}\u20ac\n" for n in range(2500))
    read = []

    def lead(request):
        at = turn(request)
        if at < 2:
            return [TEAM, call(("assign_task", {"agent": "w", "prompt": "p"}))][at]
        if at > 2:
            part, _, place = results(request)[0].rpartition("\n[bytes ")
            read.append(part)
            start = int(place.split(" to ")[1].split(" of ")[0].replace(",", ""))
            if start == len(text.encode()):
                return say("all")
            return call(("read_result", {"handle": "w-1.0", "start": start}))
        return call(("read_result", {"handle": "w-1.0"}))

    result, _, model = play(
        scripted({"main": lead, "main/*": lambda r: say(text)}), tmp_path, context_tokens=6000, main_steps=None
    )
    assert result.answer == "all" and "".join(read) == text
    assert max(sizes(model)) <= 18_000


class OddModel(FunctionModel):
    """Replies as no endpoint should give them."""

    def __init__(self, *replies: Message, finish: str) -> None:
        super().__init__(lambda request: replies[min(turn(request), len(replies) - 1)])
        self.finish = finish

    async def complete(self, request) -> ModelReply:
        reply = await super().complete(request)
        return ModelReply(message=reply.message, finish_reason=self.finish, usage=Usage(), model="odd")


@pytest.mark.parametrize("finish", ["stop", "", "content_filter", "made_up"])
@pytest.mark.parametrize(
    "first",
    [
        Message(
            "assistant", None, (ToolCall("same", "note", '{"text":"1"}'), ToolCall("same", "note", '{"text":"2"}'))
        ),
        Message("assistant", "text and calls", (ToolCall("", "note", '{"text":"1"}'),)),
        Message("assistant", ({"type": "text", "text": "part \ud800"}, {"type": "image_url"}, {"text": None})),
        Message("assistant", "half a pair \udfff", (ToolCall("id\ud800", "no\ud800te", '{"text":"\ud800"}'),)),
        Message("assistant", None),
        Message("assistant", "", reasoning="thought \ud83d"),
    ],
    ids=["ids twice", "text and calls", "parts", "surrogates", "nothing", "reasoning"],
)
def test_odd_replies_are_taken_as_far_as_they_go(first, finish, tmp_path):
    model = OddModel(first, say("end"), finish=finish)
    result, journal, _ = play(None, tmp_path, client=model)
    assert result.status == "done"
    assert result.answer == ("end" if first.tool_calls else first.text.replace("\ud800", "?"))
    assert all(json.loads(event.body) for event in journal.all)


def test_a_task_and_a_failing_tool_with_broken_characters_are_no_end_of_the_run(tmp_path):
    @tool(effects="none")
    def broken() -> str:
        """Broken."""
        raise OSError("name \udcff\x00")

    behaviour = scripted({"main": lambda r: call(("broken", {})) if turn(r) == 0 else say(results(r)[0])})
    result, _, _ = play(behaviour, tmp_path, tools=(broken,), task="file \udcff")
    assert result.status == "done" and "OSError" in result.answer


def test_a_last_step_with_calls_and_no_text_is_no_answer(tmp_path):
    result, _, _ = play(lambda r: call(("note", {"text": "more"})), tmp_path, main_steps=3)
    assert result.status == "failed" and "last step" in (result.error or "")


def test_a_last_step_that_breaks_the_schema_is_no_answer(tmp_path):
    schema = {"type": "object", "required": ["n"]}
    lead = [
        call(("create_subagent", {"name": "w", "system_prompt": "s", "output_schema": schema})),
        call(("assign_task", {"agent": "w", "prompt": "p"})),
    ]
    behaviour = scripted(
        {"main": lambda r: lead[turn(r)] if turn(r) < 2 else say(results(r)[0]), "main/*": lambda r: say("no json")}
    )
    result, _, _ = play(behaviour, tmp_path, subagent_steps=1)
    assert "schema" in result.answer and "failed" in result.answer


def test_a_deep_agent_has_a_folder_of_its_own_whatever_the_length_of_its_id():
    from perilune.swarm.run import folder_name

    deep = "main" + "/a-researcher-with-quite-a-long-name-12.34" * 12
    names = {folder_name(deep), folder_name(deep + "/x"), folder_name("main/w-1.0"), folder_name("main/w-1.1")}
    assert len(names) == 4 and all(len(name.encode()) <= 255 for name in names)
    assert folder_name("main/w-1.0") == "main_w-1.0"
