"""Contracts of the training loop."""

import errno
import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from perilune.optim import MuonClip
from perilune.train import (
    CheckpointError,
    Interrupted,
    RunError,
    TrainingStopped,
    checkpoint,
    load_run,
    preparation,
    train,
    trainer,
)
from perilune.train.config_file import from_plain, to_plain
from perilune.train.metrics import TIMING_FIELDS
from perilune.train.optimizer import Optimization
from perilune.train.run_config import RunConfig
from tests.train.tiny_runs import MOE, tiny_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def records(folder, kind=None):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def untimed(folder):
    return [{key: value for key, value in line.items() if key not in TIMING_FIELDS} for line in records(folder)]


def final_tensors(folder):
    return checkpoint.load_tensors(checkpoint.find(folder / "checkpoints").folder)


def started(config, folder):
    """A run that is ready for its first step, for tests that take steps by hand."""
    quiet = {"resume": False, "overwrite": False, "quiet": True, "on_phase": lambda phase: None}
    return trainer.prepared(config, folder / config.name, **quiet)


def gradients_of(config, folder):
    with started(config, folder) as run:
        batches = trainer.load_batches(run)
        targets = trainer.totals(batches, run.device).targets
        loss = trainer.forward_backward(run.model, batches, targets).sum()
    return len(batches), float(loss) / targets, {name: p.grad for name, p in run.model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------------
# What a step computes


def test_one_micro_batch_of_8_rows_equals_four_of_2(cache, tmp_path):
    shapes = {8: 1, 2: 4, 3: 3}
    results = {}
    for rows, expected in shapes.items():
        sizes = {"global_batch_rows": 8, "micro_batch_rows": rows}
        config = tiny_run(cache, name=f"rows{rows}", trainer=sizes, model={"compute_dtype": "float64"})
        count, loss, gradients = gradients_of(config, tmp_path)
        assert count == expected
        results[rows] = (loss, gradients)
    whole_loss, whole = results[8]
    for rows in (2, 3):
        loss, gradients = results[rows]
        # Only the order of a sum over 256 tokens differs; in float64 that leaves 256 * 2e-16 of the largest term.
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        for name, gradient in gradients.items():
            error = (gradient - whole[name]).norm() / whole[name].norm().clamp(min=1e-30)
            assert error < 1e-9, (rows, name, float(error))


def test_the_loss_is_per_valid_target(cache, tmp_path):
    with started(tiny_run(cache, trainer={"global_batch_rows": 8}), tmp_path) as run:
        batches = trainer.load_batches(run)
        count = trainer.totals(batches, run.device)
    targets = count.targets
    assert targets == sum(int((batch.targets_BT != -100).sum()) for batch in batches) < 8 * 32
    with torch.no_grad():
        nats = [
            torch.nn.functional.cross_entropy(
                run.model(batch.tokens_BT, cu_seqlens=batch.cu_seqlens)[0], batch.targets_BT[0], reduction="sum"
            )
            for batch in batches
        ]
    total = trainer.forward_backward(run.model, batches, targets)
    assert total.tolist() == pytest.approx([float(sum(nats)), 0.0], rel=1e-5)
    assert count.text_bytes > 0 == count.vision_targets


def test_router_bias_moves_once_per_step_and_not_in_validation(cache, tmp_path):
    config = tiny_run(cache, model={"moe": MOE}, trainer={"steps": 3, "eval_every": 1, "micro_batch_rows": 1})
    train(config, runs_folder=tmp_path, quiet=True)
    bias = final_tensors(tmp_path / "tiny")["model.layers.1.mlp.gate.e_score_correction_bias"]
    # Three steps of +-0.001 (or 0): four micro-batches a step and a validation after each leave no trace of their own.
    moves = bias / MOE.bias_update_rate
    assert bias.abs().max() > 0
    torch.testing.assert_close(moves, moves.round(), atol=1e-4, rtol=0)
    assert moves.abs().max() <= 3 + 1e-4
    assert all(record["moe_imbalance"] >= 1 for record in records(tmp_path / "tiny", "train"))


def test_validation_does_not_change_the_run(cache, tmp_path):
    often = tiny_run(cache, name="often", trainer={"eval_every": 1})
    never = tiny_run(cache, name="never", trainer={"eval_every": 0})
    for config in (often, never):
        train(config, runs_folder=tmp_path, quiet=True)
    ours, theirs = ([r for r in untimed(tmp_path / name) if r["kind"] == "train"] for name in ("often", "never"))
    assert ours == theirs
    assert len(records(tmp_path / "often", "valid")) == 6
    assert len(records(tmp_path / "never", "valid")) == 1


def test_the_same_config_and_seed_give_the_same_bits_and_another_seed_does_not(cache, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)  # whatever happened before in the process does not matter
        train(tiny_run(cache, name=name, seed=seed), runs_folder=tmp_path, quiet=True)
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b") != untimed(tmp_path / "c")
    ours, theirs = final_tensors(tmp_path / "a"), final_tensors(tmp_path / "b")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---------------------------------------------------------------------------------------------------------------------
# The non-finite guard


def break_steps(monkeypatch, broken, how):
    """Make the loss or a gradient non-finite in the given steps (counted from 0 over the whole process)."""
    real, counter = trainer.forward_backward, iter(range(10**6))

    def sometimes_broken(model, batches, num_targets, **how_to_step):
        loss = real(model, batches, num_targets, **how_to_step)
        if next(counter) not in broken:
            return loss
        if how == "loss":
            return loss * math.nan
        next(model.parameters()).grad.view(-1)[0] = math.inf
        return loss

    monkeypatch.setattr(trainer, "forward_backward", sometimes_broken)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(cache, tmp_path, monkeypatch, how):
    parts = {}
    real = preparation.build_optimization

    def capture(model, settings, parallel):
        parts["model"], parts["optimizer"] = model, (built := real(model, settings, parallel)).optimizer
        return built

    monkeypatch.setattr(preparation, "build_optimization", capture)
    config = tiny_run(cache, model={"moe": MOE}, optimizer={"weight_decay": 0.5}, trainer={"checkpoint_every": 1})
    with started(replace(config, name="initial"), tmp_path) as run:
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
    break_steps(monkeypatch, {0}, how)
    captured = {}

    def on_phase(phase):
        if phase == "step:optimizer" and not captured:
            tensors = {
                **checkpoint.model_tensors(parts["model"]),
                **checkpoint.optimizer_tensors(parts["model"], parts["optimizer"]),
            }
            captured.update({name: tensor.clone() for name, tensor in tensors.items()})

    summary = train(config, runs_folder=tmp_path, quiet=True, on_phase=on_phase)
    assert summary["skipped_steps"] == 1
    # After the skipped first step nothing has moved: not by decay, not by a router bias, and no momentum was gathered.
    for name, value in before.items():
        assert torch.equal(captured[f"model.{name}"], value), name
    moments = [value for name, value in captured.items() if name.startswith("optimizer.")]
    assert moments and all(not value.any() for value in moments)
    first, second = records(tmp_path / "tiny", "train")[:2]
    assert first["skipped"] == 1 and (first["loss"] is None or first["grad_norm"] is None)
    assert second["skipped"] == 1 and second["loss"] is not None


def test_statistics_of_a_skipped_step_are_forgotten(cache, tmp_path, monkeypatch):
    parts = {}
    real = preparation.build_optimization

    def capture(model, config, parallel):
        parts["model"], parts["clip"] = model, (built := real(model, config, parallel)).clip
        return built

    monkeypatch.setattr(preparation, "build_optimization", capture)
    seen = []

    def on_phase(phase):
        if phase in ("step:backward", "step:optimizer"):
            counts = parts["model"].layers[1].mlp.gate.counts
            seen.append((phase, float(parts["clip"].max_logits().max()), float(counts.sum())))

    config = tiny_run(cache, model={"moe": MOE}, optimizer={"qk_clip_tau": 1e-4}, trainer={"steps": 1})
    break_steps(monkeypatch, {0}, "loss")
    train(config, runs_folder=tmp_path, quiet=True, on_phase=on_phase)
    (_, logit_before, counts_before), (_, logit_after, counts_after) = seen
    assert logit_before > 1e-4 and counts_before > 0
    assert logit_after == -math.inf and counts_after == 0
    # The record still says what was seen, and nothing was clipped for it.
    (record,) = records(tmp_path / "tiny", "train")
    assert max(record["max_logit"]) == pytest.approx(logit_before) and record["clipped_heads"] == 0
    assert not final_tensors(tmp_path / "tiny")["qk_clip.ever_clipped"].any()


def test_too_many_bad_steps_in_a_row_stop_the_run_and_keep_the_last_good_checkpoint(cache, tmp_path, monkeypatch):
    config = tiny_run(cache, trainer={"max_bad_steps": 3, "checkpoint_every": 2})
    break_steps(monkeypatch, {1, 3, 4, 5}, "loss")  # one alone, then three in a row
    with pytest.raises(TrainingStopped, match=r"3 steps in a row.*step 6.*there is no checkpoint yet"):
        # Steps 2 and 4, when a checkpoint is due, are bad ones.
        train(config, runs_folder=tmp_path, quiet=True)
    monkeypatch.undo()
    break_steps(monkeypatch, {3, 4, 5}, "loss")
    with pytest.raises(TrainingStopped, match=r"3 steps in a row.*step 6.*step_00000002.*--resume"):
        train(config, runs_folder=tmp_path, quiet=True, overwrite=True)
    monkeypatch.undo()
    assert checkpoint.find(tmp_path / "tiny/checkpoints").state["step"] == 2
    summary = train(config, runs_folder=tmp_path, resume=True, quiet=True)
    assert summary["steps"] == 6 and summary["skipped_steps"] == 0


def break_weights(monkeypatch, step):
    """The optimizer step `step` (counted from 0) leaves a weight that is not finite, after a loss that was."""
    real, counter = Optimization.step, iter(range(10**6))

    def poisonous(self, **how_to_step):
        report = real(self, **how_to_step)
        if next(counter) == step:
            with torch.no_grad():
                self.optimizer.param_groups[0]["params"][0].view(-1)[0] = math.inf
        return report

    monkeypatch.setattr(Optimization, "step", poisonous)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_bad_steps_do_not_evict_the_last_checkpoint_with_finite_weights(cache, tmp_path, monkeypatch, capfd, keep_last):
    settings = {"steps": 20, "max_bad_steps": 5, "checkpoint_every": 1, "keep_last": keep_last}
    break_weights(monkeypatch, 2)
    with pytest.raises(TrainingStopped, match=r"5 steps in a row.*step 8.*the last good checkpoint is step_00000002"):
        train(tiny_run(cache, trainer=settings), runs_folder=tmp_path)
    assert "the weights of step 3 are not finite: not saved" in capfd.readouterr().err
    found = checkpoint.find(tmp_path / "tiny/checkpoints")
    assert found.state["step"] == 2 and found.messages == ()
    assert all(tensor.isfinite().all() for name, tensor in final_tensors(tmp_path / "tiny").items() if "model." in name)


@pytest.mark.parametrize("step", [3, 5])
def test_a_run_that_ends_with_broken_weights_says_so_and_keeps_the_last_good_checkpoint(
    cache, tmp_path, monkeypatch, step
):
    break_weights(monkeypatch, step)
    last = {3: "step_00000002", 5: "step_00000004"}[step]
    with pytest.raises(TrainingStopped, match=f"the weights after the last step, 6, are not finite.*{last}"):
        train(tiny_run(cache), runs_folder=tmp_path, quiet=True)
    assert checkpoint.find(tmp_path / "tiny/checkpoints").folder.name == last


def test_the_count_of_bad_steps_in_a_row_begins_anew_on_resume(cache, tmp_path, monkeypatch):
    config = tiny_run(cache, trainer={"max_bad_steps": 2, "checkpoint_every": 1, "steps": 2})
    break_steps(monkeypatch, {1}, "loss")  # the last step: saved although it is bad
    train(config, runs_folder=tmp_path, quiet=True)
    assert checkpoint.find(tmp_path / "tiny/checkpoints").state["bad_in_a_row"] == 1
    monkeypatch.undo()
    break_steps(monkeypatch, {0}, "loss")
    longer = tiny_run(cache, trainer={"max_bad_steps": 2, "checkpoint_every": 1, "steps": 4})
    assert train(longer, runs_folder=tmp_path, resume=True, quiet=True)["skipped_steps"] == 2


def test_a_bad_last_step_is_saved_beside_the_good_checkpoints(cache, tmp_path, monkeypatch):
    break_steps(monkeypatch, {5}, "loss")
    train(tiny_run(cache, trainer={"keep_last": 1}), runs_folder=tmp_path, quiet=True)
    names = sorted(path.name for path in (tmp_path / "tiny/checkpoints").iterdir())
    assert names == ["latest", "step_00000004", "step_00000006"]
    assert checkpoint.find(tmp_path / "tiny/checkpoints").state["step"] == 6


def test_ctrl_c_after_a_bad_step_keeps_the_last_good_checkpoint_and_says_so(cache, tmp_path, monkeypatch, capfd):
    break_steps(monkeypatch, {2, 3}, "loss")
    reached = []

    def interrupt(phase):
        reached.append(phase)
        if phase == "step:backward" and reached.count(phase) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(tiny_run(cache), runs_folder=tmp_path, on_phase=interrupt)
    assert "step 4 was not finite and is not saved: the last good checkpoint is step_00000002" in capfd.readouterr().err
    assert checkpoint.find(tmp_path / "tiny/checkpoints").state["step"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Starting, stopping, resuming


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_saves_says_how_to_resume_and_the_resumed_run_is_the_same(cache, tmp_path, capfd, number, code):
    config = tiny_run(cache, trainer={"checkpoint_every": 0})
    phases = []

    def interrupt(phase):
        phases.append(phase)
        if phases.count("step:backward") == 3 and phase == "step:backward":
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        train(config, runs_folder=tmp_path, on_phase=interrupt)
    assert stopped.value.code == code
    assert signal.getsignal(number) is before
    said = capfd.readouterr().err
    assert f"saved at step 3; continue with `perilune train tiny --resume --runs {tmp_path}`" in said
    train(config, runs_folder=tmp_path, resume=True, quiet=True)
    train(replace(config, name="alone"), runs_folder=tmp_path, quiet=True)
    assert untimed(tmp_path / "tiny") == untimed(tmp_path / "alone")
    ours, theirs = final_tensors(tmp_path / "tiny"), final_tensors(tmp_path / "alone")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_second_ctrl_c_stops_at_once_without_a_save(cache, tmp_path):
    def interrupt(phase):
        if phase == "step:backward":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(cache), runs_folder=tmp_path, quiet=True, on_phase=interrupt)
    assert not (tmp_path / "tiny/checkpoints").exists()


def test_an_existing_run_is_not_touched_without_resume_or_overwrite(cache, tmp_path):
    config = tiny_run(cache, trainer={"steps": 1})
    train(config, runs_folder=tmp_path, quiet=True)
    before = (tmp_path / "tiny/metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"already holds a run.*--resume.*--overwrite"):
        train(config, runs_folder=tmp_path, quiet=True)
    assert (tmp_path / "tiny/metrics.jsonl").read_bytes() == before
    (tmp_path / "tiny/notes.txt").write_text("mine")
    train(replace(config, seed=9), runs_folder=tmp_path, overwrite=True, quiet=True)
    assert [record["step"] for record in records(tmp_path / "tiny", "train")] == [1]
    assert (tmp_path / "tiny/notes.txt").read_text() == "mine"
    with pytest.raises(RunError, match="no run in .* to resume"):
        train(replace(config, name="absent"), runs_folder=tmp_path, resume=True, quiet=True)
    assert not (tmp_path / "absent").exists()


def test_a_start_that_fails_leaves_no_folder(cache, tmp_path):
    missing = tiny_run(cache)
    missing = replace(
        missing, data=replace(missing.data, corpus=replace(missing.data.corpus, source="/no/such/corpus"))
    )
    with pytest.raises(ValueError, match="/no/such/corpus"):
        train(missing, runs_folder=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model": {"hidden_size": 48}}, r"model\.hidden_size: 32 -> 48"),
        ({"model": {"moe": MOE}}, r"model\.moe"),
        ({"seed": 2}, r"seed: 1 -> 2"),
        ({"data": {"seq_len": 16}}, r"data\.seq_len: 32 -> 16"),
        ({"optimizer": {"kind": "adamw"}}, r"optimizer\.kind: 'muonclip' -> 'adamw'"),
    ],
)
def test_resume_refuses_another_model_or_data_and_names_what_differs(cache, tmp_path, change, named):
    train(tiny_run(cache, trainer={"steps": 2}), runs_folder=tmp_path, quiet=True)
    with pytest.raises(RunError, match=f"cannot resume.*{named}"):
        train(tiny_run(cache, **change), runs_folder=tmp_path, resume=True, quiet=True)
    assert [record["step"] for record in records(tmp_path / "tiny", "train")] == [1, 2]


@pytest.mark.parametrize("what", ["corpus", "tokenizer", "data"])
def test_resume_refuses_another_fingerprint(cache, tmp_path, monkeypatch, what):
    config = tiny_run(cache)
    train(replace(config, trainer=replace(config.trainer, steps=2)), runs_folder=tmp_path, quiet=True)
    other = replace(config.data, corpus=replace(config.data.corpus, num_documents=61))
    if what == "corpus":
        # Another tokenizer and other rows follow from other documents; the cause is what is named.
        config = replace(config, data=other)
    else:
        real = preparation.open_data

        def edited(data, *, seed, progress):
            opened, from_other = real(data, seed=seed), real(other, seed=seed)
            part = {"tokenizer": {"tokenizer": from_other.tokenizer}, "data": {"train": from_other.train}}[what]
            return replace(opened, **part)

        monkeypatch.setattr(preparation, "open_data", edited)
    with pytest.raises(RunError, match=f"the {what} fingerprint is .* but the checkpoint was trained with"):
        train(config, runs_folder=tmp_path, resume=True, quiet=True)


def test_a_run_can_be_prolonged_and_says_what_changed(cache, tmp_path, capfd):
    train(tiny_run(cache, trainer={"steps": 2}), runs_folder=tmp_path, quiet=True)
    summary = train(tiny_run(cache, trainer={"steps": 4}), runs_folder=tmp_path, resume=True)
    assert summary["steps"] == 4
    assert [record["step"] for record in records(tmp_path / "tiny", "train")] == [1, 2, 3, 4]
    said = capfd.readouterr().err
    assert "trainer.steps: 2 -> 4" in said and "resuming from step 2" in said


def test_resuming_a_finished_run_changes_nothing(cache, tmp_path):
    config = tiny_run(cache)
    first = train(config, runs_folder=tmp_path, quiet=True)
    before = (tmp_path / "tiny/metrics.jsonl").read_bytes()
    again = train(config, runs_folder=tmp_path, resume=True, quiet=True)
    assert (tmp_path / "tiny/metrics.jsonl").read_bytes() == before
    assert {k: v for k, v in again.items() if k not in TIMING_FIELDS} == {
        k: v for k, v in first.items() if k not in TIMING_FIELDS
    }


def test_a_damaged_checkpoint_resumes_from_the_one_before_and_ends_the_same(cache, tmp_path, capfd):
    config = tiny_run(cache)
    train(config, runs_folder=tmp_path, quiet=True)
    expected, weights = untimed(tmp_path / "tiny"), final_tensors(tmp_path / "tiny")
    shard = tmp_path / "tiny/checkpoints/step_00000006/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    train(config, runs_folder=tmp_path, resume=True)
    said = capfd.readouterr().err
    assert "step_00000006 is damaged" in said and "resuming from step 4" in said
    assert untimed(tmp_path / "tiny") == expected
    again = final_tensors(tmp_path / "tiny")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_full_disk_is_one_clear_error_and_the_run_resumes(cache, tmp_path, monkeypatch):
    config = tiny_run(cache)
    real = checkpoint._write_tensors

    def full(folder, tensors, group):
        if folder.name.endswith("step_00000004"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, tensors, group)

    monkeypatch.setattr(checkpoint, "_write_tensors", full)
    with pytest.raises(CheckpointError, match=r"step 4.*the disk is full"):
        train(config, runs_folder=tmp_path, quiet=True)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "tiny/checkpoints").iterdir()) == ["latest", "step_00000002"]
    train(config, runs_folder=tmp_path, resume=True, quiet=True)
    train(replace(config, name="alone"), runs_folder=tmp_path, quiet=True)
    assert untimed(tmp_path / "tiny") == untimed(tmp_path / "alone")


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


