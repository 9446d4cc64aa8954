"""The released model: how it is made in miniature, found, shown and used, and that nothing changes without it."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from perilune import cli_released, released
from perilune.cli import main
from perilune.cli_swarm_demo import DEMO_TASK, DemoFlags, chosen_model
from perilune.data.dialogues import read_dialogues
from perilune.eval.safety import load_probes
from perilune.hub import open_folder
from perilune.model import Decoder
from perilune.recipes import nano_dialogues
from perilune.recipes.nano_dialogues import (
    KINDS,
    PARTS,
    DialogueCounts,
    dialogue,
    lines,
    made_of_what,
    write_dialogues,
)
from perilune.recipes.nano_release import MOST_BYTES, TINY_COUNTS, nano_release
from perilune.released import is_whole, released_model
from perilune.rl.environments.wide_search_questions import parse_question
from tests.benchmark_scripts import load_script


def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        return load_script(patch, "nano_release")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages in miniature; the folder that comes out."""
    folder = tmp_path_factory.mktemp("release")
    module = script()
    module.main(module.Settings(tiny=True, folder=folder, out=folder / "models" / "perilune-nano"))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Making it -----------------------------------------------------------------------------------------------------------


def test_the_released_size_fits_the_repository_in_bfloat16() -> None:
    model = Decoder(nano_release().model)
    again = model.config.vocab_size * model.config.hidden_size  # tied, and written under both names
    assert 2 * (model.num_parameters() + again) <= MOST_BYTES - 1_000_000 and model.config.vision is not None


def test_the_miniature_has_weights_in_bfloat16_a_card_and_a_safety_report(stand_in: Path) -> None:
    folder = stand_in / "models" / "perilune-nano"
    found = json.loads((stand_in / "release.json").read_text())
    opened = open_folder(folder)
    assert 2 * found["parameters"] < found["bytes"] < 3 * found["parameters"] and opened.is_chat
    card = (folder / "README.md").read_text()
    for part in ("PSF licence", "## Recipe", "perilune-nano-sft | 2 of 2", "calculator, mean reward", "## Limits",
                 "[safety.md](safety.md)", "a habit of words"):  # fmt: skip
        assert part in card, part
    assert card.count("## Safety\n") == card.count("## Safety notes\n") == 1
    assert "No safety probe was run" not in card
    assert (folder / "safety.html").is_file() and not list(stand_in.glob(".perilune*"))


def test_time_that_is_up_leaves_a_stage_that_the_next_call_goes_on_with(tmp_path: Path) -> None:
    module = script()
    settings = module.Settings(tiny=True, folder=tmp_path, seconds=1e-9)
    module.main(settings)
    assert not (tmp_path / "release.json").exists() and (tmp_path / "dialogues").is_dir()
    assert not (tmp_path / "perilune-nano-pretrain" / "done").exists()


def test_wrong_settings_are_refused_by_name() -> None:
    module = script()
    with pytest.raises(ValueError, match="--licences"):
        module.Settings(corpus=("a", "b"), licences=("x",))
    with pytest.raises(ValueError, match="--sft-seconds"):
        module.Settings(sft_seconds=0)


# Dialogues -----------------------------------------------------------------------------------------------------------


def test_every_dialogue_can_be_read_and_both_ways_of_asking_are_among_them(tmp_path: Path) -> None:
    files = write_dialogues(tmp_path, TINY_COUNTS)
    found, broken = read_dialogues(files)
    assert broken.count == 0
    expected = sum(getattr(TINY_COUNTS, kind) for kind in KINDS if kind != "search")
    assert len(found) == expected + TINY_COUNTS.orchestrators + TINY_COUNTS.workers
    assert {each.thinking for each in found} == {True, False} and any(each.has_pictures for each in found)
    written = Path(files[0]).stat().st_mtime_ns
    assert write_dialogues(tmp_path, TINY_COUNTS) == files and Path(files[0]).stat().st_mtime_ns == written
    again = write_dialogues(tmp_path / "again", TINY_COUNTS)
    assert [Path(path).read_bytes() for path in files] == [Path(path).read_bytes() for path in again]


def test_wide_questions_are_handed_out_all_at_once_and_the_others_worked_on_alone() -> None:
    counts = DialogueCounts(orchestrators=40 * PARTS, workers=0, library_pages=1000)
    handed_out: dict[str, list[bool]] = {"wide": [], "narrow": [], "chain": []}
    for line in map(json.loads, lines("search", 0, counts, seed=0)):
        replies = [message.get("tool_calls") or () for message in line["messages"]]
        tasks = [sum(call["function"]["name"] == "assign_task" for call in calls) for calls in replies]
        can = any(tool["function"]["name"] == "assign_task" for tool in line["tools"])
        if can:
            handed_out[line["kind"]].append(max(tasks) > 0)
        if max(tasks):
            question = parse_question(line["messages"][1]["content"])
            assert question is not None and max(tasks) == sum(tasks) == len(question.names)
    assert sum(handed_out["wide"]) >= 0.9 * len(handed_out["wide"])
    assert handed_out["narrow"] and handed_out["chain"] and not any(handed_out["narrow"] + handed_out["chain"])


