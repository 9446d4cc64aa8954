"""The scripts of the experiments in reinforcement learning, in miniature: models, arms that go on, bars."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from perilune.data.scenes import parse_svg
from perilune.rl.environments.calculator import evaluate
from tests.peers import torchvision_stub

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = (
    "rl_rows", "rl_texts", "rl_base", "rl_levels", "rl_arms", "rl_report", "rl_page", "rl_experiments", "rl_step",
    "rl_throughput",
)  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    """The modules by name, as a script beside them finds them."""
    import importlib

    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name.removeprefix("rl_"): importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def models(scripts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and what fine-tuning without pictures makes of it."""
    out = tmp_path_factory.mktemp("models")
    given = {"tiny": True, "out": out, "results": out / "rl_base.json", "steps": 3}
    for step in ("base", "sft"):
        scripts.base.main(scripts.base.Settings(step=step, **given))
    return out


# --- texts ------------------------------------------------------------------------------------------------------------


def test_word_problems_are_worked_out_to_their_answer_in_four_lengths(scripts) -> None:
    for number in range(200):
        problems = scripts.texts.PROBLEMS[1 + number % 4]
        task = problems.task(number, "train")
        told = {
            how: scripts.texts.worked_out(task.data["question"], how) for how in ("long", "short", "bare", "direct")
        }
        for text in told.values():
            assert text.endswith(f"#### {task.data['answer']}")
            reply = [{"role": "assistant", "content": text}]
            assert problems.judge(task, reply)["outcome"] == 1.0
        assert len(told["long"]) > 2 * len(told["short"]) > 2 * len(told["bare"]) > 2 * len(told["direct"])
        assert told["direct"] == f"#### {task.data['answer']}"


def test_dialogues_answer_at_once_more_often_than_in_any_other_way_and_are_always_right(scripts) -> None:
    kinds = {"direct": 0, "long": 0, "short": 0}
    for number in range(600):
        asked, said = (
            message["content"] for message in scripts.texts.mini_lesson(seed=0, number=number)["messages"][:2]
        )
        if number % 4 == 0:
            continue
        kind = "direct" if said.startswith("####") else "long" if said.startswith("We") else "short"
        kinds[kind] += 1
        assert said == scripts.texts.worked_out(asked.rsplit("\n", 1)[0], kind)
    assert kinds["direct"] > max(kinds["long"], kinds["short"]) and min(kinds.values()) > 0.2 * sum(kinds.values())


def test_arms_of_fine_tuning_differ_in_pictures_alone(scripts) -> None:
    lessons = {
        kind: [scripts.texts.lesson(kind, seed=0, number=number) for number in range(64)]
        for kind in ("zero_vision", "text_image", "none")
    }
    shown = {kind: ["image_url" in json.dumps(each) for each in made] for kind, made in lessons.items()}
    about = [number for number in range(64) if number % 8 < 3]
    assert not any(shown["zero_vision"]) and not any(shown["none"])
    assert [number for number, is_shown in enumerate(shown["text_image"]) if is_shown] == about
    for number in range(64):
        said = [[m for m in made[number]["messages"] if m["role"] == "assistant"] for made in lessons.values()]
        assert said[0] == said[1]
        assert (said[1] == said[2]) == (number not in about)
    assert "svg" not in json.dumps(lessons["none"])


def test_what_the_base_reads_holds_every_kind_of_text_and_no_item_of_the_probe(scripts) -> None:
    from perilune.eval.spatial import spatial_items

    texts = "\n".join(scripts.texts.texts(0, 60))
    assert all(word in texts for word in ("<svg", "####", "calculator", "taller", " = "))
    assert not any(item.question in texts or "True or false" in texts for item in spatial_items(60))


