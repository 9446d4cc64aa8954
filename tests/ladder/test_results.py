"""What a result holds, what may be mixed, and where speeds come from."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.cli import main
from perilune.data.store import TokenStore
from perilune.ladder import run
from perilune.ladder.evidence import fit_what_is_there
from perilune.ladder.plan import make_plan, unique_tokens
from perilune.ladder.results import one_corpus, points, read_results, write_result
from perilune.ladder.speed import FILE, measure_ladder, read_speeds, write_speeds
from perilune.recipes.ladders import tiny
from perilune.train import RunError
from tests.ladder.synthetic import write_synthetic


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_result_says_what_it_was_made_with_and_how_logits_grew(tmp_path: Path):
    ladder = tiny()
    cell = next(ladder.cells())
    scratch = tmp_path / "elsewhere"
    found = run.run_cell(ladder, cell, tmp_path / "ladder", ran_alone=True, scratch=scratch, commit="abcdef0")
    again = read_results(tmp_path / "ladder")
    assert [result.loss for result in sorted(again, key=lambda r: r.tokens)] == [result.loss for result in found]
    for leg, result in zip(run.legs(ladder, cell), found, strict=True):
        assert result.environment["commit"] == "abcdef0" and {"torch", "started", "machine"} <= set(result.environment)
        assert result.corpus == make_plan(ladder).corpus != ""
        assert [step for step, _ in result.max_logits] == list(range(1, leg.end + 1))
        assert all(value > 0 for _, value in result.max_logits) and not result.max_logits_are_bounds
    assert list((tmp_path / "ladder").iterdir()) == [tmp_path / "ladder" / "results"]
    assert not list(scratch.glob("*/checkpoints/*"))


def test_thinned_logits_keep_every_spike():
    records = [{"step": step, "max_logit": [1.0, 50.0 if step == 777 else 2.0]} for step in range(1, 1234)]
    found = run._thinned_max_logits(records)
    assert len(found) <= run.MAX_LOGIT_ENTRIES and found[-1][0] == 1233
    assert max(value for _, value in found) == 50.0
    assert run._thinned_max_logits([{"step": 1, "max_logit": []}]) == ()


def test_results_of_another_text_stop_a_run_before_it_begins(tmp_path: Path, capsys):
    folder = tmp_path / "ladders" / "tiny"
    result = write_synthetic(dataclasses.replace(tiny(), rungs=tiny().rungs[:1]), folder, rho={})[0]
    with pytest.raises(SystemExit):
        main(["ladder", "run", "tiny"])
    assert "different text" in capsys.readouterr().err
    one_corpus([result, dataclasses.replace(result, corpus="")], "")
    with pytest.raises(RunError, match="different text"):
        one_corpus([result, dataclasses.replace(result, corpus="other")])


def test_a_document_that_stands_twice_counts_once():
    first, second = [1, 5, 6, 7, 2], [1, 9, 2]
    store = TokenStore.from_documents(
        [first, second, first, first], bytes_per_token=np.ones(16), bos_id=1, eos_id=2, pad_id=0
    )
    assert unique_tokens(store) == 8 and store.num_tokens == 18


def test_a_plan_counts_epochs_of_unique_tokens(tmp_path: Path, capsys):
    text = "".join(f"line {number} of a text that is long enough to be packed\n" for number in range(3000))
    for name, copies in (("once", 1), ("twice", 2)):
        (tmp_path / name).mkdir()
        pieces = [text[place : place + 2000] for place in range(0, len(text), 2000)] * copies
        for number, piece in enumerate(pieces):
            (tmp_path / name / f"{number:04}.txt").write_text(piece)
    plans = {}
    for name in ("once", "twice"):
        main(["ladder", "plan", "tiny", "--set", f"data.corpus.source={tmp_path / name}", "--json"])
        plans[name] = json.loads(capsys.readouterr().out)
    once, twice = plans["once"], plans["twice"]
    assert once["repeated_tokens"] == 0 and twice["repeated_tokens"] > 0.5 * twice["unique_tokens"]
    assert twice["rungs"][0]["epochs"] == pytest.approx(once["rungs"][0]["epochs"], rel=0.1)
    main(["ladder", "plan", "tiny", "--set", f"data.corpus.source={tmp_path / 'twice'}"])
    assert "more than once and counts once" in capsys.readouterr().out


def test_a_run_that_shared_the_card_has_no_speed(tmp_path: Path):
    ladder = dataclasses.replace(tiny(), rungs=tiny().rungs[:1])
    results = write_synthetic(ladder, tmp_path, rho={})
    assert {p.tokens_per_second for p in points(ladder, results)} == {None}
    alone = [dataclasses.replace(result, ran_alone=True, tokens_per_s=50.0) for result in results]
    assert {p.tokens_per_second for p in points(ladder, alone)} == {50.0}


def test_all_speeds_measured_apart_count_however_few_seeds_there_are(tmp_path: Path):
    ladder = dataclasses.replace(tiny(), seeds=(0,))
    results = write_synthetic(ladder, tmp_path, rho={"muonclip": 1.5})
    speeds = {(rung.name, arm): [100.0, 110.0, 121.0] for rung in ladder.rungs[:3] for arm in ("adamw", "muonclip")}
    speeds["w32", "muonclip"] = [200.0, 220.0, 242.0]
    fit, notes = fit_what_is_there(ladder, results, speeds, floor=None, seed_sd=0.01)
    assert fit is not None and not any("measured twice" in note for note in notes)
    by_rung = {rung.rung: rung for rung in fit.arm("muonclip").rungs}
    assert by_rung["w16"].speed_ratio == pytest.approx(1.0) and by_rung["w32"].speed_ratio == pytest.approx(2.0)
    steady = {key: values[1:2] for key, values in speeds.items()}
    once, _ = fit_what_is_there(ladder, results, steady, floor=None, seed_sd=0.01)
    assert once is not None
    wide, narrow = fit.arm("muonclip").wall_clock, once.arm("muonclip").wall_clock
    assert wide is not None and narrow is not None and None not in (wide.low, wide.high, narrow.low, narrow.high)
    assert wide.value == pytest.approx(narrow.value)
    assert wide.low < narrow.low and wide.high > narrow.high  # type: ignore[operator]


def test_speeds_are_measured_and_kept(tmp_path: Path):
    ladder = dataclasses.replace(tiny(), rungs=tiny().rungs[:1])
    told: list[tuple[str, str]] = []
    speeds = measure_ladder(
        ladder, torch.device("cpu"), repeats=2, steps=1, on_measured=lambda rung, arm, speed: told.append((rung, arm))
    )
    assert told == [("w16", "adamw"), ("w16", "muonclip")] * 2  # in turns
    write_speeds(tmp_path, speeds, torch.device("cpu"), "abc")
    kept = read_speeds(tmp_path)
    assert {place: len(values) for place, values in kept.items()} == {place: 2 for place in speeds}
    assert json.loads((tmp_path / FILE).read_text())["environment"]["commit"] == "abc"
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(RunError, match="measure again"):
        read_speeds(tmp_path)


def test_speeds_of_chosen_rungs_and_arms_join_those_that_are_known(tmp_path: Path, capsys):
    write_speeds(tmp_path / "tiny", {("w16", "adamw"): [1.0], ("w24", "adamw"): [2.0]}, torch.device("cpu"), "abc")
    few = ["--folder", str(tmp_path), "--repeats", "2", "--steps", "1", "--warmup", "1"]
    main(["ladder", "speed", "tiny", *few, "--rungs", "w16", "--arms", "muonclip"])
    kept = read_speeds(tmp_path / "tiny")
    assert kept["w16", "adamw"] == [1.0] and kept["w24", "adamw"] == [2.0]
    assert len(kept["w16", "muonclip"]) == 2 and len(kept) == 3
    with pytest.raises(SystemExit):
        main(["ladder", "speed", "tiny", *few, "--rungs", "w15"])
    assert "--rungs 'w15' is not in the ladder, did you mean 'w16'" in capsys.readouterr().err


def test_a_file_that_is_no_result_is_named(tmp_path: Path):
    result = write_synthetic(dataclasses.replace(tiny(), rungs=tiny().rungs[:1]), tmp_path, rho={})[0]
    write_result(tmp_path, result)
    (tmp_path / "results" / "x.json").write_text('{"loss": 1}')
    with pytest.raises(RunError, match=r"x\.json.*is not a result"):
        read_results(tmp_path)