def test_a_finished_run_has_its_files_and_its_model_loads(cache, tmp_path):
    config = tiny_run(cache, trainer={"report": True, "tensorboard": True})
    summary = train(config, runs_folder=tmp_path, quiet=True)
    folder = tmp_path / "tiny"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "report.html", "tensorboard"} <= names
    assert summary["report"] == str(folder / "report.html")
    assert summary["valid_bits_per_byte"] > 0 and summary["samples"][0]["prompt"] == "def "
    model, tokenizer, loaded = load_run(folder)
    assert loaded == config and not model.training
    weights = final_tensors(folder)
    assert all(torch.equal(value, weights[f"model.{name}"]) for name, value in model.state_dict().items())
    assert tokenizer.vocab_size == config.data.vocab_size


def test_plain_lines_when_not_a_terminal_and_nothing_when_quiet(cache, tmp_path, capfd):
    train(tiny_run(cache, trainer={"steps": 2, "log_every": 2}), runs_folder=tmp_path)
    said = capfd.readouterr()
    assert said.out == ""
    assert "\x1b" not in said.err
    (line,) = [line for line in said.err.splitlines() if line.startswith("step 2/2  loss")]
    assert "bits/byte" in line and "max logit" in line and "tok/s" in line
    train(tiny_run(cache, name="quiet", trainer={"steps": 1}), runs_folder=tmp_path, quiet=True)
    assert capfd.readouterr() == ("", "")


