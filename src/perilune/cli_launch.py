"""`perilune launch` and `perilune train --dry-run`: a run on many ranks, before there are any.

`launch` prints the command (torchrun) or the script (SLURM) that starts `perilune train` on every GPU of every node; it
starts nothing itself. What cannot be spread as asked is refused here, and not by a thousand ranks at once.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import tyro

from perilune.cli import TrainFlags, UserError, _early_flags, _parse_run, _positional, _print_json, _train_default
from perilune.cli import _with_set as with_set

if TYPE_CHECKING:
    from perilune.train.run_config import RunConfig

GRACE_S = 300
"""Between SIGTERM and the end of a SLURM job: time to finish a step and save."""


@dataclass(kw_only=True)
class LaunchFlags:
    nodes: int = 1
    """Machines."""
    gpus: int = 8
    """GPUs of each machine; a process for each."""
    slurm: bool = False
    """Print a script for sbatch, also for one node."""
    hours: float | None = None
    """Time limit of the SLURM job."""
    head: str = "HEAD_NODE:29500"
    """Where the processes of several nodes find each other, for the torchrun command."""
    max_restarts: int = 3
    """How often torchrun starts the world again when a rank fails; it goes on from the last checkpoint."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)!r}, expected {least} or more")


HELP = """\
perilune launch RECIPE: print what starts a run on many GPUs.

    --nodes 1          machines
    --gpus 8           GPUs of each
    --slurm            print a script for sbatch, also for one node (the default for several is the torchrun command)
    --hours H          time limit of the SLURM job
    --head HOST:PORT   where the processes of several nodes find each other, for the torchrun command
    --max-restarts 3   how often the world is started again when a rank fails
    --json             print a JSON document

and everything `perilune train RECIPE` takes.

example: perilune launch small --nodes 4 --gpus 8 --slurm --parallel.tp 2
"""


def launch_verb(arguments: list[str]) -> None:
    """Print the torchrun command or the SLURM script of a run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        raise SystemExit(0 if arguments else 2)
    name, rest = _positional(arguments, "RECIPE", "a recipe, or a run to resume", "perilune launch nano --nodes 2")
    if "-h" in rest or "--help" in rest:
        print(HELP, end="")
        raise SystemExit(0)
    flags, passed_on = tyro.cli(LaunchFlags, args=rest, return_unknown_args=True)
    early = _early_flags(TrainFlags, passed_on)
    if early.overwrite and flags.max_restarts:
        raise UserError("--overwrite with restarts would begin the run again each time: add --max-restarts 0")
    default, _ = _train_default(name, early)
    from perilune.train import RunConfig

    train, config = _parse_run(
        f"perilune launch {name}", "", TrainFlags, RunConfig, with_set(default, early.set), passed_on
    )
    config.check_ranks(flags.nodes * flags.gpus)
    command = ["-m", "perilune", "train", name, *(each for each in passed_on if each != "--json")]
    text = slurm_script(config.name, command, flags) if flags.slurm else torchrun_text(config.name, command, flags)
    if train.json:
        _print_json({"ranks": flags.nodes * flags.gpus, "slurm": flags.slurm, "text": text})
    else:
        print(text, end="")


def torchrun_text(name: str, command: Sequence[str], flags: LaunchFlags) -> str:
    how = ["torchrun", "--nproc-per-node", str(flags.gpus), "--max-restarts", str(flags.max_restarts)]
    if flags.nodes == 1:
        return shlex.join([*how, "--standalone", *command]) + "\n"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", flags.head, "--rdzv-id", name]
    start = shlex.join([*how, "--nnodes", str(flags.nodes), *meeting, *command])
    return f"# on each of the {flags.nodes} nodes, with the same run folder on all of them\n{start}\n"


def slurm_script(name: str, command: Sequence[str], flags: LaunchFlags) -> str:
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={flags.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={flags.gpus}",
        f"#SBATCH --signal=TERM@{GRACE_S}",
        "#SBATCH --output=slurm-%x-%j.txt",
    ]
    if flags.hours is not None:
        lines.append(f"#SBATCH --time={max(1, math.ceil(flags.hours * 60))}")
    torchrun = shlex.join(
        ["torchrun", "--nnodes", str(flags.nodes), "--nproc-per-node", str(flags.gpus)]
        + ["--max-restarts", str(flags.max_restarts), "--rdzv-backend", "c10d", "--rdzv-id"]
    )
    return "\n".join(
        [
            *lines,
            f"# {GRACE_S} s before the time limit every process saves and ends. Submit again with --resume to go on.",
            "# The run folder has to be on a disk that all nodes share.",
            "set -euo pipefail",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_S}  # torchrun kills after 30 s otherwise",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'exec srun {torchrun} "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \\',
            f"  {shlex.join(command)}",
            "",
        ]
    )


def show_dry_run(config: "RunConfig", world_size: int, *, as_json: bool) -> None:
    """Memory and traffic of every rank of a world that is not there."""
    if world_size < 1:
        raise UserError(f"--dry-run is {world_size!r}, expected a number of ranks")
    from perilune.train.dry_run import dry_run

    parallel = config.parallel.resolved(world_size)
    assert parallel.dp_shard is not None
    rows, settings = parallel.dp_replicate * parallel.dp_shard, config.trainer
    found = dry_run(
        config.model,
        config.parallel,
        world_size=world_size,
        row_tokens=settings.micro_batch_rows * config.data.seq_len,
        micro_batches=math.ceil(settings.global_batch_rows / rows / settings.micro_batch_rows),
    )
    if not as_json:
        print(found.table())
        if config.model.vision is not None:
            print("not counted: the activations of the vision tower")
        return
    plain: dict[str, Any] = asdict(found)
    for cost, stage in zip(plain["stages"], found.stages, strict=True):
        cost |= {"total_bytes": stage.total_bytes, "traffic_bytes": stage.traffic_bytes}
    _print_json(plain)
