"""`perilune sft` as a person meets it: a file of dialogues, a recipe, adapters, resume, and wrong input."""

import json
import shutil
from pathlib import Path

import pytest

from perilune import cli
from perilune.cli import main
from perilune.model.lora import has_adapters
from perilune.train import load_run
from perilune.train.run_folder import read_config
from tests.test_cli import TINY, fails, one_line

FAST = ["--trainer.no-tensorboard", "--trainer.no-report", "--data.seq-len", "64", "--trainer.global-batch-rows", "2"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(30)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "oops\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "micro", "--quiet", *TINY])
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setitem(cli.VERBS, "sft", cli._verb_of("sft"))
    return workplace


def test_a_file_of_dialogues_makes_a_chat_run(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sft", "micro", "--data", "chats.jsonl", "--name", "talks", "--epochs", "2", "--json", *FAST])
    summary = json.loads(capsys.readouterr().out)
    assert summary["left_out"]["count"] == 1 and summary["dialogues"]["train"] + summary["dialogues"]["valid"] == 30
    config = read_config(inside / "runs" / "talks")
    assert config.data.chat is not None and config.data.chat.sources == ("chats.jsonl",)
    assert summary["epochs"] == pytest.approx(2, abs=0.5) and summary["steps"] == config.trainer.steps
    main(["generate", "talks", "--prompt", "x", "--max-new-tokens", "3"])


def test_broken_rows_are_shown_at_the_start(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sft", "micro", "--data", "chats.jsonl", "--name", "loud", "--trainer.steps", "1", *FAST])
    said = capsys.readouterr()
    assert "1 rows left out: 1 not JSON" in said.out + said.err and "perilune chat loud" in said.out


def test_adapters_are_trained_merged_for_use_and_written_apart(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lora.rank", "2", "--adapters", "apart", "--trainer.steps", "2"]
    main(["sft", "micro", "--data", "chats.jsonl", "--name", "light", "--quiet", *flags, *FAST])
    assert read_config(inside / "runs" / "light").lora.rank == 2
    assert not has_adapters(load_run(inside / "runs" / "light")[0])
    settings = json.loads((inside / "apart" / "adapter_config.json").read_text())
    assert settings["r"] == 2 and (inside / "apart" / "adapter_model.safetensors").exists()
    main(["generate", "light", "--prompt", "x", "--max-new-tokens", "3"])


def test_a_recipe_needs_no_file(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sft", "micro", "--recipe", "none", "--dialogues", "20", "--name", "control", "--trainer.steps", "1",
          "--quiet", *FAST, "--data.seq-len", "512"])  # fmt: skip
    config = read_config(inside / "runs" / "control")
    assert config.data.chat is not None and "none-20-0" in config.data.chat.sources[0]


def test_an_exported_folder_is_fine_tuned_and_a_foreign_template_is_mentioned(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", "micro", "./exported"])
    flags = ["--data", "chats.jsonl", "--trainer.steps", "1", "--overwrite", "--name", "of-folder", *FAST]
    main(["sft", "./exported", *flags])
    assert "template" not in capsys.readouterr().err
    (inside / "exported" / "chat_template.jinja").write_text("{{ messages }}")
    main(["sft", "./exported", *flags])
    assert "brings a chat template of its own" in capsys.readouterr().err
    assert read_config(inside / "runs" / "of-folder").start_from == "exported"


def test_resume_goes_on_with_its_own_config(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sft", "micro", "--data", "chats.jsonl", "--name", "again", "--trainer.steps", "2", "--quiet", *FAST])
    main(["sft", "again", "--resume", "--trainer.steps", "3", "--json"])
    assert json.loads(capsys.readouterr().out.rpartition("\n{\n")[2].join(["{\n", ""]))["steps"] == 3
    main(["train", "again", "--resume", "--trainer.steps", "4", "--quiet"])


def test_a_copy_goes_on_by_itself(inside: Path) -> None:
    main(["sft", "micro", "--data", "chats.jsonl", "--name", "first", "--trainer.steps", "1", "--quiet", *FAST])
    shutil.copytree(inside / "runs" / "first", inside / "runs" / "copied")
    main(["sft", "copied", "--resume", "--trainer.steps", "2", "--quiet"])
    steps = {name: read_config(inside / "runs" / name).trainer.steps for name in ("first", "copied")}
    assert steps == {"first": 1, "copied": 2}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nope", "--data", "chats.jsonl"], "there is no run 'nope'"),
        (["micro"], "nothing to train on: give --data"),
        (["micro", "--data", "absent.jsonl"], "'absent.jsonl' is not a file"),
        (["micro", "--data", "chats.jsonl", "--recipe", "none"], "give one of them"),
        (["micro", "--recipe", "zeros"], "known are zero_vision, text_image, none"),
        (["micro", "--recipe", "none", "--dialogues", "0"], "count is 0"),
        (["micro", "--data", "chats.jsonl", "--epochs", "0"], "--epochs is 0.0"),
        (["micro", "--data", "chats.jsonl", "--adapters", "x"], "lora.rank is 0"),
        (["micro", "--data", "chats.jsonl", "--name", "micro", "--overwrite"], "give the new one another name"),
        (["micro", "--data", "chats.jsonl", "--data.seq-len", "4"], "none of 30 dialogues can be trained on"),
        (["micro", "--resume"], "is not a fine-tuning"),
    ],
)
def test_wrong_input_is_one_line(
    inside: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, error = fails(capsys, "sft", *arguments, "--quiet")
    assert code == 1 and words in one_line(error)


def test_help_has_examples_and_the_fields_of_a_run(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sft", "micro", "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for words in ("example: perilune sft micro --data chats.jsonl", "--lora.rank", "--data.chat.valid-fraction"):
        assert words in shown
