"""When a run saves, what goes into the checkpoint, and what a run that ends early says about it."""

from dataclasses import asdict

import torch

from perilune.optim.shards import local_part
from perilune.train import checkpoint, random_state, ranks, run_folder
from perilune.train.config_file import to_plain
from perilune.train.run import Run


def save_if_good(run: Run, *, last: bool, ends: bool) -> bool:
    """Save, unless that could cost a checkpoint that is known to work; says whether it did.

    Between two bad steps nobody knows whether the weights still work, so nothing is written. The last step has no
    better one after it, and resuming would only repeat it: its checkpoint comes beside those that are there. Weights
    that are not finite themselves are never written. `ends`: the run ends after it, so nobody gains by a thread.
    """
    bad = run.position.bad_in_a_row > 0
    if bad and not last:
        return False
    if not weights_are_finite(run):
        run.outputs.say(f"the weights of step {run.position.step} are not finite: not saved; {last_good(run)}")
        return False
    save(run, prune=not bad, last=ends)
    return True


def finish_saves(run: Run) -> None:
    """Wait for the save under way; an error on any rank is raised on all."""
    with ranks.Together():
        run.saves.wait()


def weights_are_finite(run: Run) -> bool:
    own = (local_part(parameter) for parameter in run.model.parameters())
    finite = torch.stack([parameter.isfinite().all() for parameter in own]).all()
    (broken,) = ranks.largest_over_ranks((int(not finite),), run.device)
    return not broken


def save(run: Run, *, prune: bool, last: bool) -> None:
    """Begin a save, once the one before has ended on all ranks."""
    finish_saves(run)
    model, optimization = run.model, run.optimization
    run.saves.begin(
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
        beside=run.outputs.files(),
        on_phase=run.on_save_phase,
        last=last,
    )


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
    finish_saves(run)
    found = checkpoint.find(run.folder / run_folder.CHECKPOINTS)
    return "there is no checkpoint yet" if found is None else f"the last good checkpoint is {found.folder.name}"
