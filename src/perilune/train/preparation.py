"""Everything before the first step: a run is put together from its config, or brought to where a checkpoint left it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from perilune.data.chat_rows import ChatRows
from perilune.data.media import PATCH_SIZE
from perilune.model import Decoder
from perilune.model.linear import RMSNorm, SwiGLU
from perilune.model.lora import add_adapters
from perilune.train import checkpoint, random_state, ranks, run_folder, sinks
from perilune.train.background_save import Saves
from perilune.train.batches import RunData, open_data
from perilune.train.checkpoint import OnPhase
from perilune.train.optimizer import build_optimization
from perilune.train.outputs import Outputs
from perilune.train.parallel import Parallel, parallelize
from perilune.train.parallel_tensor import decoder_layers
from perilune.train.progress import DataProgress
from perilune.train.recompute import recompute_layers
from perilune.train.run import Position, Run
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import RunError
from perilune.train.run_lock import locked
from perilune.train.stages import names_elsewhere


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
        check_pictures(config, data)
        model = run_folder.build_model(config, device)
        if config.start_from is not None and not resume:
            run_folder.load_weights(config.start_from, model, config)
        if initialize is not None:
            initialize(model)
    num_parameters, num_active = model.num_parameters(), model.num_parameters(active=True)
    with ranks.Together():
        add_adapters(model, config.lora, seed=config.seed)
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
            elsewhere = names_elsewhere(parallel)
            loaded = checkpoint.restore(found.folder, found.state, model, optimization.optimizer, elsewhere=elsewhere)
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
        saves = held.enter_context(
            Saves(in_background=config.trainer.checkpoint_in_background, timeout_s=config.trainer.hang_timeout_s)
        )
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
            num_parameters=num_parameters,
            num_active_parameters=num_active,
            parallel=parallel,
            optimization=optimization,
            position=position,
            outputs=outputs,
            saves=saves,
            on_phase=on_phase,
            on_save_phase=on_phase,
        )


def resume_messages(config: RunConfig, position: Position, changed: Sequence[str]) -> list[str]:
    if position.step >= config.trainer.steps:
        return [
            f"the run is already at step {position.step} and trainer.steps is {config.trainer.steps}: nothing to "
            "train; raise trainer.steps to continue it"
        ]
    return [*(f"changed since the checkpoint: {line}" for line in changed), f"resuming from step {position.step}"]


def check_pictures(config: RunConfig, data: RunData) -> None:
    """RunError when dialogues hold pictures that the model cannot see: only the files say whether they do."""
    if not isinstance(data.train, ChatRows) or not data.train.num_with_pictures:
        return
    tower = config.model.vision
    if tower is None or tower.patch_size != PATCH_SIZE:
        has = "has no vision tower" if tower is None else f"cuts patches of {tower.patch_size}, not {PATCH_SIZE}"
        raise RunError(
            f"{data.train.num_with_pictures} dialogues of data.chat.sources hold pictures, but the model {has}: "
            "take them out, or start from a model that sees"
        )


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
