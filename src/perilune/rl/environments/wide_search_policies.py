"""Scripted policies for wide search: what they say follows from what they have read, and from nothing else.

    serial        looks everything up itself, one thing after the other, and never errs: the oracle that fixes the cap
    parallel      hands every item of a wide question to a worker of its own; does narrow questions and chains itself
    in_groups(n)  hands items out, n of them at a time; with one at a time a worker only adds steps to the path
    delegating    hands out all of them at once, of any question
    hollow        spawns for show: empty tasks, and an answer without a row
    copying       spawns for show with tasks that look real: the first item, again and again
    padded        works alone behind a show of empty tasks: as many as the reward for instantiation asks for
    clumsy(way)   a delegation that comes to nothing ("unregistered", "vague", "copied") or to little ("single"), after
                  which it does the rest itself
    worker        looks up one thing or two and replies with lines `item: value`
    unsure(share) a worker that replies `item: unknown` now and then

A policy maps messages in OpenAI's form to the next one, so it plays through the real runtime: as a `Talk` or as a
`ModelClient` (wide_search_play.py). What it has found it notes beside its next call, which makes the table at the end a
matter of copying.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.rl.critical_steps import ASSIGN, CREATE
from perilune.rl.environment import Message
from perilune.rl.environments.wide_search_corpus import OLD_MARK, OLD_PAGE, REFERENCES
from perilune.rl.environments.wide_search_judge import UNKNOWN
from perilune.rl.environments.wide_search_questions import Question, parse_question
from perilune.rl.environments.wide_search_tools import ANSWER, OPEN, SEARCH

Policy = Callable[[Sequence[Message]], Message]
Call = tuple[str, Mapping[str, Any]]
READER = "reader"
ROLE = "You look up facts."
NOTHING_ASKED = "Nothing to look up."
TOO_MANY = "Too many. Give me one."
MOST_ITEMS = 2
"""That a worker looks up in one task."""
MANY = 4
"""Items from which on work is shared out."""
CLUMSY = ("unregistered", "vague", "copied", "single")
VAGUE = "Help with the question."
_HIT = re.compile(r"(p\d+): (.*)")


# What an agent knows --------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """What an agent has seen so far."""

    hits: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Ids and snippets by query."""
    pages: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    """Values by item, from workers."""


def read(messages: Iterable[Message]) -> Reading:
    seen, asked = Reading(), dict[str, Call]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            asked[call["id"]] = name, arguments
            seen.calls.append((name, arguments))
        if message["role"] != "tool" or message["tool_call_id"] not in asked:
            continue
        (name, arguments), text = asked[message["tool_call_id"]], str(message["content"])
        if name == SEARCH:
            seen.hits[arguments["query"]] = _HIT.findall(text)
        elif name == OPEN:
            seen.pages[arguments["page"]] = text
        elif name == ASSIGN:
            lines = [line.partition(": ") for line in text.splitlines()]
            seen.told |= {item: value for item, colon, value in lines if colon and value != UNKNOWN}
    return seen


