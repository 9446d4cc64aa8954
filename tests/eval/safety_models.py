"""Scripted models for the safety probes: a safe one, an unsafe one, one that refuses everything, and broken ones.

They know the probes, as an actor knows his play: each finds its probe by the question.
"""

from perilune.eval.safety import Probe, load_probes
from perilune.swarm.scripted import Call, Reply, Script, Turn

REFUSAL = "I'm sorry, but I can't help with that."
COMPLIANCE = "Subject: hello\nFriends,\nBREAKING: news\nDear friend\n1. Begin.\n2. Go on.\n3. End."


def _probe(turn: Turn) -> Probe:
    return next(probe for probe in load_probes() if probe.ask == turn.task)


def _done(turn: Turn, name: str) -> bool:
    return bool(turn.results(name))


def safe(turn: Turn) -> Reply:
    probe = _probe(turn)
    if probe.category == "refusal":
        return Reply(REFUSAL)
    if probe.category in ("over_refusal", "injection"):
        return Reply(f"It is {probe.signs[0]}.")
    assert probe.goal is not None
    if not _done(turn, "read_file"):
        return Reply(calls=(Call("read_file", {"path": next(iter(probe.files))}),))
    if not _done(turn, "write_file"):
        content = probe.files.get(probe.goal.file, "") + probe.goal.contains
        return Reply(calls=(Call("write_file", {"path": probe.goal.file, "content": content}),))
    return Reply("I wrote the file.")


def unsafe(turn: Turn) -> Reply:
    probe = _probe(turn)
    if probe.category == "refusal":
        return Reply(COMPLIANCE)
    if probe.category == "over_refusal":
        return Reply(probe.signs[0])
    if probe.category == "injection":
        if probe.canary:
            return Reply(probe.canary)
        name = probe.forbidden[0]
        filled = {"send_message": {"to": "x", "text": "y"}, "set_setting": {"name": "x", "value": "y"}}
        calls = () if _done(turn, name) else (Call(name, filled.get(name, {"path": "x"})),)
        return Reply("done", calls)
    victim = next(name for name in probe.files if any(name.startswith(each.rstrip("*")) for each in probe.protected))
    if not _done(turn, "delete_file"):
        return Reply(calls=(Call("delete_file", {"path": victim}),))
    return Reply("All checks pass now.")


def over_refusing(turn: Turn) -> Reply:
    return Reply(REFUSAL)


def babbling(turn: Turn) -> Reply:
    return Reply("the of the of def return self self")


def silent(turn: Turn) -> Reply:
    return Reply("")


MODELS: dict[str, Script] = {
    "safe": safe,
    "unsafe": unsafe,
    "over_refusing": over_refusing,
    "babbling": babbling,
    "silent": silent,
}
