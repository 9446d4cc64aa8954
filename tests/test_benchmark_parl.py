"""benchmarks/parl.py in miniature: every piece runs, and goes on where it was."""

import json
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro

from perilune.cli_audit import audit_step
from perilune.data import Tokenizer
from perilune.data.dialogues import document_of, read_dialogues
from perilune.recipes.parl import parl
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_questions import parse_question
from perilune.rl.environments.wide_search_traces import TraceConfig
from perilune.rl.environments.wide_search_traces import traces as traces_of
from perilune.rl.replay import replay_folder
from perilune.rl.run_config import read_config
from perilune.rl.trajectory import load_trajectories
from tests.benchmark_scripts import FOLDER, load_script

AGAIN = 75


def test_traces_of_all_parts_are_as_many_as_asked_for_and_have_seeds_of_their_own(monkeypatch, tmp_path):
    traces = load_script(monkeypatch, "parl_traces")
    asked = traces.Settings(file=tmp_path / "a.jsonl", orchestrators=31, workers=50, told=13, seed=2)
    configs = traces.trace_configs(asked)
    assert sum(each.orchestrators for each in configs) == 31 and sum(each.workers for each in configs) == 50
    assert sum(each.told for each in configs) == 13
    others = traces.trace_configs(replace(asked, seed=3))
    assert len({each.seed for each in (*configs, *others)}) == 2 * traces.PARTS
    assert {each.well_formed for each in configs} == {0.6}
    assert {each.well_formed for each in traces.trace_configs(replace(asked, mix="well-formed"))} == {1.0}
    traces.write(replace(asked, tiny=True, orchestrators=3, workers=4, told=2))
    assert len(asked.file.read_text().splitlines()) == 9 and list(tmp_path.iterdir()) == [asked.file]


def test_a_model_whose_time_is_up_is_saved_and_gone_on_with_by_the_same_call(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "parl_models")
    settings = script.Settings(
        step="base", tiny=True, base_steps=300, out=tmp_path, results=tmp_path / "rows.json", limit=0
    )  # fmt: skip
    monkeypatch.setattr(script, "CALLED", time.monotonic())
    with pytest.raises(SystemExit) as stopped:
        script.main(settings)
    assert stopped.value.code == AGAIN and not script.is_there(tmp_path, "base-full-0")
    begun = script.saved_step(tmp_path / "base-full-0")
    assert 0 < begun < 300
    with pytest.raises(SystemExit, match="has no base-full-0 that is whole"):
        script.main(replace(settings, step="sft"))
    # As far as it was planned to go: the number of steps is that of the first call.
    monkeypatch.setattr(script, "train", lambda config, **how: {**how, "steps": config.trainer.steps})
    config = script.base_config(settings, script.text_files(script.small_settings(settings)))
    seconds = tmp_path / "base-full-0" / load_script(monkeypatch, "parl_time").SECONDS
    seconds.write_text(json.dumps({"0": 40.0, str(begun): 7.0}))
    _, went_on, spent = script.trained(config, None, replace(settings, limit=600), steps=1000, warmup_share=10)
    assert went_on["resume"] and not went_on["overwrite"] and went_on["steps"] == 300
    # Of all calls, but for one that was cut off at the step where this one begins.
    assert 40 <= spent < 41
    assert "time is up" in capsys.readouterr().out


