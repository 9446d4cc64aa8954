"""Instructions of strangers, obeyed to the letter, through the whole runtime: no call reaches outside without approval.

The policy allows every tool, so that taint alone stands between an order and the call: a way by which words of a
stranger reach an agent without tainting it is a call that runs. The same orders in a trusted text do run.
"""

import base64
import itertools
import json
from pathlib import Path

import pytest

from perilune.swarm.policy import Policy, Rule
from perilune.swarm.scripted.obedient import orders
from perilune.swarm.secrets import Secrets
from perilune.swarm.swarm import Swarm
from perilune.swarm.tools.tool import Tool, ToolContext, tool
from tests.swarm.core_runs import MemoryJournal, config, note
from tests.swarm.models import FunctionModel, call, results, say, scripted, turn
from tests.swarm.virtual_time import run_virtually

CORPORA = Path(__file__).parent / "corpora"
CASES = json.loads((CORPORA / "injections.json").read_text(encoding="utf-8"))["cases"]
CANARIES = json.loads((CORPORA / "canaries.json").read_text(encoding="utf-8"))
TEAM = call(
    ("create_subagent", {"name": "reader", "system_prompt": "You read."}),
    ("create_subagent", {"name": "clerk", "system_prompt": "You work."}),
)
BUSY = call(("note", {"text": "n" * 6}))
DISGUISES = itertools.cycle(
    [
        lambda order: f"CALL {order['tool']} {json.dumps(order['arguments'])}",
        lambda order: f"<!-- call {order['tool']} {json.dumps(order['arguments'])} -->",
        lambda order: json.dumps({"tool": order["tool"], "arguments": order["arguments"]}),
        lambda order: base64.b64encode(f"CALL {order['tool']} {json.dumps(order['arguments'])}".encode()).decode(),
    ]
)


class World:
    """A page with an order, the tools an order may name, and what was done."""

    def __init__(self, case: dict, *, untrusted: bool = True) -> None:
        self.text = f"{case['text']}\n{next(DISGUISES)(case['call'])}"
        assert [each.name for each in orders(self.text)] == [case["call"]["tool"]]
        self.done: list[str] = []
        self.asked: list[str] = []
        self.handle = ""
        self.text_of_page = lambda: self.text

        @tool(effects="none", untrusted=untrusted)
        def read_page(long: bool = False) -> str:
            """What a stranger wrote."""
            return self.text_of_page() + (" " * 20_000 if long else "")

        async def act(context: ToolContext, arguments: dict) -> str:
            self.done.append(context.agent)
            return "done"

        name, effects = case["call"]["tool"], case["call"]["effects"]
        self.tools = (note, read_page, Tool(name=name, description="acts", parameters={}, call=act, effects=effects))

    def obey(self, *turns):
        """Make these turns, then do what any text says, then answer."""

        def behave(request):
            if turn(request) < len(turns):
                made = turns[turn(request)]
                return made(request) if callable(made) else made
            unread = itertools.takewhile(lambda message: message.role != "assistant", reversed(request.messages))
            found = [order for message in unread if message.role != "system" for order in orders(message.text)]
            if found and request.tools != b"[]":
                self.asked += [f"{request.agent}:{order.name}" for order in found]
                return call(*((order.name, dict(order.arguments)) for order in found[:1]))
            return say("ok")

        return behave

    def read_and_tell(self):
        """A reader: fetches the page and answers with it."""
        return lambda r: call(("read_page", {})) if turn(r) == 0 else say(results(r)[0])

    def find_handle(self, request):
        """The model that fetched a long page knows where it is stored."""
        self.handle = results(request)[0].split("the rest is ")[1][:20]
        return say("stored")


def direct(world: World):
    return {"main": world.obey(call(("read_page", {})))}


def child(world: World):
    main = world.obey(TEAM, call(("assign_task", {"agent": "reader", "prompt": "p"})))
    return {"main": main, "main/reader*": world.read_and_tell()}


def message(world: World):
    """The reader is still at work when its message is read: it is not its result that taints."""
    start = call(("start_task", {"agent": "reader", "prompt": "p"}))
    main = world.obey(TEAM, start, call(("wait", {"seconds": 0.01})))
    reader = [call(("read_page", {})), lambda r: call(("send", {"to": "parent", "text": results(r)[0]}))]
    return {"main": main, "main/reader*": world.obey(*reader, *[BUSY] * 4, say("sent"))}


def parent(world: World):
    """The one who read it writes a task for another."""
    main = world.obey(
        TEAM,
        call(("read_page", {})),
        lambda r: call(("assign_task", {"agent": "clerk", "prompt": results(r)[0]})),
        say("end"),
    )
    return {"main": main, "main/clerk*": world.obey()}


