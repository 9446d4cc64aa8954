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
from perilune.optim.shards import local_part
from perilune.train import checkpoint, random_state, ranks, run_folder, sinks
from perilune.train.batches import ALL, MicroBatch, RunData, fused_micro_batches, open_data
from perilune.train.checkpoint import OnPhase
from perilune.train.config_file import to_plain
from perilune.train.evaluate import answer_accuracy, continuations, validate
from perilune.train.gathered import MAX_PARAMETERS, whole_model
from perilune.train.interrupt import Interrupted, StopRequest
from perilune.train.metrics import Throughput, peak_memory_bytes
from perilune.train.optimizer import Optimization, build_optimization
from perilune.train.outputs import Outputs
from perilune.train.parallel import AXES, Parallel, parallelize
from perilune.train.parallel_tensor import decoder_layers
from perilune.train.pictures import draw_held_out, picture_records
from perilune.train.progress import DataProgress
from perilune.train.recompute import recompute_layers
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import RunError
from perilune.train.run_lock import locked
from perilune.train.schedule import lr_at
from perilune.train.step import forward_backward, totals
from perilune.train.watchdog import Watchdog

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
    parallel: Parallel | None
    """How the model is spread over ranks; None: one process."""
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
        ranks.joined(config.trainer.device),
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
        Watchdog(on_phase, timeout_s=config.trainer.hang_timeout_s) as reached,
    ):
        run = replace(run, on_phase=reached)
        settings, at, outputs = config.trainer, run.position, run.outputs
        model, optimization = run.model, run.optimization
        throughput = Throughput()
        throughput.mark(at.tokens)
        if at.step == 0:
            outputs.say(introduction(run))
        while at.step < settings.steps:
            reached("step:begin")
            lr_scale = lr_at(at.step, config.schedule, settings.steps)
            optimization.set_lr(lr_scale)
            batches = load_batches(run)
            count = totals(batches, run.device, run.parallel)

            loss_sums = forward_backward(
                model, batches, count.targets, decoupled=settings.decoupled_vision, parallel=run.parallel
            )
            grad_norm = optimization.clip_gradients(settings.grad_clip)
            reached("step:backward")

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
            reached("step:optimizer")

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
            reached("step:logged")

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

        reached.stop()
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
            part=ALL if run.parallel is None else run.parallel.part,
        )
    )


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
    if run.parallel is not None:
        sizes = {name: getattr(run.parallel.config, name) for name in AXES}
        named = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        lines.append(f"ranks: {ranks.world_size()} {named}".rstrip())
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


def write_pictures(run: Run) -> None:
    """Draw held-out pictures, where the run has any."""
    rows, vision = run.data.vision_valid, run.config.data.vision
    if rows is None or vision is None or not vision.samples:
        return
    model = whole(run, "drawings")
    if ranks.rank() != 0 or model is None:
        return
    drawings = draw_held_out(model, run.data.tokenizer, rows, count=vision.samples, max_new_tokens=vision.sample_tokens)
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
    own = (local_part(parameter) for parameter in run.model.parameters())
    finite = torch.stack([parameter.isfinite().all() for parameter in own]).all()
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
        config.check_ranks(ranks.world_size())
        run_folder.check_free(folder, resume=resume, overwrite=overwrite)
        sinks.check_installed(config.trainer)
        device = pick_device(config.trainer.device)
        random_state.seed_everything(config.seed)
    data = data or open_in_turn(config, quiet=quiet)
    with ranks.Together():
        model = run_folder.build_model(config, device)
        if config.start_from is not None and not resume:
            run_folder.load_weights(config.start_from, model, config)
        if initialize is not None:
            initialize(model)
    parallel = spread_over_ranks(model, config, device)
    optimization = build_optimization(model, config.optimizer, parallel)

    with ExitStack() as held:
        with ranks.Together():
            if ranks.rank() == 0:
                held.enter_context(locked(folder))
                # Again, now that nobody else can begin here.
                run_folder.check_free(folder, resume=resume, overwrite=overwrite)
        with ranks.Together():
            found = checkpoint.find(folder / run_folder.CHECKPOINTS) if resume and ranks.rank() == 0 else None
        found = ranks.told_by_first(found)
        with ranks.Together():
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
            parallel=parallel,
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


def open_in_turn(config: RunConfig, *, quiet: bool) -> RunData:
    """The data of a run; one rank of every machine builds what is missing in the cache, then the others read it."""
    data, first_here = None, ranks.local_rank() == 0
    for ours in (first_here, not first_here):
        with ranks.Together():
            if ours:
                with DataProgress(quiet=quiet or ranks.rank() != 0) as progress:
                    data = open_data(config.data, seed=config.seed, progress=progress)
    assert data is not None
    return data


def spread_over_ranks(model: Decoder, config: RunConfig, device: torch.device) -> Parallel | None:
    """Changes the model in place. One process without torch.distributed keeps it as it is."""
    if ranks.distributed():
        return parallelize(model, config.parallel, device_type=device.type, world_size=ranks.world_size())
    recompute_layers(decoder_layers(model), config.parallel.recompute)
    return None


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
