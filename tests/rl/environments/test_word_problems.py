"""Word problems: what counts as the answer, and files with broken rows."""

import json
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from perilune.rl.environments.word_problems import ProblemError, WordProblems, final_number, number_of
from tests.rl.environments.said import played


@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from(["train", "test"]))
def test_a_generated_answer_follows_from_its_sentences(number, steps, split):
    task = WordProblems(steps=steps).task(number, split)
    stock = 0
    for sentence in re.split(r"(?<=[.?]) ", task.data["question"]):
        numbers = [int(each) for each in re.findall(r"\d+", sentence)]
        if " has " in sentence:
            (stock,) = numbers
        elif "of them to" in sentence:
            stock -= numbers[0]
        elif "bags with" in sentence:
            stock += numbers[0] * numbers[1]
        elif "doubles" in sentence:
            stock *= 2
        elif "buys" in sentence:
            stock += numbers[0]
    assert stock >= 0 and task.data["answer"] == str(stock)


@given(st.integers(0, 10**6), st.integers(16, 120))
def test_the_numbers_of_a_generated_problem_keep_to_its_largest(number, largest):
    question = WordProblems(steps=3, largest=largest).task(number, "train").data["question"]
    assert 4 <= int(re.findall(r"has (\d+)", question)[0]) <= largest
    assert all(2 <= int(bought) <= largest // 4 for bought in re.findall(r"buys (\d+) more", question))
    bags = re.findall(r"gets (\d+) bags with (\d+)", question)
    assert all(2 <= int(count) <= largest // 4 and 2 <= int(each) <= largest // 8 for count, each in bags)


def test_train_and_test_share_no_generated_problem():
    environment = WordProblems(steps=1)
    names = {split: {environment.task(number, split).name for number in range(400)} for split in ("train", "test")}
    assert not names["train"] & names["test"]


@pytest.mark.parametrize(
    "reply,found",
    [
        ("#### 72", "72"),
        ("It costs $1,200.00", "1200"),
        ("3 + 4 = 7. #### 7 and 9 more", "7"),
        ("#### 1\n#### -5", "-5"),
        ("about 2.50 euros", "2.5"),
        ("none", None),
        ("", None),
        ("9" * 500, None),
        ("#### 1e999999999", "1"),
    ],
)
def test_the_number_after_the_marks_counts_else_the_last(reply, found):
    assert final_number(reply) == (None if found is None else number_of(found))


def test_a_right_reply_counts_and_its_form_is_told():
    environment = WordProblems()
    task = environment.task(1, "train")
    assert played(environment, task, f"So it is #### {task.data['answer']}")[0] == {"outcome": 1.0, "format": 1.0}
    assert played(environment, task, f"{task.data['answer']}.00")[0] == {"outcome": 1.0, "format": 0.0}
    assert played(environment, task, "")[0] == {"outcome": 0.0, "format": 0.0}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_file_of_problems_with_broken_rows(tmp_path: Path, suffix):
    rows = [
        *(json.dumps({"question": f"What is {n} + 1?", "answer": f"It is\n#### {n + 1:,}"}) for n in range(2000, 2030)),
        "not json", json.dumps({"question": "no answer"}), json.dumps({"question": "x", "answer": "#### many"}),
        json.dumps([1]), "",
    ]  # fmt: skip
    raw = "\n".join(rows).encode()
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(zstandard.ZstdCompressor().compress(raw) if suffix.endswith("zst") else raw)
    environment = WordProblems(source=str(path))
    train = {environment.task(number, "train").name for number in range(60)}
    test = {environment.task(number, "test").name for number in range(60)}
    assert len(train) == 27 and len(test) == 3 and not train & test
    assert environment.num_broken == 4  # the empty line is none
    task = environment.task(0, "test")
    assert task.data == {"question": "What is 2000 + 1?", "answer": "2001"}
    assert played(environment, task, "2,001")[0]["outcome"] == 1.0


def test_a_file_without_problems_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(ProblemError, match="holds no problem: expected JSON lines"):
        WordProblems(source=str(tmp_path / "a.jsonl")).task(0, "train")


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="steps"):
        WordProblems(steps=0)
    with pytest.raises(ValueError, match="largest is 8"):
        WordProblems(largest=8)


def test_a_question_that_comes_twice_is_in_one_split(tmp_path):
    rows = [{"question": f"{number // 2} + 1?", "answer": f"#### {number // 2 + 1}"} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = WordProblems(source=str(tmp_path / "rows.jsonl"))
    found = {split: {environment.task(number, split).name for number in range(60)} for split in ("train", "test")}
    assert found["train"] and found["test"] and not found["train"] & found["test"]