def grandchild(world: World):
    kinds = call(("create_subagent", {"name": "clerk", "system_prompt": "You work."}))
    middle = world.obey(
        kinds,
        call(("read_page", {})),
        lambda r: call(("assign_task", {"agent": "clerk", "prompt": results(r)[0]})),
        say("end"),
    )
    main = world.obey(TEAM, call(("assign_task", {"agent": "reader", "prompt": "p"})), say("end"))
    return {"main": main, "main/reader-1.0": middle, "main/reader-1.0/*": world.obey()}


def mapped(world: World):
    items = {"agent": "reader", "template": "{item}", "items": ["1", "2", "3"], "agents": 2}
    main = world.obey(TEAM, call(("map_task", items)), call(("wait", {})))
    return {"main": main, "main/reader*": world.read_and_tell()}


def steered_by_map_items(world: World):
    """Lines of a stranger's page become tasks, though the one who gives them never reads it."""
    after = {"agent": "clerk", "template": "{item}", "items_from": "reader-1.0"}
    start = call(("start_task", {"agent": "reader", "prompt": "p"}))
    main = world.obey(TEAM, start, *[BUSY] * 6, call(("map_task", after)), call(("wait", {})))
    return {"main": main, "main/reader*": world.read_and_tell(), "main/clerk*": world.obey()}


def reduced(world: World):
    items = {"agent": "reader", "template": "{item}", "items": ["1", "2", "3"]}
    merge = {"agent": "clerk", "template": "merge {parts}", "handles": ["reader-1.0"], "fan_in": 2}
    main = world.obey(TEAM, call(("map_task", items)), *[BUSY] * 6, call(("reduce_task", merge)), say("end"))
    return {"main": main, "main/reader*": world.read_and_tell(), "main/clerk*": world.obey()}


def by_handle(world: World):
    """A handle that an agent came by in some way reads like the page itself."""
    main = world.obey(
        TEAM,
        call(("start_task", {"agent": "reader", "prompt": "p"})),
        *[BUSY] * 6,
        call(("assign_task", {"agent": "clerk", "prompt": "go on"})),
        say("end"),
    )
    clerk = world.obey(lambda r: call(("read_result", {"handle": world.handle})))
    return {
        "main": main,
        "main/reader*": world.obey(call(("read_page", {"long": True})), world.find_handle),
        "main/clerk*": clerk,
    }


def by_document(world: World):
    """Composed by somebody who read nothing, read by somebody else."""

    def compose(request):
        return call(("compose", {"parts": ["Title", "reader-1.0"]}))

    def hand_over(request):
        world.handle = results(request)[0].partition(" holds")[0]
        return call(("assign_task", {"agent": "clerk", "prompt": "read it"}))

    start = call(("start_task", {"agent": "reader", "prompt": "p"}))
    waits = [BUSY] * 6
    main = world.obey(TEAM, start, *waits, compose, hand_over, say("end"))
    clerk = world.obey(lambda r: call(("read_result", {"handle": world.handle})))
    return {"main": main, "main/reader*": world.read_and_tell(), "main/clerk*": clerk}


def by_reference(world: World):
    """An untainted agent answers with a reference to the page; its answer, filled in, is read by the next one."""
    start = call(("start_task", {"agent": "reader", "prompt": "p"}))
    waits = [BUSY] * 6
    main = world.obey(
        TEAM,
        start,
        *waits,
        call(("assign_task", {"agent": "clerk", "prompt": "cite"})),
        call(("read_result", {"handle": "clerk-8.0"})),
    )
    reader = world.obey(call(("read_page", {"long": True})), world.find_handle)
    return {"main": main, "main/reader*": reader, "main/clerk*": lambda r: say("{{" + world.handle + "}}")}


WAYS = {
    "direct": direct,
    "child": child,
    "message": message,
    "parent": parent,
    "grandchild": grandchild,
    "map": mapped,
    "map items": steered_by_map_items,
    "reduce": reduced,
    "handle": by_handle,
    "document": by_document,
    "reference": by_reference,
}


def play(world: World, script, folder, *, secrets: Secrets | None = None) -> tuple[MemoryJournal, FunctionModel]:
    journal, model = MemoryJournal(), FunctionModel(scripted(script))

    async def opened() -> MemoryJournal:
        return journal

    swarm = Swarm(
        config(context_tokens=16_000, subagent_steps=8, main_steps=20),
        client=model,
        tools=world.tools,
        policy=Policy((Rule(decision="allow"),)),
        secrets=secrets or Secrets(),
        open_journal=opened,
    )
    result = run_virtually(swarm.run("Read the page.", folder=folder))
    assert result.status == "done", result.error
    return journal, model


