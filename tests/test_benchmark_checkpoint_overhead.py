"""benchmarks/checkpoint_overhead.py in miniature: every part gives its numbers."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "checkpoint_overhead.py"


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_checkpoint_overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_checkpoint_overhead"] = module
    spec.loader.exec_module(module)
    return module


def test_every_part_gives_its_numbers(overhead, tmp_path):
    small = {"recipe": "micro", "hidden_layers": 4, "seq_len": 32, "rows": 2, "steps": 1, "rounds": 1, "device": "cpu"}
    path = tmp_path / "overhead.json"
    overhead.main(overhead.Settings(**small, folder=tmp_path, results=path))
    result = json.loads(path.read_text())
    assert result["layers"] == 4 and result["tokens_per_step"] == 64
    seconds = result["saves"]["seconds"]
    assert all(seconds[name] > 0 for name in ("step", "waits_for_disk", "waits_for_copy", "copy", "write"))
    # Weights, a momentum and the generators: more than 4 bytes a parameter, less than AdamW's state would need.
    assert 4 < result["saves"]["checkpoint_bytes"] / result["saves"]["parameters"] < 14
    kept = [result["recompute"][how]["kept_bytes"] for how in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] > 0
    assert result["fsdp"]["plain_step_s"] > 0 and not result["fsdp"]["launched_by_torchrun"]
    assert [path.name for path in tmp_path.iterdir()] == ["overhead.json"], "checkpoints are removed again"
