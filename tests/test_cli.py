"""The command line as a person meets it: help, wrong input, and the four verbs on a tiny run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.cli import main
from perilune.train import load_run
from tests.peers import torchvision_stub

TINY = [
    "--trainer.steps", "3", "--trainer.global-batch-rows", "2", "--trainer.micro-batch-rows", "2",
    "--trainer.eval-rows", "2",
    "--data.seq-len", "32", "--data.corpus.num-documents", "40", "--trainer.no-tensorboard",
    "--model.hidden-size", "32", "--trainer.sample-prompts", "def ", "--trainer.sample-tokens", "5",
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run named micro."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "micro", "--quiet", *TINY])
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a call that must fail with one line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert isinstance(stop.value.code, int)
    return stop.value.code, error


def one_line(error: str) -> str:
    assert error.startswith("perilune: ") and error.count("\n") == 1, error
    return error


def test_training_leaves_a_complete_run_folder(inside: Path) -> None:
    run = inside / "runs" / "micro"
    assert {"config.json", "metrics.jsonl", "tokenizer.json", "report.html", "checkpoints"} <= {
        p.name for p in run.iterdir()
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3]
    assert json.loads((run / "config.json").read_text())["model"]["hidden_size"] == 32
    assert "<svg" in (run / "report.html").read_text()


def test_generate_streams_and_json_holds_the_same_text(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "micro", "--prompt", "def ", "--max-new-tokens", "12", "--seed", "3"]
    main(arguments)
    streamed = capsys.readouterr().out
    main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert streamed == found["prompt"] + found["text"] + "\n"
    assert len(found["tokens"]) <= 12
    main(["generate", str(inside / "runs" / "micro"), "--max-new-tokens", "1"])  # a folder works as well as a name


def test_resume_continues_the_named_run_with_its_own_config(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "micro", "--resume", "--json", "--trainer.steps", "4"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 4
    assert json.loads((inside / "runs/micro/config.json").read_text())["data"]["seq_len"] == 32


def test_a_copy_of_a_run_goes_on_by_itself_and_leaves_the_run_alone(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(inside / "runs/micro", inside / "runs/copied")
    before = (inside / "runs/micro/config.json").stat().st_mtime_ns
    main(["train", "copied", "--resume", "--json", "--trainer.steps", "5"])
    assert Path(json.loads(capsys.readouterr().out)["run"]) == Path("runs/copied")
    assert (inside / "runs/micro/config.json").stat().st_mtime_ns == before


def test_data_shows_documents_tokens_and_borders(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "micro", "--json", *TINY])
    found = json.loads(capsys.readouterr().out)
    assert found["splits"]["train"]["tokens"] > 0 and len(found["rows"]) == 3
    main(["data", "micro", *TINY])
    assert "bytes/token" in capsys.readouterr().out


def test_doctor_names_versions_and_checks_operators(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["operators"] == {"attention": "ok", "kda": "ok"}
    main(["doctor"])
    assert "torch" in capsys.readouterr().out


def test_export_of_a_plain_residual_run_is_what_transformers_loads(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torchvision_stub.declare_operators()
    transformers = pytest.importorskip("transformers")
    main(["train", "micro", "--name", "plain", "--model.residual", "plain", "--quiet", *TINY])
    main(["export", "plain", "exported", "--json"])
    assert '"model_type": "kimi_linear"' in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported")
    ours, own_tokenizer, _ = load_run(inside / "runs" / "plain")
    ids = own_tokenizer.encode("def f(x):\n    return x")
    assert tokenizer.encode("def f(x):\n    return x", add_special_tokens=False) == ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[BOS]", "[EOS]", "[PAD]")
    torch.testing.assert_close(theirs(torch.tensor([ids])).logits, ours(torch.tensor([ids])), rtol=1e-4, atol=1e-4)


def test_what_transformers_lacks_is_exported_under_our_own_type(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", "micro", "own", "--json"])
    assert json.loads(capsys.readouterr().out)["model_type"] == "perilune"


@pytest.mark.parametrize("arguments", [
    ["train", "micro", "--resume", "--runs=runs"],
    ["train", "micro", "--runs=./runs", "--resume", "--set=trainer.eval_every=1"],
    ["train", "runs/micro", "--resume"],
])  # fmt: skip
def test_equals_forms_and_folders_mean_the_same_run(
    arguments: list[str], inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*arguments, "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert Path(summary["run"]) == Path("runs/micro") and summary["steps"] >= 3


def test_ctrl_c_outside_training_is_one_line_and_130(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perilune.train.run_folder.load_run", interrupted)
    code, error = fails(capsys, "generate", "micro")
    assert code == 130 and one_line(error) == "perilune: interrupted\n"


def test_a_bug_shows_its_traceback_instead_of_one_line(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.train.run_folder.load_run", lambda *_, **__: {}["missing"])
    with pytest.raises(KeyError):
        main(["generate", "micro"])


def test_report_can_be_written_again(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "micro", "--json"])
    assert Path(json.loads(capsys.readouterr().out)["report"]).exists()


@pytest.mark.parametrize(("arguments", "code", "text"), [
    (["trian", "nano"], 2, "did you mean 'train'"),
    (["train"], 2, "RECIPE is missing"),
    (["train", "nanp"], 1, "did you mean 'nano'"),
    (["train", "micro"], 1, "already holds a run"),
    (["train", "micro", "--resume", "--set", "model.hiden_size=8"], 1, "did you mean 'hidden_size'"),
    (["train", "micro", "--resume", "--set", "model.hidden_size=tall"], 1, "expected int"),
    (["train", "micro", "--resume", "--set", "model.hidden_size=48"], 1, "model.hidden_size: 32 -> 48"),
    (["train", "nano", "--data.corpus.source", "nowhere"], 1, "nowhere"),
    (["train", "micro", "--overwrite", "--data.corpus.source", "empty"], 1, "empty"),
    (["generate", "micra"], 1, "did you mean 'micro'"),
    (["generate", "micro", "--temperature", "-1"], 1, "temperature must be >= 0"),
    (["export", "micro", "runs/micro/config.json"], 1, "is a file"),
    (["report", "nobody"], 1, "there is no run 'nobody'"),
    (["train", "micro", "--name", "../x"], 1, "name is '../x'"),
    (["train", "micro", "--resume", "--set", "model.moe.num_experts=4"], 1, "'moe' is not set"),
    (["train", "micro", "--resume", "--set", "name"], 1, "expected path=value"),
    (["data", "micro", "--rows", "-1"], 1, "--rows is -1"),
    (["export", "micro", "runs/micro"], 1, "other than an exported model"),
    (["generate", "micro", "--temperature", "nan"], 1, "temperature must be"),
    (["generate", "micro", "--seed", "99999999999999999999"], 1, "seed must be in"),
    (["generate", "micro", "--device", "abacus"], 1, "--device is 'abacus'"),
    (["generate", "micro", "--device", "meta"], 1, "which is not there"),
    (["train", "micro", "--overwrite", "--trainer.device", "abacus"], 1, "abacus"),
    (["train", "micro", "--overwrite", "--trainer.tracker", "trackio"], 1, "trackio"),
])  # fmt: skip
def test_wrong_input_gives_one_clear_line_and_a_failing_exit(
    arguments: list[str], code: int, text: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "empty").mkdir(exist_ok=True)
    before = sorted(path for path in inside.rglob("*") if ".cache" not in path.parts)
    found, error = fails(capsys, *arguments)
    assert found == code and text in (one_line(error) if code == 1 else error)
    assert sorted(path for path in inside.rglob("*") if ".cache" not in path.parts) == before, "left something behind"


def test_unknown_fields_name_the_nearest_and_exit_with_2(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = fails(capsys, "train", "nano", "--optimizer.wieght-decay", "1")
    assert code == 2 and "--optimizer.weight-decay" in error
    code, error = fails(capsys, "train", "nano", "--trainer.stepz", "1")
    assert code == 2 and "--trainer.steps" in error


def test_a_corrupt_tokenizer_or_checkpoint_is_one_clear_error(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = inside / "runs" / "micro"
    good = (run / "tokenizer.json").read_text()
    (run / "tokenizer.json").write_text(good[: len(good) // 2])
    assert fails(capsys, "generate", "micro")[0] == 1
    (run / "tokenizer.json").write_text(good)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "model": {**config["model"], "hidden_size": 64}}))
    code, error = fails(capsys, "generate", "micro")
    assert code == 1 and one_line(error)
    (run / "config.json").write_text(json.dumps(config))


def test_help_of_every_verb_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["train", "nano"],
        ["generate", "x"],
        ["view", "x"],
        ["data", "nano"],
        ["report", "x"],
        ["export", "x", "y"],
        ["doctor"],
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--help"])
        assert stop.value.code == 0
        assert "example: perilune" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "perilune train nano" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb, flags",
    [
        ("export", {"--to", "--runs"}),
        ("import", {"--runs", "--json"}),
        ("train", {"--resume", "--trainer.steps", "--optimizer.lr"}),
        ("data", {"--rows"}),
        ("report", {"--png"}),
        ("generate", {"--prompt"}),
        ("view", {"--count"}),
        ("rl", {"--iterations", "--learner.routing-replay"}),
    ],
)
def test_help_without_a_name_shows_the_flags_and_an_example(capsys, verb: str, flags: set[str]) -> None:
    for asked in ("--help", "-h"):
        with pytest.raises(SystemExit) as stop:
            main([verb, asked])
        assert stop.value.code == 0
        said = capsys.readouterr().out
        words = {word.strip(",[]") for word in said.split()}
        assert flags <= words and f"example: perilune {verb} " in said and "comes first: " in said


def test_help_needs_no_torch() -> None:
    code = """
import sys
from perilune.cli import main
try:
    main(["--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
