"""Dialogues become rows: everything once an epoch, only what an assistant wrote is learnt, bad rows are counted."""

import base64
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.data.dialogues import DialogueError, document_of, read_dialogues
from perilune.data.packing import IGNORED
from perilune.data.raster import rasterize_png
from perilune.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["What is it? It is a word, a number or a list of words and numbers. " * 20], 400)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="28" height="28"><rect width="14" height="14" fill="red"/></svg>'


def written(folder: Path, *rows: object, name: str = "chats.jsonl") -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def talk(question: str, answer: str, **more) -> dict:
    assistant = {"role": "assistant", "content": answer, **more}
    return {"messages": [{"role": "user", "content": question}, assistant]}


def rows_of(*sources: str, seq_len: int = 96, seed: int = 0, **more) -> ChatRows:
    config = ChatDataConfig(sources=sources, valid_fraction=more.pop("valid_fraction", 0.0))
    return ChatRows(config, TOKENIZER, seq_len=seq_len, seed=seed, **more)


def texts(tokens: np.ndarray) -> str:
    return TOKENIZER.decode(tokens.tolist())


def learnt(batch) -> list[str]:
    """What is predicted, document by document."""
    found = []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
        targets = batch.targets[start:end]
        found.append(texts(targets[targets != IGNORED]))
    return [text for text in found if text]


def test_only_what_the_assistant_wrote_is_learnt(tmp_path):
    calls = [{"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    dialogue = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "add <|im_end|> please"},
            {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "functions.add:0", "content": "2"},
            {"role": "assistant", "content": "two", "reasoning_content": "done"},
        ],
        "tools": [tool],
    }
    rows = rows_of(written(tmp_path, dialogue), seq_len=400)
    (text,) = learnt(rows.batch(0, 1))
    assert text == (
        "use it</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>done</think>two<|im_end|>'
    )


def test_a_dialogue_without_reasoning_is_answered_at_once(tmp_path):
    source = written(tmp_path, talk("what", "a word"), {**talk("who", "x"), "thinking": True})
    found = sorted(learnt(rows_of(source, seq_len=200).batch(0, 1)))
    assert found == ["</think>x<|im_end|>", "a word<|im_end|>"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_epoch_holds_every_dialogue_once_in_an_order_of_its_own(tmp_path_factory, lengths, seed):
    folder = tmp_path_factory.mktemp("chats")
    source = written(folder, *(talk(f"number {n}", "word " * length + str(n)) for n, length in enumerate(lengths)))
    rows = rows_of(source, seed=seed)
    expected = sorted(
        texts(document.tokens[document.predicted])
        for document in (document_of(each, TOKENIZER) for each in read_dialogues([source])[0])
    )
    per_epoch, first = [], 0
    for epoch in range(2):
        count = len(rows._epoch(epoch))
        batch = rows.batch(first, count)
        assert len(batch.tokens) == count * 96 and batch.num_targets == (batch.targets != IGNORED).sum()
        assert set(np.arange(0, count * 96, 96)) <= set(batch.cu_seqlens.tolist())
        per_epoch.append(learnt(batch))
        first += count
    assert [sorted(each) for each in per_epoch] == [expected, expected]
    again = rows_of(source, seed=seed)
    for name in ("tokens", "targets", "cu_seqlens"):  # any row, in any order of asking
        np.testing.assert_array_equal(getattr(again.batch(first - 1, 2), name), getattr(rows.batch(first - 1, 2), name))
    assert again.fingerprint == rows.fingerprint


def test_bad_rows_are_counted_by_their_reason_and_the_rest_is_read(tmp_path):
    source = written(
        tmp_path,
        talk("what", "a word"),
        "{not json",
        [1, 2],
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        "",
        talk("long", "word " * 500),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "../../etc/x.png"}}]},
                      {"role": "assistant", "content": "no"}]},
        talk("what", "\ud800"),
    )  # fmt: skip
    rows = rows_of(source)
    assert rows.num_dialogues == 1 and learnt(rows.batch(0, 1)) == ["a word<|im_end|>"]
    assert rows.broken.reasons == {"not JSON": 1, "not a dialogue": 4, "too long": 1, "unusable: outside the folder": 1}
    assert "7 rows left out" in str(rows.broken) and "line 2" in str(rows.broken)


