"""`perilune export` and `perilune import` as a person meets them, and the verbs that take what they write."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from perilune.cli import main
from perilune.cli_hub import export_verb, import_verb, open_model
from perilune.train.run_folder import load_run, load_weights
from tests.hub import released

transformers = pytest.importorskip("transformers")

TINY = [
    "--trainer.steps", "2", "--trainer.global-batch-rows", "2", "--trainer.micro-batch-rows", "2",
    "--trainer.eval-rows", "2", "--data.seq-len", "32", "--data.corpus.num-documents", "40",
    "--trainer.no-tensorboard", "--trainer.no-report", "--model.hidden-size", "32",
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run named micro, and a released model beside it."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "micro", "--quiet", *TINY])
    released.kimi_linear(folder / "Kimi-Linear")
    return folder


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def fails(verb: Callable[[list[str]], None], *arguments: str) -> str:
    """The message of a call that must fail, in one line."""
    with pytest.raises(ValueError) as caught:
        verb(list(arguments))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_exported_under_a_name_of_its_own_with_its_card(inside: Path, capsys: pytest.CaptureFixture) -> None:
    export_verb(["micro"])
    assert "as model_type 'perilune'" in capsys.readouterr().out
    card = (inside / "micro-perilune" / "README.md").read_text()
    records = [json.loads(line) for line in (inside / "runs/micro/metrics.jsonl").read_text().splitlines()]
    assert f"{next(r for r in reversed(records) if r['kind'] == 'valid')['loss']:.4f}" in card
    assert "2 of 2" in card and "`generated`" in card
    export_verb(["micro", "there", "--to", "perilune", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == "there" and found["model_type"] == "perilune" and found["parameters"] > 0


def test_the_exported_run_writes_the_same_text_in_transformers(inside: Path, capsys: pytest.CaptureFixture) -> None:
    export_verb(["micro", "text"])
    capsys.readouterr()
    main(["generate", "micro", "--prompt", "def ", "--max-new-tokens", "15", "--temperature", "0", "--json"])
    ours = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained("text", trust_remote_code=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("text", trust_remote_code=True)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("def ", add_special_tokens=False)]])
    found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=15)[0, ids.shape[1] :]
    assert tokenizer.decode(found, skip_special_tokens=True) == ours["text"]


def test_what_was_exported_is_used_like_the_run(inside: Path, capsys: pytest.CaptureFixture) -> None:
    export_verb(["micro", "folder"])
    capsys.readouterr()
    texts = []
    for name in ("micro", "folder"):
        main(["generate", name, "--prompt", "import ", "--max-new-tokens", "10", "--seed", "4", "--json"])
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]
    main(["eval", "folder", "--no-domains", "--copy-lengths", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["copy"][0]["length"] == 4
    opened, run = open_model("folder"), open_model("micro")
    assert opened.tokenizer.fingerprint == run.tokenizer.fingerprint and run.name == "micro"
    fresh, _, config = load_run("runs/micro")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    load_weights("folder", fresh, config)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), run.model.parameters(), strict=True))


def test_a_released_model_is_imported_among_the_runs_and_generates(inside: Path, capsys: pytest.CaptureFixture) -> None:
    import_verb(["Kimi-Linear"])
    shown = capsys.readouterr().out
    assert "vocabulary from tiktoken.model; try: perilune generate Kimi-Linear" in shown
    main(["generate", "Kimi-Linear", "--prompt", "中文 reads", "--max-new-tokens", "6", "--json"])
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 6
    import_verb(["Kimi-Linear", "elsewhere", "--json"])
    assert json.loads(capsys.readouterr().out)["tokenizer"] == "tiktoken.model"
    export_verb(["elsewhere", "again", "--to", "kimi_linear", "--json"])
    assert json.loads(capsys.readouterr().out)["model_type"] == "kimi_linear"


def test_what_cannot_be_done_is_one_line(inside: Path) -> None:
    assert "model.residual='block_attnres'" in fails(export_verb, "micro", "x", "--to", "kimi_linear")
    assert "there is no run 'none'" in fails(export_verb, "none")
    assert "other than an exported model" in fails(export_verb, "micro", "runs/micro")
    assert "is not a folder" in fails(import_verb, "nowhere")
    assert "names no model_type" in fails(import_verb, "runs/micro")
    assert "holds no config.json" in fails(import_verb, "runs")
    assert not (inside / "x").exists()
