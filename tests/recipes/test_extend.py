"""Extending a run: same weights, tokenizer and tokens a batch; longer rows; positions where there are any."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.train.tiny_runs import tiny_run

from perilune.cli import main
from perilune.data import Corpus, CorpusConfig
from perilune.model import RopeConfig
from perilune.recipes.extend import LR_SHARE, extend
from perilune.train import RunError, load_run, train
from perilune.train.run_folder import load_weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with rotary positions, in rows of 32."""
    folder = tmp_path_factory.mktemp("source")
    config = tiny_run(folder / "cache", trainer={"steps": 4, "sample_prompts": ()})
    rope = replace(config.model.mla, rope=RopeConfig())
    train(replace(config, model=replace(config.model, mla=rope)), runs_folder=folder / "runs", quiet=True)
    return folder / "runs" / "tiny"


def test_an_extended_run_starts_from_the_weights_and_tokenizer_of_its_source(source: Path, tmp_path: Path) -> None:
    before, tokenizer, config = load_run(source)
    extended = extend(config, source, length=128, steps=2)
    starts: dict[str, torch.Tensor] = {}
    summary = train(
        extended, runs_folder=tmp_path, quiet=True, initialize=lambda model: starts.update(model.state_dict())
    )
    assert {name: tensor.shape for name, tensor in starts.items()} == {
        name: tensor.shape for name, tensor in before.state_dict().items()
    }
    after, own_tokenizer, own = load_run(tmp_path / "tiny-128")
    assert own_tokenizer.fingerprint == tokenizer.fingerprint and own.start_from == str(source)
    assert summary["tokens"] == 2 * 4 * 32, "as many tokens a step as before"
    assert any(not torch.equal(a, b) for a, b in zip(before.state_dict().values(), after.state_dict().values()))


def test_weights_before_the_first_step_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    before, _, config = load_run(source)
    copies: dict[str, torch.Tensor] = {}

    def keep(model: torch.nn.Module) -> None:
        copies.update({name: tensor.clone() for name, tensor in model.state_dict().items()})

    train(extend(config, source, length=64, steps=1), runs_folder=tmp_path, quiet=True, initialize=keep)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in before.state_dict().items())


def test_what_follows_from_the_source(source: Path) -> None:
    config = load_run(source)[2]
    found = extend(config, source, length=64)
    assert found.trainer.global_batch_rows * found.data.seq_len == config.trainer.global_batch_rows * 32
    assert found.optimizer.lr == LR_SHARE * config.optimizer.lr and found.schedule.decay_fraction == 1.0
    assert found.model.mla.rope == RopeConfig(factor=2.0, original_max_position_embeddings=32)
    assert extend(config, source, length=1024).trainer.global_batch_rows == 1, "a row may be more than a batch was"
    nope = replace(config, model=replace(config.model, mla=replace(config.model.mla, rope=None)))
    assert extend(nope, source, length=64).model == nope.model
    with pytest.raises(ValueError, match="expected more than the 32 tokens"):
        extend(config, source, length=32)


def test_another_model_is_refused(source: Path) -> None:
    model, _, config = load_run(source)
    other = replace(config, model=replace(config.model, hidden_size=48))
    with pytest.raises(RunError, match=r"model.hidden_size: 32 -> 48"):
        load_weights(source, model, other)


def test_documents_of_one_domain_and_split_are_joined_for_long_rows(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    kinds = [("a", "train"), ("a", "train"), ("a", "valid"), ("a", "train"), ("b", "train"), ("b", "train")]
    lines = [
        {"text": f"text {n} " + "x" * 20, "domain": domain, "split": split} for n, (domain, split) in enumerate(kinds)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = CorpusConfig(source=str(path), split_field="split", join_characters=60)
    texts = [(document.text.count("text"), document.domain) for document in Corpus(whole).documents("train")]
    assert texts == [(2, "a"), (1, "a"), (2, "b")]
    assert [document.text.count("text") for document in Corpus(whole).documents("valid")] == [1]
    one = next(iter(Corpus(whole).documents("train")))
    assert one.text == f"{lines[0]['text']}\n\n{lines[1]['text']}" and one.id == "corpus.jsonl:1+1"
    short = replace(whole, join_characters=59)
    assert [document.text.count("text") for document in Corpus(short).documents("train")] == [2, 1, 2]
    assert len(list(Corpus(replace(whole, join_characters=0)).documents("train"))) == 5

    config = load_run(source)[2]
    split = replace(config.data.corpus, source=str(path), split_field="split")
    corpus = extend(replace(config, data=replace(config.data, corpus=split)), source, length=64).data.corpus
    assert corpus.join_characters == 256 and extend(config, source, length=64).data.corpus.join_characters == 0
    with pytest.raises(ValueError, match="needs split_field"):
        CorpusConfig(source=str(path), join_characters=10)


def test_the_command_extends_a_run_by_name(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parents[1])
    main(["train", "extend", "--from", "tiny", "--length", "64", "--steps", "1", "--optimizer.lr", "0.5", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["run"], summary["steps"]) == ("runs/tiny-64", 1)
    assert load_run("runs/tiny-64")[2].optimizer.lr == 0.5
    main(["train", "tiny-64", "--resume", "--trainer.steps", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    main(["eval", "tiny-64", "--rows", "2", "--copy-lengths", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["trained_length"] == 64
    for arguments, text in ((["--length", "64"], "--from is missing"), (["--from", "tinny"], "did you mean 'tiny'")):
        with pytest.raises(SystemExit):
            main(["train", "extend", *arguments])
        assert text in capsys.readouterr().err
