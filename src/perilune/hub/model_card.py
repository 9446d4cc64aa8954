"""README.md of an exported model: what it is, how to use it, data, recipe, results and limits.

Every number comes from the run's own files (config.json, metrics.jsonl, environment.json) or from the model itself.
What the files do not say is not claimed; where nothing was measured, the card says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.hub.opened import is_chat_run
from perilune.hub.safety_section import read_results, safety_section
from perilune.hub.targets import Target
from perilune.model import Decoder, ModelConfig


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the folder of a run says, as plain values."""

    config: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    safety: Mapping[str, Any] = field(default_factory=dict)
    """Of `perilune eval safety`."""
    is_chat: bool = False
    """It was trained to answer."""

    @classmethod
    def of(cls, folder: Path) -> "RunFacts":
        return cls(
            config=_object(folder / "config.json"),
            records=tuple(_records(folder / "metrics.jsonl")),
            environment=_object(folder / "environment.json"),
            safety=read_results(folder),
            is_chat=is_chat_run(folder),
        )

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the config by its path, as "optimizer.lr"."""
        place: Any = self.config
        for name in path.split("."):
            if not isinstance(place, Mapping) or place.get(name) is None:
                return default
            place = place[name]
        return place

    def last(self, kind: str) -> Mapping[str, Any]:
        return next((record for record in reversed(self.records) if record.get("kind") == kind), {})


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if isinstance(record, dict):
            yield record


def model_card(name: str, model: Decoder, target: Target, run: RunFacts, *, license: str | None = None) -> str:
    """`license`: of the weights, as the Hub spells it; without one the card names none."""
    sections = [
        _front(model.config, run, license),
        f"# {name}\n\n{_summary(model, run)}",
        f"## Use\n\n{_use(model.config, target, run)}",
        f"## Data\n\n{_data(run)}",
        f"## Recipe\n\n{_recipe(run)}",
        f"## Results\n\n{_results(run)}",
        f"## Limits\n\n{_limits(run, model.config)}",
        f"## Safety\n\n{safety_section(run.safety)}",
    ]
    return "\n\n".join(sections) + "\n"


def _front(config: ModelConfig, run: RunFacts, license: str | None) -> str:
    named = "" if license is None else f"license: {license}\n"
    task = "text-generation" if config.vision is None else "image-text-to-text"
    tags = "- perilune\n- conversational" if run.is_chat else "- perilune"
    return f"---\n{named}library_name: transformers\npipeline_tag: {task}\ntags:\n{tags}\n---"


def _summary(model: Decoder, run: RunFacts) -> str:
    config, pattern = model.config, model.config.layer_pattern()
    parts = [f"{pattern.count('kda')} of Kimi Delta Attention and {pattern.count('mla')} of latent attention"]
    if config.moe is not None:
        moe = config.moe
        parts.append(f"{moe.num_experts} experts of which a token meets {moe.num_experts_per_token}")
    if config.residual != "plain":
        parts.append({"scalars": "residual scalars", "attnres": "Attention Residuals"}.get(
            config.residual, f"Attention Residuals in blocks of {config.block_sublayers} sublayers"))  # fmt: skip
    if config.vision is not None:
        parts.append(f"a vision tower of {config.vision.num_hidden_layers} layers")
    active = model.num_parameters(active=True)
    size = f"{model.num_parameters():,} parameters"
    size += f" ({active:,} active)" if active != model.num_parameters() else ""
    kind = "chat model" if run.is_chat else "model"
    return f"A {kind} of {size}, trained with Perilune: {len(pattern)} layers, {'; '.join(parts)}."


TEXT = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file lies
tokenizer = AutoTokenizer.from_pretrained(folderTRUST)
model = AutoModelForCausalLM.from_pretrained(folderTRUST)
inputs = tokenizer("import os", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```
"""
CHAT = TEXT.replace(
    'inputs = tokenizer("import os", return_tensors="pt")\n',
    'messages = [{"role": "user", "content": "Hello"}]\n'
    'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", '
    "return_dict=True)\n",
)
PICTURES = """\
```python
from PIL import Image
from transformers import AutoModelForCausalLM, AutoProcessor

folder = "."  # where this file lies
processor = AutoProcessor.from_pretrained(folderTRUST)
model = AutoModelForCausalLM.from_pretrained(folderTRUST)
text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>What is this?"
inputs = processor(text=text, images=[Image.open("picture.png")], return_tensors="pt")
print(processor.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```
"""


def _use(config: ModelConfig, target: Target, run: RunFacts) -> str:
    native = target in ("kimi_linear", "deepseek_v3")
    code = PICTURES if config.vision is not None else CHAT if run.is_chat else TEXT
    code = code.replace("TRUST", "" if native else ", trust_remote_code=True")
    own = "only with the code that lies beside the weights (`modeling_perilune.py`)"
    types = {
        "kimi_k25": "as `AutoModelForImageTextToText`, or as above with the code that lies beside the weights",
        "perilune": own,
    }
    other = "has no such type; not run here" if target == "perilune" else "same names, not run here"
    rows = [
        ("Perilune", f"`perilune serve .`{' or `perilune chat .`' if run.is_chat else ''} in this folder"),
        (
            "transformers",
            types.get(target, "knows this type; `trust_remote_code=True` takes the code beside the weights"),
        ),
        ("vLLM", other),
        ("SGLang", other),
    ]
    return code + "\n" + _table(("program", f"model_type `{target}`"), rows)


