"""Contracts of TensorBoard and the trackers: checked before a run, never its end."""

import json
import sys

import pytest

from perilune.train import RunError, TrainerConfig, train
from perilune.train.sinks import Sinks, TensorBoardSink, check_installed, scalars, start_tracker
from tests.train.tiny_runs import tiny_run


class Tracker:
    """A module that looks like wandb; `fails_in` names the calls that raise."""

    def __init__(self, *fails_in):
        self.calls = []
        self.fails_in = fails_in

    def _called(self, name, value=None):
        self.calls.append((name, value))
        if name in self.fails_in:
            raise ConnectionError("no route to host")

    def init(self, **settings):
        self._called("init", (settings["name"], settings["config"]))

    def log(self, values):
        self._called("log", values)

    def finish(self):
        self._called("finish")


def test_a_layer_list_becomes_one_curve_per_layer():
    record = {"kind": "train", "step": 3, "loss": 1.5, "max_logit": [2.0, 4.0], "prompt": "x", "grad_norm": None}
    assert scalars(record) == {"loss": 1.5, "max_logit/0": 2.0, "max_logit/1": 4.0}


def test_tensorboard_files_hold_the_scalars(tmp_path):
    sink = TensorBoardSink(tmp_path, step=0)
    sink.log({"kind": "train", "step": 7, "loss": 1.25, "max_logit": [3.0]})
    sink.log({"kind": "sample", "step": 7, "prompt": "a", "text": "b"})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 1.25)]
    assert events.Scalars("train/max_logit/0")[0].value == 3.0


def test_a_tracker_gets_name_config_and_scalars(monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    sink = start_tracker("trackio", name="toy", config={"a": 1})
    sink.log({"kind": "train", "step": 7, "loss": 1.25})
    sink.close()
    assert tracker.calls == [("init", ("toy", {"a": 1})), ("log", {"train/loss": 1.25, "step": 7}), ("finish", None)]


@pytest.mark.parametrize(
    "module,settings,message",
    [
        ("wandb", {"tracker": "wandb"}, "trainer.tracker is 'wandb'.*pip install wandb"),
        ("torch.utils.tensorboard", {"tensorboard": True}, "trainer.tensorboard is True.*pip install tensorboard"),
    ],
)
def test_an_absent_package_is_named_with_its_setting(monkeypatch, module, settings, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=message):
        check_installed(TrainerConfig(**{"tensorboard": False, **settings}))


@pytest.mark.parametrize("fails_in", ["log", "finish"])
def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_go_on(fails_in):
    warnings, good, bad = [], Tracker(), Tracker(fails_in)
    sinks = Sinks(warnings.append)
    for name, tracker in (("bad", bad), ("good", good)):
        sys.modules[name] = tracker
        try:
            sinks.add(name, lambda name=name: start_tracker(name, name="toy", config={}))
        finally:
            del sys.modules[name]
    for step in (1, 2, 3):
        sinks.log({"kind": "train", "step": step})
    sinks.close()
    assert [name for name, _ in good.calls] == ["init", "log", "log", "log", "finish"]
    assert [name for name, _ in bad.calls].count(fails_in) == 1
    (warning,) = warnings
    assert "bad failed (ConnectionError: no route to host)" in warning and "goes on without it" in warning


@pytest.mark.parametrize("fails_in", ["log", "finish"])
def test_a_run_outlives_its_tracker(tmp_path, monkeypatch, capfd, fails_in):
    monkeypatch.setitem(sys.modules, "wandb", Tracker(fails_in))
    config = tiny_run(tmp_path / "cache", trainer={"tracker": "wandb", "steps": 3})
    assert train(config, runs_folder=tmp_path)["steps"] == 3
    said = capfd.readouterr().err
    assert said.count("trainer.tracker failed (ConnectionError") == 1
    lines = (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"] == [1, 2, 3]


def test_a_run_outlives_a_tensorboard_that_cannot_write(tmp_path, monkeypatch, capfd):
    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardSink, "log", full)
    config = tiny_run(tmp_path / "cache", trainer={"tensorboard": True, "steps": 2})
    assert train(config, runs_folder=tmp_path)["steps"] == 2
    assert capfd.readouterr().err.count("trainer.tensorboard failed") == 1