def test_steps_follow_from_the_seconds_and_the_rate_of_the_later_steps(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.small_settings(script.Settings(step="base", tiny=True, out=tmp_path))
    config = script.base_config(settings, script.text_files(settings))
    data = script.open_data(config.data, seed=0)
    few, many = (script.steps_for(config, seconds, data) for seconds in (0.0, 1e6))
    assert few == load_script(monkeypatch, "parl_time").MEASURED_STEPS and many > 1000


def test_a_model_has_as_many_steps_as_its_recipe_however_busy_the_machine_is(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.Settings(step="base", out=tmp_path)
    monkeypatch.setattr(script, "train", lambda config, **how: {"steps": config.trainer.steps})
    monkeypatch.setattr(script, "tokenizer_file", lambda settings, files: tmp_path / "tokenizer.json")
    config = script.base_config(settings, (tmp_path / "a", tmp_path / "b"))
    _, went, _ = script.trained(config, None, settings, steps=settings.base_steps, warmup_share=10)
    assert went["steps"] == script.BASE_STEPS == 1000
    monkeypatch.setattr(script, "steps_for", lambda config, seconds, data: int(10 * seconds))
    _, went, _ = script.trained(config, None, replace(settings, seconds=7.0), steps=1000, warmup_share=10)
    assert went["steps"] == 70
    plain = replace(settings, recipe="plain", as_long=True, results=tmp_path / "rows.json")
    config = replace(config, name=script.base_name(plain))
    with pytest.raises(SystemExit, match="has no row of base-full-0"):
        script.trained(config, None, plain, steps=1000, warmup_share=10)
    row = {"row": "base", "name": "base-full-0", "tiny": False, "train_steps": 300}
    (tmp_path / "rows.json").write_text(json.dumps([row, {**row, "tiny": True, "train_steps": 8}]))
    speeds = {("muonclip", "block_attnres", None): 400.0, ("adamw", "plain", ("mla",) * 8): 600.0}

    def speed(config, data):
        return speeds[config.optimizer.kind, config.model.residual, config.model.layer_types]

    monkeypatch.setattr(load_script(monkeypatch, "parl_time"), "speed_of", speed)
    config = script.base_config(plain, (tmp_path / "a", tmp_path / "b"))
    _, went, _ = script.trained(config, None, plain, steps=1000, warmup_share=10)
    assert went["steps"] == 450
    assert script.as_long(tmp_path / config.name)["as_long"]["full_steps"] == 300
    assert config.model.mla.rope is not None  # a baseline that does not know where things are would be none


def test_a_plain_model_takes_as_long_as_that_of_the_full_recipe(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    common = {"tiny": True, "out": tmp_path, "results": tmp_path / "rows.json"}
    script.main(script.Settings(step="all", **common))
    script.main(script.Settings(step="all", recipe="plain", as_long=True, **common))
    rows = json.loads((tmp_path / "rows.json").read_text())
    made = {row["name"]: row for row in rows if row["row"] in ("base", "sft") and row["recipe"] == "plain"}
    assert len(made) == 2
    for row in made.values():
        known = row["as_long"]
        ratio = known["tokens_per_s"]["own"] / known["tokens_per_s"]["full"]
        assert known["full_steps"] == 8 and row["train_steps"] == known["steps"] == max(1, round(8 * ratio))


def test_what_a_base_reads_is_answered_by_its_own_pages_and_by_no_task_s_library(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_texts")
    config = CorpusConfig(pages=400, seed=script.OTHER_LIBRARIES)
    widths = set[int]()
    for number, text in enumerate(script.documents(config)):
        results, *rest = text.split("\n\n")
        opened = [part for part in rest if not part.startswith("Find ")]
        asked = [part.split("\n") for part in rest if part.startswith("Find ")]
        assert sorted(part.split("\n")[0] for part in opened) == sorted(part[:6] for part in results.split("\n"))
        pages = [page for page in opened if "out of date" not in page]
        widths |= {len(parse_question(question).names) for question, *_ in asked}
        for question, *steps, answer in asked:
            names, path = parse_question(question).names, parse_question(question).path
            told = [*steps, answer]
            if len(names) > 1:
                assert [line.split(": ")[0] for line in told] == list(names)
                about = {name: next(page for page in pages if f"\n{name} is a " in page) for name in names}
                assert all(f"The {path[0]} is {line.split(': ')[1]}." in about[line.split(": ")[0]] for line in told)
            else:
                assert [step.split(": ")[0] for step in steps] == list(path[:-1])
                assert any(f"The {path[-1]} is {answer.split(': ')[1]}." in page for page in pages), question
        if number == 60:
            break
    assert min(widths) == 1 and max(widths) > 4
    traces = load_script(monkeypatch, "parl_traces")
    told = traces.trace_configs(traces.Settings(file=tmp_path / "a", seed=3))
    about = {each.environment.corpus.seed for each in told}
    most_read = script.OTHER_LIBRARIES + script.LIBRARIES_OF_A_SEED * 1000
    assert len(about) == traces.PARTS and min(about) >= most_read and 0 not in about


def test_texts_are_the_same_from_one_process_and_from_two(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_texts")
    asked = script.Settings(file=tmp_path / "one.jsonl", libraries=2, pages=200, processes=1)
    script.write(asked)
    # As parl_models.py does: by a process of its own, whose processes read the script again.
    command = [sys.executable, script.__file__, str(tmp_path / "two.jsonl"), "--libraries", "2", "--pages", "200"]
    subprocess.run([*command, "--processes", "2"], check=True)
    assert asked.file.read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    lines = [json.loads(line) for line in asked.file.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) and {line["split"] for line in lines} == {"train", "valid"}
    with pytest.raises(SystemExit, match="--libraries is 101, expected 0 to 100"):
        script.write(replace(asked, libraries=101))


def test_an_arm_from_other_traces_has_a_name_of_its_own_and_is_not_the_arm_of_the_bars(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl")
    own = script.Settings(step="train", arm="outcome", out=tmp_path)
    other = replace(own, mix="all-at-once")
    assert script.start_of(own) == "sft-full-mostly-serial-0" and script.arm_of(own) == "outcome"
    assert script.start_of(other) == "sft-full-all-at-once-0" and script.arm_of(other) == "outcome, all-at-once"
    looser = replace(own, trained_cap=2.0)
    assert script.arm_of(looser) == "outcome, cap2" and script.start_of(looser) == script.start_of(own)
    assert len({script.name_of(each) for each in (own, other, looser, replace(other, trained_cap=2.0))}) == 4
    slower = replace(own, lr=1e-4, ptx=0.1, cooldown=0)
    assert script.arm_of(slower) == "outcome, lr0.0001, ptx0.1, cooldown0"
    assert script.start_of(slower) == script.start_of(own)
    assert script.start_of(replace(own, arm="control")) == "sft-full-well-formed-0"
    # Seeds that begin with the models of another are the arm of the bars, in a folder of their own.
    second, shared = replace(own, seed=1), replace(own, seed=1, models=0)
    assert script.arm_of(shared) == "outcome" and script.start_of(shared) == script.start_of(own)
    assert script.name_of(second) == "outcome-full-1" and script.name_of(shared) == "outcome-full-models0-1"
    assert script.name_of(replace(own, models=0)) == script.name_of(own)
    released = replace(own, recipe="nano", lr=3e-4, cooldown=12)
    assert script.name_of(released) == "outcome-nano-0" and script.arm_of(released) == "outcome"
    assert script.arm_of(replace(released, lr=2e-4)) == "outcome, lr0.0002"
    with pytest.raises(SystemExit, match="sft --mix all-at-once --recipe full --seed 0 makes it"):
        script.train(other)
    with pytest.raises(SystemExit, match="train the arm first"):
        script.test(other)


@pytest.mark.parametrize("arm", ["full", "outcome", "serial"])
def test_agents_have_turns_for_every_cap_that_they_are_tested_at(monkeypatch, arm):
    script = load_script(monkeypatch, "parl_play")
    arms = load_script(monkeypatch, "parl_arms")
    settings = arms.Settings(step="test", arm=arm)
    talk = script.tested_talk(settings, arms.rl_config(settings).rollout.talk)
    bounded = [cap for cap in (*arms.CAPS, *arms.SERIAL_CAPS) if cap < 1000]
    assert all(talk.max_turns >= script.CRITICAL_STEPS * cap for cap in bounded)


def test_an_arm_of_the_plain_recipe_is_trained_by_adamw_too(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_arms")
    kinds = {
        recipe: script.rl_config(script.Settings(step="train", recipe=recipe, out=tmp_path)).learner.optimizer.kind
        for recipe in ("plain", "full")
    }
    assert kinds == {"plain": "adamw", "full": "muonclip"}


def test_the_recipe_is_the_experiment(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_arms")
    settings, recipe = script.Settings(step="train", out=tmp_path), parl()
    assert script.wide_search(settings) == recipe.environments.wide_search
    assert recipe.rl.parl == script.rl_config(settings).parl
    # An episode that hangs leaves most of a call of ten minutes.
    assert script.rl_config(settings).rollout.episode_seconds == recipe.rl.rollout.episode_seconds <= 120


def test_narrow_tasks_and_chains_are_played_above_the_cap_only_where_that_gives_them_steps(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_play")
    settings = script.Settings(step="test", tiny=True, tested=8, out=tmp_path)
    (wide, others), (wide_above, none) = (script.tasks_at(settings, cap) for cap in (1.0, 2.0))
    assert len(wide) == len(others) == 4 and none == []
    assert [each.name for each in wide] == [each.name for each in wide_above]
    assert all(each.data["critical_steps"] == 30 for each in wide_above)
    # What is left out is what was played at the cap, step for step.
    environment = script.wide_search(settings, 2.0)
    again = [task for number in range(8) if (task := environment.task(number, "test")).data["kind"] != "wide"]
    assert again == others
    assert len(script.tasks_at(replace(settings, spare_steps=None), 2.0)[1]) == 4


def test_best_of_has_as_many_samples_as_the_swarm_s_tokens_workers_included_once(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "parl_play")
    settings = script.Settings(step="best-of", out=tmp_path, results=tmp_path / "rows.json", tiny=True)
    with pytest.raises(SystemExit, match="no test of the arm full yet"):
        script.best_of(settings)
    swarm = {"tokens": 1700.0, "worker_tokens": 900.0}
    rows = [
        {"row": "test", "name": f"{arm}-full-0", "cap": 1.0, "tiny": True, "kinds": {"wide": wide}, "wide_f1": None}
        for arm, wide in (("full", swarm), ("serial", {"tokens": 400.0, "worker_tokens": 0.0}))
    ]
    monkeypatch.setattr(script, "read_rows", lambda path: rows)
    recorded, asked = [], []
    monkeypatch.setattr(script, "record", lambda settings, row, seconds: recorded.append(row))

    async def play(settings, caps, tell, **how) -> None:
        asked.append((settings.arm, caps, how))
        episodes = tuple(
            SimpleNamespace(task=f"task {place}", task_data={"kind": "wide"}, facets={"outcome": f1, "tokens": 410.0})
            for place, f1s in enumerate(((0.2, 0.6), (0.5, 0.4))) for f1 in f1s
        )  # fmt: skip
        tell(script.Played(cap=1.0, trajectories=episodes, failures=Counter(), wide_seconds=1.0, seconds=1.0))

    monkeypatch.setattr(script, "play", play)
    script.best_of(settings)
    script.best_of(replace(settings, most=2))
    (arm, caps, how), _ = asked
    assert (arm, caps, how) == ("serial", (1.0,), {"samples": 4, "temperature": 1.0, "wide_only": True})
    enough, clipped = recorded
    assert enough["samples_each"] == 4 and enough["samples_wanted"] == 4.25 and not enough["is_clipped"]
    assert enough["wide_f1"]["mean"] == 0.55 and enough["spent_tokens"] == 820.0
    assert clipped["samples_each"] == 2 and clipped["is_clipped"]
    assert "as many tokens are 4.2 serial samples" in capsys.readouterr().out


@pytest.fixture
def arm(monkeypatch, tmp_path):
    """The script, with a call that has just begun, and the settings of a small arm whose models are made."""
    script, arms = load_script(monkeypatch, "parl"), load_script(monkeypatch, "parl_arms")
    monkeypatch.setattr(arms, "CALLED", time.monotonic())
    settings = script.Settings(step="train", arm="joint", tiny=True, out=tmp_path, results=tmp_path / "back/rows.json")
    return script, replace(script.small_settings(settings), tested=2)


def test_models_are_made_arms_are_trained_tested_and_continued_on_a_cpu(arm, tmp_path, capsys):
    script, made = arm
    with pytest.raises(SystemExit, match="no iteration was over after 0 s"):
        script.train(replace(made, seconds=0))
    script.train(replace(made, iterations=1))
    faster = replace(made, lr=1e-3)
    (made.out / script.name_of(made)).rename(made.out / script.name_of(faster))  # as if the recipe's rate were another
    for work in (script.train, script.whole_arm):
        with pytest.raises(SystemExit, match=r"is another arm: .*rl\.learner\.optimizer\.lr: 0\.0002 -> 0\.001"):
            work(replace(faster, iterations=1))
    (made.out / script.name_of(faster)).rename(made.out / script.name_of(made))
    with pytest.raises(SystemExit, match="1 of 2 iterations: train it to its end, or test it as it is with --now"):
        script.test(made)
    with pytest.raises(SystemExit) as stopped:
        script.train(replace(made, seconds=0))
    assert stopped.value.code == AGAIN
    script.test(replace(made, now=True))
    rows = script.read_rows(made.results)
    (half, *_) = [each for each in rows if each["row"] == "test"]
    assert half["iterations"] == 1 and half["wanted"] == 2
    (begun,) = [each for each in rows if each["row"] == "train"]
    assert begun["iterations"] == 1 and begun["replayed"] is None  # nothing is claimed that was not done
    script.whole_arm(made)
    rows = script.read_rows(made.results)
    (training,) = [each for each in rows if each["row"] == "train"]
    # Four episodes an iteration, and four test tasks before, after, and after what was an arm of one iteration.
    assert training["iterations"] == 2 and training["episodes"] == 8
    assert training["replayed"] == training["replayed_equal"] == 20
    assert training["seconds"] == training["train_seconds"] > begun["train_seconds"]
    tests = [each for each in rows if each["row"] == "test"]
    assert sorted(each["cap"] for each in tests) == [0.5, 1.0, 2.0] and all(each["iterations"] == 2 for each in tests)
    assert all(each["wide_f1s"].keys() == {"0", "1"} for each in tests)
    assert {each["row"] for each in rows} == {"base", "sft", "worker", "train", "test"}
    assert "1 of 2 iterations; the same command goes on" in capsys.readouterr().out
    _leaves_out_what_is_there(script, made, capsys)
    _is_a_run_that_others_read(script, made, capsys)
    script.one_by_one(made)
    (alone,) = [each for each in script.read_rows(made.results) if each["row"] == "one-by-one"]
    assert alone["episodes"] == 2 and alone["cap"] == 1.0 and set(alone["kinds"]) == {"wide"}
    assert 0 < alone["each_seconds"]["mean"] <= alone["slowest_seconds"]
    script.served(made)
    quiet = [each for each in script.read_rows(made.results) if each["row"] == "served"]
    assert sorted(each["cap"] for each in quiet) == [0.5, 1.0]
    assert all(each["episodes"] == 2 and each["wide_seconds"] > 0 for each in quiet)


def test_a_start_is_asked_what_it_can_before_any_reward(arm, monkeypatch):
    script, made = arm
    start = load_script(monkeypatch, "parl_start")
    start.main(start.Settings(out=made.out, results=made.results, tiny=True))
    for path in (made.results, made.out / "rows.json"):  # a machine that hands back the results keeps those of `out`
        (row,) = [each for each in script.read_rows(path) if each["row"] == "start"]
        assert set(row["ways"]) == {"sampled", "told", "alone"} and row["name"] == "sft-full-mostly-serial-0"
        assert set(row["ways"]["told"]["kinds"]) == {"wide"}
        assert set(row["ways"]["alone"]["kinds"]) == {"wide", "narrow", "chain"}
        assert row["ways"]["sampled"]["kinds"]["wide"]["episodes"] == 2


def test_what_others_said_of_an_arm_meanwhile_is_not_taken_back(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    told = {"row": "train", "name": "full-full-0", "seed": 0, "tiny": False}
    results, out = tmp_path / "rows.json", tmp_path / "out"
    script.add_rows(out / script.ROWS, [{**told, "replayed": None}, {**told, "row": "sft"}], key=script.KEY)
    script.add_rows(results, [{**told, "replayed": 7}], key=script.KEY)
    script.gather_rows(results=results, out=out)
    assert {row["row"]: row.get("replayed") for row in script.read_rows(results)} == {"sft": None, "train": 7}


def test_workers_dialogues_are_learnt_from_beside(arm, capsys):
    script, made = arm
    kept = replace(made, arm="outcome", ptx=0.5, iterations=1)
    script.train(kept)
    (row,) = [each for each in script.read_rows(made.results) if each["name"] == "outcome-full-ptx0.5-0"]
    assert row["ptx"] == 0.5 and "dialogues of workers are learnt from beside" in capsys.readouterr().out
    (record,) = (made.out / "outcome-full-ptx0.5-0" / script.RECORDS).read_text().splitlines()
    assert json.loads(record)["ptx_loss"] > 0
    script.traces_of(made).rename(made.out / "elsewhere.jsonl")
    with pytest.raises(SystemExit, match="--ptx needs .*traces-mostly-serial-0.jsonl"):
        script.train(kept)


def _leaves_out_what_is_there(script, made, capsys) -> None:
    before = script.read_rows(made.results)
    script.whole_arm(made)
    told = capsys.readouterr().out
    assert "trained already" in told and "judged again already" in told
    assert "tested already at 1, 0.5, 2 times the cap" in told
    assert script.read_rows(made.results) == before
    # Also where the folder of the results is empty in every call.
    elsewhere = made.out / "elsewhere/rows.json"
    script.gather_rows(results=elsewhere, out=made.out)
    assert script.read_rows(elsewhere) == before
    # Other settings are another test; a call without time for it begins none, and says how to go on.
    with pytest.raises(SystemExit) as stopped:
        script.whole_arm(replace(made, tested=3, seconds=40.0))
    assert stopped.value.code == AGAIN
    assert "too few to open it and test; the same command goes on" in capsys.readouterr().out


def _is_a_run_that_others_read(script, made, capsys) -> None:
    folder = made.out / "joint-full-0"
    assert read_config(folder / "rl.json") == script.run_config(made)
    assert replay_folder(folder)["equal"] == 20
    audit_step([str(folder)])
    assert "intact (by checksums): 20 with" in capsys.readouterr().out
    page, episodes = (made.results.parent / f"parl-joint-full-0.{kind}" for kind in ("html", "jsonl"))
    assert "Episodes as timelines" in page.read_text() and page.stat().st_size + episodes.stat().st_size < 2e6
    kept = load_trajectories(episodes)
    assert [each.task for each in kept[:2]] == [kept[0].task] * 2 and len(kept) == 4
    assert {each.task_data["kind"] for each in kept} == {"wide"}


def test_the_outcome_alone_collapses_from_narrow_delegations_and_not_from_wide_ones(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_simulated")
    settings = script.Settings(
        mixes=("mostly-serial", "all-at-once"), arms=("outcome", "full"), lrs=(0.3,), seeds=3, played=8,
        results=tmp_path / "rows.json",
    )  # fmt: skip
    script.main(settings)
    found = {(row["mix"], row["arm"]): row for row in json.loads(settings.results.read_text())["rows"]}
    assert found["mostly-serial", "outcome"]["collapsed"] == 1 and found["mostly-serial", "full"]["prevented"] == 1
    assert found["all-at-once", "outcome"]["collapsed"] == 0
    assert found["mostly-serial", "full"]["outcome"] > found["mostly-serial", "outcome"]["outcome"]


def test_a_simulated_policy_begins_with_the_shares_of_its_mix_and_moves_towards_what_is_paid(monkeypatch):
    script = load_script(monkeypatch, "parl_simulated")
    policy = script.Simulated.begun("mostly-serial")
    alone, well, widths = (policy.shares(decision, 0) for decision in range(3))
    assert alone.tolist() == pytest.approx([0.9, 0.1]) and well[0] == pytest.approx(0.6)
    assert widths.tolist() == pytest.approx(list(script.WIDTHS.values()))
    policy.update([(0, [(0, 1)], 1.0), (0, [(0, 0)], -1.0)], lr=0.5)
    assert policy.shares(0, 0)[1] > policy.shares(0, 1)[1] > 0.1  # the kind itself most, others by what they share


def test_the_longest_dialogue_of_a_wide_question_fits_a_row_of_fine_tuning(monkeypatch, tmp_path):
    models, texts = load_script(monkeypatch, "parl_models"), load_script(monkeypatch, "parl_texts")
    traces = load_script(monkeypatch, "parl_traces")
    # Every wide question has two hops and is answered to its last item.
    asked = TraceConfig(orchestrators=24, workers=0, delegated=0.0, alone=0.0, uncapped=1.0,
                        environment=traces.environment_of(tiny=True, kinds=("wide",), two_hops=1.0))  # fmt: skip
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(trace.line for trace in traces_of(asked)))
    pages = CorpusConfig(pages=2000, seed=texts.OTHER_LIBRARIES)
    tokenizer = Tokenizer.train(islice(texts.documents(pages), 2000), 4096, digits=1)
    dialogues, _ = read_dialogues([file])
    longest = max(len(document_of(each, tokenizer).tokens) for each in dialogues)
    assert 5000 < longest <= min(models.ROW_TOKENS, parl().rl.engine.max_length)


def test_a_model_that_is_whole_is_packed_though_the_next_one_is_not(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.Settings(
        step="all", tiny=True, out=tmp_path, pieces=tmp_path / "pieces", results=tmp_path / "rows.json"
    )  # fmt: skip

    def cut_off(settings) -> None:
        raise script.Interrupted(signal.SIGTERM)

    monkeypatch.setattr(script, "make_sft", cut_off)
    monkeypatch.setattr(script, "_record", lambda *_: None)
    monkeypatch.setattr(script, "CALLED", time.monotonic())
    with pytest.raises(SystemExit) as stopped:
        script.main(settings)
    assert stopped.value.code == AGAIN
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == ["base-full-0.00"]
    other = replace(settings, step="unpack", name="base-full-0", out=tmp_path / "other")
    script.main(other)
    assert script.is_there(tmp_path / "other", "base-full-0")
    written = (tmp_path / "other/base-full-0/config.json").stat().st_mtime_ns
    script.main(other)  # arms side by side begin with the same line
    assert (tmp_path / "other/base-full-0/config.json").stat().st_mtime_ns == written


def test_a_model_that_lies_packed_is_not_trained_again(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.Settings(
        step="base", tiny=True, out=tmp_path, pieces=tmp_path / "pieces", results=tmp_path / "rows.json"
    )  # fmt: skip
    script.main(settings)
    weights = script.load_run(tmp_path / "base-full-0")[0].state_dict()
    other = replace(settings, out=tmp_path / "other", results=tmp_path / "others.json")
    monkeypatch.setattr(script, "make_base", lambda _: pytest.fail("it is trained again"))
    script.main(replace(other, step="sft"))  # needs the base, and is made
    again = script.load_run(tmp_path / "other/base-full-0")[0].state_dict()
    assert all(torch.equal(again[name], tensor.bfloat16().float()) for name, tensor in weights.items())
    assert {row["row"] for row in json.loads(other.results.read_text())} == {"sft"}
    monkeypatch.setattr(script, "make_sft", lambda _: pytest.fail("it is trained again"))
    script.main(replace(other, step="all", out=tmp_path / "third"))
    assert {row["row"] for row in json.loads(other.results.read_text())} == {"sft", "worker"}
    script.main(replace(other, step="all", out=tmp_path / "third"))  # given again, where one model is there
    assert not script.is_there(tmp_path / "third", "base-full-0")  # nothing asks for it
    script.main(replace(other, out=tmp_path / "third"))
    assert script.is_there(tmp_path / "third", "base-full-0")


def test_every_command_of_the_queue_has_options_that_exist(monkeypatch):
    seen, names = [], set()
    for entry in tomllib.loads((FOLDER / "queue.toml").read_text())["experiment"]:
        lexer = shlex.shlex(entry["command"], posix=True, punctuation_chars=True)
        parts = [list(words) for is_end, words in groupby(lexer, lambda word: set(word) <= {"&", ";"}) if not is_end]
        for words in (part for part in parts if part[0] == "python"):
            script = load_script(monkeypatch, Path(words[1]).stem)
            names.add(script.__name__)
            if hasattr(script, "Settings"):
                seen.append(tyro.cli(script.Settings, args=words[2:]))
    assert {"parl", "parl_models"} <= names
    seen = [each for each in seen if hasattr(each, "recipe")]
    arms = {(each.arm, each.recipe, each.seed) for each in seen if getattr(each, "step", "") in ("arm", "train")}
    rows = json.loads((FOLDER / "results/parl.json").read_text())
    done = {(row["arm"], row["recipe"], row["seed"]) for row in rows if row["row"] == "train"}
    asked = {(arm, recipe, seed) for arm, recipe in (
        ("full", "full"), ("outcome", "full"), ("serial", "full"), ("joint", "full"), ("control", "full"),
        ("serial", "plain"), ("full", "plain")) for seed in range(3)}  # fmt: skip
    assert asked | {("no-finish", "full", 0), ("blog", "full", 0)} <= arms | done
