"""benchmarks/parl.py in miniature: every piece runs, goes on where it was, and the bars say what was not met."""

import time
from dataclasses import replace

import pytest

from tests.benchmark_scripts import load_script


def row(name: str, arm: str = "full", *, seed: int = 0, recipe: str = "full", **more) -> dict:
    return {"row": name, "arm": arm, "seed": seed, "recipe": recipe, "tiny": False, **more}


def a_test(arm: str, f1: float, steps: float, *, cap: float = 1.0, seed: int = 0, recipe: str = "full") -> dict:
    wide = {"critical_steps": steps, "total_steps": 40.0, "tokens": 800.0, "worker_tokens": 900.0}
    interval = {"mean": f1, "low": f1, "high": f1}
    return row("test", arm, seed=seed, recipe=recipe, cap=cap, wide_f1=interval, play_seconds=9.0, kinds={"wide": wide})


def trained(arm: str, *, wide: float, narrow: float = 0.0, seed: int = 0, **more) -> dict:
    last = {"wide": {"spawn": wide, "finished": 0.95, "unused": 0.05}, "narrow": {"spawn": narrow}}
    return row("train", arm, seed=seed, last_fifth=last, episodes=10, replayed_equal=10, **more)


@pytest.fixture
def bars(monkeypatch):
    return load_script(monkeypatch, "parl_bars")


def met(bars, rows) -> dict[str, bool | None]:
    return {goal: is_met for goal, _, _, is_met in bars.bars(rows)}


def test_what_was_not_measured_is_said_and_nothing_is_met_by_it(bars):
    assert set(met(bars, []).values()) == {None}
    assert bars.bars_text([]).count("not measured") >= 9


def test_bars_need_three_seeds_and_every_one_of_them(bars):
    rows = [trained("outcome", wide=0.01, seed=seed) for seed in range(3)]
    assert met(bars, rows[:2])["serial collapse shown"] is False
    assert met(bars, rows)["serial collapse shown"] is True
    assert met(bars, [*rows[:2], trained("outcome", wide=0.2, seed=2)])["serial collapse shown"] is False
    full = [trained("full", wide=0.9, narrow=0.1, seed=seed) for seed in range(3)]
    assert met(bars, full)["prevented"] is True and met(bars, full)["no hollow work"] is True
    assert met(bars, [*full[:2], trained("full", wide=0.9, narrow=0.5, seed=2)])["prevented"] is False
    broken = [*full[:2], replace_row(full[2], replayed_equal=9)]
    assert met(bars, full)["audit"] is True and met(bars, broken)["audit"] is False


def replace_row(found: dict, **more) -> dict:
    return {**found, **more}


def test_equal_quality_is_looked_for_between_the_caps_of_the_serial_agent(bars):
    serial = [a_test("serial", f1, steps, cap=cap) for cap, f1, steps in ((1.0, 0.5, 15.0), (2.0, 0.9, 30.0))]
    assert bars._steps_at([(0.5, 15.0), (0.9, 30.0)], 0.7) == (22.5, True)
    assert met(bars, [a_test("full", 0.9, 6.0), *serial])["latency"] is True
    assert met(bars, [a_test("full", 0.9, 12.0), *serial])["latency"] is False
    never = [a_test("full", 0.95, 6.0), *serial]
    assert "more than 5.0x" in bars.bars_text(never) and met(bars, never)["quality at equal cap"] is True


def test_the_product_of_recipe_and_swarm_has_an_interval_over_seeds(bars):
    cells = [(recipe, arm, f1) for recipe, arm, f1 in (
        ("plain", "serial", 0.2), ("plain", "full", 0.4), ("full", "serial", 0.3), ("full", "full", 0.6))]  # fmt: skip
    rows = [a_test(arm, f1 + 0.001 * seed, 6.0, seed=seed, recipe=recipe) for recipe, arm, f1 in cells
            for seed in range(3)]  # fmt: skip
    told = bars.product_text(rows)
    assert "Interaction (1: gains multiply): 1.00 [" in told
    assert "not measured" in bars.product_text(rows[:3])


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
    settings = script.Settings(step="base", tiny=True, steps=300, out=tmp_path, results=tmp_path / "rows.json", limit=0)
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
    config = script.base_config(settings, script.corpus_file(script.small_settings(settings)))
    _, went_on, _ = script.trained(config, None, replace(settings, steps=None, limit=600), warmup_share=10)
    assert went_on["resume"] and not went_on["overwrite"] and went_on["steps"] == 300
    assert "time is up" in capsys.readouterr().out


def test_steps_follow_from_the_seconds_and_the_rate_of_the_later_steps(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl_models")
    settings = script.small_settings(script.Settings(step="base", tiny=True, out=tmp_path))
    config = script.base_config(settings, script.corpus_file(settings))
    data = script.open_data(config.data, seed=0)
    few, many = (script.steps_for(config, seconds, data) for seconds in (0.0, 1e6))
    assert few == script.MEASURED_STEPS and many > 1000


def test_an_arm_from_other_traces_has_a_name_of_its_own_and_is_not_the_arm_of_the_bars(monkeypatch, tmp_path):
    script = load_script(monkeypatch, "parl")
    own = script.Settings(step="train", arm="outcome", out=tmp_path)
    other = replace(own, mix="mostly-clumsy")
    assert script.start_of(own) == "sft-full-mostly-serial-0" and script.arm_of(own) == "outcome"
    assert script.start_of(other) == "sft-full-mostly-clumsy-0" and script.arm_of(other) == "outcome, mostly-clumsy"
    looser = replace(own, trained_cap=2.0)
    assert script.arm_of(looser) == "outcome, cap2" and script.start_of(looser) == script.start_of(own)
    assert len({script.name_of(each) for each in (own, other, looser, replace(other, trained_cap=2.0))}) == 4
    assert script.start_of(replace(own, arm="control")) == "sft-full-well-formed-0"
    with pytest.raises(SystemExit, match="sft --mix mostly-clumsy --recipe full --seed 0 makes it"):
        script.train(other)
    with pytest.raises(SystemExit, match="train the arm first"):
        script.test(other)


def test_models_are_made_arms_are_trained_tested_and_continued_on_a_cpu(monkeypatch, tmp_path, capsys):
    script = load_script(monkeypatch, "parl")
    settings = script.Settings(step="train", arm="joint", tiny=True, out=tmp_path, results=tmp_path / "rows.json")
    made = script.small_settings(settings)
    script.train(replace(made, iterations=1))
    script.train(replace(made, iterations=2))
    script.test(replace(made, tested=2))
    rows = script.read_rows(tmp_path / "rows.json")
    (training,) = [each for each in rows if each["row"] == "train"]
    assert training["iterations"] == 2 and training["episodes"] == training["replayed_equal"] == 8
    assert sorted(each["cap"] for each in rows if each["row"] == "test") == [0.5, 1.0, 2.0]
    assert {each["row"] for each in rows} == {"base", "sft", "worker", "train", "test"}
    assert "1 of 2 iterations" not in capsys.readouterr().out
