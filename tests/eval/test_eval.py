"""What a run can do: numbers that agree with the trainer's, and probes that a perfect reader passes."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.train.tiny_runs import MODEL, tiny_run

from perilune.cli import main
from perilune.data import Corpus, Tokenizer
from perilune.data.probes.needle import KEYS, needle_row, value_tokens
from perilune.eval import EvalConfig, evaluate_run
from perilune.eval.held_out import HeldOut, held_out
from perilune.eval.needle import needle_accuracy
from perilune.eval.positions import bucket_borders, loss_by_position
from perilune.model import Decoder
from perilune.train import RunConfig, load_run, scores, train
from perilune.train.copying import copy_accuracy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    changes = {"vocab_size": 512}
    config = tiny_run(
        folder / "cache",
        model=changes,
        data=changes,
        trainer={"steps": 3, "sample_prompts": (), "eval_rows": 1000},
    )
    train(config, runs_folder=folder, quiet=True)
    return folder / "tiny"


@pytest.fixture(scope="module")
def parts(run: Path) -> tuple[Decoder, Tokenizer, RunConfig, HeldOut]:
    model, tokenizer, config = load_run(run)
    return model, tokenizer, config, held_out(config.data.corpus, tokenizer)


def reader(answer: Callable[[list[int]], int], vocab_size: int) -> Decoder:
    """A decoder whose next token is what `answer` says of the tokens so far."""
    model = Decoder(MODEL)

    def hidden(tokens_BT: torch.Tensor) -> torch.Tensor:
        picked = [[answer(row[: at + 1]) for at in range(len(row))] for row in tokens_BT.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(picked), vocab_size).float()

    model.hidden = hidden  # type: ignore[method-assign, assignment]
    model.logits = lambda states: 100.0 * states  # type: ignore[method-assign, assignment]
    return model


def test_domains_together_are_the_validation_of_the_run(run: Path) -> None:
    found = evaluate_run(run, EvalConfig(rows=1000, copy_lengths=()), device=CPU)
    assert set(found["domains"]) <= {"program", "prose", "recall", "nested", "sequence"} and len(found["domains"]) > 1
    assert all(numbers["whole"] for numbers in found["domains"].values())
    config = load_run(run)[2]
    total = Corpus(config.data.corpus).summary.num_bytes["valid"]
    assert sum(numbers["bytes"] for numbers in found["domains"].values()) == total
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = [record for record in records if record["kind"] == "valid"][-1]["bits_per_byte"]
    mean = sum(numbers["bits_per_byte"] * numbers["bytes"] for numbers in found["domains"].values()) / total
    # Rows are cut elsewhere, so a few tokens see less context: not the same number, but nearly.
    assert mean == pytest.approx(whole, rel=0.02)


def test_small_domains_are_joined(parts: tuple) -> None:
    _, tokenizer, config, text = parts
    two = held_out(config.data.corpus, tokenizer, max_domains=2)
    assert len(two.stores) == 2 and list(two.stores)[1] == "others"
    assert sum(store.num_bytes for store in two.stores.values()) == sum(s.num_bytes for s in text.stores.values())


def test_scores_are_those_of_the_logits_in_any_piece(parts: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _, text = parts
    tokens = torch.from_numpy(text.text[:41])
    logits = model(tokens[None, :-1])
    for elements in (1, 7 * 512, 1 << 26):
        monkeypatch.setattr(scores, "PIECE_ELEMENTS", elements)
        with scores.evaluating(model):
            nats, right = scores.token_scores(model, tokens[None, :-1], tokens[None, 1:])
        expected = torch.nn.functional.cross_entropy(logits[0], tokens[1:], reduction="none")
        torch.testing.assert_close(nats[0], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(right[0], logits[0].argmax(-1) == tokens[1:])


def test_copying_is_perfect_for_who_looks_back_and_chance_for_who_does_not(parts: tuple) -> None:
    model, tokenizer, _, _ = parts
    length = 12

    def look_back(tokens: list[int]) -> int:
        return tokens[-length] if len(tokens) > length else 0

    perfect = copy_accuracy(reader(look_back, 512), tokenizer, length=length, rows=3, device=CPU)
    assert perfect["accuracy"] == 1.0 and perfect["nats"] < 1e-3 < perfect["nats_first_half"]
    assert copy_accuracy(model, tokenizer, length=length, rows=3, device=CPU)["accuracy"] < 0.3
    assert copy_accuracy(reader(lambda _: 0, 512), tokenizer, length=length, rows=3, device=CPU)["accuracy"] < 0.1


def test_needles_lie_where_they_say_and_questions_end_before_their_answers(parts: tuple) -> None:
    _, tokenizer, _, text = parts
    rows = [needle_row(text.text, tokenizer, length=700, needles=3, number=number) for number in range(4)]
    for row in rows:
        assert len(row.tokens) == 700 and row.tokens[0] == tokenizer.bos_id
        written = tokenizer.decode(row.tokens)
        places = []
        for at, answer in zip(row.asked_at, row.answers):
            question = tokenizer.decode(row.tokens[at - 20 : at + 1].tolist()).rpartition("\n")[2]
            assert question.startswith("The code word of the ") and question.endswith(" is")
            fact = question + tokenizer.decode([int(answer)]) + "."
            places.append(written.index(fact))
        assert np.argsort(places).tolist() == np.argsort(row.depths).tolist() and max(row.depths) < 1
        assert max(places) < written.index("The code word", max(places) + 1)
        first = row.tokens[row.asked_at[:-1] + 1]
        assert np.array_equal(first, row.answers[:-1]), "an answer follows its question"
        assert len(set(row.answers.tolist())) == 3
    assert len({row.tokens.tobytes() for row in rows}) == 4
    again = needle_row(text.text, tokenizer, length=700, needles=3, number=2)
    assert np.array_equal(again.tokens, rows[2].tokens)


def test_who_reads_finds_every_needle_and_who_does_not_finds_as_many_as_chance(parts: tuple) -> None:
    model, tokenizer, _, text = parts
    names = {tuple(tokenizer.encode(f" {key} is")): key for key in KEYS}
    values = set(value_tokens(tokenizer).tolist())

    def look_up(tokens: list[int]) -> int:
        for question in names:
            if tuple(tokens[-len(question) :]) == question:
                for at in range(len(tokens) - len(question)):
                    if tuple(tokens[at : at + len(question)]) == question and tokens[at + len(question)] in values:
                        return tokens[at + len(question)]
        return 0

    settings = {"length": 500, "needles": 3, "rows": 2, "device": CPU}
    found = needle_accuracy(reader(look_up, 512), tokenizer, text, **settings)
    assert found["ranked"] == found["exact"] == 1.0 and found["questions"] == 6 and found["nats"] < 1e-3
    assert [share for share in found["ranked_by_depth"] if share is not None] == pytest.approx([1.0] * 3, abs=0)
    blind = needle_accuracy(model, tokenizer, text, **settings)
    assert blind["exact"] == 0.0 and blind["chance"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("length", "expected"), [(64, [0, 64]), (65, [0, 64, 65]), (256, [0, 64, 128, 256]), (9, [0, 9])]
)
def test_buckets_double_and_end_at_the_length(length: int, expected: list[int]) -> None:
    assert bucket_borders(length) == expected


def test_loss_by_position_is_the_mean_over_rows_of_each_bucket(parts: tuple) -> None:
    model, tokenizer, _, text = parts
    found = loss_by_position(model, text, length=100, rows=2, device=CPU)
    expected = []
    for row in range(2):
        tokens = torch.from_numpy(np.append(tokenizer.bos_id, text.text[100 * row : 100 * (row + 1)]))
        with scores.evaluating(model):
            expected.append(scores.token_scores(model, tokens[None, :-1], tokens[None, 1:])[0][0])
    nats = torch.stack(expected).double()
    assert [(bucket["from"], bucket["to"], bucket["tokens"]) for bucket in found] == [(0, 64, 128), (64, 100, 72)]
    assert found[1]["nats"] == pytest.approx(float(nats[:, 64:].mean()))
    assert found[1]["standard_error"] == pytest.approx(float(nats[:, 64:].std(correction=0)) / math.sqrt(72))
    size = text.bytes_per_token[text.text[:200].reshape(2, 100)[:, :64]].sum()
    assert found[0]["bits_per_byte"] == pytest.approx(float(nats[:, :64].sum()) / math.log(2) / size)


def test_the_command_prints_one_table_and_json_holds_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", str(run), "--rows", "4", "--copy-lengths", "8", "--positions", "128", "--needle", "400"]
    main([*arguments, "--needles", "3", "--needle-rows", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["copy"][0]["length"] == 8 and found["needle"][0]["length"] == 400 and len(found["positions"]) == 2
    main([*arguments, "--needles", "3", "--needle-rows", "1"])
    shown = capsys.readouterr().out
    for text in ("bits per byte", "copying", "loss by position", "needles found"):
        assert text in shown


@pytest.mark.parametrize(("arguments", "text"), [
    (["--needle", "100"], "too short for 8 needles"),
    (["--needle", "900000"], "tokens of held-out text"),
    (["--positions", "900000"], "held-out text has only"),
    (["--needle", "400", "--needles", "99"], "needles is 99"),
    (["--rows", "0"], "rows is 0"),
    (["--corpus", "nowhere"], "nowhere"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_one_line(
    arguments: list[str], text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(run), *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 1 and text in error and error.count("\n") == 1