@pytest.mark.parametrize("change", [{"ALONE": 0.5}, {"DELEGATED": {"wide": 0.5}}, {"AT_ONCE": {1: 1.0}}, {"VERSION": 0},
                                    {"MADE_BY": ("released.py",)}])  # fmt: skip
def test_whatever_changes_the_dialogues_changes_the_names_of_their_files(
    monkeypatch: pytest.MonkeyPatch, change: dict
) -> None:
    before = made_of_what(TINY_COUNTS, seed=0)
    assert before == made_of_what(TINY_COUNTS, seed=0) != made_of_what(TINY_COUNTS, seed=1)
    monkeypatch.setattr(nano_dialogues, *next(iter(change.items())))
    assert made_of_what(TINY_COUNTS, seed=0) != before


def test_no_safety_probe_is_trained_on() -> None:
    counts = DialogueCounts(talk=400, decline=400, tools=400, pictures=0)
    parts = [(kind, part) for kind in ("talk", "decline", "tools") for part in range(PARTS)]
    said = "".join(line for kind, part in parts for line in lines(kind, part, counts, seed=0))
    for probe in load_probes():
        assert json.dumps(probe.ask)[1:-1] not in said, probe.id
        assert not probe.canary or probe.canary not in said, probe.id


def test_what_is_declined_and_what_is_answered_differ_in_more_than_words() -> None:
    answers = [dialogue("decline", seed=0, number=number)["messages"][-1]["content"] for number in range(60)]
    declined = [answer for answer in answers if "help with that" in answer]
    assert 20 < len(declined) < 55


# Finding it ----------------------------------------------------------------------------------------------------------


def test_a_folder_counts_only_when_it_is_whole(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stand_in / "models" / "perilune-nano"
    assert is_whole(folder) and not is_whole(tmp_path)
    pointer = tmp_path / "models" / "perilune-nano"
    pointer.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (pointer / name).write_text("version https://git-lfs\n")
    assert not is_whole(pointer)
    monkeypatch.delenv(released.VARIABLE, raising=False)
    monkeypatch.chdir(stand_in)
    assert released_model() == folder
    monkeypatch.setenv(released.VARIABLE, "")
    assert released_model() is None
    monkeypatch.setenv(released.VARIABLE, str(folder))
    monkeypatch.chdir(tmp_path)
    assert released_model() == folder


def test_weights_that_are_a_link_to_nowhere_are_no_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert not is_whole(tmp_path)


def test_without_the_model_nothing_is_shown(here: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(released.VARIABLE, "")
    assert not cli_released.show(cli_released.Settings())
    assert capsys.readouterr().out == "" and not list(here.iterdir())


# Showing it ----------------------------------------------------------------------------------------------------------


def test_the_model_is_shown_in_a_chat_with_pictures_and_as_a_swarm(
    here: Path, stand_in: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(released.VARIABLE, str(stand_in / "models" / "perilune-nano"))
    settings = cli_released.Settings(pictures=1, max_tokens=4, picture_tokens=8)
    assert cli_released.show(settings)
    said = capsys.readouterr().out
    for part in ("the released model", cli_released.QUESTIONS[0], "as SVG: score", "question: Find the", "of 9 right"):
        assert part in said, part
    assert "data:image/png;base64," in (here / "runs/released/report.html").read_text()
    main(["swarm", "audit", "runs/released/swarm"])
    assert "intact" in capsys.readouterr().out


def test_the_demonstration_of_swarms_uses_it_where_it_can(
    here: Path, stand_in: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(released.VARIABLE, str(stand_in / "models" / "perilune-nano"))
    main(["swarm", "demo", "--json", "--task", "Find the year of each ship: Crystal Mountain, Open Turtle."])
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "done" and found["spent"]["steps"] >= 1
    assert json.loads((here / "runs/swarm/demo/session.json").read_text())["model"] == "perilune-nano"
    with pytest.raises(SystemExit):
        main(["swarm", "demo", "--task", "Find the year of each ship: Silly Nonsense, Open Turtle."])
    assert "no page about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "uses_it"),
    [
        ({}, True),
        ({"task": "Find the year of each ship: Crystal Mountain, Open Turtle."}, True),
        ({"task": DEMO_TASK}, False),
        ({"docs": "."}, False),
        ({"scripted": True}, False),
    ],
)
def test_what_the_model_cannot_know_is_left_to_the_scripted_one(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, flags: dict, uses_it: bool
) -> None:
    folder = stand_in / "models" / "perilune-nano"
    monkeypatch.setenv(released.VARIABLE, str(folder))
    assert chosen_model(DemoFlags(**flags)) == (folder if uses_it else None)