def test_a_calculation_that_is_told_in_words_is_called_by_its_expression(scripts) -> None:
    told = 0
    for number in range(400):
        lesson = scripts.texts.lesson("none", seed=0, number=number)
        calls = [call for message in lesson["messages"] for call in message.get("tool_calls", ())]
        if not calls or calls[0]["function"]["name"] != "calculator":
            continue
        asked, answer = lesson["messages"][0]["content"], lesson["messages"][2]["content"]
        expression = json.loads(calls[0]["function"]["arguments"])["expression"]
        assert str(evaluate(expression)) == answer
        told += asked.startswith("Start with")
        assert asked.startswith("Start with") or expression in asked
    assert 0 < told < 40


def test_calculations_that_are_told_in_words_are_mostly_answered_at_once(scripts) -> None:
    made = [scripts.texts.mini_lesson(seed=0, number=4 * number) for number in range(200)]
    called = {"What is": [], "Start with": []}
    for lesson in made:
        asked, reply = lesson["messages"][:2]
        called[next(each for each in called if asked["content"].startswith(each))].append("tool_calls" in reply)
        assert lesson["tools"]
    assert all(called["What is"]) and 0 < sum(called["Start with"]) < 0.5 * len(called["Start with"])


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_there_is_not_made_again_and_each_has_a_row(scripts, models: Path, capsys) -> None:
    rows = {row["name"]: row for row in json.loads((models / "rl_base.json").read_text())}
    assert set(rows) == {"base-hybrid", "sft-hybrid-zero_vision"}
    assert rows["sft-hybrid-zero_vision"]["with_pictures"] == 0 and rows["base-hybrid"]["vision_loss"] > 0
    before = (models / "base-hybrid" / "config.json").stat().st_mtime_ns
    scripts.base.main(scripts.base.Settings(step="base", tiny=True, out=models, results=models / "rl_base.json"))
    assert "is there" in capsys.readouterr().out
    assert (models / "base-hybrid" / "config.json").stat().st_mtime_ns == before


