"""A run killed by SIGKILL at any instant and resumed equals the run that was left alone: bit for bit, on CPU."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.train import checkpoint
from perilune.train.metrics import TIMING_FIELDS
from perilune.train.run_folder import CHECKPOINTS, METRICS
from tests.train import killable_runs
from tests.train.tiny_runs import MOE, tiny_run

MOE_MODEL = {"model": {"residual": "block_attnres", "block_sublayers": 2, "moe": MOE}}


@dataclass
class Reference:
    """An uninterrupted run, and the names of the phases it went through."""

    cache: Path
    phases: list[str]
    records: list[dict]
    tensors: dict[str, torch.Tensor]
    saved_bytes: int
    """What DCP writes in one save."""


def outcome(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """All a run leaves: its records without timings, and every tensor of its last checkpoint."""
    lines = (folder / METRICS).read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k not in TIMING_FIELDS} for line in lines]
    found = checkpoint.find(folder / CHECKPOINTS)
    assert found is not None and found.state["step"] == 6
    return records, checkpoint.load_tensors(found.folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    config = tiny_run(root / "cache", **MOE_MODEL)
    assert killable_runs.finish(config, root, phases_to=root / "phases") == 0
    records, tensors = outcome(root / config.name)
    last = root / config.name / CHECKPOINTS / "step_00000006"
    return Reference(
        cache=root / "cache",
        phases=(root / "phases").read_text().splitlines(),
        records=records,
        tensors=tensors,
        saved_bytes=(last / "__0_0.distcp").stat().st_size + (last / ".metadata").stat().st_size,
    )


def assert_equal_to(reference: Reference, folder: Path) -> None:
    records, tensors = outcome(folder)
    assert records == reference.records
    assert set(tensors) == set(reference.tensors)
    for name, value in tensors.items():
        assert torch.equal(value, reference.tensors[name]), name
    leftovers = [path.name for path in (folder / CHECKPOINTS).iterdir() if path.name.startswith(".")]
    assert leftovers == []


def kill_then_finish(reference: Reference, root: Path, kills: list[int]) -> None:
    config = tiny_run(reference.cache, **MOE_MODEL)
    for kill_at in kills:
        # A resumed run has fewer phases left, so a late kill may come after its end.
        assert killable_runs.finish(config, root, kill_at=kill_at) in (-9, 0)
    assert killable_runs.finish(config, root) == 0
    assert_equal_to(reference, root / config.name)


def test_the_reference_run_reports_every_phase_of_a_save(reference):
    save = ["begin", "tensors", "manifest", "renamed", "pointer_written", "latest", "pruned"]
    assert [phase for phase in reference.phases if phase.startswith("save:")] == [f"save:{name}" for name in save] * 3
    kinds = [(record["kind"], record["step"]) for record in reference.records]
    assert kinds.count(("valid", 3)) == kinds.count(("valid", 6)) == kinds.count(("sample", 6)) == 1
    assert sum(kind == "train" for kind, _ in kinds) == 6


@pytest.mark.parametrize("phase", ["begin", "tensors", "manifest", "renamed", "pointer_written", "latest"])
def test_killed_inside_the_second_save_and_resumed_equals_uninterrupted(reference, tmp_path, phase):
    config = tiny_run(reference.cache, **MOE_MODEL)
    assert killable_runs.finish(config, tmp_path, kill_in=(f"save:{phase}", 2)) == -9
    kill_then_finish(reference, tmp_path, [])


@settings(max_examples=12)
@given(kills=st.lists(st.integers(0, 45), min_size=1, max_size=2))
@example(kills=[0])
@example(kills=[20, 3])
def test_killed_anywhere_and_resumed_equals_uninterrupted(reference, tmp_path_factory, kills):
    kill_then_finish(reference, tmp_path_factory.mktemp("run"), kills)


@settings(max_examples=3)
@given(part=st.floats(0.0, 1.0), first_save=st.booleans())
@example(part=0.5, first_save=False)
@example(part=0.999, first_save=False)  # in .metadata, which DCP writes last
def test_killed_while_the_files_of_a_save_are_written_equals_uninterrupted(
    reference, tmp_path_factory, part, first_save
):
    root = tmp_path_factory.mktemp("run")
    config = tiny_run(reference.cache, **MOE_MODEL)
    # Saves differ by a few bytes of numbers in their names; the first has the same tensors as all others.
    last_byte = max(1, int(part * 0.99 * reference.saved_bytes)) + (0 if first_save else reference.saved_bytes)
    assert killable_runs.finish(config, root, kill_after_bytes=last_byte) == -9
    checkpoints = root / config.name / CHECKPOINTS
    (torn,) = checkpoints.glob(".partial-step_*")
    assert torn.name == (".partial-step_00000002" if first_save else ".partial-step_00000004")
    assert any(torn.iterdir()) and not (torn / "manifest.json").exists()
    kill_then_finish(reference, root, [])


@settings(max_examples=3)
@given(delays=st.lists(st.floats(0.05, 0.8), min_size=2, max_size=2))
def test_killed_at_any_time_of_the_clock_equals_uninterrupted(reference, tmp_path_factory, delays):
    root = tmp_path_factory.mktemp("run")
    config = tiny_run(reference.cache, **MOE_MODEL)
    for delay in delays:
        process = killable_runs.start(config, root)
        time.sleep(delay)
        process.kill()
        process.join()
    kill_then_finish(reference, root, [])


def test_a_torn_metrics_line_is_cut_off(reference, tmp_path):
    config = tiny_run(reference.cache, **MOE_MODEL)
    killable_runs.finish(config, tmp_path, kill_at=30)
    with (tmp_path / config.name / METRICS).open("a") as file:
        file.write('{"kind": "train", "st')
    kill_then_finish(reference, tmp_path, [])
