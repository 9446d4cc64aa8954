"""Probe rows: answers follow from what came before, rows are addressed, nothing is repeated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.packing import IGNORED
from perilune.data.probes import TASKS, ProbeConfig, ProbeRows, mqar, palindrome, stack
from perilune.data.probes.draws import Draws
from perilune.data.probes.rows import short_lengths

LENGTHS = st.integers(16, 97)


def rows_of(task: str, *, seq_len: int, seed: int = 0, held_out: bool = False, **changes) -> ProbeRows:
    config = ProbeConfig(task=task, **{"num_stacks": 3, **changes})
    return ProbeRows(config, seq_len=seq_len, vocab_size=64, seed=seed, held_out=held_out)


def each(rows: ProbeRows, count: int = 3):
    """(tokens, answers) of every row, as lists."""
    tokens, answers = rows.generate(np.arange(count))
    assert tokens.shape == (count, rows.seq_len + 1) and answers.shape == (count, rows.seq_len)
    assert tokens.min() >= 0 and tokens.max() < rows.vocab_size
    return [(row.tolist(), np.flatnonzero(mask).tolist()) for row, mask in zip(tokens, answers)]


@settings(max_examples=40)
@given(seq_len=LENGTHS, seed=st.integers(0, 99), density=st.sampled_from((4, 7, 16)))
def test_mqar_shows_every_pair_once_and_asks_for_as_many_later(seq_len: int, seed: int, density: int) -> None:
    pairs = max(1, seq_len // density)
    for tokens, answers in each(rows_of("mqar", seq_len=seq_len, seed=seed, num_pairs=min(pairs, 24))):
        first_value = mqar.NOISE + (64 - mqar.NOISE) // 2
        keys = [at for at, token in enumerate(tokens) if mqar.NOISE <= token < first_value]
        shown, asked = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        assert shown[-1] < (seq_len + 1) // 2 <= asked[0]
        value = {tokens[at]: tokens[at + 1] for at in shown}
        assert len(value) == len(shown) == min(pairs, 24), "keys are different"
        assert len(asked) == len(shown)
        assert answers == asked and all(value[tokens[at]] == tokens[at + 1] for at in asked)
        assert all(token >= first_value for token in value.values())


@settings(max_examples=20)
@given(seq_len=LENGTHS, seed=st.integers(0, 99))
def test_palindromes_read_the_same_from_both_ends(seq_len: int, seed: int) -> None:
    for tokens, answers in each(rows_of("palindrome", seq_len=seq_len, seed=seed)):
        half = seq_len // 2
        assert tokens == tokens[::-1] and palindrome.SEPARATOR not in tokens[:half]
        assert tokens[half] == palindrome.SEPARATOR
        assert answers == list(range(seq_len - half, seq_len))


@settings(max_examples=40)
@given(seq_len=LENGTHS, seed=st.integers(0, 99), num_stacks=st.integers(1, 5))
def test_pops_give_back_what_their_own_stack_got_last(seq_len: int, seed: int, num_stacks: int) -> None:
    for tokens, answers in each(rows_of("stack", seq_len=seq_len, seed=seed, num_stacks=num_stacks)):
        stacks: dict[int, list[int]] = {}
        asked = []
        for at in range(0, (seq_len + 1) // 3 * 3, 3):
            what, which, symbol = tokens[at : at + 3]
            if what == stack.PUSH:
                stacks.setdefault(which, []).append(symbol)
            else:
                assert what == stack.POP and stacks[which].pop() == symbol
                asked.append(at + 1)
        assert answers == asked and set(tokens[(seq_len + 1) // 3 * 3 :]) <= {stack.PADDING}
        assert len(stacks) <= num_stacks


@pytest.mark.parametrize("task", TASKS)
def test_a_row_is_the_same_in_any_batch_and_another_with_another_number_seed_or_split(task: str) -> None:
    rows = rows_of(task, seq_len=48)
    whole, part = rows.batch(0, 6), rows.batch(2, 1)
    assert np.array_equal(whole.tokens.reshape(6, 48)[2], part.tokens)
    assert np.array_equal(whole.targets.reshape(6, 48)[2], part.targets)
    assert len({row.tobytes() for row in rows.batch(0, 200).tokens.reshape(200, 48)}) == 200
    others = [rows_of(task, seq_len=48, seed=1), rows_of(task, seq_len=48, held_out=True)]
    assert not any(np.array_equal(other.batch(0, 1).tokens, rows.batch(0, 1).tokens) for other in others)
    assert len({each.fingerprint for each in [rows, *others]}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_are_targets_and_every_row_is_a_document(task: str) -> None:
    rows = rows_of(task, seq_len=48)
    batch = rows.batch(5, 4)
    tokens, answers = rows.generate(np.arange(5, 9))
    targets = batch.targets.reshape(4, 48)
    assert np.array_equal(targets != IGNORED, answers)
    assert np.array_equal(targets[answers], tokens[:, 1:][answers])
    assert batch.num_targets == batch.num_bytes == answers.sum() > 0
    assert batch.cu_seqlens.tolist() == [0, 48, 96, 144, 192] and batch.cu_seqlens.dtype == np.int32


@settings(max_examples=30)
@given(
    task=st.sampled_from(TASKS), seq_len=st.integers(32, 150), num_short=st.integers(1, 40), first=st.integers(0, 60)
)
def test_short_problems_come_first_and_grow_to_whole_rows(task: str, seq_len: int, num_short: int, first: int) -> None:
    short, whole = rows_of(task, seq_len=seq_len, short_first=num_short), rows_of(task, seq_len=seq_len)
    found = short.problem_lengths(np.arange(first, first + 8))
    assert sorted(found) == list(found) and (found >= 16).all()
    assert ((found < seq_len) == (np.arange(first, first + 8) < num_short)).all()
    assert set(short.problem_lengths(np.arange(num_short + 1))) <= {*short_lengths(seq_len), seq_len}
    if num_short >= len(short_lengths(seq_len)):
        assert len(set(short.problem_lengths(np.arange(num_short)))) == len(short_lengths(seq_len))
    batch = short.batch(first, 8)
    assert len(batch.tokens) == len(batch.targets) == batch.cu_seqlens[-1] == 8 * seq_len
    assert len(batch.cu_seqlens) - 1 == (seq_len // found).sum()
    assert batch.num_targets == (batch.targets != IGNORED).sum() > 0
    for n, length in enumerate(found):
        part, plain = short.batch(first + n, 1), whole.batch(first + n, 1)
        assert np.array_equal(part.tokens, batch.tokens[n * seq_len : (n + 1) * seq_len])
        assert np.array_equal(part.tokens, plain.tokens) == (length == seq_len)
    held_out = rows_of(task, seq_len=seq_len, short_first=num_short, held_out=True).batch(first, 8)
    assert np.array_equal(held_out.tokens, rows_of(task, seq_len=seq_len, held_out=True).batch(first, 8).tokens)


@pytest.mark.parametrize("task", TASKS)
def test_answers_of_short_problems_follow_from_their_own_document(task: str) -> None:
    rows = rows_of(task, seq_len=64, short_first=4, num_stacks=20, num_pairs=6)
    batch = rows.batch(0, 4)
    named = set()
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        tokens, targets = batch.tokens[begin:end].tolist(), batch.targets[begin:end].tolist()
        answers = {at: target for at, target in enumerate(targets) if target != IGNORED}
        assert {at: tokens[at + 1] for at in answers if at + 1 < len(tokens)}.items() <= answers.items()
        if task == "mqar":
            assert len(answers) == min(6, len(tokens) // 4)
            assert all(answers[at] == tokens[tokens.index(tokens[at]) + 1] for at in answers)
        if task == "palindrome":
            assert list(answers.values()) == tokens[: len(tokens) // 2][::-1]
        if task == "stack":
            named |= {tokens[at] for at in range(1, len(tokens), 3)}
    assert task != "stack" or len(named) > 10, "short problems take few stacks, but any of them"
    assert len({problem.tobytes() for problem in batch.tokens[:64].reshape(4, 16)}) == 4


def test_few_numbers_are_drawn_as_if_all_had_been_put_in_order() -> None:
    draws = Draws(7, np.arange(20))
    for options, count in ((504, 1), (504, 16), (100, 25), (100, 26), (9, 9)):
        expected = np.argsort(draws.words(1, options), axis=1, kind="stable")[:, :count]
        assert np.array_equal(draws.choice(options, stream=1, count=count), expected)


def test_rows_do_not_change_between_versions() -> None:
    """Losses on probes are compared over months: raise rows.VERSION when this changes."""
    sums = {task: int((rows_of(task, seq_len=48).batch(0, 4).tokens * np.arange(192)).sum()) for task in TASKS}
    assert sums == EXPECTED_SUMS


EXPECTED_SUMS = {"mqar": 284978, "palindrome": 579696, "stack": 264113}


@pytest.mark.parametrize(("changes", "text"), [
    ({"task": "maze"}, "probe.task is 'maze'"),
    ({"task": "mqar", "num_pairs": 0}, "probe.num_pairs is 0"),
    ({"task": "mqar", "num_pairs": 40}, "raise data.vocab_size"),
    ({"task": "mqar", "num_pairs": 13}, "needs 52 tokens"),
    ({"task": "stack", "num_stacks": 61}, "leaves 0 symbols"),
    ({"task": "stack", "seq_len": 2}, "too short"),
    ({"task": "stack", "short_first": -1}, "probe.short_first is -1"),
    ({"task": "mqar", "short_first": 1, "seq_len": 31}, "expected 32 tokens or more"),
])  # fmt: skip
def test_what_cannot_be_generated_is_refused_at_once(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rows_of(**{"seq_len": 48, **changes})