def test_config_survives_json_and_names_the_nearest_field():
    config = tiny_run("cache", model={"moe": MOE}, trainer={"grad_clip": None})
    plain = json.loads(json.dumps(to_plain(config)))
    assert from_plain(RunConfig, plain) == config
    plain["model"]["hiden_size"] = plain["model"].pop("hidden_size")
    with pytest.raises(ValueError, match=r"config\.model\.hiden_size.*nearest is 'hidden_size'"):
        from_plain(RunConfig, plain)
    with pytest.raises(ValueError, match=r"config\.trainer\.steps is 'many', expected int"):
        from_plain(RunConfig, {"name": "x", "trainer": {"steps": "many"}})


@pytest.mark.parametrize(
    "change,named",
    [
        ({"trainer": {"steps": 0}}, "trainer.steps is 0"),
        ({"trainer": {"grad_clip": 0.0}}, "trainer.grad_clip is 0.0"),
        ({"optimizer": {"lr": -1.0}}, "optimizer.lr is -1.0"),
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"optimizer": {"lr": math.inf}}, "optimizer.lr is inf"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr is nan"),
        ({"optimizer": {"weight_decay": -0.1}}, "optimizer.weight_decay is -0.1"),
        ({"optimizer": {"momentum": 1.0}}, "optimizer.momentum is 1.0"),
        ({"optimizer": {"momentum": math.nan}}, "optimizer.momentum is nan"),
        ({"optimizer": {"adam_betas": (0.9, 1.0)}}, r"optimizer.adam_betas is \(0.9, 1.0\)"),
        ({"optimizer": {"adam_betas": (0.9,)}}, r"optimizer.adam_betas is \(0.9,\)"),
        ({"optimizer": {"orthogonalize_dtype": "int8"}}, "optimizer.orthogonalize_dtype is 'int8'"),
        ({"trainer": {"sample_temperature": -1.0}}, "trainer.sample_temperature is -1.0"),
        ({"trainer": {"sample_temperature": math.inf}}, "trainer.sample_temperature is inf"),
        ({"trainer": {"grad_clip": math.nan}}, "trainer.grad_clip is nan"),
        ({"trainer": {"tracker": "mlflow"}}, "trainer.tracker is 'mlflow'"),
        ({"data": {"vocab_size": 10_000}}, "model.vocab_size is 320, smaller than data.vocab_size=10000"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(change, named):
    with pytest.raises(ValueError, match=named):
        tiny_run("cache", **change)


@pytest.mark.long
def test_compiled_parts_train_to_the_same_loss(cache, tmp_path):
    losses = {}
    for compiled in (False, True):
        config = tiny_run(cache, name=f"compiled{compiled}", trainer={"compile": compiled, "steps": 4})
        train(config, runs_folder=tmp_path, quiet=True)
        losses[compiled] = [record["loss"] for record in records(tmp_path / config.name, "train")]
    # Fused kernels round differently; four steps at lr 0.01 amplify float32's 1e-7 by far less than 1e3.
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_muonclip_is_what_a_run_trains_with(cache, tmp_path):
    with started(tiny_run(cache), tmp_path) as run:
        assert isinstance(run.optimization.optimizer, MuonClip)


def test_a_folder_that_cannot_be_written_is_one_clear_error(cache, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write to the run folder .*Not a directory"):
        train(tiny_run(cache), runs_folder=tmp_path / "file", quiet=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["muonclip", "adamw"])
def test_a_bf16_run_on_cuda_resumes_close_to_the_uninterrupted_one(cache, tmp_path, kind):
    changes = {"model": {"moe": MOE}, "optimizer": {"kind": kind}, "schedule": {"kind": "constant"}}
    half, whole = ({"precision": "bf16", "device": "cuda", "steps": steps} for steps in (4, 6))
    train(tiny_run(cache, name="half", trainer=half, **changes), runs_folder=tmp_path, quiet=True)
    train(tiny_run(cache, name="half", trainer=whole, **changes), runs_folder=tmp_path, resume=True, quiet=True)
    train(tiny_run(cache, name="whole", trainer=whole, **changes), runs_folder=tmp_path, quiet=True)
    resumed, alone = ([r["loss"] for r in records(tmp_path / name, "train")] for name in ("half", "whole"))
    # Atomics in CUDA's scatter-adds change the order of sums; bf16 keeps 8 bits of them.
    assert resumed == pytest.approx(alone, rel=1e-2)
    model, _, _ = load_run(tmp_path / "half", device="cuda")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