def test_pictures_come_from_data_addresses_and_from_beneath_the_folder(tmp_path):
    png = rasterize_png(SVG, 28, 28)
    (tmp_path / "red.png").write_bytes(png)
    addresses = ("red.png", f"data:image/png;base64,{base64.b64encode(png).decode()}")
    for address in addresses:
        part = {"type": "image_url", "image_url": {"url": address}}
        messages = [
            {"role": "user", "content": [part, {"type": "text", "text": "what"}]},
            {"role": "assistant", "content": "red"},
        ]
        batch = rows_of(written(tmp_path, {"messages": messages})).batch(0, 1)
        assert batch.grids == ((1, 2, 2),) and batch.pixels is not None and batch.pixels.shape == (4, 3, 14, 14)
        assert batch.media_positions is not None and len(batch.media_positions) == 1
        assert learnt(batch) == ["red<|im_end|>"]


def shown(kind: str, address: str, answer: str = "red") -> dict:
    """A dialogue about one picture or video."""
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": address}}
    question = {"role": "user", "content": [part, {"type": "text", "text": "what"}]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def video_of(colours: Sequence[str], folder: Path) -> bytes:
    """Frames of half a second each as a GIF; the same as files in `folder`."""
    frames = [Image.new("RGB", (28, 28), colour) for colour in colours]
    folder.mkdir()
    for number, frame in enumerate(frames):
        frame.save(folder / f"frame{number}.png")
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    return file.getvalue()


def test_videos_come_from_files_addresses_and_folders_of_frames_with_their_times(tmp_path):
    gif = video_of(["red", "lime", "blue", "black", "white"], tmp_path / "frames")
    (tmp_path / "film.gif").write_bytes(gif)
    batches = [
        rows_of(written(tmp_path, shown("video", address))).batch(0, 1)
        for address in ("film.gif", "frames", data_url(gif, "image/gif"))
    ]
    for batch in batches:
        assert batch.grids == ((4, 2, 2), (1, 2, 2)) and batch.pixels is not None and batch.pixels.shape[0] == 4 * 4 + 4
        assert batch.media_positions is not None and len(batch.media_positions) == 2
        assert "00:00:00.000<|media_begin|>video" in texts(batch.tokens)
        assert "00:00:02.000<|media_begin|>video" in texts(batch.tokens)
        assert learnt(batch) == ["red<|im_end|>"]  # neither times nor frames
        np.testing.assert_array_equal(batch.tokens, batches[0].tokens)
        np.testing.assert_array_equal(batch.pixels, batches[0].pixels)


def test_pictures_and_videos_that_cannot_be_read_are_counted_by_their_reason(tmp_path):
    png, gif = rasterize_png(SVG, 28, 28), video_of(["red", "lime", "blue"], tmp_path / "frames")
    flipped = png[:45] + bytes([png[45] ^ 255]) + png[46:]
    huge = png[:16] + (1 << 20).to_bytes(4, "big") * 2 + png[24:29]
    huge += zlib.crc32(huge[12:29]).to_bytes(4, "big") + png[33:]
    (tmp_path / "flipped.png").write_bytes(flipped)
    (tmp_path / "cut.gif").write_bytes(gif[:-30])
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "0.png").symlink_to("/etc/hostname")
    (tmp_path / "odd").mkdir()
    for number, side in enumerate((28, 56)):
        Image.new("RGB", (side, side)).save(tmp_path / "odd" / f"{number}.png")
    rows = rows_of(
        written(
            tmp_path,
            shown("image", data_url(png, "image/png")),
            shown("image", "flipped.png"),
            shown("image", data_url(png[:60], "image/png")),
            shown("video", "cut.gif"),
            shown("image", data_url(huge, "image/png")),
            shown("video", data_url(huge, "image/png")),
            shown("image", "absent.png"),
            shown("video", "empty"),
            shown("video", "odd"),
            shown("image", data_url(b"hello", "image/png")),
            shown("image", "frames"),
            shown("image", "data:image/png;base64,???"),
            shown("image", "a\0b"),
            shown("video", "x" * 5000),
            shown("video", "linked"),
            shown("video", ".."),
        )
    )
    assert rows.num_dialogues == rows.num_with_pictures == 1
    assert rows.broken.reasons == {
        "unusable: corrupt": 3,
        "unusable: too many pixels": 2,
        "unusable: missing": 2,
        "unusable: frames of unequal size": 1,
        "unusable: not a picture": 2,
        "unusable: unreadable": 3,
        "unusable: outside the folder": 2,
    }
    assert "15 rows left out: 3 unusable: corrupt" in str(rows.broken) and "flipped.png" in str(rows.broken)