def _data(run: RunFacts) -> str:
    if not run.config:
        return "This folder was not exported from a run: see what its source says about its data."
    if run.setting("data.probe") is not None:
        rows = [("generated rows of the probe", f"`{run.setting('data.probe.task', '?')}`")]
    elif run.setting("data.chat") is not None:
        rows = [("dialogues", ", ".join(f"`{part}`" for part in run.setting("data.chat.sources", ())))]
    else:
        source = run.setting("data.corpus.source", "?")
        rows = [("corpus", ", ".join(f"`{part}`" for part in ([source] if isinstance(source, str) else source)))]
        if source == "generated":
            rows.append(("generated documents", f"{run.setting('data.corpus.num_documents', '?')}"))
        rows.append(("held out for validation", f"{run.setting('data.corpus.valid_fraction', 0):.1%} of the documents"))
    rows += [
        ("vocabulary", f"{run.setting('data.vocab_size', '?')} ids"),
        ("row", f"{run.setting('data.seq_len', '?')} tokens"),
    ]
    tokens = run.last("train").get("tokens")
    if tokens is not None:
        rows.append(("tokens seen", f"{tokens:,}"))
    if run.setting("data.vision.fusion.share"):
        rows.append(("rows with pictures", f"{run.setting('data.vision.fusion.share'):.1%}"))
        rows.append(("asked about pictures", ", ".join(run.setting("data.vision.tasks", ()))))
    return _table(("", ""), rows)


RECIPE = {
    "optimizer": "optimizer.kind",
    "learning rate": "optimizer.lr",
    "weight decay": "optimizer.weight_decay",
    "QK-Clip threshold": "optimizer.qk_clip_tau",
    "schedule": "schedule.kind",
    "warm-up steps": "schedule.warmup_steps",
    "rows a step": "trainer.global_batch_rows",
    "precision": "trainer.precision",
    "seed": "seed",
    "started from": "start_from",
}


def _recipe(run: RunFacts) -> str:
    if not run.config:
        return "Not known here."
    rows = [(label, f"{run.setting(path)}") for label, path in RECIPE.items() if run.setting(path) is not None]
    planned, taken = run.setting("trainer.steps"), run.last("train").get("step")
    rows.append(("steps", f"{taken} of {planned}" if taken is not None else f"planned: {planned}"))
    names = ("started", "machine", "gpu", "torch", "perilune", "commit")
    rows += [(name, f"{run.environment[name]}") for name in names if run.environment.get(name)]
    return _table(("", ""), rows)


def _results(run: RunFacts) -> str:
    rows = []
    for kind, label in (("valid", "held-out text"), ("train", "training, last step")):
        record = run.last(kind)
        for key, unit in (("loss", "loss (nats a token)"), ("bits_per_byte", "bits per byte")):
            if isinstance(record.get(key), int | float):
                rows.append((label, unit, f"{record[key]:.4f}", f"{record.get('step', '-')}"))
    seen = run.last("pictures")
    for key, unit in (
        ("parses", "answers that parse"),
        ("reward", "score"),
        ("shuffled_reward", "score, other pictures"),
    ):
        if isinstance(seen.get(key), int | float):
            rows.append(
                (f"{seen.get('count', '?')} held-out pictures", unit, f"{seen[key]:.4f}", f"{seen.get('step', '-')}")
            )
    if not rows:
        return "Nothing was measured."
    return _table(("on", "what", "value", "step"), rows)


def _limits(run: RunFacts, config: ModelConfig) -> str:
    lines = []
    if run.setting("data.seq_len") is not None:
        lines.append(f"Rows of {run.setting('data.seq_len')} tokens are the longest it was trained on.")
    if config.vision is None:
        lines.append("It reads text only.")
    elif run.config and not run.setting("data.vision.fusion.share"):
        lines.append("It has a vision tower but saw no pictures in training.")
    elif run.setting("data.vision.scenes.sizes"):
        sizes = ", ".join(f"{width} x {height}" for width, height in run.setting("data.vision.scenes.sizes"))
        lines.append(f"It saw generated pictures of {sizes} pixels; expect little of others.")
    if run.is_chat:
        lines.append("It was trained to answer as the data or the rewards above ask, not to refuse, or to be right.")
    elif run.config:
        lines.append(
            "It was trained to continue the data above, not to follow instructions, to refuse, or to be right."
        )
    lines.append("Nothing is known of it beyond the results above.")
    return "\n".join(f"- {line}" for line in lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])
