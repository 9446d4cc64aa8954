"""The training loop. `train` reads from top to bottom; the functions around it are what its lines mean.

One optimizer step over the micro-batches m of the global batch, with V valid targets in all of them on all ranks:

    gradient = sum_m d(sum of cross entropy in m) / V            so the cut into micro-batches and ranks does not matter

Then the gradient is clipped (AdamW's part), the optimizer moves, QK-Clip shrinks heads whose logits grew, router biases
move. A step whose loss or gradient norm is not finite changes nothing but the count of such steps.

A run is a function of its config and seed. Everything that decides the next step is in the checkpoint: on CPU, killing
the process at any instant and resuming gives the same bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perilune.data import Fusion
from perilune.data.packing import PackedDataset
from perilune.data.probes import ProbeRows
from perilune.model import Decoder, SamplingConfig
from perilune.model.linear import RMSNorm, SwiGLU
from perilune.optim import MuonClip
from perilune.train import checkpoint, random_state, ranks, run_folder, sinks
from perilune.train.batches import MicroBatch, RunData, fused_micro_batches, open_data
from perilune.train.checkpoint import OnPhase
from perilune.train.config_file import to_plain
from perilune.train.decoupled import decoupled_backward
from perilune.train.evaluate import answer_accuracy, bits_per_byte, continuations, validate
from perilune.train.interrupt import Interrupted, StopRequest
from perilune.train.metrics import Throughput, peak_memory_bytes
from perilune.train.optimizer import Optimization, build_optimization
from perilune.train.outputs import Outputs
from perilune.train.pictures import draw_held_out, picture_records
from perilune.train.progress import DataProgress
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import RunError
from perilune.train.run_lock import locked
from perilune.train.schedule import lr_at

VISION_VALID_ROWS = 32
"""Rows with pictures in a validation: their loss varies less than that of text."""


class TrainingStopped(RuntimeError):
    """Too many steps in a row, or the weights at the end, were not finite; the last good checkpoint is kept."""


@dataclass(kw_only=True)
class Position:
    """How far a run is; all of it goes into the checkpoint."""

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    rows: int = 0
    """Rows of data consumed, over all ranks."""
    tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The parts of a running training."""

    config: RunConfig
    folder: Path
    device: torch.device
    data: RunData
    fusion: Fusion | None
    """Which rows hold pictures; None: none of them."""
    model: Decoder
    optimization: Optimization
    position: Position
    outputs: Outputs
    on_phase: OnPhase


def train(
    config: RunConfig,
    *,
    runs_folder: str | Path = "runs",
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    on_phase: OnPhase = lambda phase: None,
    initialize: Callable[[Decoder], None] | None = None,
    data: RunData | None = None,
) -> dict[str, Any]:
    """Train to `config.trainer.steps`, write checkpoints, metrics and the report, and return the summary.

    Raises Interrupted (a SystemExit) after saving when asked to stop, TrainingStopped when the numbers broke for good,
    RunError or CheckpointError with one clear sentence when the folder, the data or the disk do not allow it.
    `on_phase` is told the name of every phase as it is reached. `initialize` may change the weights of a new model.
    `data` is what `config.data` and the seed give, where the caller has opened it already.
    """
    folder = Path(runs_folder) / config.name
    with (
        prepared(
            config,
            folder,
            resume=resume,
            overwrite=overwrite,
            quiet=quiet,
            on_phase=on_phase,
            initialize=initialize,
            data=data,
        ) as run,
        StopRequest(run.outputs.say_stopping) as stop,
    ):
        settings, at, outputs = config.trainer, run.position, run.outputs
        model, optimization = run.model, run.optimization
        throughput = Throughput()
        throughput.mark(at.tokens)
        if at.step == 0:
            outputs.say(introduction(run))
        while at.step < settings.steps:
            on_phase("step:begin")
            lr_scale = lr_at(at.step, config.schedule, settings.steps)
            optimization.set_lr(lr_scale)
            batches = load_batches(run)
            count = totals(batches, run.device)

            loss_sums = forward_backward(model, batches, count.targets, decoupled=settings.decoupled_vision)
            grad_norm = optimization.clip_gradients(settings.grad_clip)
            on_phase("step:backward")

            # The one wait for the device in a step: whether to take it has to be known before the weights move.
            text_nats, vision_nats, norm = torch.cat([loss_sums, grad_norm.double()[None]]).tolist()
            finite = math.isfinite(text_nats + vision_nats) and math.isfinite(norm)
            if finite:
                clip = optimization.step()
                imbalance = model.after_optimizer_step()
                at.bad_in_a_row = 0
            else:
                clip, imbalance = optimization.skip(), None
                model.discard_step_statistics()
                at.skipped += 1
                at.bad_in_a_row += 1
            on_phase("step:optimizer")

            at.step += 1
            at.rows += settings.global_batch_rows
            at.tokens += settings.global_batch_rows * config.data.seq_len
            last = at.step == settings.steps

            if at.step % settings.log_every == 0 or last or not finite:
                max_logit, is_bound = clip.by_layer()
                record = {
                    "kind": "train",
                    "step": at.step,
                    **count.losses(text_nats, vision_nats),
                    "lr": config.optimizer.lr * lr_scale,
                    "grad_norm": norm,
                    "tokens": at.tokens,
                    "tokens_per_s": throughput.mark(at.tokens),
                    "peak_memory_bytes": peak_memory_bytes(run.device),
                    "max_logit": max_logit,
                    **({"max_logit_is_bound": is_bound} if any(is_bound) else {}),
                    "clipped_heads": int(clip.num_clipped),
                    "skipped": at.skipped,
                }
                outputs.write(record if imbalance is None else {**record, "moe_imbalance": float(imbalance)})
            outputs.progress.step(at.step)
            on_phase("step:logged")

            if at.bad_in_a_row >= settings.max_bad_steps or (last and not weights_are_finite(run)):
                raise TrainingStopped(stopped_message(run))
            stopped_by = ranks.largest_over_ranks(stop.signal_number or 0, run.device)
            with throughput.pause():
                if due(at.step, settings.eval_every) or last:
                    write_validation(run)
                if last:
                    write_samples(run)
                    write_pictures(run)
                if due(at.step, settings.checkpoint_every) or last or stopped_by:
                    saved = save_if_good(run, last=last)
                    if stopped_by and not last:
                        outputs.say(interrupted_message(run, saved))
                        raise Interrupted(stopped_by)

        return finish(run)


