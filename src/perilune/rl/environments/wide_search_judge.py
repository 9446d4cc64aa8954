"""What an episode of wide search was worth: facets read from its question, its truth and its events, nothing else.

    item F1 = 2 hits / (rows + items)       a hit is an item whose value is right, once; every row of the answer counts
    parallel = min(1, spawned / ceil(items / 2))       workers that began to work, whatever they were told
    finish = finished / assigned                       tasks that came to something
    economy = item F1 min(1, oracle's steps / total steps)     what the answer cost, by the steps of everybody

A task has finished when its worker opened a page and returned a line `item: value` about a thing that the task names
and that no finished task was about before, with a value that the task did not tell. An empty task, one about the same
thing again in whatever words, one given to nobody, a worker that guesses, repeats what it was told or has nothing to
say: they all look like parallel work and finish nothing. A worker is unused when the final answer has none of its
lines.

`success` is the F1 of answers that are at least half right, `tokens` counts what all agents wrote (`worker_tokens`:
what workers did), and the rest are counts of calls, workers and steps, as rl/critical_steps.py defines them.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perilune.rl.critical_steps import ASSIGN, MAIN, steps_of
from perilune.rl.environment import OUTCOME, Message
from perilune.rl.environments.wide_search_tools import ANSWER, OPEN

Row = tuple[str, str]
UNKNOWN = "unknown"
TASK_KINDS = ("wide", "narrow", "chain")


def judged(data: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """All facets. `data` is the task's; `events` what the episode noted."""
    replies = [event["body"] for event in events if event["kind"] == "reply" and event["chain"] == MAIN]
    rows = final_rows([reply["message"] for reply in replies])
    steps = steps_of(events)
    tasks = _assigned(replies, events)
    delivered = [lines_of(task["text"]) for task in tasks if task["is_started"]]
    said = {row for row in rows or () if row is not None}
    spawned = len(delivered)
    finished = sum(task["is_finished"] for task in tasks)
    scores = item_scores(data["items"], rows)
    written = [(event["chain"], event["body"].get("tokens") or 0) for event in events if event["kind"] == "reply"]
    return {
        **scores,
        "success": scores[OUTCOME] if scores[OUTCOME] >= 0.5 else 0.0,
        "parallel": min(1.0, spawned / math.ceil(len(data["items"]) / 2)),
        "finish": finished / len(tasks) if tasks else 0.0,
        **economy(data, scores[OUTCOME], steps.total),
        "width": float(steps.width),
        "critical_steps": float(steps.critical),
        "total_steps": float(steps.total),
        "assigned": float(len(tasks)),
        "finished": float(finished),
        "spawned": float(spawned),
        "unused_workers": float(sum(said.isdisjoint(lines) for lines in delivered)),
        "answered": float(rows is not None),
        "items": float(len(data["items"])),
        "tokens": float(sum(count for _, count in written)),
        "worker_tokens": float(sum(count for chain, count in written if chain != MAIN)),
        **{kind: float(data["kind"] == kind) for kind in TASK_KINDS},
    }


def economy(data: Mapping[str, Any], outcome: float, total_steps: int) -> dict[str, float]:
    """Nothing for tasks of before it was known how many steps an agent takes that never errs."""
    oracle = data.get("oracle_steps")
    return {} if oracle is None else {"economy": outcome * min(1.0, oracle / max(1, total_steps))}


def item_scores(items: Iterable[Sequence[str]], rows: Sequence[Row | None] | None) -> dict[str, float]:
    """outcome (F1), precision and recall of the rows of an answer; None in place of a row that cannot be read."""
    truth = {(normal(item), normal(value)) for item, value in items}
    hits = len(truth & set(rows or ()))
    return {
        OUTCOME: 2 * hits / (len(rows or ()) + len(truth)),
        "precision": hits / len(rows) if rows else 0.0,
        "recall": hits / len(truth),
    }


def normal(value: Any) -> str:
    """A text as it is compared: case, spaces and a full stop at the end say nothing."""
    return " ".join(str(value).casefold().split()).rstrip(".").rstrip()


def final_rows(messages: Iterable[Message]) -> list[Row | None] | None:
    """The table of the answer: of the last reply with a call of `answer`, its first one. None where there is none."""
    found = None
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name") == ANSWER:
                found = table_rows(function.get("arguments"))
                break
    return found


def table_rows(arguments: Any) -> list[Row | None] | None:
    """Rows of a call's arguments, as they were written; None for arguments without a table."""
    plain = _read(arguments)
    table = plain.get("table")
    if not isinstance(table, list):
        return None
    return [_row(each) for each in table]


def _row(row: Any) -> Row | None:
    if not isinstance(row, Mapping) or not all(
        isinstance(row.get(name), str | int | float) for name in ("item", "value")
    ):
        return None
    return normal(row["item"]), normal(row["value"])


def lines_of(text: str) -> list[Row]:
    """What a worker found: its lines `item: value`."""
    found = []
    for line in text.splitlines():
        item, colon, value = line.partition(":")
        if colon and normal(item) and normal(value) not in ("", UNKNOWN):
            found.append((normal(item), normal(value)))
    return found


def _assigned(replies: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every call of assign_task that ran, in order: its text, whether a worker began, whether it came to something."""
    outcomes = {event["chain"]: event["body"] for event in events if event["kind"] == "outcome"}
    started = {
        event["body"]["call"]: event["chain"]
        for event in events
        if event["kind"] == "started" and event["body"]["parent"] == MAIN
    }
    readers = {
        chain.partition("#")[0] for chain, body in outcomes.items() if body["tool"] == OPEN and body["status"] == "ok"
    }
    tasks, known = list[dict[str, Any]](), set[str]()
    for reply in replies:
        for place, call in enumerate(reply["message"].get("tool_calls") or ()):
            name = f"{reply['step']}.{place}"
            outcome = outcomes.get(f"{MAIN}#{name}")
            if outcome is None or outcome["tool"] != ASSIGN or not outcome["ran"]:
                continue
            prompt = str(_read((call.get("function") or {}).get("arguments")).get("prompt") or "")
            text = str(outcome.get("text") or "") if outcome["status"] == "ok" else ""
            news = _learnt(prompt, text) - known if started.get(name) in readers else set()
            known |= news
            tasks.append({"text": text, "is_started": name in started, "is_finished": bool(news)})
    return tasks


def _learnt(prompt: str, text: str) -> set[str]:
    """Things that a task names, of which a worker's text tells something that the task did not."""
    named, told = names_in(prompt), f" {_plain(_without_names(prompt))} "
    return {
        item
        for item, value in lines_of(text)
        if item in named and value not in named and _plain(value) and f" {_plain(value)} " not in told
    }


def _plain(text: str) -> str:
    """The words of a text and nothing between them."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def _without_names(text: str) -> str:
    """What a text says beside the names in it: Grey Oak is no word about oak."""
    return re.sub(r"\b[A-Z]\w*\s+[A-Z]\w*", " | ", text)


def names_in(text: str) -> set[str]:
    """What a text may name: two words with a capital, one after the other."""
    words = re.findall(r"\w+", text)
    return {normal(f"{one} {two}") for one, two in zip(words, words[1:]) if one[0].isupper() and two[0].isupper()}


def _read(arguments: Any) -> Mapping[str, Any]:
    """Arguments of a call as an object; empty for what is none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, Mapping) else {}
