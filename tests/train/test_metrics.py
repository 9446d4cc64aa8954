"""Contracts of the metrics files."""

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.metrics import JsonLines, Throughput, open_sinks, peak_memory_bytes, scalars


@given(before=st.integers(0, 5), after=st.integers(0, 5), again=st.integers(0, 5))
def test_cutting_back_forgets_exactly_what_came_after(before, after, again, tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    log = JsonLines(path)
    for step in range(before):
        log.append({"kind": "train", "step": step})
    position = log.position()
    for step in range(after):
        log.append({"kind": "train", "step": 100 + step})
    log.close()

    log = JsonLines(path)
    log.cut_to(position)
    for step in range(again):
        log.append({"kind": "train", "step": 200 + step})
    log.close()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [*range(before), *range(200, 200 + again)]


def test_records_are_strict_json(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"loss": float("nan"), "max_logit": [1.0, float("-inf")], "text": "ö"})
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "max_logit": [1.0, None], "text": "ö"}


def test_a_layer_list_becomes_one_curve_per_layer():
    record = {"kind": "train", "step": 3, "loss": 1.5, "max_logit": [2.0, 4.0], "prompt": "x", "grad_norm": None}
    assert scalars(record) == {"loss": 1.5, "max_logit/0": 2.0, "max_logit/1": 4.0}


def test_tensorboard_files_hold_the_scalars(tmp_path):
    (sink,) = open_sinks(tmp_path, tensorboard=True, tracker=None, name="toy", config={}, step=0)
    sink.log({"kind": "train", "step": 7, "loss": 1.25, "max_logit": [3.0]})
    sink.log({"kind": "sample", "step": 7, "prompt": "a", "text": "b"})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 1.25)]
    assert events.Scalars("train/max_logit/0")[0].value == 3.0


def test_a_tracker_is_used_when_asked_for_and_named_when_absent(tmp_path, monkeypatch):
    calls = []

    class Tracker:
        def init(self, **settings):
            calls.append(("init", settings["name"], settings["config"]))

        def log(self, values):
            calls.append(("log", values))

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "trackio", Tracker())
    (sink,) = open_sinks(tmp_path, tensorboard=False, tracker="trackio", name="toy", config={"a": 1}, step=0)
    sink.log({"kind": "train", "step": 7, "loss": 1.25})
    sink.close()
    assert calls == [("init", "toy", {"a": 1}), ("log", {"train/loss": 1.25, "step": 7}), "finish"]

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb.*not installed"):
        open_sinks(tmp_path, tensorboard=False, tracker="wandb", name="toy", config={}, step=0)


def test_throughput_is_the_rate_over_the_window():
    times = iter([0.0, 1.0, 2.0, 4.0])
    rate = Throughput(window=2, clock=lambda: next(times))
    assert [rate.mark(tokens) for tokens in (0, 100, 300, 500)] == [0.0, 100.0, 150.0, 400 / 3]


def test_pauses_do_not_lower_the_throughput():
    times = iter([0.0, 1.0, 1.0, 51.0, 52.0])
    rate = Throughput(window=8, clock=lambda: next(times))
    rate.mark(0)
    assert rate.mark(100) == 100.0
    with rate.pause():
        pass
    assert rate.mark(200) == 100.0


def test_peak_memory_is_a_plausible_number_of_bytes():
    assert 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**40
