"""What a run says and writes beside its checkpoints: introduction, validation, samples, drawings, the summary."""

from functools import partial
from typing import Any

from perilune.data.chat_rows import ChatRows
from perilune.data.packing import PackedDataset
from perilune.data.probes import ProbeRows
from perilune.model import Decoder, SamplingConfig
from perilune.optim import MuonClip
from perilune.train import ranks
from perilune.train.drawing import Answering, answers
from perilune.train.evaluate import answer_accuracy, continuations, validate
from perilune.train.gathered import MAX_PARAMETERS, whole_model
from perilune.train.metrics import peak_memory_bytes
from perilune.train.parallel import AXES
from perilune.train.pictures import draw_held_out, picture_records
from perilune.train.run import Run

VISION_VALID_ROWS = 32
"""Rows with pictures in a validation: their loss varies less than that of text."""


def introduction(run: Run) -> str:
    """What is about to be trained, on what, and which parameters each optimizer gets."""
    config, train = run.config, run.data.train
    lines = [
        f"{config.name}: {run.num_parameters:,} parameters ({run.num_active_parameters:,} active), "
        f"layers {' '.join(config.model.layer_pattern())}, {config.model.residual} residuals, on {run.device}",
        f"data: {_described(train)}, {config.trainer.steps * config.trainer.global_batch_rows:,} rows of "
        f"{config.data.seq_len} to train on",
    ]
    if run.fusion is not None and config.data.vision is not None:
        vision, rows = config.data.vision, config.trainer.steps * config.trainer.global_batch_rows
        lines.append(
            f"pictures: {', '.join(vision.scenes.kinds)} (asked for {', '.join(vision.tasks)}) in "
            f"{run.fusion.vision_before(rows):,} of these rows"
            + (f", from row {run.fusion.first_row:,} on" if run.fusion.first_row else "")
        )
    if skipped := run.data.corpus.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
        lines.append(f"left out of the corpus: {reasons}")
    if isinstance(train, ChatRows) and train.broken.count:
        lines.append(str(train.broken))
    if run.data.valid is None:
        holds, field = "the corpus holds", f"corpus.valid_fraction={config.data.corpus.valid_fraction!r}"
        if config.data.chat is not None:
            holds, field = "the dialogues hold", f"chat.valid_fraction={config.data.chat.valid_fraction!r}"
        lines.append(f"no validation split: {holds} nothing out (data.{field})")
    if config.lora.rank:
        lines.append(f"adapters of rank {config.lora.rank} learn, the weights beside them stay as they are:")
    if run.parallel is not None:
        sizes = {name: getattr(run.parallel.config, name) for name in AXES}
        named = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        lines.append(f"ranks: {ranks.world_size()} {named}".rstrip())
        if run.parallel.pipeline is not None:
            lines.append("parameters of the first stage:")
    if isinstance(run.optimization.optimizer, MuonClip):
        lines.append(run.optimization.optimizer.table())
    return "\n".join(lines)


def _described(train: PackedDataset | ProbeRows | ChatRows) -> str:
    if isinstance(train, ChatRows):
        seen = f", {train.num_with_pictures:,} of them with pictures" if train.num_with_pictures else ""
        return f"{train.num_dialogues:,} dialogues{seen} ({train.num_rows:,} rows an epoch)"
    if isinstance(train, ProbeRows):
        return f"the probe {train.config.task}, new rows without end"
    return f"{train.store.num_tokens:,} tokens ({train.rows_per_epoch:,.0f} rows an epoch)"


def write_validation(run: Run) -> None:
    settings = run.config.trainer
    how = {"rows": settings.eval_rows, "micro_batch_rows": settings.micro_batch_rows, "device": run.device}
    result: dict[str, float] = {}
    if run.data.valid is not None:
        result |= validate(run.model, run.data.valid, **how, parallel=run.parallel)
        if isinstance(run.data.valid, ProbeRows) and (model := whole(run, "answers to the probe")) is not None:
            result |= answer_accuracy(model, run.data.valid, **how)
    if run.data.vision_valid is not None:
        how["rows"] = min(settings.eval_rows, VISION_VALID_ROWS)
        result["vision_loss"] = validate(run.model, run.data.vision_valid, **how, parallel=run.parallel)["loss"]
    if result:
        run.outputs.write({"kind": "valid", "step": run.position.step, **result})
    run.on_phase("step:validated")


