"""The released model: how it is made in miniature, found, shown and used, and that nothing changes without it."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perilune import cli_released, released
from perilune.cli import main
from perilune.cli_swarm_demo import DEMO_TASK, DemoFlags, chosen_model
from perilune.data.dialogues import read_dialogues
from perilune.data.tokenizer import Tokenizer
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
from perilune.train import train
from tests.benchmark_scripts import load_script

WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] == "torch" else find(name, *more)
from perilune.cli import main
main(sys.argv[1:])
"""
"""As on a machine where torch is not installed."""


def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        return load_script(patch, "nano_release")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages in miniature; the folder that comes out."""
    folder = tmp_path_factory.mktemp("release")
    module = script()
    module.main(module.Settings(step="all", tiny=True, folder=folder, out=folder / "models" / "perilune-nano"))
    return folder


@pytest.fixture(scope="module")
def pieces(stand_in: Path) -> Path:
    """What comes back from the machine that trained."""
    module = script()
    module.main(module.Settings(step="pack", folder=stand_in, pieces=stand_in / "pieces"))
    return stand_in / "pieces"


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
    assert (folder / "safety.html").is_file() and not (stand_in / ".making").exists()
    assert "Safety probes: perilune-nano" in (folder / "safety.md").read_text()


def test_the_card_names_the_licence_of_the_weights_in_its_head(stand_in: Path) -> None:
    card = (stand_in / "models" / "perilune-nano" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")


def test_pieces_are_few_small_files_with_plain_names(pieces: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        nano_pieces, rl_base = (load_script(patch, name) for name in ("nano_pieces", "rl_base"))
    found = sorted(pieces.iterdir())
    assert [path.name for path in found] == ["perilune-nano-sft.00", "perilune-nano.json"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in found)
    # Of the real size, tied weights under both names, if nothing could be compressed.
    numbers = Decoder(nano_release().model).num_parameters() + 4096 * 256
    assert -(-2 * numbers // rl_base.PIECE_BYTES) + 1 <= nano_pieces.MOST_FILES


def test_an_export_from_pieces_is_the_export_of_the_run(stand_in: Path, pieces: Path, tmp_path: Path) -> None:
    module = script()
    folder = tmp_path / "elsewhere"
    shutil.copytree(pieces, tmp_path / "pieces")
    for run in ("pretrain", "sft"):  # the machine of training is another one
        path = stand_in / f"perilune-nano-{run}" / "environment.json"
        assert json.loads(path.read_text())["machine"]
    record = tmp_path / "pieces" / "perilune-nano.json"
    record.write_text(record.read_text().replace("cores", "cores of the machine of training"))
    module.main(module.Settings(step="export", tiny=True, folder=folder, pieces=tmp_path / "pieces"))
    ours, theirs = folder / "perilune-nano", stand_in / "models" / "perilune-nano"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    card = (ours / "README.md").read_text()
    recipe, before = (
        text.partition("## Recipe")[2].partition("## Limits")[0] for text in (card, (theirs / "README.md").read_text())
    )
    assert recipe.replace(" of the machine of training", "") == before and recipe.count("machine of training") == 2
    assert recipe.count("| perilune-nano-pretrain |") == recipe.count("| perilune-nano-sft |") == 1
    assert "| ? |" not in recipe and "PSF licence" in card
    module.main(
        module.Settings(
            step="export", tiny=True, folder=folder, pieces=tmp_path / "pieces", start=str(folder / "perilune-nano-sft")
        )
    )
    assert (ours / "README.md").read_text().count("| perilune-nano-sft | 2 of 2") == 1


@pytest.mark.parametrize("harm", ["missing", "damaged", "other run"])
def test_pieces_that_cannot_be_used_are_named(stand_in: Path, pieces: Path, tmp_path: Path, harm: str) -> None:
    module = script()
    there = tmp_path / "pieces"
    shutil.copytree(pieces, there)
    folder = tmp_path / "folder"
    if harm == "missing":
        (there / "perilune-nano-sft.00").unlink()
    elif harm == "damaged":
        (there / "perilune-nano-sft.00").write_bytes(b"x")
    else:
        (folder / "perilune-nano-sft").mkdir(parents=True)
    with pytest.raises(SystemExit, match="perilune-nano-sft"):
        module.main(module.Settings(step="export", tiny=True, folder=folder, pieces=there))


def test_fine_tuning_goes_on_from_pieces_of_the_pre_training(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script()
    half = tmp_path / "half"
    shutil.copytree(stand_in, half, ignore=shutil.ignore_patterns("perilune-nano-sft", "models"))
    module.main(module.Settings(step="pack", folder=half, pieces=tmp_path / "pieces"))
    assert {path.name for path in (tmp_path / "pieces").iterdir()} == {
        "perilune-nano-pretrain.00",
        "perilune-nano.json",
    }
    new = tmp_path / "new"
    module.main(module.Settings(step="train", tiny=True, folder=new, pieces=tmp_path / "pieces"))
    record = json.loads((new / "perilune-nano-sft" / "stage.json").read_text())
    assert record["done"] and record["steps"] == 2 and record["seconds"] > 0


def test_what_was_prepared_is_not_made_again(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    module = script()
    first, second = tmp_path / "first", tmp_path / "second"
    module.main(module.Settings(step="prepare", tiny=True, folder=first))
    second.mkdir()
    shutil.copy(first / "prepared.tar.zst", second)
    for name in ("perilune.recipes.nano_dialogues._write_part", "perilune.data.chat_rows._that_fit"):
        monkeypatch.setattr(name, None)
    monkeypatch.setattr(Tokenizer, "train", None)
    module.main(module.Settings(step="train", tiny=True, folder=second))
    assert "prepared data are laid out" in capsys.readouterr().out
    assert json.loads((second / "perilune-nano-sft" / "stage.json").read_text())["done"]


def test_steps_follow_from_the_median_speed_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script()
    speeds = [1.0] * 8 + [1000.0] * 7 + [1.0]

    def stand_in_train(config, *, runs_folder, **_) -> None:
        folder = Path(runs_folder) / config.name
        folder.mkdir()
        lines = [json.dumps({"kind": "train", "tokens_per_s": speed}) for speed in speeds]
        (folder / "metrics.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(module, "train", stand_in_train)
    run = nano_release()
    tokens = run.trainer.global_batch_rows * run.data.seq_len
    assert module.steps_for(run, 100 * tokens, None) == 100 * 1000


def test_time_that_is_up_leaves_a_stage_that_the_next_call_goes_on_with(tmp_path: Path) -> None:
    module = script()
    with pytest.raises(SystemExit) as stopped:
        module.main(module.Settings(step="all", tiny=True, folder=tmp_path, seconds=1e-9))
    assert stopped.value.code == module.AGAIN and (tmp_path / "dialogues").is_dir()
    assert not (tmp_path / "release.json").exists() and not (tmp_path / "perilune-nano-pretrain").exists()


def test_a_stage_that_was_cut_off_is_gone_on_with_and_its_seconds_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script()
    settings = module.Settings(step="train", tiny=True, folder=tmp_path)
    with monkeypatch.context() as patch:
        # As if the time were up right after the first step.
        patch.setattr(module, "train", lambda *more, on_phase, **given: train(*more, on_phase=cut(on_phase), **given))

        def cut(on_phase):
            def reached(phase: str) -> None:
                if phase == "step:logged":
                    signal.raise_signal(signal.SIGTERM)

            return reached

        with pytest.raises(SystemExit) as stopped:
            module.main(settings)
    assert stopped.value.code == module.AGAIN
    folder = tmp_path / "perilune-nano-pretrain"
    before = json.loads((folder / "stage.json").read_text())
    assert not before["done"] and before["seconds"] > 0
    module.main(settings)
    after = json.loads((folder / "stage.json").read_text())
    assert after["done"] and after["seconds"] > before["seconds"] and after["steps"] == before["steps"]
    steps = [record["step"] for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
             if record["kind"] == "train"]  # fmt: skip
    assert steps == [1, 2]


def test_wrong_settings_are_refused_by_name() -> None:
    module = script()
    for licences in ((), ("x",)):
        with pytest.raises(ValueError, match="--licences .*whose text it is and its licence"):
            module.Settings(step="train", corpus=("a", "b"), licences=licences)
    with pytest.raises(ValueError, match="--sft-seconds"):
        module.Settings(step="train", sft_seconds=0)
    with pytest.raises(ValueError, match="--pieces"):
        module.Settings(step="pack")
    described = module.Settings(step="train", corpus=("texts/a.jsonl",), licences=("MDN, CC-BY-SA-2.5",)).described
    assert described[0] == "a.jsonl: MDN, CC-BY-SA-2.5"


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


def test_a_folder_that_is_named_and_not_whole_is_spoken_of(here: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["released"])
    monkeypatch.setenv(released.VARIABLE, "nowhere")
    with pytest.raises(SystemExit, match="PERILUNE_NANO is 'nowhere'"):
        cli_released.main()
    assert chosen_model(DemoFlags()) is None and "the scripted model takes its place" in capsys.readouterr().err


def test_without_torch_the_demonstration_of_swarms_is_scripted_and_says_why(
    here: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(released.VARIABLE, str(stand_in / "models" / "perilune-nano"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "swarm", "demo", "--json", "--quiet"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    assert done.stderr.count("\n") == 1 and "needs torch" in done.stderr and "scripted model takes" in done.stderr


# Showing it ----------------------------------------------------------------------------------------------------------


def test_the_model_is_shown_in_a_chat_with_pictures_and_as_a_swarm(
    here: Path, stand_in: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = here / "another-name"  # a folder is served under its own
    shutil.copytree(stand_in / "models" / "perilune-nano", other)
    monkeypatch.setenv(released.VARIABLE, str(other))
    settings = cli_released.Settings(pictures=1, max_tokens=4, picture_tokens=8)
    assert cli_released.show(settings)
    said = capsys.readouterr().out
    assert "came to no answer" not in said
    for part in (
        "the released model",
        "another-name answers from",
        cli_released.QUESTIONS[0],
        "as SVG: score",
        "question: Find the",
        "of 9 right",
    ):
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


def test_the_released_model_is_a_start_of_parl(stand_in: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = load_script(monkeypatch, "parl_models")
    settings = models.Settings(
        step="all", recipe="nano", tiny=True, sft_steps=1, out=here, results=here / "rows.json", lookups=1
    )  # fmt: skip
    monkeypatch.setenv("PERILUNE_NANO", "")
    with pytest.raises(SystemExit, match="models/perilune-nano is not here: nothing to fine-tune"):
        models.main(settings)
    monkeypatch.setenv("PERILUNE_NANO", str(stand_in / "models" / "perilune-nano"))
    models.main(settings)
    assert {(row["row"], row["name"], row["recipe"]) for row in models.read_rows(settings.results)} == {
        ("sft", "sft-nano-mostly-serial-0", "nano"), ("worker", "sft-nano-mostly-serial-0", "nano"),
    }  # fmt: skip
    arms = load_script(monkeypatch, "parl_arms")
    wanted = arms.Settings(
        step="train", recipe="nano", out=here, lr=arms.NANO_LR, cooldown=arms.NANO_COOLDOWN
    )  # fmt: skip
    assert models.is_there(here, arms.start_of(wanted)) and arms.name_of(wanted) == "full-nano-0"
