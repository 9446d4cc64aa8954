"""A whole run in its folder: what it leaves, that it resumes to the same bits, and what does not stop it."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.recipes.rl import micro_copy
from perilune.rl import tiny_model
from perilune.rl.environment import OUTCOME
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.copying import Copying
from perilune.rl.environments.drawing import Drawing
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.evaluation import OTHER_PICTURES, read_evaluations
from perilune.rl.loop import LoopError
from perilune.rl.progress import RLProgress
from perilune.rl.replay import replay_folder
from perilune.rl.rollout import RolloutConfig, said_nothing
from perilune.rl.run import Policy, _check_same, train_policy
from perilune.rl.run_config import (
    EnvironmentsConfig,
    EvaluationConfig,
    RLRunConfig,
    RLRunError,
    check,
    check_model,
    plain_config,
    read_config,
)
from perilune.rl.talk import TalkConfig
from perilune.rl.trajectory import Recording, Trajectory, load_trajectories, save_trajectories
from perilune.train.interrupt import Interrupted
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import RunError, build_model, load_run
from perilune.train.run_lock import locked
from tests.serve.tiny import VARIANTS, fresh_model, tokenizer


def policy(name: str = "run") -> Policy:
    """Untaught: what it says does not matter here."""
    run = tiny_model.tiny_config(name)
    return Policy(model=build_model(run, torch.device("cpu")), tokenizer=tiny_model.tiny_tokenizer(), run=run)


def config(iterations: int = 2, *, deterministic: bool = False, **more) -> RLRunConfig:
    recipe = micro_copy()
    rl = replace(
        recipe.rl,
        iterations=iterations,
        checkpoint_every=2,
        rollout=RolloutConfig(group_size=4, talk=TalkConfig(max_tokens=4)),
        engine=replace(recipe.rl.engine, deterministic=deterministic),
        **more.pop("rl", {}),
    )
    return replace(recipe, **{"name": "run", "rl": rl, "evaluation": EvaluationConfig(tasks=2, every=2), **more})


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_a_run_is_opened_like_any_other_run(tmp_path):
    begun = policy()
    summary = train_policy(config(), begun, tmp_path / "run", quiet=True)
    model, opened, run = load_run(tmp_path / "run")
    for name, value in begun.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert opened.fingerprint == begun.tokenizer.fingerprint and run.name == "run"
    assert summary["iterations"] == 2 and Path(summary["report"]).read_text().startswith("<!")
    assert [record["iteration"] for record in read_evaluations(tmp_path / "run")] == [0, 2]
    assert "gain" in read_evaluations(tmp_path / "run")[1]["environments"]["copying"]


class Stops(Exception):
    """Stands for a kill."""


def test_a_run_that_was_killed_resumes_to_the_same_bits(tmp_path, monkeypatch):
    settings = config(4, deterministic=True)
    train_policy(settings, policy(), tmp_path / "whole", quiet=True)

    def killed(self, record):
        if record["iteration"] == 3:
            raise Stops  # one iteration after the checkpoint

    with monkeypatch.context() as patched:
        patched.setattr(RLProgress, "record", killed)
        with pytest.raises(Stops):
            train_policy(settings, policy(), tmp_path / "cut", quiet=True)
    train_policy(settings, policy(), tmp_path / "cut", resume=True, quiet=True)
    clock = ("seconds", "_per_s", "waiting")
    whole, cut = (
        [{key: value for key, value in each.items() if not key.endswith(clock)} for each in records(tmp_path / name)]
        for name in ("whole", "cut")
    )
    assert cut == whole and len(whole) == 4
    assert [each["gap"] for each in whole] == [0.0] * 4
    expected, found = (load_run(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    for number in range(4):
        first, second = ((tmp_path / name / "trajectories" / f"{number:06d}.jsonl") for name in ("whole", "cut"))
        assert first.read_bytes() == second.read_bytes()
    evaluations = [read_evaluations(tmp_path / name) for name in ("whole", "cut")]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, number, code):
    monkeypatch.setattr(RLProgress, "record", lambda self, record: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted) as stopped:
        train_policy(config(6), policy(), tmp_path / "run")
    assert stopped.value.code == code
    assert "saved at iteration 1; go on with `perilune rl run --resume" in capsys.readouterr().err.replace("\n", " ")
    monkeypatch.undo()
    train_policy(config(2), policy(), tmp_path / "run", resume=True, quiet=True)
    assert [each["iteration"] for each in records(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("cooldown,done,is_same", [(0, 2, True), (2, 1, True), (2, 2, False)])
def test_more_iterations_are_taken_where_those_that_are_over_would_have_learnt_the_same(
    tmp_path, monkeypatch, cooldown, done, is_same
):
    """Of four with a cooldown of two, the first two have the whole rate; so they would among six, the third not."""

    def cooled(iterations: int, cooldown: int = cooldown) -> RLRunConfig:
        settings = config(iterations)
        return replace(settings, rl=replace(settings.rl, warmup=0, cooldown=cooldown))

    def stop(self, record):
        if record["iteration"] == done + 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(RLProgress, "record", stop)
        with pytest.raises(Interrupted):
            train_policy(cooled(4), policy(), tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "rl.json").read_bytes()
    longer = cooled(6)
    if not is_same:
        with pytest.raises(RLRunError, match=r"rl.iterations 4 -> 6.*iteration 2, which is over, had 0.67 of it and"):
            train_policy(longer, policy(), tmp_path / "run", resume=True, quiet=True)
        assert (tmp_path / "run" / "rl.json").read_bytes() == before
        return
    train_policy(longer, policy(), tmp_path / "run", resume=True, quiet=True)
    train_policy(longer, policy(), tmp_path / "straight", quiet=True)
    cut, straight = ([each["rate"] for each in records(tmp_path / name)] for name in ("run", "straight"))
    assert cut == straight and len(cut) == 6


def test_two_processes_do_not_write_one_run(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(RunError, match="another process"):
        train_policy(config(), policy(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "rl.json").exists()


def test_a_folder_with_a_run_is_kept_unless_told(tmp_path):
    settings, folder = config(1), tmp_path / "run"
    with pytest.raises(RLRunError, match="without --resume"):
        train_policy(settings, policy(), folder, resume=True, quiet=True)
    train_policy(settings, policy(), folder, quiet=True)
    with pytest.raises(RLRunError, match="--overwrite"):
        train_policy(settings, policy(), folder, quiet=True)
    rl = settings.rl
    optimizer = replace(rl.learner.optimizer, lr=1.0)
    other = replace(settings, rl=replace(rl, iterations=2, learner=replace(rl.learner, optimizer=optimizer)))
    with pytest.raises(RLRunError, match=r"rl\.learner\.optimizer\.lr"):
        train_policy(other, policy(), folder, resume=True, quiet=True)
    before = records(folder)
    train_policy(settings, policy(), folder, overwrite=True, quiet=True)
    assert len(records(folder)) == len(before) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(RLRunError, match="another kind"):
        train_policy(settings, policy(), tmp_path / "other", overwrite=True, quiet=True)


class Troubled(Copying):
    """Each letter has a trouble of its own."""

    async def episode(self, task, talk):
        if task.data["letter"] == "b":
            await asyncio.sleep(3600)
        if task.data["letter"] == "e":
            return  # nobody asks the policy: an empty generation
        if task.data["letter"] == "f":
            raise RuntimeError("the world is broken")
        if task.data["letter"] == "h":
            raise SystemExit("the world is over")
        if task.data["letter"] == "i":
            raise asyncio.CancelledError
        if task.data["letter"] == "j":
            raise TimeoutError("of its own")
        if task.data["letter"] == "k":
            for _ in range(20):  # it does not let itself be cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.2)
        await super().episode(task, talk)

    def judge(self, task, messages):
        if task.data["letter"] == "a":
            raise RuntimeError("no verdict")
        if task.data["letter"] == "c":
            return {OUTCOME: float("nan")}
        if task.data["letter"] == "g":
            time.sleep(30)
        if task.data["letter"] == "l":
            raise SystemExit("no more")
        if task.data["letter"] == "m":
            raise TimeoutError("of its own")
        return {OUTCOME: float(len(str(messages)) % 2)}


def test_an_environment_can_be_evaluated_on_more_tasks_than_others(tmp_path):
    told = EvaluationConfig(tasks=2, tasks_of={"more": 5})
    settings = config(1, rl={"tasks": 2, "pool": 4}, evaluation=told)
    environments = {"copying": Copying(letters="abcdefgh"), "more": Copying(letters="abcdefgh")}
    train_policy(settings, policy(), tmp_path / "run", environments=environments, quiet=True)
    for found in read_evaluations(tmp_path / "run"):
        assert {name: each["count"] for name, each in found["environments"].items()} == {"copying": 2, "more": 5}
    unknown = replace(settings, name="other", evaluation=EvaluationConfig(tasks=2, tasks_of={"nobody": 5}))
    for refused in (
        lambda: check(unknown, environments),
        lambda: train_policy(unknown, policy(), tmp_path / "other", environments=environments, quiet=True),
    ):
        with pytest.raises((RLRunError, ValueError), match="tasks_of has 'nobody', expected one of copying, more"):
            refused()
    with pytest.raises(ValueError, match="expected 1 or more"):
        EvaluationConfig(tasks_of={"copying": 0})
    with pytest.raises(ValueError, match="none at all"):
        EvaluationConfig(tasks=0, tasks_of={"copying": 4})


def test_bad_episodes_are_counted_and_shown_and_the_run_goes_on(tmp_path):
    letters = "abcdefghijklm"
    count = len(letters)
    settings = config(2, rl={"tasks": count, "pool": count}, evaluation=EvaluationConfig(tasks=count))
    rollout = replace(settings.rl.rollout, episode_seconds=1.0, judge_seconds=1.0)
    settings = replace(settings, rl=replace(settings.rl, rollout=rollout))
    environments = {"copying": Troubled(letters=letters)}
    summary = train_policy(settings, policy(), tmp_path / "run", environments=environments, quiet=True)
    found = records(tmp_path / "run")
    expected = {"judge": 12, "hung": 8, "reward": 4, "environment": 16, "judge hung": 4}
    assert [each["failures"] for each in found] == [expected] * 2
    assert [(each["episodes"], each["empty"]) for each in found] == [(8, 4)] * 2
    assert summary["failures"] == {kind: 2 * count for kind, count in expected.items()}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Episodes lost" in page and "no verdict" in page and "judge hung" in page
    kept = load_trajectories(tmp_path / "run" / "unjudged" / "000000.jsonl")
    assert Counter(each.task_data["letter"] for each in kept) == dict.fromkeys("acglm", 4)
    assert all(each.num_trained and not each.facets for each in kept)  # tokens and transcript are there to be judged


def test_broken_rows_of_a_file_are_said_at_the_start(tmp_path, capsys):
    rows = [json.dumps({"question": f"{number}?", "answer": str(number)}) for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{", '{"question": 1}', "no"]) + "\n")
    problems = WordProblems(source=str(tmp_path / "rows.jsonl"), max_tokens=4)
    chosen = EnvironmentsConfig(word_problems=problems)
    settings = config(1, environments=chosen, start_from="a run", rl={"tasks": 1, "pool": 2})
    train_policy(settings, policy(), tmp_path / "run", quiet=False)
    assert "word_problems: 3 rows of its file are broken and left out" in capsys.readouterr().err


class Unmade(Copying):
    """Every other task cannot be made."""

    def task(self, number, split):
        if number % 2:
            raise ValueError(f"number {number} is no task")
        return super().task(number, split)


def test_tasks_that_cannot_be_made_are_counted_and_the_others_are_trained_on(tmp_path):
    settings = config(1, rl={"tasks": 2, "pool": 4}, evaluation=EvaluationConfig(tasks=0))
    train_policy(settings, policy(), tmp_path / "run", environments={"copying": Unmade()}, quiet=True)
    (record,) = records(tmp_path / "run")
    assert record["failures"] == {"task not made": 2} and record["episodes"] == 8
    page = (tmp_path / "run" / "report.html").read_text()
    assert "task not made" in page and "number 1 of train: ValueError: number 1 is no task" in page

    class Never(Copying):
        def task(self, number, split):
            raise ValueError("nothing here")

    with pytest.raises(LoopError, match="makes no task: copying, number 0 of train: ValueError: nothing here"):
        train_policy(settings, policy(), tmp_path / "never", environments={"copying": Never()}, quiet=True)


def test_a_reply_that_ends_at_once_is_empty():
    recording = Recording()
    recording.add([1, 2], [3], [-0.5], 0)

    def played(*messages):
        return Trajectory(
            environment="e", task="t", task_data={}, weights={}, sample=0, seed=0, iteration=0,
            branches=tuple(recording.branches), messages=messages, facets={}, reward=0.0, finish="stop",
        )  # fmt: skip

    user = {"role": "user", "content": "a"}
    assert said_nothing(played(user, {"role": "assistant", "content": ""}))
    assert not said_nothing(played(user, {"role": "assistant", "content": "b"}))
    assert not said_nothing(played(user, {"role": "assistant", "tool_calls": [{"id": "1"}]}))


def test_stored_episodes_are_judged_again_and_a_changed_reward_is_found(tmp_path):
    train_policy(config(1), policy(), tmp_path / "run", quiet=True)
    found = replay_folder(tmp_path / "run")
    assert found["episodes"] == found["equal"] == 16 + 2 * 2 and found["files"] == 3
    path = tmp_path / "run" / "trajectories" / "000000.jsonl"
    changed = load_trajectories(path)
    changed[3] = replace(changed[3], reward=np.nextafter(changed[3].reward, 2.0).item())
    save_trajectories(path, changed)
    found = replay_folder(tmp_path / "run")
    assert found["equal"] == found["episodes"] - 1 and "sample 3" in found["examples"][0]


def test_a_facet_that_is_new_is_no_difference_and_one_that_changed_or_is_gone_is(tmp_path):
    train_policy(config(1), policy(), tmp_path / "run", quiet=True)
    path = tmp_path / "run" / "trajectories" / "000000.jsonl"
    stored = load_trajectories(path)
    unpaid = next(name for name in stored[0].facets if name not in stored[0].weights)
    shorter = {name: value for name, value in stored[0].facets.items() if name != unpaid}
    save_trajectories(path, [replace(stored[0], facets=shorter), *stored[1:]])
    found = replay_folder(tmp_path / "run")
    assert found["equal"] == found["episodes"]  # of before the judge had it
    changed = replace(stored[0], facets={**stored[0].facets, unpaid: stored[0].facets[unpaid] + 1})
    gone = replace(stored[1], facets={**stored[1].facets, "rows": 2.0})
    save_trajectories(path, [changed, gone, *stored[2:]])
    found = replay_folder(tmp_path / "run")
    assert found["equal"] == found["episodes"] - 2
    assert f"{unpaid} " in found["examples"][0] and "rows 2.0 then, None now" in found["examples"][1]


def test_pictures_are_also_tested_with_those_of_other_tasks(tmp_path):
    model = fresh_model("pictures", "float32")
    run = replace(tiny_model.tiny_config("run"), model=replace(VARIANTS["pictures"], compute_dtype="float32"))
    drawing = Drawing(max_tokens=4)
    settings = config(
        1, environments=EnvironmentsConfig(drawing=drawing), start_from="a run", rl={"tasks": 1, "pool": 1}
    )  # fmt: skip
    train_policy(settings, Policy(model=model, tokenizer=tokenizer(), run=run), tmp_path / "run", quiet=True)
    last = read_evaluations(tmp_path / "run")[-1]
    assert set(last["environments"]) == {"drawing", "drawing" + OTHER_PICTURES}
    assert last["environments"]["drawing"]["looking"]["mean"] == 0.0  # nothing that it writes can be drawn
    assert all(sample["image"] and sample["problem"] for sample in last["samples"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Drawings before and after" in page and "drawing: by looking" in page
    assert replay_folder(tmp_path / "run")["equal"] == 4 + 2 * 4


@pytest.mark.parametrize(
    "changes,complaint",
    [
        ({"environments": EnvironmentsConfig()}, "no environment"),
        ({"makes_model": False}, "--from RUN"),
        ({"environments": EnvironmentsConfig(arithmetic=Arithmetic())}, "knows only copying"),
        (
            {
                "environments": EnvironmentsConfig(word_problems=WordProblems(source="none.jsonl")),
                "start_from": "a run",
            },
            r"environments\.word_problems\.source is 'none\.jsonl', which does not exist",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(changes, complaint):
    wrong = replace(config(), **changes)
    with pytest.raises(RLRunError, match=complaint):
        check(wrong, wrong.environments.chosen())


def test_a_model_that_does_not_fit_is_refused():
    begun, settings = policy(), config()
    with pytest.raises(RLRunError, match="vision tower.*drawing_text"):
        check_model(settings, {"drawing": Drawing()}, begun.model, begun.tokenizer)
    longest = check_model(settings, {"words": Drawing(ask="words")}, begun.model, begun.tokenizer)
    engine = replace(settings.rl.engine, max_length=longest["words"] + 3)
    short = replace(settings, rl=replace(settings.rl, engine=engine))
    with pytest.raises(RLRunError, match="rollout.talk.max_tokens=4 need"):
        check_model(short, {"words": Drawing(ask="words")}, begun.model, begun.tokenizer)


def test_a_config_comes_back_from_its_file(tmp_path):
    settings = config(3)
    (tmp_path / "rl.json").write_text(json.dumps(plain_config(settings)))
    assert read_config(tmp_path / "rl.json") == settings
    assert isinstance(policy().run, RunConfig)
    with pytest.raises(RLRunError, match=r"holds no run"):
        read_config(tmp_path / "none" / "rl.json")


def test_a_checkpoint_from_before_a_field_existed_is_resumed_and_a_changed_one_is_named():
    now = plain_config(config())
    before = json.loads(json.dumps(now))
    del before["rl"]["processes"], before["rl"]["learner"]["routing_replay"]
    _check_same(before, now)
    before["rl"]["seed"] = 7
    with pytest.raises(RLRunError, match=r"rl\.seed: 7 -> 0"):
        _check_same(before, now)
