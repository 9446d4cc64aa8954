"""Rows with pictures: what is predicted, where documents end, and that a number alone decides a row."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import IGNORED, FusionConfig, Tokenizer, VisionDataConfig, VisionRows, VisionRowsError
from perilune.data.media import media_tokens, tokens_of_grid
from perilune.data.scenes import ScenesConfig
from perilune.data.vision_documents import TASKS, dialect, document, exercise, exercises, pictures, question
from perilune.data.vision_rows import GROUP_ROWS, GroupMaker

SCENES = ScenesConfig(sizes=((28, 28), (56, 28)), max_shapes=2, primitives=("rect", "circle"), max_questions=2)
CONFIG = VisionDataConfig(scenes=SCENES, tasks=("svg", "caption", "count"), workers=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(dialect(replace(CONFIG, dialect_texts=1500)), 500)


def rows_of(tokenizer: Tokenizer, seq_len: int = 192, **changes) -> VisionRows:
    held_out, seed = changes.pop("held_out", False), changes.pop("seed", 3)
    return VisionRows(replace(CONFIG, **changes), tokenizer, seq_len=seq_len, seed=seed, held_out=held_out)


def test_a_document_is_begin_media_prompt_answer_end_and_only_the_answer_is_predicted(tokenizer):
    for number in range(20):
        each = exercise(CONFIG, 0, number)
        assert each is not None
        made = document(tokenizer, each)
        (picture,), videos = pictures(each.sample)
        assert not videos
        answer = [*tokenizer.encode(each.answer), tokenizer.eos_id]
        before = [tokenizer.bos_id, *media_tokens(tokenizer, picture), *tokenizer.encode(each.prompt + "\n")]
        assert made.tokens.tolist() == before + answer
        assert made.predicted.tolist() == [False] * len(before) + [True] * len(answer)
        assert question(tokenizer, each).tokens == before
        trained = document(tokenizer, each, train_prompt=True)
        num_prompt = len(tokenizer.encode(each.prompt + "\n"))
        assert trained.predicted.sum() == len(answer) + num_prompt
        assert not trained.predicted[: len(before) - num_prompt].any()


def test_no_media_token_is_ever_a_target_and_pads_agree_with_patches(tokenizer):
    batch = rows_of(tokenizer).batch(0, 20)
    special = tokenizer.special_ids
    media = [special[name] for name in special if "media" in name]
    assert not np.isin(batch.targets, media).any()
    assert (batch.targets != IGNORED).sum() == batch.num_targets > 0
    assert batch.pixels is not None and batch.media_positions is not None
    assert (batch.tokens[batch.media_positions] == special["<|media_pad|>"]).all()
    assert len(batch.media_positions) == sum(map(tokens_of_grid, batch.grids))
    assert len(batch.pixels) == sum(t * h * w for t, h, w in batch.grids)
    counted = batch.targets[batch.targets != IGNORED]
    assert batch.num_bytes == tokenizer.bytes_per_token[counted].sum()


@settings(max_examples=10, deadline=None)
@given(first=st.integers(0, 40), count=st.integers(1, 6), seq_len=st.sampled_from([150, 192, 300]))
def test_rows_are_whole_documents_and_padding_that_counts_nothing(tokenizer, first, count, seq_len):
    batch = rows_of(tokenizer, seq_len).batch(first, count)
    borders = batch.cu_seqlens.tolist()
    assert borders == sorted(set(borders)) and borders[-1] == count * seq_len
    assert set(range(0, count * seq_len, seq_len)) <= set(borders)
    for start, stop in zip(borders, borders[1:]):
        tokens, targets = batch.tokens[start:stop], batch.targets[start:stop]
        if tokens[0] == tokenizer.pad_id:
            assert (tokens == tokenizer.pad_id).all() and (targets == IGNORED).all()
            continue
        assert tokens[0] == tokenizer.bos_id and tokenizer.bos_id not in tokens[1:]
        assert targets[-1] == tokenizer.eos_id and tokenizer.eos_id not in tokens
        known = targets != IGNORED
        assert (targets[:-1][known[:-1]] == tokens[1:][known[:-1]]).all()


def test_a_document_that_does_not_fit_begins_the_next_row(tokenizer):
    group = GroupMaker.of(rows_of(tokenizer))(0)
    lengths = [np.diff([*row.starts, len(row.tokens)]) for row in group.rows]
    padded = [row.tokens[row.starts[-1]] == tokenizer.pad_id for row in group.rows]
    for number in range(GROUP_ROWS - 1):
        assert not padded[number] or lengths[number + 1][0] > lengths[number][-1]
    in_rows = sum(len(each) - ends for each, ends in zip(lengths, padded))
    assert in_rows == group.num_documents
    # In the order of the exercises: nothing is left out in between.
    taken = [row.tokens[start] for row in group.rows for start in row.starts]
    assert taken.count(tokenizer.bos_id) == group.num_documents


def test_a_row_is_a_function_of_its_number(tokenizer):
    one, other = rows_of(tokenizer), rows_of(tokenizer)
    late = [other.row(index) for index in (37, 2, 16)]
    for row, index in zip(late, (37, 2, 16)):
        again = one.row(index)
        assert (row.tokens == again.tokens).all() and (row.targets == again.targets).all()
        assert all((a.pixels == b.pixels).all() for a, b in zip(row.media, again.media, strict=True))
    assert (rows_of(tokenizer, seed=4).row(0).tokens != one.row(0).tokens).any()


def test_rows_made_ahead_in_a_process_are_the_same_rows(tokenizer):
    here, ahead = rows_of(tokenizer), rows_of(tokenizer, workers=1)
    try:
        for index in (0, 1, 15, 16, 17):
            assert (here.row(index).tokens == ahead.row(index).tokens).all()
        assert here.num_documents == ahead.num_documents > 0
    finally:
        ahead.close()


def test_held_out_rows_show_no_source_that_is_trained_on(tokenizer):
    trained = {each.sample.svg for each in rows_of(tokenizer).examples(300)}
    held_out = {each.sample.svg for each in rows_of(tokenizer, held_out=True).examples(100)}
    assert len(held_out) > 50 and not trained & held_out


def test_the_fingerprint_names_everything_a_row_depends_on(tokenizer):
    base = rows_of(tokenizer).fingerprint
    assert rows_of(tokenizer, workers=2, samples=1, fusion=FusionConfig(share=0.5)).fingerprint == base
    others = [
        rows_of(tokenizer, seed=4),
        rows_of(tokenizer, seq_len=193),
        rows_of(tokenizer, tasks=("svg",)),
        rows_of(tokenizer, train_prompt=True),
        rows_of(tokenizer, scenes=replace(SCENES, max_shapes=1)),
        rows_of(tokenizer, held_out=True),
        rows_of(Tokenizer.train(["other words"], 500)),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == len(others) + 1


def test_a_file_of_icons_that_changed_under_its_name_gives_another_fingerprint(tokenizer, tmp_path):
    place = tmp_path / "icons.jsonl"
    scenes = ScenesConfig(kinds=("icon",), icons=str(place), icon_sets=("moon",), icon_held_out_sets=("sun",))

    def fingerprint(end: int, when: int) -> str:
        given = {"licence": "", "style": "outline", "name": "stroke"}
        svg = '<svg viewBox="0 0 24 24" fill="none" stroke="black" stroke-width="2"><path d="M4 4{}"/></svg>'
        records = [{"source": "moon", "svg": svg.format(f"H{end}")}, {"source": "sun", "svg": svg.format("V20")}]
        place.write_text("".join(json.dumps({**given, **record}) + "\n" for record in records))
        os.utime(place, ns=(when, when))
        return rows_of(tokenizer, scenes=scenes).fingerprint

    assert fingerprint(20, 1) == fingerprint(20, 2) != fingerprint(12, 3)


def test_documents_too_long_for_a_row_are_skipped_and_counted(tokenizer):
    lengths = sorted(len(document(tokenizer, each).tokens) for each in rows_of(tokenizer).examples(60))
    rows = rows_of(tokenizer, lengths[30])
    rows.row(0)
    assert rows.num_skipped > 0 and rows.num_documents > 0


def test_rows_that_hold_no_document_at_all_are_an_error_with_the_fix(tokenizer):
    with pytest.raises(VisionRowsError, match="seq_len=12.*longer"):
        rows_of(tokenizer, 12).row(0)
    with pytest.raises(VisionRowsError, match="tasks=.'html'"):
        rows_of(tokenizer, tasks=("html",)).row(0)
    with pytest.raises(ValueError, match=r"data.vision.tasks is \('paint',\)"):
        replace(CONFIG, tasks=("paint",))


def test_numbers_that_the_dialect_often_holds_are_one_token():
    texts = dialect(replace(CONFIG, tasks=("svg",), dialect_texts=1000))
    tokenizer = Tokenizer.train(texts, 500)
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(40))
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2


def test_every_task_of_a_scene_is_asked(tokenizer):
    config = replace(CONFIG, tasks=TASKS, scenes=replace(SCENES, max_questions=4))
    asked = {each.task for number in range(60) if (each := exercise(config, 0, number))}
    assert {"svg", "caption", "count", "box", "colour", "spatial"} <= asked
    sample = rows_of(tokenizer).examples(1)[0].sample
    assert [each.answer for each in exercises(sample, ("svg",))] == [sample.svg]
