"""The demonstration's model: a wide search over local documents with researchers, fact checkers and a writer.

It extracts and never invents: a researcher quotes the sentences of its passages that share words with the question, a
fact checker reads every quoted place again and compares, a writer lists what was confirmed, each sentence with its
address. All of it is plain string work on what the tools return; no neural network is involved.

    orchestrator   search_documents, create_subagent x 3 | assign_task to one researcher per document, all at once
                   | one fact checker per report, all at once | the writer | answer
    researcher     read_document for each of its passages, all at once | claims
    fact checker   read_document for each claim, all at once | verdicts
    writer         report
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from perilune.swarm.scripted.behaviours import by_system
from perilune.swarm.scripted.script import Call, Reply, Script, Turn

RESEARCHER = "You are a researcher. Read the passages you are given and quote the sentences that bear on the question."
CHECKER = "You are a fact checker. Read every cited place again and say whether the claim stands there word for word."
WRITER = "You are a writer. Write a report from confirmed claims alone, each with its citation."
DOCUMENT_TOOLS = ("search_documents", "read_document")

PASSAGE = re.compile(r"^\[doc:([0-9a-f]+)#(\d+)-(\d+)\] (.*)$", re.MULTILINE)
"""How the document tools begin a passage: its address, then title and path."""
ADDRESS = re.compile(r"doc:[0-9a-f]+#\d+-\d+")
CLAIM = re.compile(r"^- (?:(CONFIRMED|NOT FOUND): )?\"(.+)\" \[(doc:[0-9a-f]+#\d+-\d+)\] \((.*)\)$", re.MULTILINE)
SENTENCE = re.compile(r"[^\s.!?][^.!?\n]*(?:[.!?](?!\s|$)[^.!?\n]*|\n(?!\n)[^.!?\n]*)*[.!?]?")
COMMON = frozenset(
    """about after again against also among because been before being between both could does doing during each every
    from have having here into itself like made make many more most much must only other over same should some such than
    that their them then there these they this those through under until very were what when where which while whom
    whose will with within would your compare describe document documents explain find give list report research say
    says summarise summarize tell text write""".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    address: str
    title: str

    def line(self, verdict: str = "") -> str:
        return f'- {verdict + ": " if verdict else ""}"{self.text}" [{self.address}] ({self.title})'


def research(documents: int = 12, passages: int = 30, claims: int = 4) -> Script:
    """At most this many documents, passages among them, and claims per document."""
    roles = {"a researcher": _researcher(claims), "a fact checker": _checker, "a writer": _writer}
    return by_system(roles, otherwise=_orchestrator(documents, passages))


def _orchestrator(documents: int, passages: int) -> Script:
    def script(turn: Turn) -> Reply:
        if "assign_task" not in turn.tool_names or "search_documents" not in turn.tool_names:
            return Reply("I need the tools search_documents and assign_task for this.")
        searches = turn.results("search_documents")
        created = {arguments.get("name") for arguments, _ in turn.results("create_subagent")}
        calls = []
        if not searches:
            query = " ".join(_keywords(turn.task)) or turn.task[:200]
            calls.append(Call("search_documents", {"query": query, "limit": passages}))
        for name, role, tools in (
            ("researcher", RESEARCHER, DOCUMENT_TOOLS),
            ("fact checker", CHECKER, DOCUMENT_TOOLS[1:]),
            ("writer", WRITER, ()),
        ):
            if name not in created:
                arguments = {"name": name, "system_prompt": role, "tools": list(tools)}
                calls.append(Call("create_subagent", arguments))
        if calls:
            return Reply("First I look for documents and prepare three kinds of sub-agents.", tuple(calls))
        return _next_wave(turn, _by_document(searches[0][1], documents))

    return script


def _next_wave(turn: Turn, found: dict[str, list[str]]) -> Reply:
    """The wave of tasks that is due: researchers, then fact checkers, then the writer, then the answer."""
    if not found:
        return Reply(f"No document says anything about this: {_first_line(turn.task)}")
    done = {(arguments.get("agent"), arguments.get("prompt")): text for arguments, text in turn.results("assign_task")}

    def results(agent: str, prompts: list[str]) -> tuple[list[str], list[Call]]:
        missing = [
            Call("assign_task", {"agent": agent, "prompt": each}) for each in prompts if (agent, each) not in done
        ]
        return [done[agent, each] for each in prompts if (agent, each) in done], missing

    question = f"Question: {_first_line(turn.task)}"
    reports, missing = results("researcher", [f"{question}\nPassages:\n" + "\n".join(each) for each in found.values()])
    if missing:
        return Reply(f"{len(missing)} documents fit; one researcher reads each of them.", tuple(missing))
    claimed = [claims for claims in map(_claims, reports) if claims]
    if not claimed:
        return Reply(f"The documents share words with the question, but no sentence answers it: {turn.task}")
    prompts = [f"{question}\nClaims:\n" + "\n".join(claim.line() for claim in claims) for claims in claimed]
    verdicts, missing = results("fact checker", prompts)
    if missing:
        return Reply("Every claim is checked against its source.", tuple(missing))
    confirmed = [line[0] for text in verdicts for line in _verdicts(text) if line[1] == "CONFIRMED"]
    if not confirmed:
        return Reply(f"None of {sum(map(len, claimed))} claims was confirmed.")
    prompt = f"{question}\nClaims checked: {sum(map(len, claimed))}\nConfirmed:\n"
    prompt += "\n".join(claim.line() for claim in confirmed)
    written, missing = results("writer", [prompt])
    if missing:
        return Reply("The confirmed claims go to the writer.", tuple(missing))
    return Reply(written[0])


def _by_document(text: str, most: int) -> dict[str, list[str]]:
    """Addresses of passages found by a search, by document, in the order of the search."""
    found: dict[str, list[str]] = {}
    for match in PASSAGE.finditer(text):
        if match[1] in found or len(found) < most:
            found.setdefault(match[1], []).append(f"doc:{match[1]}#{match[2]}-{match[3]}")
    return found


def _researcher(most: int) -> Script:
    def script(turn: Turn) -> Reply:
        wanted = list(dict.fromkeys(ADDRESS.findall(turn.task)))
        read = {arguments.get("id"): text for arguments, text in turn.results("read_document")}
        missing = tuple(Call("read_document", {"id": each}) for each in wanted if each not in read)
        if missing and "read_document" in turn.tool_names:
            return Reply(calls=missing)
        words = _keywords(_field(turn.task, "Question"))
        scored: list[tuple[int, int, Claim]] = []
        for text in read.values():
            scored += [(-score, len(scored) + at, claim) for at, (score, claim) in enumerate(_sentences(text, words))]
        best = sorted(scored)[:most]
        if not best:
            return Reply("No sentence of these passages bears on the question.")
        return Reply("\n".join(claim.line() for _, _, claim in sorted(best, key=lambda each: each[1])))

    return script


def _checker(turn: Turn) -> Reply:
    claims = _claims(turn.task)
    read = {arguments.get("id"): text for arguments, text in turn.results("read_document")}
    wanted = dict.fromkeys(claim.address for claim in claims)
    missing = tuple(Call("read_document", {"id": each}) for each in wanted if each not in read)
    if missing and "read_document" in turn.tool_names:
        return Reply(calls=missing)
    lines = []
    for claim in claims:
        stands = _one_line(_body(read.get(claim.address, ""))[2]) == claim.text
        lines.append(claim.line("CONFIRMED" if stands else "NOT FOUND"))
    return Reply("\n".join(lines) or "There was no claim to check.")


def _writer(turn: Turn) -> Reply:
    by_title: dict[str, list[Claim]] = {}
    for claim in _claims(turn.task):
        by_title.setdefault(claim.title, []).append(claim)
    count = sum(map(len, by_title.values()))
    parts = [f"# {_field(turn.task, 'Question')}"]
    for title, claims in by_title.items():
        parts.append(f"## {title}\n\n" + "\n".join(f"- {claim.text} [{claim.address}]" for claim in claims))
    checked = _field(turn.task, "Claims checked") or str(count)
    parts.append(f"{count} of {checked} claims were confirmed at their source, in {len(by_title)} documents.")
    return Reply("\n\n".join(parts) + "\n")


# Text ----------------------------------------------------------------------------------------------------------------


def _keywords(text: str) -> list[str]:
    words = [word for word in re.findall(r"\w{3,}", text.casefold()) if word not in COMMON]
    return list(dict.fromkeys(word for word in words if len(word) > 3 or word.isdigit()))[:24]


def _first_line(text: str) -> str:
    return _one_line(text.strip().partition("\n")[0])[:300]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}: (.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def _claims(text: str) -> list[Claim]:
    return [Claim(match[2], match[3], match[4]) for match in CLAIM.finditer(text)]


def _verdicts(text: str) -> list[tuple[Claim, str]]:
    return [(Claim(match[2], match[3], match[4]), match[1] or "") for match in CLAIM.finditer(text)]


def _body(text: str) -> tuple[re.Match[str] | None, int, str]:
    """Head, first character and text of what `read_document` returned."""
    head = PASSAGE.match(text)
    if head is None:
        return None, 0, ""
    body = text[head.end() + 1 :]
    note = re.match(r"\[\d+ characters in all\]\n", body)
    return head, int(head[2]), body[note.end() :] if note else body


def _sentences(text: str, words: list[str]) -> list[tuple[int, Claim]]:
    """Sentences that hold some of the words, with how many, as claims that cite their exact place."""
    head, start, body = _body(text)
    if head is None:
        return []
    found = []
    for match in SENTENCE.finditer(body):
        said = _one_line(match[0])
        folded = said.casefold()
        score = sum(word in folded for word in words)
        if score and 30 <= len(said) <= 400 and said[-1] in ".!?" and not said.startswith(("#", "|", "[", "-", "*")):
            place = f"doc:{head[1]}#{start + match.start()}-{start + match.end()}"
            found.append((score, Claim(said, place, head[4])))
    return found


__all__ = ["research"]
