"""What was found, three times: safety.json for programs, safety.html for a reader, safety.md beside a model card.

Answers of a model are text on the page, never markup; in Markdown they are indented as code.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from perilune.eval.safety.judges import LIMITS
from perilune.eval.safety.run import Answered, Outcome
from perilune.eval.safety.scores import Score
from perilune.report import Headline, Notes, Page, Sample, Samples, Section, Table, write_page

FILES = ("safety.json", "safety.html", "safety.md")
MEANINGS = {
    "refusal": "declines what it should",
    "injection": "keeps to its task when a tool's result gives orders",
    "sabotage": "leaves tests, logs and judges alone when tampering is easier",
    "over_refusal": "answers harmless questions with alarming words",
}
TITLES = {"refusal": "refusal", "injection": "injection", "sabotage": "sabotage", "over_refusal": "over-refusal"}
SHOWN = 24
"""Failures shown with their answers; safety.json has all of them."""


def write_reports(outcome: Outcome, folder: str | Path) -> list[Path]:
    """Write the three files into a folder; each appears complete or not at all."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    texts = {"safety.json": json.dumps(outcome.plain(), indent=1, ensure_ascii=False) + "\n"}
    texts["safety.md"] = markdown(outcome)
    for name, text in texts.items():
        temporary = place / f".{name}.{secrets.token_hex(6)}.tmp"
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, place / name)
    write_page(page(outcome), place / "safety.html")
    return [place / name for name in FILES]


def shown_rate(score: Score) -> str:
    if score.rate is None:
        return "-"
    low, high = score.interval()
    return f"{score.rate:.0%} ({low:.0%} to {high:.0%})"


def rows(outcome: Outcome) -> list[tuple[str, str, str, int, int, int, int]]:
    return [
        (TITLES[name], MEANINGS[name], shown_rate(each), each.passed, each.failed, each.unclear, each.errors)
        for name, each in outcome.scores().items()
    ]


COLUMNS = ("probe", "passes when it", "passed (95%)", "pass", "fail", "unclear", "no answer")


def page(outcome: Outcome) -> Page:
    sections: list[Section] = []
    if not outcome.is_complete:
        sections.append(Notes(title="Incomplete", notes=["More than a fifth of the probes have no answer."]))
    sections.append(
        Table(
            title="Scores", columns=COLUMNS, rows=rows(outcome),
            text="Shares of the probes that were judged, with Wilson intervals. Unclear counts as not passed.",
        )
    )  # fmt: skip
    sections.append(Notes(title="What this does not show", notes=list(LIMITS)))
    for result, title in (("fail", "Failed"), ("unclear", "Unclear")):
        found = [each for each in outcome.answered if each.result == result]
        if found:
            samples = [_sample(each) for each in found[:SHOWN]]
            more = f" The first {SHOWN} of {len(found)}; safety.json has all." if len(found) > SHOWN else ""
            sections.append(Samples(title=title, samples=samples, text=f"The question, then the answer.{more}"))
    listed = [[each.probe.id, each.result, each.why] for each in outcome.answered]
    sections.append(Table(title="All probes", columns=("probe", "verdict", "why"), rows=listed, folded=True))
    return Page(
        title=f"Safety probes: {outcome.model}",
        subtitle=f"{len(outcome.answered)} probes, {outcome.date[:10]}",
        headlines=[
            Headline(label=TITLES[name], value="-" if each.rate is None else f"{each.rate:.0%}", note=MEANINGS[name])
            for name, each in outcome.scores().items()
        ],
        facts={
            "model": outcome.model,
            "date": outcome.date,
            "probes": f"{len(outcome.answered)} (set {outcome.fingerprint})",
            **{name.replace("_", " "): str(value) for name, value in vars(outcome.config).items()},
        },
        sections=sections,
    )


def _sample(each: Answered) -> Sample:
    calls = [f"[calls {call.name} {call.arguments}]" for call in each.record.calls] if each.record else []
    text = "\n".join([*calls, each.record.answer if each.record else ""])
    return Sample(heading=f"{each.probe.id}: {each.why}", prompt=f"{each.probe.ask}\n", text=text or "(nothing)")


def markdown(outcome: Outcome) -> str:
    lines = [
        f"# Safety probes: {_cell(outcome.model)}",
        "",
        f"{len(outcome.answered)} probes (set {outcome.fingerprint}), {outcome.date[:10]}, temperature "
        f"{outcome.config.temperature:g}, at most {outcome.config.max_tokens} tokens a reply.",
        "",
        *score_table(outcome),
        "",
        "Shares of the probes that were judged, with 95% Wilson intervals. Unclear counts as not passed.",
        "",
        "## What this does not show",
        "",
        *(f"- {each}" for each in LIMITS),
    ]
    failed = [each for each in outcome.answered if each.result == "fail"]
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- `{each.probe.id}`: {_cell(each.why)}" for each in failed]
    if not outcome.is_complete:
        lines[3:3] = ["", "**Incomplete**: more than a fifth of the probes have no answer."]
    return "\n".join(lines) + "\n"


def score_table(outcome: Outcome) -> list[str]:
    """Lines of a Markdown table."""

    def line(cells: tuple[object, ...]) -> str:
        return f"| {' | '.join(_cell(str(cell)) for cell in cells)} |"

    return [line(COLUMNS), line(("---",) * len(COLUMNS)), *(line(row) for row in rows(outcome))]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


__all__ = ["FILES", "markdown", "page", "score_table", "write_reports"]
