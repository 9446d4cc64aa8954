"""What Block Attention Residuals cost in decoding: a step of a model of about 1B parameters with them and without.

    python benchmarks/attnres_decode.py --seconds 60              on a GPU
    python benchmarks/attnres_decode.py --tiny                    the same code on a CPU, in seconds

Two hybrids of the same shape with random weights, one with blocks of `--block` sublayers and one with plain sums, both
as the engine runs them (serve/runner.py: a CUDA graph for the batch). Their steps are timed in turns, a few tenths of a
second each, so that whatever else happens on the machine meets both; the overhead is that of the medians. Then the
kernels of one step are counted: the mix is one kernel with the residual addition and the norm that a plain step has
anyway (kernels/attnres/few_rows.py), so no sublayer costs a further launch. On a CPU operators are counted instead.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from parts import Session, pick_device, results_file, wait
from serve_decode import PAGE, Shape, model_config

from perilune.model import Decoder
from perilune.model.paged_batch import decode_batch
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner

ARMS = ("plain", "block_attnres")


@dataclass(frozen=True, kw_only=True)
class Settings:
    parts: tuple[Literal["time", "launches"], ...] = ("time", "launches")
    seconds: float = 60.0
    """For all of it."""
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 1024
    """Tokens of every sequence."""
    block: int = 4
    """Sublayers, two for a layer: 8 blocks in 16 layers."""
    rounds: int = 7
    round_seconds: float = 0.25
    tiny: bool = False
    commit: str = ""
    results: Path | None = None
    """File of the rows; benchmarks/results/attnres_decode.json when not given, and never that of a miniature."""


class Arm:
    """A model whose sequences all have the same length, at every batch size."""

    def __init__(self, residual: str, shape: Shape, settings: Settings, device: torch.device) -> None:
        self.device, self.settings = device, settings
        config = replace(
            model_config("3to1", shape, "bfloat16" if device.type == "cuda" else "float32"),
            residual=residual, block_sublayers=settings.block,
        )  # fmt: skip
        with device:
            model = Decoder(config)
            for name, parameter in model.named_parameters():
                if name.endswith("_res.query"):  # zeros at first: all sources would count the same
                    parameter.data.normal_(0.0, 0.02)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_sublayers = 2 * shape.layers
        most = max(settings.batches)
        self.pages = -(-settings.context // PAGE)
        self.runner = Runner(
            model, num_pages=most * self.pages, page_size=PAGE, num_slots=most, max_sequences=most, device=device,
            use_graphs=True,
        )  # fmt: skip

    def step_of(self, batch: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """The step of `batch` sequences as it is replayed, and launched kernel by kernel."""
        shares = tuple(
            Share(
                request_id=str(row), start=self.settings.context - 1, tokens=(row,),
                pages=tuple(range(row * self.pages, (row + 1) * self.pages)), slot=row, want="last", samples=True,
            )
            for row in range(batch)
        )  # fmt: skip
        self.runner.run(StepPlan(shares=shares))
        assert self.runner._graphs is not None
        recording = next(each for key, each in self.runner._graphs._recordings.items() if key[0] == batch)

        @torch.inference_mode()
        def launched() -> object:
            return self.runner._logits(decode_batch(recording.numbers, recording.table, recording.late_ids))

        return (launched if recording.graph is None else recording.graph.replay), launched


def seconds_of(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Of one step, over many in a row."""
    wait(device)
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        count += 5
        wait(device)
    return (time.perf_counter() - began) / count


def time_part(session: Session, settings: Settings, arms: dict[str, Arm]) -> None:
    for batch in settings.batches:
        steps = {name: arm.step_of(batch)[0] for name, arm in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for step in steps.values():
            seconds_of(step, session.device, settings.round_seconds / 2)
        for _ in range(settings.rounds):
            for name, step in steps.items():
                times[name].append(seconds_of(step, session.device, settings.round_seconds))
        plain, mixed = (1e3 * statistics.median(times[name]) for name in ARMS)
        case = f"decode, batch {batch}, {settings.context:,} tokens"
        session.bench.add(case, "step", "ms", mixed, peers={"plain residual": plain})
        session.bench.add(case, "overhead, at most 5%", "%", 100 * (mixed / plain - 1))


# --- counting launches ------------------------------------------------------------------------------------------------


def launches_part(session: Session, settings: Settings, arms: dict[str, Arm]) -> None:
    batch = settings.batches[0]
    counts = {}
    for name, arm in arms.items():
        replayed, launched = arm.step_of(batch)
        launched()
        wait(session.device)
        counts[name] = profiled(launched, session.device) or drawn(launched)
    if not all(counts.values()):
        raise RuntimeError("no kernels were seen: neither the profiler nor a drawn graph can count them here")
    plain, mixed = (counts[name] for name in ARMS)
    sublayers, blocks = arms["plain"].num_sublayers, -(-arms["plain"].num_sublayers // settings.block)
    case = f"launches of a step, {sublayers} sublayers in {blocks} blocks"
    what = "kernels" if session.device.type == "cuda" else "operators"
    extra = mixed.total() - plain.total()
    session.bench.add(case, what, "", mixed.total(), peers={"plain residual": plain.total()})
    session.bench.add(case, f"further {what} a block", "", extra / (blocks + 1))
    session.bench.add(case, f"further {what} a sublayer", "", extra / sublayers)
    gained = ", ".join(f"{count} {name[:60]}" for name, count in sorted((mixed - plain).items()))
    lost = ", ".join(f"{count} {name[:60]}" for name, count in sorted((plain - mixed).items()))
    session.note(f"instead of {lost or 'nothing'}: {gained or 'nothing'}")


def profiled(step: Callable[[], object], device: torch.device) -> Counter[str]:
    """Kernels by name, as the profiler sees them; operators on a CPU. Empty where a profiler is not allowed."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if on_cuda else [])]) as profile:
        step()
        wait(device)
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    events = (event for event in profile.events() if event.device_type == kind)
    if on_cuda:
        return Counter(event.name for event in events if not event.name.startswith(("Memcpy", "Memset", "gpu_")))
    return Counter(event.name for event in events if event.name.startswith("aten::") and not event.cpu_children)


def drawn(step: Callable[[], object]) -> Counter[str]:
    """Kernels of the step captured in a graph and drawn as text: for machines on which nothing may be profiled."""
    if not torch.cuda.is_available():
        return Counter()
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        graph.debug_dump(str(file))
        text = file.read_text(errors="replace")
    return Counter({"kernel": text.count("KERNEL")})


def main(settings: Settings) -> int:
    shape = Shape(hidden=2048, layers=16, heads=16)
    if settings.tiny:
        shape = Shape(hidden=64, layers=4, heads=4, head_dim=16, kv_heads=2, intermediate=128, vocabulary=320)
        settings = replace(settings, batches=(1, 4), context=64, rounds=3, round_seconds=0.02)
    device = pick_device(tiny=settings.tiny)
    session = Session(
        settings.seconds, results_file("attnres_decode", settings.results, tiny=settings.tiny), settings.commit, device
    )  # fmt: skip
    arms: dict[str, Arm] = {}

    def set_up() -> None:
        for name in ARMS:
            arms[name] = Arm(name, shape, settings, device)
        session.note(f"{arms['plain'].num_parameters / 1e6:,.1f}M parameters with plain sums")

    session.run("set up", set_up)
    for name, part in (("time", time_part), ("launches", launches_part)):
        if name in settings.parts and len(arms) == len(ARMS):
            session.run(name, partial(part, session, settings, arms))
    return session.close()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
