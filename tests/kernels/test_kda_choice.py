"""The table that chooses between our own kernels of KDA and cuDNN's."""

import json
from pathlib import Path

import pytest
import torch

from perilune.kernels.kda import BoundedGate, choice

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "bench_kda.json"
HOPPER = (9, 0)


def ask(**changes):
    case = {
        "capability": HOPPER,
        "dtype": torch.bfloat16,
        "key_dim": 128,
        "value_dim": 128,
        "tokens": 32768,
        "heads": 32,
    }
    flags = {"is_bounded": True, "with_backward": False}
    case |= {name: value for name, value in changes.items() if name in case}
    flags |= {name: value for name, value in changes.items() if name in flags}
    return choice.fastest(*case.values(), **flags)


def test_the_table_is_what_was_measured():
    measured = {(row["case"], row["metric"], row["peer_name"]): row for row in json.loads(ROWS.read_text())}
    for row in choice.TABLE[HOPPER]:
        metric = "forward + backward" if row.with_backward else "forward"
        for index, gate in enumerate(("strong", "weak")):
            found = measured[f"T{row.tokens} H{row.heads} {gate}, own kernel", metric, "cudnn + prepare"]
            assert row.own[index] == pytest.approx(found["ours"], rel=0.02)
            assert row.cudnn[index] == pytest.approx(found["peer"], rel=0.02)


def test_the_worst_time_over_gates_decides_and_the_nearest_row_counts(monkeypatch):
    near = choice.Measured(1024, 32, False, own=(2.0, 2.0), cudnn=(1.0, 1.9))
    far = choice.Measured(131072, 32, False, own=(2.0, 2.0), cudnn=(1.0, 2.1))
    monkeypatch.setitem(choice.TABLE, HOPPER, (near, far))
    choice.fastest.cache_clear()
    try:
        assert ask(tokens=2048) == "cudnn"
        assert ask(tokens=100_000) == "triton"
        assert ask(tokens=2048, with_backward=True) == "triton"  # no such row
        for other in ({"is_bounded": False}, {"dtype": torch.float32}, {"key_dim": 64}, {"capability": (8, 0)}):
            assert ask(tokens=2048, **other) == "triton"
    finally:
        choice.fastest.cache_clear()


def test_the_library_is_not_taken_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(choice, "fastest", lambda *case, **flags: "cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    q = torch.randn(1, 64, 2, 128).bfloat16()
    options = {
        "scale": 128**-0.5, "initial_state_NHKV": None, "cu_seqlens": None, "gate": BoundedGate(torch.zeros(2, 128)),
        "qk_l2norm": True, "dtype": torch.float32, "beta_bound": 1.0,
    }  # fmt: skip
    assert choice.own_or_library(q, q, q, q, q[..., 0], options) == "triton"  # on a CPU
    monkeypatch.setattr(choice, "why_not_cudnn", lambda *tensors, **keywords: None)
    assert choice.own_or_library(q, q, q, q, q[..., 0], options) == "cudnn"
