"""benchmarks/parl.py in miniature: every piece runs, and goes on where it was."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_questions import parse_question
from tests.benchmark_scripts import load_script


def test_traces_of_all_parts_are_as_many_as_asked_for_and_have_seeds_of_their_own(monkeypatch, tmp_path):
    traces = load_script(monkeypatch, "parl_traces")
    asked = traces.Settings(file=tmp_path / "a.jsonl", orchestrators=31, workers=50, seed=2)
    configs = traces.trace_configs(asked)
    assert sum(each.orchestrators for each in configs) == 31 and sum(each.workers for each in configs) == 50
    others = traces.trace_configs(replace(asked, seed=3))
    assert len({each.seed for each in (*configs, *others)}) == 2 * traces.PARTS
    assert {each.well_formed for each in configs} == {0.6}
    assert {each.well_formed for each in traces.trace_configs(replace(asked, mix="well-formed"))} == {1.0}
    traces.write(replace(asked, tiny=True, orchestrators=3, workers=4))
    assert len(asked.file.read_text().splitlines()) == 7 and list(tmp_path.iterdir()) == [asked.file]


def test_a_model_whose_time_is_up_is_saved_and_gone_on_with_by_the_same_call(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "parl_models")
    settings = script.Settings(
        step="base", tiny=True, base_steps=300, out=tmp_path, results=tmp_path / "rows.json", limit=0
    )  # fmt: skip
    monkeypatch.setattr(script, "CALLED", time.monotonic())
    with pytest.raises(SystemExit) as stopped:
        script.main(settings)
    assert stopped.value.code == script.AGAIN and not script.is_there(tmp_path, "base-full-0")
    begun = script.saved_step(tmp_path / "base-full-0")
    assert 0 < begun < 300
    with pytest.raises(SystemExit, match="has no base-full-0 that is whole"):
        script.main(replace(settings, step="sft"))
    # As far as it was planned to go: the number of steps is that of the first call.
    monkeypatch.setattr(script, "train", lambda config, **how: {**how, "steps": config.trainer.steps})
    config = script.base_config(settings, script.text_files(script.small_settings(settings)))
    _, went_on, _ = script.trained(config, None, replace(settings, limit=600), steps=1000, warmup_share=10)
    assert went_on["resume"] and not went_on["overwrite"] and went_on["steps"] == 300
    assert "time is up" in capsys.readouterr().out


def test_steps_follow_from_the_seconds_and_the_rate_of_the_later_steps(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.small_settings(script.Settings(step="base", tiny=True, out=tmp_path))
    config = script.base_config(settings, script.text_files(settings))
    data = script.open_data(config.data, seed=0)
    few, many = (script.steps_for(config, seconds, data) for seconds in (0.0, 1e6))
    assert few == script.MEASURED_STEPS and many > 1000


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
    assert script.start_of(replace(own, arm="control")) == "sft-full-well-formed-0"
    with pytest.raises(SystemExit, match="sft --mix all-at-once --recipe full --seed 0 makes it"):
        script.train(other)
    with pytest.raises(SystemExit, match="train the arm first"):
        script.test(other)


def test_models_are_made_arms_are_trained_tested_and_continued_on_a_cpu(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "parl")
    settings = script.Settings(step="train", arm="joint", tiny=True, out=tmp_path, results=tmp_path / "rows.json")
    made = script.small_settings(settings)
    with pytest.raises(SystemExit, match="no iteration was over after 0 s"):
        script.train(replace(made, seconds=0))
    script.train(replace(made, iterations=1))
    with pytest.raises(SystemExit, match="1 of 2 iterations: train it to its end, or test it as it is with --now"):
        script.test(replace(made, tested=2))
    with pytest.raises(SystemExit) as stopped:
        script.train(replace(made, seconds=0))
    assert stopped.value.code == script.AGAIN
    script.test(replace(made, tested=2, now=True))
    (half, *_) = [each for each in script.read_rows(tmp_path / "rows.json") if each["row"] == "test"]
    assert half["iterations"] == 1 and half["wanted"] == 2
    script.train(made)
    script.test(replace(made, tested=2))
    rows = script.read_rows(tmp_path / "rows.json")
    (training,) = [each for each in rows if each["row"] == "train"]
    assert training["iterations"] == 2 and training["episodes"] == training["replayed_equal"] == 8
    assert sorted(each["cap"] for each in rows if each["row"] == "test") == [0.5, 1.0, 2.0]
    assert {each["row"] for each in rows} == {"base", "sft", "worker", "train", "test"}
    assert all(each["iterations"] == 2 for each in rows if each["row"] == "test")
    assert "1 of 2 iterations: the same command goes on" in capsys.readouterr().out


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
