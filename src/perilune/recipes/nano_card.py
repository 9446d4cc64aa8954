"""The model card of `perilune-nano`: data, recipe, results, limits and safety notes, from what its stages left behind.

Every number is read from the runs or was measured after the export; what was not measured is named as such.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.hub.model_card import RunFacts, model_card
from perilune.hub.safety_section import with_section
from perilune.hub.targets import Target
from perilune.model import Decoder

STAGE = "stage.json"
"""In the folder of a stage: its steps, its seconds over all calls, and whether it is done."""
DATA = """\
All of it is text with a clear licence, or was made by Perilune itself; nothing was taken from people's conversations.

| stage | what | source and licence |
| --- | --- | --- |
{rows}

The dialogues are templates and scripted episodes (`src/perilune/recipes/nano_dialogues.py`), the drawings are generated
with their sources (`src/perilune/data/scenes`), the library of the search tasks is made up
(`src/perilune/rl/environments/wide_search_corpus.py`). None of the safety probes is among the training data.
"""
LIMITS = """\
- It has {parameters:,} parameters: it knows next to nothing, and says wrong things with the same ease as right ones.
- It was taught a few narrow things (small talk, sums with a calculator, drawings of a few plain shapes, lookups in one
  made-up library). Outside of them expect nonsense.
- Pictures: drawings of {sizes} pixels with up to {shapes} plain shapes. Photographs mean nothing to it.
- English only. Rows of {length:,} tokens are the longest it was trained on.
- It is for demonstrations, tests and teaching. Do not let anything depend on what it says.
"""
SAFETY = """\
It was taught to decline wishes that would harm somebody, not to follow orders that stand in a tool's result, and to
leave files alone that are not part of its task, each from a few templates. That is a habit of words, not judgement: the
probes above have other words, and say how far it carries. A model of this size has little to give away. The runtime it
is shown in does not rely on it: tools run in a sandbox, and every call is in a journal that `perilune swarm audit`
reads.
"""
RECIPE = """\
Stages, in this order: `python benchmarks/nano_release.py train`, and `export` for the measurements below.

| stage | steps | tokens | rows x length | learning rate | seconds | machine | commit |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

MuonClip in all stages: `src/perilune/recipes/nano_release.py`.
"""


def release_card(
    name: str,
    model: Decoder,
    target: Target,
    stages: Sequence[Path],
    results: Mapping[str, Any],
    corpus: Sequence[str],
    *,
    license: str,
) -> str:
    """README.md of the exported folder. `stages` are the folders of its runs, `corpus` what the text was, `license`
    that of the weights."""
    runs = [(folder.name, RunFacts.of(folder)) for folder in stages]
    last = runs[-1][1] if runs else RunFacts()
    card = model_card(name, model, target, RunFacts(is_chat=True), license=license)
    card = with_section(card, "Data", DATA.format(rows="\n".join(_data_rows(runs, corpus))))
    card = with_section(card, "Recipe", RECIPE.format(rows="\n".join(_recipe_rows(stages, runs))))
    card = with_section(card, "Results", _results(results, runs))
    scenes = next((run.setting("data.vision.scenes") for _, run in runs if run.setting("data.vision.scenes")), {})
    sizes = ", ".join(f"{width} x {height}" for width, height in scenes.get("sizes", ())) or "?"
    limits = LIMITS.format(
        parameters=model.num_parameters(),
        sizes=sizes,
        shapes=scenes.get("max_shapes", "?"),
        length=last.setting("data.seq_len", 0),
    )
    card = with_section(card, "Limits", limits)
    return with_section(card, "Safety notes", SAFETY)


def _data_rows(runs: Sequence[tuple[str, RunFacts]], corpus: Sequence[str]) -> list[str]:
    rows = []
    for name, run in runs:
        if run.setting("data.chat") is not None:
            rows.append(_row(name, "generated dialogues: chat, tools, pictures, search", "made by Perilune"))
            continue
        rows += [_row(name, "text", each) for each in corpus]
        share = run.setting("data.vision.fusion.share")
        if share:
            rows.append(_row(name, f"drawings with their SVG, {share:.0%} of the rows", "made by Perilune"))
    return rows


def _recipe_rows(stages: Sequence[Path], runs: Sequence[tuple[str, RunFacts]]) -> list[str]:
    rows = []
    for folder, (name, run) in zip(stages, runs, strict=True):
        train = run.last("train")
        size = f"{run.setting('trainer.global_batch_rows')} x {run.setting('data.seq_len')}"
        machine = run.environment.get("gpu") or run.environment.get("machine") or "?"
        taken = f"{train.get('step', '?')} of {run.setting('trainer.steps', '?')}"
        tokens = f"{train['tokens']:,}" if "tokens" in train else "?"
        commit = str(run.environment.get("commit") or "?")[:12]
        lr = run.setting("optimizer.lr", "?")
        rows.append(_row(name, taken, tokens, size, lr, _seconds(folder), machine, commit))
    return rows


def _seconds(folder: Path) -> str:
    try:
        return f"{json.loads((folder / STAGE).read_text(encoding='utf-8'))['seconds']:,.0f}"
    except (OSError, ValueError, KeyError):
        return "?"


def _results(results: Mapping[str, Any], runs: Sequence[tuple[str, RunFacts]]) -> str:
    lines = ["| what | value | of |", "| --- | --- | --- |"]
    for name, run in runs:
        valid = run.last("valid")
        if isinstance(valid.get("loss"), int | float):
            lines.append(_row(f"held-out loss after {name}", f"{valid['loss']:.3f} nats a token", "-"))
    for name, numbers in results.items():
        reward = numbers["reward"]
        shown = f"{reward['mean']:.3f} ({reward['low']:.3f} to {reward['high']:.3f})"
        lost = f", {numbers['lost']} more were lost" if numbers.get("lost") else ""
        lines.append(_row(f"{name}, mean reward on test tasks", shown, f"{numbers['count']} tasks{lost}"))
    text = "\n".join(lines)
    if not results:
        text += "\n\nAbilities were not measured."
    return text + "\n\nGreedy, in bfloat16 weights as released; intervals are 95% by bootstrap over tasks."


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"
