"""The training loop. `train` reads from top to bottom; the functions around it are what its lines mean.

One optimizer step over the micro-batches m of the global batch, with V valid targets in all of them on all ranks:

    gradient = sum_m d(sum of cross entropy in m) / V            so the cut into micro-batches and ranks does not matter

Then the gradient is clipped (AdamW's part), the optimizer moves, QK-Clip shrinks heads whose logits grew, router biases
move. A step whose loss or gradient norm is not finite changes nothing but the count of such steps.

A run is a function of its config and seed. Everything that decides the next step is in the checkpoint: on CPU, killing
the process at any instant and resuming gives the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perilune.kernels.cpu_products import fast_products
from perilune.model import Decoder
from perilune.train import graphed, ranks
from perilune.train.batches import ALL, MicroBatch, Packed, RunData, fused_packed
from perilune.train.checkpoint import OnPhase
from perilune.train.drawing import Answering, answers
from perilune.train.interrupt import Interrupted, StopRequest
from perilune.train.metrics import Throughput, peak_memory_bytes
from perilune.train.preparation import pick_device as pick_device
from perilune.train.preparation import prepared
from perilune.train.records import finish, introduction, write_pictures, write_samples, write_validation
from perilune.train.run import Run
from perilune.train.run_config import RunConfig
from perilune.train.saving import finish_saves, interrupted_message, save_if_good, stopped_message, weights_are_finite
from perilune.train.schedule import lr_at
from perilune.train.stages import step_statistics
from perilune.train.step import forward_backward, totals
from perilune.train.steps_ahead import StepsAhead
from perilune.train.watchdog import Watchdog


class TrainingStopped(RuntimeError):
    """Too many steps in a row, or the weights at the end, were not finite; the last good checkpoint is kept."""


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
    answer: Answering = answers,
) -> dict[str, Any]:
    """Train to `config.trainer.steps`, write checkpoints, metrics and the report, and return the summary.

    Raises Interrupted (a SystemExit) after saving when asked to stop, TrainingStopped when the numbers broke for good,
    RunError or CheckpointError with one clear sentence when the folder, the data or the disk do not allow it.
    `on_phase` is told the name of every phase as it is reached. `initialize` may change the weights of a new model.
    `data` is what `config.data` and the seed give, where the caller has opened it already. `answer` asks the model
    about held-out pictures after the last step.
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
        StepsAhead(lambda first_row: packed_rows(run, first_row), in_background=reads_ahead(run)) as ahead,
        fast_products(run.device, bits_matter=run.model.deterministic),
    ):
        run = replace(run, on_phase=reached)
        settings, at, outputs = config.trainer, run.position, run.outputs
        model, optimization = run.model, run.optimization
        throughput = Throughput()
        throughput.mark(at.tokens)
        if at.step == 0:
            outputs.say(introduction(run))
        graphs = graphed.of_run(run)
        while at.step < settings.steps:
            reached("step:begin")
            lr_scale = lr_at(at.step, config.schedule, settings.steps)
            optimization.set_lr(lr_scale)
            next_row = at.rows + settings.global_batch_rows if at.step + 1 < settings.steps else None
            batches = [packed.on(run.device) for packed in ahead.take(at.rows, then=next_row)]
            count = totals(batches, run.device, run.parallel)

            loss_sums = forward_backward(
                model,
                batches,
                count.targets,
                decoupled=settings.decoupled_vision,
                parallel=run.parallel,
                graphed=graphs,
            )
            grad_norm = optimization.clip_gradients(settings.grad_clip)
            reached("step:backward")

            # The one wait for the device in a step: whether to take it has to be known before the weights move.
            text_nats, vision_nats, norm = torch.cat([loss_sums, grad_norm.double()[None]]).tolist()
            finite = math.isfinite(text_nats + vision_nats) and math.isfinite(norm)
            if finite:
                clip = optimization.step(gradients_stay=graphs is not None and graphs.gradients_stay)
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
                record = {
                    "kind": "train",
                    "step": at.step,
                    **count.losses(text_nats, vision_nats),
                    "lr": config.optimizer.lr * lr_scale,
                    "grad_norm": norm,
                    "tokens": at.tokens,
                    "tokens_per_s": throughput.mark(at.tokens),
                    "peak_memory_bytes": peak_memory_bytes(run.device),
                    "skipped": at.skipped,
                    **step_statistics(run.parallel, clip, imbalance),
                }
                outputs.write(record)
            outputs.progress.step(at.step)
            reached("step:logged")

            if at.bad_in_a_row >= settings.max_bad_steps or (last and not weights_are_finite(run)):
                raise TrainingStopped(stopped_message(run))
            asked = (stop.signal_number or 0, int(run.saves.failed()))
            stopped_by, save_failed = ranks.largest_over_ranks(asked, run.device)
            if save_failed:
                finish_saves(run)  # which raises what went wrong
            with throughput.pause():
                if due(at.step, settings.eval_every) or last:
                    write_validation(run)
                if last:
                    write_samples(run)
                    write_pictures(run, answer)
                if due(at.step, settings.checkpoint_every) or last or stopped_by:
                    saved = save_if_good(run, last=last, ends=last or bool(stopped_by))
                    if last or stopped_by:
                        finish_saves(run)
                    if stopped_by and not last:
                        outputs.say(interrupted_message(run, saved))
                        raise Interrupted(stopped_by)

        reached.stop()
        return finish(run)


def load_batches(run: Run) -> list[MicroBatch]:
    """This rank's micro-batches of the next optimizer step."""
    return [packed.on(run.device) for packed in packed_rows(run, run.position.rows)]


def packed_rows(run: Run, first_row: int) -> list[Packed]:
    """This rank's micro-batches of the optimizer step that begins at this row, on the host."""
    settings = run.config.trainer
    return list(
        fused_packed(
            run.data,
            run.fusion,
            first_row=first_row,
            rows=settings.global_batch_rows,
            micro_batch_rows=settings.micro_batch_rows,
            part=ALL if run.parallel is None else run.parallel.part,
        )
    )


def reads_ahead(run: Run) -> bool:
    """On a CPU a thread would take the time it saves."""
    return run.device.type == "cuda"


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
