"""Contracts of starting a run: what is refused, what is said, and that a start that fails changes nothing."""

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.train import RunError, read_config, train
from perilune.train.run_folder import resume_command
from perilune.train.run_lock import locked
from tests.train import killable_runs
from tests.train.test_sinks import Tracker
from tests.train.tiny_runs import tiny_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# A start that fails


def without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    return {"trainer": {"tracker": "wandb"}}, "trainer.tracker is 'wandb'.*not installed"


def without_login(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Tracker("init"))
    return {"trainer": {"tracker": "wandb"}}, "trainer.tracker is 'wandb'.*did not start .*no route to host"


def without_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    return {"trainer": {"tensorboard": True}}, "trainer.tensorboard is True"


def without_cuda(monkeypatch):
    # The highest index torch has room for: no machine has so many devices.
    return {"trainer": {"device": "cuda:127"}}, r"trainer.device is 'cuda:127', which is not there .*\"cpu\""


def unknown_device(monkeypatch):
    return {"trainer": {"device": "abacus"}}, r"trainer.device is 'abacus', which is not there .*\"cpu\""


def without_data(monkeypatch):
    corpus = replace(tiny_run("cache").data.corpus, source="/no/such/corpus")
    return {"data": {"corpus": corpus}}, "/no/such/corpus"


FAILURES = (without_package, without_login, without_tensorboard, without_cuda, unknown_device, without_data)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_a_start_that_fails_leaves_the_old_run_as_it_was(cache, tmp_path, monkeypatch, failure, how):
    train(tiny_run(cache, trainer={"steps": 2}), runs_folder=tmp_path, quiet=True)
    before = contents(tmp_path)
    change, message = failure(monkeypatch)
    config = tiny_run(cache, **{**change, "trainer": {"steps": 4, **change.get("trainer", {})}})
    expected = ValueError if failure is without_data else RunError
    with pytest.raises(expected, match=message):
        train(config, runs_folder=tmp_path, quiet=True, **{how: True})
    assert contents(tmp_path) == before


def test_resume_and_overwrite_together_are_refused(cache, tmp_path):
    train(tiny_run(cache, trainer={"steps": 1}), runs_folder=tmp_path, quiet=True)
    before = contents(tmp_path)
    with pytest.raises(RunError, match="one of --resume and --overwrite"):
        train(tiny_run(cache), runs_folder=tmp_path, quiet=True, resume=True, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "content,named",
    [
        ("[1, 2]", "expected the fields of RunConfig"),
        ('{"name": "x", "stepz": 3}', "stepz"),
        ('{"name": "x", "trainer": []}', "config.trainer is"),
        ('{"name": "x", "optimizer": {"lr": -1}}', "optimizer.lr is -1"),
        ("{}", "name"),
        ("{", "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_malformed_config_is_one_error_that_names_the_file(tmp_path, content, named):
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=rf"config\.json.*{named}"):
        read_config(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# One process at a time


def test_a_second_process_is_refused_while_the_first_trains_and_not_after_its_death(cache, tmp_path):
    config = tiny_run(cache, trainer={"steps": 100_000, "eval_every": 0, "checkpoint_every": 2})
    short = tiny_run(cache, trainer={"steps": 1})
    process = killable_runs.start(config, tmp_path)
    try:
        wait_for(tmp_path / "tiny/checkpoints/latest", process)
        for how in ("resume", "overwrite"):
            with pytest.raises(RunError, match=rf"being trained by another process \(pid {process.pid}\)"):
                train(short, runs_folder=tmp_path, quiet=True, **{how: True})
        assert process.is_alive()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    lines = (tmp_path / "tiny/metrics.jsonl").read_bytes().split(b"\n")[:-1]
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(1, len(steps) + 1)]
    summary = train(short, runs_folder=tmp_path, resume=True, quiet=True)
    assert summary["steps"] >= 2


def wait_for(path, process):
    pause = threading.Event()
    while not path.exists():
        assert process.is_alive()
        pause.wait(0.01)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    to_child, to_parent = os.pipe(), os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(to_parent[1], b"x")
            os.read(to_child[0], 1)  # alive until the parent has tried
            os._exit(0)
        os.read(to_parent[0], 1)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*to_child, *to_parent):
            os.close(descriptor)


def test_the_lock_is_free_again_after_a_start_that_failed(cache, tmp_path):
    config = tiny_run(cache, trainer={"steps": 1})
    train(config, runs_folder=tmp_path, quiet=True)
    with pytest.raises(RunError, match="seed: 1 -> 2") as held:  # keeps the traceback, and with it every local
        train(replace(config, seed=2), runs_folder=tmp_path, resume=True, quiet=True)
    assert held.tb is not None
    assert train(config, runs_folder=tmp_path, resume=True, quiet=True)["steps"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def test_resuming_to_fewer_steps_says_where_the_run_is_and_changes_nothing(cache, tmp_path, capfd):
    train(tiny_run(cache, trainer={"steps": 4}), runs_folder=tmp_path, quiet=True)
    before = contents(tmp_path)
    summary = train(tiny_run(cache, trainer={"steps": 2}), runs_folder=tmp_path, resume=True)
    assert "the run is already at step 4 and trainer.steps is 2" in capfd.readouterr().err
    assert summary["steps"] == 4 and summary["loss"] is not None
    assert contents(tmp_path) == before


def test_resume_commands_name_the_runs_folder_unless_it_is_the_default():
    assert resume_command(Path("runs/tiny")) == "perilune train tiny --resume"
    assert resume_command(Path("other runs/tiny")) == "perilune train tiny --resume --runs 'other runs'"


def test_the_hint_at_an_existing_run_is_a_command_that_finds_it(cache, tmp_path):
    config = tiny_run(cache, trainer={"steps": 1})
    train(config, runs_folder=tmp_path, quiet=True)
    with pytest.raises(RunError, match=rf"`perilune train tiny --resume --runs {tmp_path}`"):
        train(config, runs_folder=tmp_path, quiet=True)


def test_the_start_says_what_the_corpus_leaves_out_and_that_nothing_is_held_out(cache, tmp_path, capfd):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    (texts / "empty.txt").write_text(" \n")
    (texts / "latin.txt").write_bytes("größer".encode("latin-1"))
    config = tiny_run(cache, trainer={"steps": 1})
    corpus = replace(config.data.corpus, source=str(texts), valid_fraction=0.0)
    train(replace(config, data=replace(config.data, corpus=corpus)), runs_folder=tmp_path)
    said = capfd.readouterr().err
    assert "left out of the corpus: 1 not UTF-8, 1 too short" in said
    assert "no validation split" in said and "data.corpus.valid_fraction=0.0" in said
    train(replace(config, name="generated"), runs_folder=tmp_path)
    said = capfd.readouterr().err
    assert "left out" not in said and "no validation split" not in said