@dataclass
class Trail:
    """How far a path has been followed."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    """Attributes and values on the way."""
    call: Call | None = None
    """What to do next; None when it is known, or lost."""
    value: str | None = None


def follow(seen: Reading, kind: str, name: str, path: Sequence[str]) -> Trail:
    trail = Trail()
    for attribute in path:
        start, page = f"{name} is a {kind} in the ", None
        for text in seen.pages.values():
            if text.startswith(start) and OLD_PAGE not in text:
                page = text
        if page is None:
            trail.call = _next_call(seen, f"{name} {kind}", start)
            return trail
        found = re.search(rf"The {attribute} is ([^.]+)\.", page)
        if found is None:
            return trail
        trail.facts.append((attribute, found[1]))
        kind, name = REFERENCES.get(attribute, ""), found[1]
    trail.value = name
    return trail


def _next_call(seen: Reading, query: str, start: str) -> Call | None:
    if query not in seen.hits:
        return SEARCH, {"query": query}
    for page, snippet in seen.hits[query]:
        if snippet.startswith(start) and OLD_MARK not in snippet and page not in seen.pages:
            return OPEN, {"page": page}
    return None


# What it says ---------------------------------------------------------------------------------------------------------


def say(text: str, messages: Sequence[Message], *calls: Call) -> Message:
    """A message with calls, numbered on from those before it, as Kimi's models number them."""
    first = sum(len(message.get("tool_calls") or ()) for message in messages)
    made = [
        {
            "id": f"functions.{name}:{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls, start=first)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _asked(messages: Sequence[Message]) -> tuple[Question | None, str, bool]:
    """The question, its text, and whether this is the last reply: somebody spoke after the question."""
    spoken = [str(message["content"]) for message in messages if message["role"] == "user"]
    return parse_question(spoken[0]), spoken[0], len(spoken) > 1


def _news(messages: Sequence[Message], question: Question) -> str:
    """What the last results told, in a few words: values that were not known before them."""
    known = max((at for at, message in enumerate(messages, start=1) if message["role"] == "assistant"), default=0)
    before, now, lines = read(messages[:known]), read(messages), list[str]()
    for name in question.names:
        old, new = (follow(each, question.kind, name, question.path) for each in (before, now))
        if len(new.facts) > len(old.facts):
            attribute, value = new.facts[-1]
            lines.append(f"{name}: {value}" if new.value is not None else f"{attribute}: {value}")
    return "\n".join(lines)


def _work(messages: Sequence[Message], question: Question) -> tuple[list[tuple[str, str]], Call | None]:
    """What is known of the question, and the next call for what is not."""
    seen, rows, call = read(messages), list[tuple[str, str]](), None
    for name in question.names:
        trail = follow(seen, question.kind, name, question.path)
        value = seen.told.get(name, trail.value)
        if value is not None:
            rows.append((name, value))
        elif call is None:
            call = trail.call
    return rows, call


def serial(messages: Sequence[Message]) -> Message:
    question, _, is_last = _asked(messages)
    if question is None:
        return say("", messages, (ANSWER, {"table": []}))
    rows, call = _work(messages, question)
    if call is None or is_last:
        call = ANSWER, {"table": [{"item": item, "value": value} for item, value in rows]}
    return say(_news(messages, question), messages, call)


def in_groups(width: int | None) -> Policy:
    """Delegates every item, `width` of them at a time (None: all): what one group costs, the next has no more."""

    def policy(messages: Sequence[Message]) -> Message:
        question, _, is_last = _asked(messages)
        if question is None or is_last:
            return serial(messages)
        calls = read(messages).calls
        if CREATE not in [name for name, _ in calls]:
            return say("", messages, (CREATE, {"name": READER, "system_prompt": ROLE}))
        given = {arguments["prompt"] for name, arguments in calls if name == ASSIGN}
        left = [task for name in question.names if (task := question.one(name).text) not in given]
        if not left:
            return serial(messages)  # which fills in what no worker found
        return say("", messages, *map(assigned, left[:width]))

    return policy


delegating = in_groups(None)


def parallel(messages: Sequence[Message]) -> Message:
    question, _, _ = _asked(messages)
    return delegating(messages) if question is not None and len(question.names) >= MANY else serial(messages)


def hollow(messages: Sequence[Message]) -> Message:
    return _for_show(messages, lambda question: "")


def copying(messages: Sequence[Message]) -> Message:
    return _for_show(messages, lambda question: question.one(question.names[0]).text)


def _for_show(messages: Sequence[Message], task: Callable[[Question], str]) -> Message:
    question, _, is_last = _asked(messages)
    seen = read(messages)
    called = [name for name, _ in seen.calls]
    if question is None or is_last or ASSIGN in called:
        rows = [{"item": item, "value": value} for item, value in seen.told.items()]
        return say("", messages, (ANSWER, {"table": rows}))
    if CREATE not in called:
        return say("", messages, (CREATE, {"name": READER, "system_prompt": ROLE}))
    return say("", messages, *(assigned(task(question)) for _ in question.names))


def padded(messages: Sequence[Message]) -> Message:
    question, _, is_last = _asked(messages)
    called = [name for name, _ in read(messages).calls]
    if question is None or is_last or ASSIGN in called:
        return serial(messages)
    if CREATE not in called:
        return say("", messages, (CREATE, {"name": READER, "system_prompt": ROLE}))
    return say("", messages, *[assigned("")] * math.ceil(len(question.names) / 2))


def clumsy(way: str) -> Policy:
    if way not in CLUMSY:
        raise ValueError(f"way is {way!r}, expected one of {', '.join(CLUMSY)}")

    def policy(messages: Sequence[Message]) -> Message:
        question, text, is_last = _asked(messages)
        called = [name for name, _ in read(messages).calls]
        if question is None or is_last or ASSIGN in called:
            return serial(messages)
        if CREATE not in called and way != "unregistered":
            return say("", messages, (CREATE, {"name": READER, "system_prompt": ROLE}))
        one = question.one(question.names[0]).text
        tasks = {"unregistered": [one], "vague": [VAGUE] * 3, "copied": [text] * 2, "single": [one]}[way]
        return say("", messages, *map(assigned, tasks))

    return policy


def errand(prompts: Sequence[str]) -> Policy:
    """Gives these tasks to workers, all at once, and reports nothing: to see what workers make of them."""

    def policy(messages: Sequence[Message]) -> Message:
        called = [name for name, _ in read(messages).calls]
        if ASSIGN in called:
            return say("", messages, (ANSWER, {"table": []}))
        if CREATE not in called:
            return say("", messages, (CREATE, {"name": READER, "system_prompt": ROLE}))
        return say("", messages, *map(assigned, prompts))

    return policy


def assigned(prompt: str) -> Call:
    return ASSIGN, {"agent": READER, "prompt": prompt}


def worker(messages: Sequence[Message], slip: str | None = None) -> Message:
    """`slip`: an error of a first step, from which it recovers: "half" of the name searched for, or a "wrong" page."""
    question, _, is_last = _asked(messages)
    if question is None:
        return say(NOTHING_ASKED, messages)
    if len(question.names) > MOST_ITEMS:
        return say(TOO_MANY, messages)
    rows, call = _work(messages, question)
    if call is None or is_last:
        values = dict(rows)
        return say("\n".join(f"{name}: {values.get(name, UNKNOWN)}" for name in question.names), messages)
    return say(_news(messages, question), messages, _slipped(messages, call, slip))


def unsure(share: float) -> Policy:
    """A worker that does not find its item now and then, which depends on its task alone."""

    def policy(messages: Sequence[Message]) -> Message:
        question, text, _ = _asked(messages)
        if question is not None and zlib.crc32(text.encode()) < share * (1 << 32):
            return say(f"{question.names[0]}: {UNKNOWN}", messages)
        return worker(messages)

    return policy


def _slipped(messages: Sequence[Message], call: Call, slip: str | None) -> Call:
    seen = read(messages)
    if slip == "half" and not seen.calls:
        return SEARCH, {"query": " ".join(call[1]["query"].split()[1:])}
    if slip == "wrong" and len(seen.calls) == 1:
        others = [page for page, _ in next(iter(seen.hits.values()), []) if page != call[1].get("page")]
        return (OPEN, {"page": others[0]}) if others else call
    return call