# ---------------------------------------------------------------------------------------------------------------------
# One step


def load_batches(run: Run) -> list[MicroBatch]:
    """This rank's micro-batches of the next optimizer step."""
    settings = run.config.trainer
    return list(
        fused_micro_batches(
            run.data,
            run.fusion,
            first_row=run.position.rows,
            rows=settings.global_batch_rows,
            micro_batch_rows=settings.micro_batch_rows,
            device=run.device,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Valid targets of the whole global batch, over all ranks, and the bytes of text they stand for."""

    text_targets: int
    text_bytes: int
    vision_targets: int

    @property
    def targets(self) -> int:
        return self.text_targets + self.vision_targets

    def losses(self, text_nats: float, vision_nats: float) -> dict[str, float]:
        """For the record. Bits per byte are those of text rows; a step without text has the loss of its pictures."""
        found = {"loss": text_nats / self.text_targets if self.text_targets else vision_nats / max(1, self.targets)}
        if self.text_targets:
            found["bits_per_byte"] = bits_per_byte(text_nats, self.text_bytes)
        if self.vision_targets:
            found["vision_loss"] = vision_nats / self.vision_targets
        return found


def totals(batches: Sequence[MicroBatch], device: torch.device) -> Totals:
    own = [0, 0, 0]
    for batch in batches:
        if batch.media is None:
            own[0] += batch.num_targets
            own[1] += batch.num_bytes
        else:
            own[2] += batch.num_targets
    if ranks.distributed():
        own = ranks.sum_over_ranks(torch.tensor(own, device=device)).tolist()
    return Totals(text_targets=own[0], text_bytes=own[1], vision_targets=own[2])


def forward_backward(
    model: Decoder, batches: Sequence[MicroBatch], num_targets: int, *, decoupled: bool = False
) -> torch.Tensor:
    """Gradients of the loss per target of the global batch into .grad.

    Returns the summed losses in nats of text rows and of rows with pictures, float64 [2]. `decoupled` runs the vision
    tower apart from the language model.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens_BT.device)
    if decoupled:
        losses = decoupled_backward(model, batches, num_targets)
    else:
        losses = (backward(model, batch, num_targets) for batch in batches)
    for batch, loss in zip(batches, losses, strict=True):
        sums[0 if batch.media is None else 1] += loss
    return ranks.sum_over_ranks(sums)


def backward(model: Decoder, batch: MicroBatch, num_targets: int) -> torch.Tensor:
    loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=batch.media)
    (loss / max(1, num_targets)).backward()
    return loss.detach()


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---------------------------------------------------------------------------------------------------------------------
# What a run writes