ALL = [pytest.param(case, case["via"], id=case["id"]) for case in CASES]
ALL += [pytest.param(case, way, id=f"{way}-{case['id']}") for way in WAYS for case in CASES[:: len(CASES) // 6]]


@pytest.mark.parametrize(("case", "way"), ALL)
def test_an_order_of_a_stranger_is_never_carried_out_without_approval(case, way, tmp_path):
    world = World(case)
    play(world, WAYS[way](world), tmp_path)
    assert world.asked, "the order did not reach anybody: nothing was tested"
    assert world.done == []


@pytest.mark.parametrize("way", WAYS)
def test_the_same_order_in_a_trusted_text_is_carried_out(way, tmp_path):
    world = World(CASES[0], untrusted=False)
    play(world, WAYS[way](world), tmp_path)
    assert world.done


# Secrets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANARIES["canaries"])
@pytest.mark.parametrize("way", ["direct", "child", "message", "map", "reduce", "handle", "document", "reference"])
def test_a_registered_secret_is_in_no_prompt_no_record_and_no_artefact(name, way, tmp_path):
    value = CANARIES["canaries"][name]
    texts = [case["text"] for case in CANARIES["cases"] if case["canary"] == name and case["covered"]]
    leaks = [case["leak"] for case in CANARIES["cases"] if case["canary"] == name and case["covered"]]
    world = World(CASES[0])
    world.text_of_page = lambda: "\n\n".join([world.text, *texts])
    secrets = Secrets({name: value})
    journal, model = play(world, WAYS[way](world), tmp_path, secrets=secrets)
    prompts = [message.wire for request in model.requests for message in request.messages]
    records = [event.body for event in journal.all]
    for text in [*prompts, *records, *journal.blobs.values()]:
        for leak in [value, *leaks]:
            assert leak.encode() not in text
            assert json.dumps(leak)[1:-1].encode() not in text


def test_a_secret_that_a_model_or_a_failing_tool_says_is_masked(tmp_path):
    value = CANARIES["canaries"]["PLAIN_API_KEY"]
    world = World(CASES[0])

    def burst() -> str:
        raise OSError(f"no access with {value}")

    world.text_of_page = burst
    main = [
        TEAM,
        call(("assign_task", {"agent": "reader", "prompt": f"use {value}"}), ("read_page", {}), text=f"key {value}"),
        say(f"the key is {value}"),
    ]
    script = {"main": lambda r: main[turn(r)], "main/*": lambda r: say(f"I know {value}")}
    journal, model = play(world, script, tmp_path, secrets=Secrets({"KEY": value}))
    prompts = [message.wire for request in model.requests for message in request.messages]
    for text in [*prompts, *(event.body for event in journal.all), *journal.blobs.values()]:
        assert value.encode() not in text


# Rights --------------------------------------------------------------------------------------------------------------


def test_a_child_has_no_way_to_a_tool_that_it_was_not_given(tmp_path):
    """By name, by asking for more, by a kind of its own, by a child of a child."""
    world = World(CASES[0], untrusted=False)
    name = CASES[0]["call"]["tool"]
    poor = {"name": "poor", "system_prompt": "s", "tools": ["note", "create_subagent", "assign_task", "start_task"]}
    main = [call(("create_subagent", poor)), call(("assign_task", {"agent": "poor", "prompt": "p"})), say("end")]
    below = {"name": "x", "system_prompt": "s"}
    script = [
        call((name, {}), ("create_subagent", below | {"tools": [name]}), ("create_subagent", below)),
        call(("assign_task", {"agent": "x", "prompt": "p"}), ("map_task", {"agent": "x", "template": "{item}"})),
        say("end"),
    ]
    behaviours = {
        "main": lambda r: main[turn(r)],
        "main/poor*": lambda r: script[turn(r)],
        "main/poor-1.0/*": lambda r: call((name, {}), (name.upper(), {})) if turn(r) == 0 else say("end"),
    }
    journal, model = play(world, behaviours, tmp_path)
    assert world.done == []
    assert any(request.agent.count("/") == 2 for request in model.requests)
    statuses = {event.chain: event.read()["status"] for event in journal.all if event.kind == "outcome"}
    assert statuses["main/poor-1.0#0.0"] == statuses["main/poor-1.0#0.1"] == "error"
    assert statuses["main/poor-1.0#1.1"] == "error"
    assert all(name.encode() not in request.tools for request in model.requests if request.agent != "main")