def test_held_out_dialogues_are_never_trained_on(tmp_path):
    source = written(tmp_path, *(talk(f"number {n}", str(n)) for n in range(200)))
    train, valid = (rows_of(source, valid_fraction=0.2, held_out=each) for each in (False, True))
    trained, held = (set(learnt(rows.batch(0, rows.num_rows))) for rows in (train, valid))
    assert len(trained) + len(held) == 200 and not trained & held and 15 < len(held) < 70


def test_the_other_side_is_what_was_held_out_without_reading_again(tmp_path, monkeypatch):
    source = written(tmp_path, *(talk(f"number {n}", str(n)) for n in range(80)))
    train, valid = (rows_of(source, valid_fraction=0.3, held_out=each) for each in (False, True))
    first = train.batch(0, 3)
    monkeypatch.setattr("perilune.data.chat_rows.document_of", None)
    for ours, theirs in ((train.other_side(), valid), (valid.other_side(), train), (train, valid.other_side())):
        assert ours.fingerprint == theirs.fingerprint and ours.num_rows == theirs.num_rows
        several = 2 * ours.num_rows  # epochs are laid anew
        assert np.array_equal(ours.batch(0, several).tokens, theirs.batch(0, several).tokens)
    assert np.array_equal(train.batch(0, 3).tokens, first.tokens)


@pytest.mark.parametrize(
    "rows,message",
    [
        (["{}"], "no dialogue found"),
        ([talk("x", "word " * 500)], "none of 1 dialogues can be trained on in rows of 96 tokens"),
    ],
)
def test_nothing_to_learn_is_an_error_that_says_why(tmp_path, rows, message):
    with pytest.raises(DialogueError, match=message):
        rows_of(written(tmp_path, *rows))


def test_tokens_that_were_stored_are_those_that_would_be_made(tmp_path, monkeypatch):
    url = f"data:image/png;base64,{base64.b64encode(rasterize_png(SVG, 28, 28)).decode()}"
    shown = talk([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}], "a list")
    source = written(tmp_path, *(talk(f"What is {n}?", f"number {n}") for n in range(20)), shown, talk("w" * 400, "a"))
    cache = tmp_path / "cache"
    plain = rows_of(source, valid_fraction=0.3)
    made = rows_of(source, valid_fraction=0.3, cache_dir=cache)
    monkeypatch.setattr("perilune.data.chat_rows._that_fit", None)  # not asked again
    again = rows_of(source, valid_fraction=0.3, cache_dir=cache)
    assert plain.fingerprint == made.fingerprint == again.fingerprint
    assert str(again.broken) == str(plain.broken) and again.broken.reasons["too long"] == 1
    assert again.num_with_pictures == plain.num_with_pictures
    assert again.other_side().fingerprint == plain.other_side().fingerprint
    for ours, theirs in zip(vars(again.batch(0, 3)).items(), vars(plain.batch(0, 3)).items(), strict=True):
        assert ours[0] == theirs[0] and np.array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("change", ["file", "length", "tokenizer", "damage"])
def test_what_is_stored_is_made_again_when_anything_it_follows_from_changed(tmp_path, change):
    source = written(tmp_path, *(talk(f"What is {n}?", f"number {n}") for n in range(4)))
    cache = tmp_path / "cache"
    before = rows_of(source, cache_dir=cache)
    (stored,) = cache.iterdir()
    length, tokenizer = 96, TOKENIZER
    if change == "file":
        written(tmp_path, talk("What is it?", "a word"))
    elif change == "length":
        length = 64
    elif change == "tokenizer":
        tokenizer = Tokenizer.train(["other words and 12 numbers " * 20], 380)
    else:
        stored.write_bytes(stored.read_bytes()[:-40])
    config = ChatDataConfig(sources=(source,), valid_fraction=0.0)
    after = ChatRows(config, tokenizer, seq_len=length, seed=0, cache_dir=cache)
    assert after.fingerprint == ChatRows(config, tokenizer, seq_len=length, seed=0).fingerprint
    assert (after.fingerprint == before.fingerprint) == (change == "damage")


def test_pictures_in_files_of_their_own_are_not_stored_because_they_may_change(tmp_path):
    (tmp_path / "a.png").write_bytes(rasterize_png(SVG, 28, 28))
    shown = talk([{"type": "image_url", "image_url": {"url": "a.png"}}], "a list")
    rows_of(written(tmp_path, shown), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