def introduction(run: Run) -> str:
    """What is about to be trained, on what, and which parameters each optimizer gets."""
    config, train = run.config, run.data.train
    lines = [
        f"{config.name}: {run.model.num_parameters():,} parameters ({run.model.num_parameters(active=True):,} active), "
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
    if run.data.valid is None:
        lines.append(
            "no validation split: the corpus holds nothing out "
            f"(data.corpus.valid_fraction={config.data.corpus.valid_fraction!r})"
        )
    if isinstance(run.optimization.optimizer, MuonClip):
        lines.append(run.optimization.optimizer.table())
    return "\n".join(lines)


def _described(train: PackedDataset | ProbeRows) -> str:
    if isinstance(train, ProbeRows):
        return f"the probe {train.config.task}, new rows without end"
    return f"{train.store.num_tokens:,} tokens ({train.rows_per_epoch:,.0f} rows an epoch)"


def write_validation(run: Run) -> None:
    settings = run.config.trainer
    how = {"rows": settings.eval_rows, "micro_batch_rows": settings.micro_batch_rows, "device": run.device}
    result: dict[str, float] = {}
    if run.data.valid is not None:
        result |= validate(run.model, run.data.valid, **how)
        if isinstance(run.data.valid, ProbeRows):
            result |= answer_accuracy(run.model, run.data.valid, **how)
    if run.data.vision_valid is not None:
        how["rows"] = min(settings.eval_rows, VISION_VALID_ROWS)
        result["vision_loss"] = validate(run.model, run.data.vision_valid, **how)["loss"]
    if result:
        run.outputs.write({"kind": "valid", "step": run.position.step, **result})
    run.on_phase("step:validated")


def write_samples(run: Run) -> None:
    settings = run.config.trainer
    sampling = SamplingConfig(
        max_new_tokens=settings.sample_tokens, temperature=settings.sample_temperature, seed=run.config.seed
    )
    if ranks.rank() == 0:
        for prompt, text in continuations(run.model, run.data.tokenizer, settings.sample_prompts, sampling):
            run.outputs.write({"kind": "sample", "step": run.position.step, "prompt": prompt, "text": text})


def write_pictures(run: Run) -> None:
    """Draw held-out pictures, where the run has any."""
    rows, vision = run.data.vision_valid, run.config.data.vision
    if rows is None or vision is None or not vision.samples or ranks.rank() != 0:
        return
    drawings = draw_held_out(
        run.model, run.data.tokenizer, rows, count=vision.samples, max_new_tokens=vision.sample_tokens
    )
    for record in picture_records(drawings, step=run.position.step):
        run.outputs.write(record)


def save_if_good(run: Run, *, last: bool) -> bool:
    """Save, unless that could cost a checkpoint that is known to work; says whether it did.

    Between two bad steps nobody knows whether the weights still work, so nothing is written. The last step has no
    better one after it, and resuming would only repeat it: its checkpoint comes beside those that are there. Weights
    that are not finite themselves are never written.
    """
    bad = run.position.bad_in_a_row > 0
    if bad and not last:
        return False
    if not weights_are_finite(run):
        run.outputs.say(f"the weights of step {run.position.step} are not finite: not saved; {last_good(run)}")
        return False
    save(run, prune=not bad)
    return True


def weights_are_finite(run: Run) -> bool:
    finite = torch.stack([parameter.isfinite().all() for parameter in run.model.parameters()]).all()
    return not ranks.largest_over_ranks(int(not finite), run.device)


def save(run: Run, *, prune: bool) -> None:
    model, optimization = run.model, run.optimization
    checkpoint.save(
        run.folder / run_folder.CHECKPOINTS,
        step=run.position.step,
        tensors={
            **checkpoint.model_tensors(model),
            **checkpoint.optimizer_tensors(model, optimization.optimizer),
            **optimization.clip_tensors(),
            **random_state.tensors(),
        },
        state={
            **asdict(run.position),
            "optimizer_scalars": checkpoint.optimizer_scalars(model, optimization.optimizer),
            **run_folder.fingerprints(run.config, run.data),
            "metrics_bytes": run.outputs.metrics_bytes(),
            "config": to_plain(run.config),
        },
        keep_last=run.config.trainer.keep_last if prune else None,
        on_phase=run.on_phase,
    )


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
        "parameters": run.model.num_parameters(),
        "loss": last["train"].get("loss"),
        "bits_per_byte": last["train"].get("bits_per_byte"),
        "valid_loss": last["valid"].get("loss"),
        "valid_bits_per_byte": last["valid"].get("bits_per_byte"),
        "skipped_steps": run.position.skipped,
        "tokens_per_s": last["train"].get("tokens_per_s"),
        "peak_memory_bytes": peak_memory_bytes(run.device),
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


def stopped_message(run: Run) -> str:
    at, limit = run.position, run.config.trainer.max_bad_steps
    if at.bad_in_a_row >= limit:
        what = f"loss or gradient was not finite for {at.bad_in_a_row} steps in a row (trainer.max_bad_steps={limit}), "
        what += f"up to step {at.step}"
    else:
        what = f"the weights after the last step, {at.step}, are not finite"
    return (
        f"{what}: {last_good(run)}; lower optimizer.lr or look at the data, then continue with "
        f"`{run_folder.resume_command(run.folder)}`"
    )


def interrupted_message(run: Run, saved: bool) -> str:
    kept = f"saved at step {run.position.step}"
    if not saved:
        kept = f"step {run.position.step} was not finite and is not saved: {last_good(run)}"
    return f"{kept}; continue with `{run_folder.resume_command(run.folder)}`"


def last_good(run: Run) -> str:
    found = checkpoint.find(run.folder / run_folder.CHECKPOINTS)
    return "there is no checkpoint yet" if found is None else f"the last good checkpoint is {found.folder.name}"


# ---------------------------------------------------------------------------------------------------------------------
# Before the first step


@contextmanager
def prepared(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    on_phase: OnPhase,
    initialize: Callable[[Decoder], None] | None = None,
    data: RunData | None = None,
) -> Iterator[Run]:
    """Every part of the run, brought to where its checkpoint left it; leaving closes its files and frees its folder.

    What can fail comes first, what changes an earlier run last: a start that fails leaves it as it was.
    """
    with ranks.Together():
        check_batch_divides(config)
        run_folder.check_free(folder, resume=resume, overwrite=overwrite)
        sinks.check_installed(config.trainer)
        device = pick_device(config.trainer.device)
        random_state.seed_everything(config.seed)
        if data is None:
            with DataProgress(quiet=quiet or ranks.rank() != 0) as progress:
                data = open_data(config.data, seed=config.seed, progress=progress)
        model = run_folder.build_model(config, device)
        if config.start_from is not None and not resume:
            run_folder.load_weights(config.start_from, model, config)
        if initialize is not None:
            initialize(model)
        optimization = build_optimization(model, config.optimizer)

    with ExitStack() as held:
        with ranks.Together():
            if ranks.rank() == 0:
                held.enter_context(locked(folder))
                # Again, now that nobody else can begin here.
                run_folder.check_free(folder, resume=resume, overwrite=overwrite)
        with ranks.Together():
            found = checkpoint.find(folder / run_folder.CHECKPOINTS) if resume else None
            changed = [] if found is None else run_folder.check_same_run(found.state, config, data)
        position, metrics_bytes, messages = Position(), 0, []
        if found is not None:
            loaded = checkpoint.restore(found.folder, found.state, model, optimization.optimizer)
            optimization.load_clip_tensors(loaded)
            saved = {name: found.state[name] for name in asdict(position)}
            position = replace(Position(**saved), bad_in_a_row=0)
            metrics_bytes = found.state["metrics_bytes"]
            messages = [*found.messages, *resume_messages(config, position, changed)]

        with ranks.Together():
            outputs = held.enter_context(Outputs(config, folder, quiet=quiet))
            if ranks.rank() == 0 and position.step < config.trainer.steps:
                run_folder.create(folder, config, data.tokenizer, device=device, fresh=not resume)
            outputs.open_files(step=position.step, metrics_bytes=metrics_bytes)
        if config.trainer.compile:
            compile_dense_parts(model)
        held.callback(data.close)
        model.train()
        for message in messages:
            outputs.say(message)
        yield Run(
            config=config,
            folder=folder,
            device=device,
            data=data,
            fusion=config.fusion(),
            model=model,
            optimization=optimization,
            position=position,
            outputs=outputs,
            on_phase=on_phase,
        )


def resume_messages(config: RunConfig, position: Position, changed: Sequence[str]) -> list[str]:
    if position.step >= config.trainer.steps:
        return [
            f"the run is already at step {position.step} and trainer.steps is {config.trainer.steps}: nothing to "
            "train; raise trainer.steps to continue it"
        ]
    return [*(f"changed since the checkpoint: {line}" for line in changed), f"resuming from step {position.step}"]


def check_batch_divides(config: RunConfig) -> None:
    rows, world = config.trainer.global_batch_rows, ranks.world_size()
    if rows % world:
        raise ValueError(f"trainer.global_batch_rows is {rows!r}, expected a multiple of the {world} ranks")


def pick_device(name: str, field: str = "trainer.device") -> torch.device:
    """RunError when there is no such device here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # what every kind of device answers that can hold numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f'{field} is {name!r}, which is not there ({reason}): take "cpu", "cuda", or "auto"') from error
    return device


def compile_dense_parts(model: Decoder) -> None:
    """The MLPs and the norms before them, in place, so that names in the checkpoint stay.

    Their shapes are the same in every batch. Attention operators plan their work from the document borders of the batch
    on the host; traced with the rest, they are compiled anew for every batch.
    """
    for module in model.modules():
        wide = isinstance(module, RMSNorm) and len(module.weight) == model.config.hidden_size
        if wide or isinstance(module, SwiGLU):
            module.compile()