def test_a_second_base_takes_the_steps_of_the_first(scripts, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotTrained(Exception): ...

    taken = []

    def refuse(config, **_) -> None:
        taken.append(config)
        raise NotTrained

    monkeypatch.setattr(scripts.base, "train", refuse)
    settings = scripts.base.Settings(
        step="base", pattern="mla", tiny=True, out=models, texts=12, megabytes=0.01, corpus="generated"
    )  # fmt: skip
    with pytest.raises(NotTrained):
        scripts.base.make_base(settings)
    (config,) = taken
    assert config.trainer.steps == 3 and set(config.model.layer_pattern()) == {"mla"}


def test_text_that_would_be_read_too_often_is_refused_before_training(
    scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.base, "train", lambda *_, **__: pytest.fail("it was refused too late"))
    small = {"tiny": True, "texts": 40, "megabytes": 0.02, "corpus": "generated", "workers": 0, "out": tmp_path}
    with pytest.raises(SystemExit, match=r"the texts would be read \d+\.\d times, expected at most 4: raise --texts"):
        scripts.base.make_base(scripts.base.Settings(step="base", steps=2000, **small))


def test_what_is_prepared_is_read_by_the_trainings(scripts, tmp_path: Path, capsys) -> None:
    settings = scripts.base.Settings(step="prepare", tiny=True, out=tmp_path, dialogues=16)
    scripts.base.main(settings)
    made, said = sorted(tmp_path.glob("*.jsonl")), capsys.readouterr().out
    assert len(made) == 4 and all(str(path) in said for path in made)
    made[0].write_text("{}\n")
    scripts.base.main(settings)
    assert made[0].read_text() == "{}\n"  # what is there is left alone


def test_a_base_that_was_cut_off_goes_on_by_the_same_command(
    scripts, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """With the steps that it began with, though nobody names them again."""
    begun = []

    def cut(phase: str) -> None:
        begun.extend([phase] if phase == "step:begin" else [])
        if phase == "step:begin" and len(begun) == 3:
            signal.raise_signal(signal.SIGTERM)

    train = scripts.base.train
    settings = scripts.base.Settings(step="base", tiny=True, out=tmp_path, results=tmp_path / "rl_base.json")
    monkeypatch.setattr(scripts.base, "train", lambda config, **given: train(config, on_phase=cut, **given))
    with pytest.raises(SystemExit):
        scripts.base.main(replace(settings, steps=4))
    assert not scripts.base.is_there(tmp_path, "base-hybrid") and not (tmp_path / "rl_base.json").exists()
    monkeypatch.setattr(scripts.base, "train", train)
    small = {"texts": 120, "megabytes": 0.1, "corpus": "generated", "workers": 0}
    capsys.readouterr()
    scripts.base.make_base(replace(settings, **small))
    assert "base-hybrid: goes on at 3/4" in capsys.readouterr().out
    assert scripts.base.is_there(tmp_path, "base-hybrid")
    (row,) = json.loads((tmp_path / "rl_base.json").read_text())
    assert row["steps"] == 4


def test_weights_come_back_from_pieces_rounded_once(
    scripts, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.base, "PIECE_BYTES", 100_000)
    pieces = scripts.base.pack(models / "sft-hybrid-zero_vision", tmp_path / "pieces")
    assert len(pieces) > 1 and max(path.stat().st_size for path in pieces) <= 100_000
    folder = scripts.base.unpack(tmp_path / "pieces", "sft-hybrid-zero_vision", tmp_path / "out")
    first, tokenizer, config = scripts.base.load_run(models / "sft-hybrid-zero_vision")
    second, again, same = scripts.base.load_run(folder)
    assert tokenizer.fingerprint == again.fingerprint and config == same
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor.to(torch.bfloat16).to(tensor.dtype)), name
    with pytest.raises(SystemExit, match=r"holds no base-mla\.00"):
        scripts.base.unpack(tmp_path / "pieces", "base-mla", tmp_path / "out")


# --- arms -------------------------------------------------------------------------------------------------------------


def arm(scripts, models: Path, name: str, **more) -> dict:
    given = {"tiny": True, "out": models, "results": models / "rl.json", **more}
    scripts.experiments.main(scripts.experiments.Settings(arm=name, **given))
    (row,) = [row for row in json.loads((models / "rl.json").read_text()) if row["arm"] == name]
    return row


def test_an_arm_that_runs_out_of_time_goes_on_where_it_was_and_keeps_what_it_measured_before(
    scripts, models: Path
) -> None:
    first = arm(scripts, models, "vision", seconds=0.0)
    assert (first["iterations"], first["wanted"]) == (1, 2)
    second = arm(scripts, models, "vision", seconds=600.0)
    assert second["iterations"] == 2 and second["before"] == first["before"]
    assert second["probe_before"] == first["probe_before"]
    for name in ("reward", "length", "gap", "clipped", "equal_groups"):
        assert len(second["curves"][name]) == 2 and second["curves"][name][:1] == first["curves"][name]
    drawing = second["after"]["drawing"]
    assert len(drawing["rewards"]) == drawing["count"] == 2 and set(second["after"]) == {
        "drawing", "words", "sums", "drawing (other pictures)",
    }  # fmt: skip
    assert second["learn_tokens_per_s"] > 0 and second["examples"]["after"][0]["image"]
    with pytest.raises(SystemExit, match="was begun with"):
        arm(scripts, models, "vision", lr=1.0)


def test_an_arm_with_ptx_reads_the_dialogues_of_its_start_in_every_update(scripts, models: Path) -> None:
    row = arm(scripts, models, "vision-ptx", seconds=600.0)
    assert row["iterations"] == 2
    lines = (models / "rl-vision-ptx-0" / "records.jsonl").read_text().splitlines()
    losses = [json.loads(line)["ptx_loss"] for line in lines]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


def test_an_arm_that_is_told_to_stop_saves_and_leaves_and_goes_on_later(
    scripts, models: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    step = scripts.experiments.Loop.step

    async def interrupted(self) -> dict:
        signal.raise_signal(signal.SIGTERM)
        return await step(self)

    with monkeypatch.context() as patched:
        patched.setattr(scripts.experiments.Loop, "step", interrupted)
        with pytest.raises(SystemExit) as left:
            arm(scripts, models, "words")
    assert left.value.code == 128 + signal.SIGTERM and "the same command goes on" in capsys.readouterr().out
    row = arm(scripts, models, "words")
    assert row["iterations"] == 2 and len(row["curves"]["reward"]) == 2


@pytest.mark.parametrize("name", ["sums-toggle", "tools", "joint"])
def test_arms_without_pictures_and_with_several_environments_give_rows(scripts, models: Path, name: str) -> None:
    row = arm(scripts, models, name, iterations=1)
    assert row["iterations"] == 1 and row["failures"] == {} and row["curves"]["reward"][0] > 0
    assert ("tools" in row["after"]) == (name == "tools")


def test_each_environment_takes_the_hardest_level_that_the_model_earns_enough_on(scripts) -> None:
    def hardest(name: str, *rewards: float, sampled: float = 0.2) -> int:
        found = {level: {"reward": reward, "sampled": sampled / level} for level, reward in enumerate(rewards, 1)}
        return scripts.levels.hardest(name, found)

    assert hardest("tools", 0.9, 0.5, 0.1) == 2 and hardest("sums", 0.9, 0.4, 0.1, sampled=0.7) == 2
    assert hardest("tools", 0.2, 0.1, 0.0) == 1
    assert hardest("tools", 0.9, 0.1, 0.4, sampled=0.6) == 3
    assert hardest("drawing", 0.9, 0.8, 0.7, 0.45, 0.31, sampled=0.6) == 5
    assert hardest("drawing", 0.9, 0.8, 0.7, 0.45, 0.31) == 2  # above, hardly a sample earns anything
    for given, known in (({"sums": 7}, "1, 2, 3, 4"), ({"drawing": 6}, "1, 2, 3, 4, 5")):
        ((name, level),) = given.items()
        with pytest.raises(ValueError, match=f"{name} has level {level}, expected one of {known}"):
            scripts.levels.Levels(**given)


def test_every_level_of_drawing_has_its_number_of_shapes_and_room_for_the_longest_source(scripts, models: Path) -> None:
    _, tokenizer, _ = scripts.base.load_run(models / "base-hybrid")
    for level, (few, many) in scripts.levels.SHAPES.items():
        for ask in ("picture", "words", "shuffled"):
            made = scripts.levels.drawing(level, ask)
            for number in range(4):
                source = made.task(number, "train").data["svg"]
                assert few <= len(parse_svg(source).shapes) <= many
        # A tokenizer of 640 words needs more tokens than the one of 4096.
        assert len(tokenizer.encode(source)) < 2 * made.max_tokens


def test_a_start_without_room_is_warned_about(scripts, capsys) -> None:
    seen = {"sampled": 0.5, "length": 50.0, "shortest": 20.0, "longest": 90.0}
    found = {"drawing": {level: seen | {"reward": 0.95} for level in range(1, 6)}}
    scripts.levels.tell(found, scripts.levels.Levels(drawing=4))
    said = capsys.readouterr().out
    assert "* drawing 4: reward 0.950 greedy" in said
    assert "WARNING: drawing starts on level 4 at 0.950 greedy" in said and "little is left to gain" in said
    for more, warned in (({"reward": 0.5}, False), ({"reward": 0.2}, True), ({"reward": 0.5, "sampled": 0.01}, True)):
        found["drawing"][4] = seen | more
        scripts.levels.tell(found, scripts.levels.Levels(drawing=4))
        assert ("too little to learn from" in capsys.readouterr().out) == warned


@pytest.fixture
def short_answers(scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model never ends: tasks of every level allow a few tokens."""
    whole = scripts.levels.environment_of
    monkeypatch.setattr(scripts.levels, "environment_of", lambda *given: replace(whole(*given), max_tokens=4))


def test_levels_are_chosen_once_for_all_arms_of_a_folder(
    scripts, models: Path, short_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = scripts.experiments
    settings = experiments.Settings(arm="sums", out=models, sequences=8, memory_gib=0.25, max_length=1024, played=1)
    chosen = experiments.levels_of(settings, torch.device("cpu"))
    assert chosen == scripts.levels.Levels(drawing=1, sums=1, tools=1)  # an untrained model solves none
    kept = json.loads((models / "levels.json").read_text())
    assert set(kept["found"]) == {"drawing", "sums", "tools"} and set(kept["found"]["tools"]) == {"1", "2", "3"}
    monkeypatch.setattr(experiments, "choose_levels", lambda *_, **__: pytest.fail("they were chosen already"))
    assert experiments.levels_of(replace(settings, arm="vision"), torch.device("cpu")) == chosen
    told = experiments.levels_of(replace(settings, sums_level=3), torch.device("cpu"))
    assert told == scripts.levels.Levels(drawing=1, sums=3, tools=1)


def test_a_probe_tells_every_level_and_chooses_for_arms_to_come_by_one_model_alone(
    scripts, models: Path, short_answers: None, tmp_path: Path, capsys
) -> None:
    (tmp_path / "sft-hybrid-zero_vision").symlink_to(models / "sft-hybrid-zero_vision")
    (tmp_path / "sft-hybrid-none").symlink_to(models / "sft-hybrid-zero_vision")
    settings = scripts.experiments.Settings(arm="probe", out=tmp_path, tiny=True, played=1)
    scripts.experiments.main(replace(settings, start="hybrid-none"))
    assert "drawing 5: reward" in capsys.readouterr().out and not (tmp_path / "levels.json").exists()
    scripts.experiments.main(settings)
    said = capsys.readouterr().out
    assert said.count(": reward") == 5 + 4 + 3 and said.count("  * ") == 3
    assert scripts.levels.kept_levels(tmp_path / "levels.json") == scripts.levels.Levels(drawing=1, sums=1, tools=1)


def test_an_arm_without_its_model_says_what_to_run(scripts, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no sft-hybrid-none: run benchmarks/rl_base.py base, then sft, with"):
        scripts.experiments.run_arm(scripts.experiments.Settings(arm="vision-none", out=tmp_path))


def test_toggle_begins_late_and_ends_free_and_rigid_never_lifts_its_budget(scripts) -> None:
    from perilune.rl.lengths import Toggle

    for name in scripts.arms.ARMS:
        made = scripts.arms.arm_of(name, scripts.levels.Levels(), 100)
        assert made.trained and made.evaluated and (made.toggle is not None) == (name in ("sums-toggle", "sums-rigid"))
    for iterations in (40, 100, 107):
        free, rigid = (Toggle(scripts.arms.toggle(iterations, is_rigid=is_rigid)) for is_rigid in (False, True))
        phases = [free.is_budgeted(iteration) for iteration in range(iterations)]
        assert not phases[0] and not phases[-1] and sum(phases) == 3 * (iterations // 10)
        begun = phases.index(True)
        assert [rigid.is_budgeted(each) for each in range(10_000)] == [False] * begun + [True] * (10_000 - begun)


def test_a_miniature_of_numbers_learns_and_says_what_it_does_not_know(scripts, tmp_path: Path, capsys) -> None:
    given = {"out": tmp_path, "results": tmp_path / "rl.json", "mini": True}
    with pytest.raises(SystemExit, match="holds no sft-mini: run benchmarks/rl_base.py mini with"):
        scripts.experiments.main(scripts.experiments.Settings(arm="sums", **given))
    scripts.base.main(scripts.base.Settings(step="mini", out=tmp_path, steps=2, dialogues=64, results=given["results"]))
    small = {"iterations": 1, "tasks": 2, "samples": 2, "evaluated": 2, "items": 4}
    with pytest.raises(SystemExit, match="--mini knows numbers alone, not drawing"):
        scripts.experiments.main(scripts.experiments.Settings(arm="vision", **given, **small))
    scripts.experiments.main(
        scripts.experiments.Settings(arm="tools", **(given | {"results": tmp_path / "r.json"}), **small)
    )
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert set(row["after"]) == {"sums", "tools"} and row["levels"]["sums"] == 3 and row["start"] == "mini"
    numbers = [row | {"arm": arm} for arm in ("sums", "tools")]
    (tmp_path / "r.json").write_text(json.dumps(numbers))
    told = scripts.report.write_report(tmp_path / "r.json", tmp_path / "none.json")
    assert "| 6. sums alone | reported | sums " in told and "not measured: joint" in told


def test_a_step_is_measured_by_what_it_moves_and_what_it_gains(scripts, models: Path) -> None:
    """Two samples of a group, the first of which is right."""
    from perilune.rl.learner import Learner, LearnerConfig, Sample
    from perilune.rl.trajectory import Branch
    from perilune.train import OptimizerConfig

    model, _, _ = scripts.base.load_run(models / "sft-hybrid-zero_vision")
    learner = Learner(model, LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0)))
    samples = []
    for advantage, last in ((0.5, 7), (-0.5, 9)):
        tokens, mask = np.array([3, 4, 5, last]), np.array([False, False, True, True])
        drawn = Branch(
            tokens=tokens, mask=mask, logprobs=np.zeros(4), versions=np.where(mask, 0, -1), media=(), starts=(),
        )  # fmt: skip
        (logprobs,) = learner.log_probs([drawn])
        samples.append(Sample(branches=[replace(drawn, logprobs=np.array([0.0, 0.0, *logprobs]))], advantage=advantage))
    still = scripts.step.moved(learner, samples)
    assert still.mean < 1e-5 and abs(still.gain) < 1e-5
    learner.update(samples)
    after = scripts.step.moved(learner, samples)
    assert after.mean > 1e-4 and after.gain > 1e-4


def test_a_lost_episode_leaves_a_gap_in_the_rewards_of_its_arm(scripts) -> None:
    experiments = scripts.experiments
    sums = scripts.levels.sums(2)
    names = [sums.task(number, "test").name for number in range(3)]
    found = {"environments": {"sums": {"count": 2, "rewards": {names[2]: 0.3, names[0]: 0.1}}}}
    settings = experiments.Settings(arm="sums", evaluated=3)
    numbers = experiments._numbers(experiments.Arm(trained={}, evaluated={"sums": sums}), settings, found)
    assert numbers["sums"]["rewards"] == [0.1, None, 0.3]
    pictures = scripts.levels.drawing(2)
    shuffled = experiments.replace(pictures, ask="shuffled")
    assert experiments.task_of(pictures.task(5, "test").name) == experiments.task_of(shuffled.task(5, "test").name)


# --- bars -------------------------------------------------------------------------------------------------------------


def made_row(
    name: str, before: float, after: float, *, length: float = 100.0, right: float = 0.6, seed: int = 0
) -> dict:
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, 0.02, 64)

    def numbers(mean: float) -> dict:
        rewards = (mean + noise - noise.mean()).tolist()
        facets = {"facet.valid": 0.99, "facet.called": 0.5}
        return {
            "count": 64,
            "reward": {"mean": mean, "low": 0, "high": 1},
            "rewards": rewards,
            "length": length,
            **facets,
        }

    def probe(share: float) -> dict:
        bits = np.arange(64) < share * 64
        return {"items": 64, "chance": 0.46, "accuracy": share, "right": np.packbits(bits).tobytes().hex()}

    names = ("drawing", "words", "sums", "tools", "drawing (other pictures)")
    later = {each: numbers(after - (0.3 if "other" in each else 0.0)) for each in names}
    return {
        "arm": name, "seed": seed, "tiny": False, "iterations": 200, "wanted": 200, "seconds_an_iteration": 1.0,
        "before": {each: numbers(before) for each in names}, "after": later,
        "curves": {"gap": [0.01], "clipped": [0.0]},
        "probe_before": probe(0.5), "probe_after": probe(right),
    }  # fmt: skip


def test_bars_are_met_or_not_and_missing_arms_are_named(scripts, tmp_path: Path) -> None:
    rows = [
        made_row("vision", 0.3, 0.5, right=0.7), made_row("vision-text-image", 0.3, 0.52),
        made_row("sums", 0.5, 0.8, length=100), made_row("sums-toggle", 0.5, 0.795, length=70),
        made_row("shuffled", 0.3, 0.3, right=0.5),
    ]  # fmt: skip
    scripts.rows.add_rows(tmp_path / "rl.json", rows, key=scripts.experiments.KEY)
    text = scripts.report.write_report(tmp_path / "rl.json", tmp_path / "rl_throughput.json")
    found = {(name, bar): (said, met) for name, bar, said, met in scripts.report.bars(scripts.report.Rows(rows))}
    name = "1. picture to SVG from zero-vision SFT"
    assert [met for (each, _), (_, met) in found.items() if each == name] == [True] * 4
    said, met = found["4. Toggle", ">= 20% fewer tokens, <= 0.01 lost"]
    assert met and "30.0% fewer" in said
    assert found["5. tool use", "reported"] == ("not measured: tools", None)
    assert found["7. attention", "reported"][0] == "not measured: vision-mla"
    assert "| vision RL, shuffled pictures | 0.500 | 0.500 |" in text and "benchmarks/rl_throughput.py" in text
    assert (tmp_path / "rl.md").read_text() == text


def test_a_bar_that_is_missed_is_said_to_be(scripts) -> None:
    rows = [made_row("vision", 0.3, 0.4), made_row("vision-text-image", 0.3, 0.6),
            made_row("sums", 0.5, 0.8), made_row("sums-toggle", 0.5, 0.7, length=70)]  # fmt: skip
    found = {bar: met for _, bar, _, met in scripts.report.bars(scripts.report.Rows(rows))}
    assert found["reward +0.15"] is False and found[">= 90% of the text+image arm"] is False
    assert found[">= 20% fewer tokens, <= 0.01 lost"] is False


def test_arms_with_tasks_of_different_levels_are_said_to_differ(scripts, tmp_path: Path) -> None:
    rows = [made_row("sums", 0.5, 0.8) | {"levels": {"sums": 2}}, made_row("sums-toggle", 0.5, 0.8, length=70)]
    rows[1]["levels"] = {"sums": 3}
    (said,) = [said for name, _, said, _ in scripts.report.bars(scripts.report.Rows(rows)) if name == "4. Toggle"]
    assert said.endswith("levels differ: sums 2 | sums 3")
    rows[1]["levels"] = {"sums": 2}
    scripts.rows.add_rows(tmp_path / "rl.json", rows, key=scripts.experiments.KEY)
    text = scripts.report.write_report(tmp_path / "rl.json", tmp_path / "none.json")
    assert "levels differ" not in text and "Levels of the tasks: sums 2." in text


def test_the_page_shows_curves_and_answers_of_the_arms_that_there_are(scripts, tmp_path: Path) -> None:
    shown = {"environment": "sums", "task": "A sum.", "prompt": "What is it?", "text": "#### 4", "reward": 1.0}
    rows = [
        made_row(name, 0.3, 0.5, seed=seed)
        | {
            "tasks": 32, "samples": 8, "environment": {"machine": "H200"},
            "examples": {"before": [shown], "after": [shown]},
            "curves": {"reward": [0.1, 0.5, 0.9], "length": [9.0, 8.0, 7.0], "gap": [0.0], "clipped": [0.0]},
        }
        for name in ("vision", "sums") for seed in (0, 1)
    ]  # fmt: skip
    scripts.rows.add_rows(tmp_path / "rl.json", rows, key=scripts.experiments.KEY)
    settings = scripts.experiments.Settings(arm="report", results=tmp_path / "rl.json", png=tmp_path / "rl.png")
    scripts.experiments.main(settings)
    page = (tmp_path / "rl.html").read_text()
    assert "Picture to SVG" in page and "What is it?" in page and "#### 4" in page
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG")
    (series,) = scripts.page.curves(rows, {"sums": "word problems"}, "reward")
    assert series.x == [1, 2, 3] and series.y == pytest.approx([0.1, 0.3, 0.5])


def test_rows_are_merged_by_their_key(scripts, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    scripts.rows.add_rows(path, [{"arm": "b", "seed": 0, "x": 1}, {"arm": "a", "seed": 0}], key=("arm", "seed"))
    scripts.rows.add_rows(path, [{"arm": "b", "seed": 0, "x": 2}, {"arm": "b", "seed": 1}], key=("arm", "seed"))
    rows = scripts.rows.read_rows(path)
    assert [(row["arm"], row["seed"], row.get("x")) for row in rows] == [("a", 0, None), ("b", 0, 2), ("b", 1, None)]


# --- throughput -------------------------------------------------------------------------------------------------------


def _with_transformers() -> None:
    torchvision_stub.declare_operators()
    pytest.importorskip("transformers")


def test_both_loops_sample_and_learn_from_as_many_tokens(scripts, tmp_path: Path) -> None:
    _with_transformers()
    settings = scripts.throughput.Settings(tiny=True, pattern="mla", results=tmp_path / "rows.json")
    scripts.throughput.main(settings)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["peer_tokens_per_s"])
    assert 0 <= row["waiting"] <= 1 and row["gap"] < 1e-3 and "ForCausalLM" in row["peer"]


def test_the_plain_loop_takes_the_step_that_the_learner_takes(scripts) -> None:
    """The same samples, advantages and AdamW: log-probs move alike."""
    from perilune.data.tokenizer import Tokenizer
    from perilune.model import Decoder
    from perilune.rl.learner import Learner, LearnerConfig, Sample
    from perilune.rl.trajectory import Recording
    from perilune.train import OptimizerConfig

    _with_transformers()
    settings = scripts.throughput.Settings(tiny=True, pattern="mla", lr=1e-3)
    config = scripts.throughput.model_config(settings, torch.device("cpu"))
    tokenizer = Tokenizer.train(["a few words to begin with"], config.vocab_size)
    model = Decoder(config, seed=0)
    peer = scripts.throughput.peer_of(model, tokenizer, torch.device("cpu"))
    whole = torch.randint(0, 256, (4, 20), generator=torch.Generator().manual_seed(0))
    relative = torch.tensor([0.5, -0.5, 0.25, -0.25], dtype=torch.float64)
    learner = Learner(
        model,
        LearnerConfig(optimizer=OptimizerConfig(kind="adamw", lr=1e-3, weight_decay=0.0, qk_clip_tau=None)),
    )
    samples = []
    for row, advantage in zip(whole.tolist(), relative.tolist()):
        recording = Recording()
        recording.add(row[:8], row[8:], [0.0] * 12, 0)
        (logprobs,) = learner.log_probs(recording.branches)
        exact = Recording()
        exact.add(row[:8], row[8:], logprobs.tolist(), 0)
        samples.append(Sample(branches=exact.branches, advantage=advantage))
    before = [learner.log_probs(sample.branches)[0] for sample in samples]
    learner.update(samples)
    after = [learner.log_probs(sample.branches)[0] for sample in samples]
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scripts.throughput._plain_step(peer, optimizer, whole, 8, relative, replace(settings, rows_at_once=3))
    with torch.no_grad():
        logits = peer(whole[:, :-1], use_cache=False).logits[:, 7:].float()
    theirs = logits.log_softmax(-1).gather(2, whole[:, 8:, None])[..., 0].numpy()
    moved = np.abs(np.array(after) - np.array(before)).max()
    assert moved > 1e-3 and np.abs(np.array(after) - theirs).max() < 0.02 * moved
