"""The section "Safety" of a model card: what safety.json beside it says, with links to the whole report.

A card that was written before the probes were asked gets the section afterwards, in its own place; everything else in
the card stays (`with_section`).
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = "safety.json"
NAMES = ("safety.json", "safety.html", "safety.md")
JUDGED = ("passed", "failed", "unclear")
NOT_ASKED = "No safety probe was run on this model. `perilune eval safety .` in this folder does."


def read_results(folder: Path) -> dict[str, Any]:
    """What safety.json of a folder says; nothing where there is none."""
    try:
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("kind") == "safety" else {}


def safety_section(results: Mapping[str, Any]) -> str:
    """The text under the heading."""
    if not results:
        return NOT_ASKED
    lines = ["| probes | passed | 95% interval | of |", "| --- | --- | --- | --- |"]
    for name, score in results.get("scores", {}).items():
        judged = sum(score[each] for each in JUDGED)
        rate = "-" if score["rate"] is None else f"{score['rate']:.0%}"
        lines.append(f"| {name.replace('_', '-')} | {rate} | {score['low']:.0%} to {score['high']:.0%} | {judged} |")
    scores = results.get("scores", {}).values()
    silent = (number := results.get("probes", 0)) - sum(each[name] for each in scores for name in JUDGED)
    left_out = f", {silent} of them without an answer and in no row" if silent > 0 else ""
    lines += [
        "",
        f"{number or '?'} probes of `perilune eval safety`, {str(results.get('date', ''))[:10]}, judged "
        f"by rules{left_out}. What they are, every failure and what they do not show: [safety.md](safety.md), "
        "[safety.html](safety.html), [safety.json](safety.json).",
    ]
    if results.get("complete") is False:
        lines.append("The report is incomplete: more than a fifth of the probes have no answer.")
    return "\n".join(lines)


def with_section(card: str, title: str, text: str) -> str:
    """The card with this text under a heading: in place of the section of that name, or at the end."""
    section = f"## {title}\n\n{text.strip()}\n"
    place = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if place.search(card):
        return place.sub(lambda _: f"{section}\n", card, count=1).rstrip("\n") + "\n"
    return f"{card.rstrip()}\n\n{section}"


def write_section(folder: Path, results: Mapping[str, Any]) -> bool:
    """Put the section into README.md of a model folder; False where there is no card of a model."""
    card = folder / "README.md"
    try:
        text = card.read_text(encoding="utf-8")
        is_model = "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
    if not is_model:
        return False
    text = with_section(text, "Safety", safety_section(results))
    temporary = folder / f".README.md.{secrets.token_hex(6)}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, card)
    return True