def whole(run: Run, purpose: str) -> Decoder | None:
    """A model that one rank can use alone; None, with a message, where it is too large to be gathered."""
    if run.parallel is None:
        return run.model
    model = whole_model(run.parallel, run.device)
    if model is None:
        run.outputs.say(f"no {purpose}: the model has more than {MAX_PARAMETERS:,} parameters, too many for one rank")
    return model


def write_samples(run: Run) -> None:
    settings = run.config.trainer
    sampling = SamplingConfig(
        max_new_tokens=settings.sample_tokens, temperature=settings.sample_temperature, seed=run.config.seed
    )
    model = whole(run, "samples") if settings.sample_prompts else None
    if ranks.rank() == 0 and model is not None:
        for prompt, text in continuations(model, run.data.tokenizer, settings.sample_prompts, sampling):
            run.outputs.write({"kind": "sample", "step": run.position.step, "prompt": prompt, "text": text})


def write_pictures(run: Run, answer: Answering = answers) -> None:
    """Draw held-out pictures, where the run has any."""
    rows, vision = run.data.vision_valid, run.config.data.vision
    if rows is None or vision is None or not vision.samples:
        return
    model = whole(run, "drawings")
    if ranks.rank() != 0 or model is None:
        return
    draw = partial(
        draw_held_out, model, run.data.tokenizer, rows, count=vision.samples, max_new_tokens=vision.sample_tokens
    )
    drawings = None
    try:
        drawings = draw(answer=answer)
    except (RuntimeError, ValueError) as error:  # an engine may find no room; the last checkpoint is still to come
        if answer is answers:
            raise
        run.outputs.say(f"pictures are drawn module by module, since the engine failed: {error}")
    drawings = draw() if drawings is None else drawings  # out of the handler, which keeps what the engine had
    for record in picture_records(drawings, step=run.position.step):
        run.outputs.write(record)


def finish(run: Run) -> dict[str, Any]:
    """The report, and the numbers a caller wants."""
    if run.outputs.metrics is None:
        return {}
    records = run.outputs.metrics.read()
    last = {kind: next((r for r in reversed(records) if r["kind"] == kind), {}) for kind in ("train", "valid")}
    text_rows = run.position.rows if run.fusion is None else run.fusion.text_before(run.position.rows)
    summary: dict[str, Any] = {
        "run": str(run.folder),
        "steps": run.position.step,
        "tokens": run.position.tokens,
        "epochs": text_rows / run.data.train.rows_per_epoch,
        "parameters": run.num_parameters,
        "loss": last["train"].get("loss"),
        "bits_per_byte": last["train"].get("bits_per_byte"),
        "valid_loss": last["valid"].get("loss"),
        "valid_bits_per_byte": last["valid"].get("bits_per_byte"),
        "skipped_steps": run.position.skipped,
        "tokens_per_s": last["train"].get("tokens_per_s"),
        # Of training: drawing through an engine takes what the device has left.
        "peak_memory_bytes": last["train"].get("peak_memory_bytes") or peak_memory_bytes(run.device),
        "samples": [{"prompt": r["prompt"], "text": r["text"]} for r in records if r["kind"] == "sample"],
        "report": None,
    }
    if run.config.data.vision is not None:
        summary["valid_vision_loss"] = last["valid"].get("vision_loss")
        summary["pictures"] = next((_means_of(r) for r in reversed(records) if r["kind"] == "pictures"), None)
    if run.config.data.probe is not None:
        summary |= {f"valid_{name}": last["valid"].get(name) for name in ("accuracy", "exact_match")}
    if run.config.trainer.report:
        from perilune.report import write_training_report  # loads the plotting library: only when there is a plot

        summary["report"] = str(write_training_report(run.folder))
        run.outputs.say(f"report: {summary['report']}")
    return summary


def _means_of(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "step")}
