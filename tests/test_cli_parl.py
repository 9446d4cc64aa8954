"""`perilune rl micro_parl`, its arms and their comparison: what a user sees, what is refused, and that it goes on."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from perilune.cli import UserError, main
from perilune.cli_rl import rl_verb
from perilune.recipes.rl import RL_RECIPES, rl_recipe
from perilune.report.training import ReportError
from perilune.rl import tiny_swarm
from perilune.rl.run_config import RLRunError, check, read_config
from perilune.rl.workers import load_workers
from perilune.train.run_folder import load_run

SMALL = [
    "--iterations", "2", "--tasks", "2", "--rollout.group-size", "2", "--evaluation.tasks", "4", "--quiet",
    "--rollout.talk.max-tokens", "64", "--engine.max-sequences", "8", "--engine.token-budget", "256",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_swarm, "TEACHING_STEPS", 3)
    return tmp_path


def test_arms_are_trained_resumed_replayed_and_compared(place, capsys):
    rl_verb(["micro_parl", *SMALL])
    rl_verb(["micro_parl", "--resume", "--iterations", "3", "--quiet"])
    rl_verb(["micro_parl", *SMALL, "--arm", "outcome", "--name", "alone"])
    records = [json.loads(line) for line in (place / "runs/micro_parl/records.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3] and all("parl" in record for record in records)
    assert (place / "runs/micro_parl/workers/weights.safetensors").exists()
    alone = read_config(place / "runs/alone/rl.json").rl.parl
    assert alone is not None and (alone.parallel, alone.finish, alone.over) == (0.0, 0.0, 6)
    load_run(place / "runs/micro_parl")
    capsys.readouterr()
    rl_verb(["replay", "micro_parl", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] == found["episodes"] >= 12 + 8
    rl_verb(["compare", "micro_parl", "alone", "--out", "arms.html"])
    assert "micro_parl, alone" in (place / "arms.html").read_text()
    shutil.copytree(place / "runs/alone", place / "elsewhere/micro_parl")
    rl_verb(["compare", "micro_parl", "elsewhere/micro_parl", "--out", "arms.html"])
    assert "micro_parl, elsewhere/micro_parl" in (place / "arms.html").read_text()
    with pytest.raises(ReportError, match="'wider' to show: there are narrow, wide"):
        rl_verb(["compare", "micro_parl", "--kind", "wider", "--out", "none.html"])


def test_how_a_swarm_failed_is_said_at_the_end(place, monkeypatch, capsys):
    monkeypatch.setattr("perilune.report.parl.FEWEST_ITERATIONS", 1)
    monkeypatch.setattr("perilune.report.parl.MOST_UNUSED", -1.0)  # whoever has any workers has some for show then
    monkeypatch.setattr("perilune.report.parl.OFTEN", 1e-6)
    rl_verb(["micro_parl", *[each for each in SMALL if each != "--quiet"]])
    said = capsys.readouterr().err
    assert "Workers for show on wide tasks: " in said or "No episode on wide tasks had a worker." in said
    assert "on narrow tasks" not in said  # which nobody is paid to share


def test_workers_can_be_those_of_another_run(place):
    rl_verb(["micro_parl", *SMALL, "--name", "other", "--seed", "5"])
    rl_verb(["micro_parl", *SMALL, "--parl.workers-from", "other"])
    workers, _ = load_workers(place / "runs/micro_parl")
    other, _, _ = load_run(place / "runs/other")
    policy, _, _ = load_run(place / "runs/micro_parl")
    for name, value in other.state_dict().items():
        torch.testing.assert_close(workers.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert not torch.equal(policy.embed_tokens.weight, other.embed_tokens.weight)


@pytest.mark.parametrize(
    "arguments,told",
    [
        (["micro_parl", "--arm", "ful"], "--arm is 'ful', expected one of full, outcome"),
        (["micro_copy", "--arm", "full"], "is for recipes of PARL"),
        (["compare", "--out", "x.html"], "give the runs to compare"),
    ],
)
def test_what_is_refused_says_what_to_do(place, arguments, told):
    with pytest.raises(UserError, match=told):
        rl_verb(arguments)


def test_rewards_for_workers_need_an_environment_with_workers(place, capsys):
    config = replace(rl_recipe("parl"), start_from="somewhere")
    assert "parl" in RL_RECIPES and config.rl.parl is not None
    with pytest.raises(RLRunError, match="has no workers: train in wide_search or gathering"):
        check(config, {"copying": object()})  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(SystemExit):
        main(["rl", "parl"])
    assert "give --from RUN" in capsys.readouterr().err
