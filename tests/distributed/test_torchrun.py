"""The command under torchrun itself: two ranks, one killed, and torchrun's restart that goes on from the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perilune
from perilune.cli import main
from tests.distributed.trained_runs import losses_of, worst_difference

pytestmark = pytest.mark.distributed

COMMAND = ["train", "micro", "--trainer.steps", "5", "--trainer.checkpoint-every", "2", "--trainer.device", "cpu"]
COMMAND += [
    "--trainer.global-batch-rows",
    "3",
    "--trainer.eval-rows",
    "2",
    "--trainer.no-report",
    "--data.seq-len",
    "32",
]
COMMAND += ["--optimizer.orthogonalize-dtype", "float32", "--data.corpus.num-documents", "60", "--json"]


def test_torchrun_restarts_a_run_that_lost_a_rank_and_it_ends_as_if_nothing_happened(tmp_path, capsys):
    places = ["--data.cache-dir", str(tmp_path / "cache")]
    main([*COMMAND, *places, "--runs", str(tmp_path / "alone")])
    capsys.readouterr()
    sources = Path(perilune.__file__).parent.parent
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "--max-restarts", "1", "-m", "tests.distributed.dying_command", *COMMAND, *places]
        + ["--runs", str(tmp_path / "together")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert "exitcode: -9" in ended.stderr, "a rank was killed"
    assert json.loads(ended.stdout)["steps"] == 5, "the first rank alone prints the summary"
    found, expected = (losses_of(tmp_path / name / "micro") for name in ("together", "alone"))
    assert worst_difference(found, expected) <= 1e-5
