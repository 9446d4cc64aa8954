"""`perilune rl`: what a new user sees, what is refused, and that every setting has a flag."""

import json
import shutil
from pathlib import Path

import pytest

from perilune.cli import main
from perilune.cli_rl import rl_verb
from perilune.recipes.rl import RL_RECIPES, rl_recipe
from perilune.rl import tiny_model
from perilune.rl.run_config import check, needs_sight, read_config
from perilune.train.run_folder import load_run

SMALL = ["--iterations", "2", "--rollout.group-size", "4", "--evaluation.tasks", "2"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def untaught(monkeypatch):
    monkeypatch.setattr(tiny_model, "TEACHING_STEPS", 1)


def test_a_new_user_sees_the_reward_rise(place, capsys):
    rl_verb(["micro_copy", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["before"]["copying"]["reward"]["mean"] <= 0.5
    assert summary["after"]["copying"]["reward"]["mean"] == 1.0
    assert summary["first_reward"] < 0.6 and summary["last_reward"] > 0.85
    assert (place / "runs" / "micro_copy" / "report.html").exists()
    load_run(place / "runs" / "micro_copy")
    rl_verb(["replay", "micro_copy", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] == found["episodes"] > 1000


def test_a_run_goes_on_by_its_name_and_a_run_starts_from_another(place, capsys, untaught):
    rl_verb(["micro_copy", *SMALL, "--engine.deterministic", "--quiet"])
    rl_verb(["micro_copy", "--resume", "--iterations", "3", "--quiet"])
    lines = (place / "runs" / "micro_copy" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert "perilune serve micro_copy" in capsys.readouterr().out
    few = [*SMALL, "--tasks", "1", "--rollout.talk.max-tokens", "4", "--engine.max-sequences", "8", "--quiet"]
    rl_verb(["arithmetic", "--from", "micro_copy", *few])
    assert read_config(place / "runs" / "arithmetic" / "rl.json").start_from == "runs/micro_copy"
    load_run(place / "runs" / "arithmetic")


def test_a_copy_of_a_run_goes_on_by_itself_and_leaves_the_run_alone(place, untaught):
    rl_verb(["micro_copy", *SMALL, "--quiet"])
    run, copy = place / "runs" / "micro_copy", place / "runs" / "copy"
    shutil.copytree(run, copy)
    rl_verb(["copy", "--resume", "--iterations", "3", "--quiet"])
    lengths = [len((folder / "records.jsonl").read_text().splitlines()) for folder in (run, copy)]
    assert lengths == [2, 3] and read_config(copy / "rl.json").name == "copy"


@pytest.mark.parametrize("name", ["rl.json", "evaluations.jsonl"])
def test_a_kill_while_a_resumed_run_writes_leaves_what_was_there(place, untaught, monkeypatch, name):
    rl_verb(["micro_copy", *SMALL, "--quiet"])
    whole = Path.write_text

    def half(path, text, *options, **more):
        if path.name.lstrip(".") == name:
            whole(path, text[: len(text) // 2], *options, **more)
            raise KeyboardInterrupt
        return whole(path, text, *options, **more)

    before = (place / "runs" / "micro_copy" / name).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            rl_verb(["micro_copy", "--resume", "--iterations", "3", "--quiet"])
    assert (place / "runs" / "micro_copy" / name).read_bytes() == before
    rl_verb(["micro_copy", "--resume", "--iterations", "3", "--quiet"])


def test_every_way_to_shape_the_reward_has_a_flag(place, untaught):
    chats = place / "chats.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(3)))
    rl_verb([
        "micro_copy", *SMALL, "--quiet", "--toggle", "--groups.toggle.period", "3", "--groups.length-reward", "0.1",
        "--priorities.floor", "0.5", "--rollout.iteration-tokens", "1", "--overlap", "--learner.objective.kind", "grpo",
        "--learner.ptx-weight", "0.1", "--ptx.sources", str(chats), "--ptx.valid-fraction", "0",
    ])  # fmt: skip
    run = place / "runs" / "micro_copy"
    rl = read_config(run / "rl.json").rl
    assert rl.groups.toggle is not None and rl.groups.toggle.period == 3 and rl.groups.length_reward == 0.1
    assert rl.priorities.floor == 0.5 and rl.rollout.iteration_tokens == 1 and rl.overlap
    assert all("ptx_loss" in json.loads(line) for line in (run / "records.jsonl").read_text().splitlines())


def refused(arguments, capsys) -> str:
    from perilune import cli

    cli.VERBS.setdefault("rl", cli._verb_of("rl"))
    with pytest.raises(SystemExit) as stopped:
        main(["rl", *arguments])
    assert stopped.value.code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        ([], "RECIPE is missing"),
        (["micro_cpy"], "did you mean 'micro_copy'"),
        (["arithmetic"], "give --from RUN"),
        (["arithmetic", "--from", "nothing"], "there is no run 'nothing'"),
        (["micro_copy", "--resume"], "start it without --resume"),
        (["stopped-early", "--resume"], "there is no run 'stopped-early' in 'runs' to resume"),
        (["micro_copy", "--iterations", "0"], "iterations is 0"),
        (["micro_copy", "--learner.ptx-weight", "1"], "ptx.sources is empty"),
        (["micro_copy", "--overlap", "--groups.max-staleness", "0"], "at least 1"),
        (["micro_copy", "--engine.max-length", "8"], "engine holds 8"),
        (["replay", "nothing"], "there is no run"),
    ],
)
def test_wrong_input_is_one_line_with_the_fix(place, capsys, untaught, arguments, complaint):
    said = refused(arguments, capsys)
    assert complaint in said and "Traceback" not in said
    assert not list(place.glob("runs/*/rl.json"))


@pytest.mark.parametrize("name", [name for name in RL_RECIPES if name != "code"])
def test_every_recipe_is_whole(name):
    config = rl_recipe(name)
    assert config.name == name
    environments = config.environments.chosen()
    if not config.makes_model:
        check(type(config)(**{**vars(config), "start_from": "a run"}), environments)
    assert any(needs_sight(each) for each in environments.values()) == (
        name in ("drawing", "drawing_shuffled", "looking", "joint")
    )
    for environment in environments.values():
        assert environment.task(0, "train").name != environment.task(0, "test").name


def test_help_names_the_fields(capsys):
    with pytest.raises(SystemExit) as stopped:
        rl_verb(["micro_copy", "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--from", "--resume", "--iterations", "--environments.copying.letters", "--learner.objective.tau"):
        assert flag in said, flag
