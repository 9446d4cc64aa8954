"""The tokenizer's promises: exact round trips, no injected special tokens, deterministic training, safe files."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data import generated
from perilune.data.tokenizer import (
    KIMI_PATTERN,
    LONG_TEXT,
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    StreamDecoder,
    Tokenizer,
    TokenizerError,
    _parts,
)

TEXTS = [text for _, text in generated.generate(seed=0, num_documents=60)]
TOKENIZER = Tokenizer.train(TEXTS, 400)

# Text near the things that break tokenizers: specials, byte order marks, combining marks, odd spaces, code
TRICKY = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(SPECIAL_TOKENS),
        st.sampled_from(
            ["\n    return", "\r\n\t", "don't", "1234567", "e\u0301", "\ufeff", "\u00a0", "👩‍🚀", "\0", "<|im_"]
        ),
    ),
    max_size=8,
).map("".join)


@given(TRICKY)
def test_decode_of_encode_is_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(TRICKY.filter(bool))
def test_a_long_text_is_the_same_tokens_as_a_short_one(text: str) -> None:
    long = text * (LONG_TEXT // len(text) + 1)
    assert TOKENIZER.encode(long) == TOKENIZER._core.encode(long, add_special_tokens=False).ids


# Everything that stands at, before or behind a place where a text may be cut
NEAR_BORDERS = st.lists(
    st.one_of(
        TRICKY,
        st.sampled_from(
            [" ", "  ", "\n", " \n  x", "a.", "a,b", "a。\n", "中文，字", "x's y", "DON'T ", "1234 5", "12.5",
             "e\u0301 a", "_a b", "ǅ a", "ª ", "²\t", "一二 ", "a\u0301.", "a\x1c", "\u2028", "a\u200d b", "A'll.b",
             ")a)", '"q"']
        ),
    ),
    min_size=1,
    max_size=30,
).map("".join)  # fmt: skip


def kimi() -> Tokenizer:
    parts = json.loads(TOKENIZER.to_json())
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": KIMI_PATTERN}
    return Tokenizer.from_json(json.dumps(parts))


@pytest.mark.parametrize("tokenizer", [TOKENIZER, kimi()], ids=["own", "kimi"])
@given(text=NEAR_BORDERS.filter(bool), size=st.integers(1, 9))
def test_a_text_that_is_cut_at_borders_has_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perilune.data.tokenizer.PART", size)
        parts = list(_parts(text))
    assert "".join(parts) == text

    def pieces(given: str) -> list[str]:
        """What merges stay inside of, whatever merges there are."""
        return [piece for piece, _ in tokenizer._core.pre_tokenizer.pre_tokenize_str(given)]

    assert [piece for part in parts for piece in pieces(part)] == pieces(text)
    whole = tokenizer._core.encode(text, add_special_tokens=False).ids
    assert [token for part in parts for token in tokenizer._core.encode(part, add_special_tokens=False).ids] == whole


def test_megabytes_of_text_are_encoded_in_a_few_times_their_size() -> None:
    code = """
import resource, sys
from perilune.data.tokenizer import Tokenizer
tokenizer = Tokenizer.train(["The moon turns around the earth.\\n"], 300)
tokenizer.encode("The moon " * 2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids = tokenizer.encode("The moon turns around the earth.\\n" * 100_000)
print(len(ids), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    count, grown = map(int, said.split())
    assert count > 300_000 and grown < 40 * 3_300_000


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    ticks, is_over = 0, False

    def tick() -> None:
        nonlocal ticks
        while not is_over:
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    TOKENIZER.encode("a b " * 100_000)
    after = ticks
    is_over = True
    thread.join()
    assert after - before > 2


@given(TRICKY)
def test_text_never_becomes_a_special_token(text: str) -> None:
    first_special = TOKENIZER.vocab_size - len(SPECIAL_TOKENS)
    assert all(token < first_special for token in TOKENIZER.encode(text))
    assert TOKENIZER.encode_batch([text]) == [TOKENIZER.encode(text)]


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_allow_special_gives_exactly_the_special_id(name: str) -> None:
    inner = TOKENIZER.encode("a b")
    assert TOKENIZER.encode(f"a b{name}a b", allow_special=True) == [*inner, TOKENIZER.special_ids[name], *inner]


@given(TRICKY)
def test_allow_special_round_trips_too(text: str) -> None:
    ids = TOKENIZER.encode(text, allow_special=True)
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.booleans())
def test_streamed_text_equals_decoded_text_for_any_ids(ids: list[int], skip_special: bool) -> None:
    decoder = StreamDecoder(TOKENIZER, skip_special=skip_special)
    streamed = [decoder.push(token) for token in ids]
    streamed.append(decoder.finish())
    assert "".join(streamed) == TOKENIZER.decode(ids, skip_special=skip_special)
    # The definition: runs of ordinary tokens decode as one byte string, specials stand between them.
    expected, run = "", b""
    for token in ids:
        if token_bytes := TOKENIZER.token_bytes(token):
            run += token_bytes
            continue
        expected += run.decode("utf-8", "replace") + ("" if skip_special else TOKENIZER.special_name(token) or "")
        run = b""
    assert "".join(streamed) == expected + run.decode("utf-8", "replace")


def test_stream_holds_incomplete_characters() -> None:
    ids = TOKENIZER.encode("🌖")
    assert len(ids) > 1
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🌖"]
    assert decoder.finish() == ""


@given(TRICKY)
def test_bytes_per_token_adds_up_to_the_bytes_of_the_text(text: str) -> None:
    assert TOKENIZER.bytes_per_token[TOKENIZER.encode(text)].sum() == len(text.encode())


def test_special_tokens_are_the_last_ids_and_have_no_bytes() -> None:
    ids = [TOKENIZER.special_ids[name] for name in SPECIAL_TOKENS]
    assert ids == list(range(TOKENIZER.vocab_size - len(SPECIAL_TOKENS), TOKENIZER.vocab_size))
    assert TOKENIZER.bytes_per_token[ids].sum() == 0
    assert TOKENIZER.pad_id == TOKENIZER.vocab_size - 1


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 300, 5000])
def test_vocabulary_has_the_size_asked_for_even_if_the_corpus_has_fewer_merges(vocab_size: int) -> None:
    tokenizer = Tokenizer.train(["low lower lowest"], vocab_size)
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.bytes_per_token) == vocab_size
    assert tokenizer.special_ids["[PAD]"] == vocab_size - 1
    assert tokenizer.decode(range(vocab_size), skip_special=True)


def test_digits_are_at_most_three_to_a_token_and_words_keep_their_space() -> None:
    tokenizer = Tokenizer.train(["12345678 the 12345678 the"] * 50, 400)
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode("12345678 the")]
    assert pieces == [b"123", b"456", b"78", b" the"]


def test_digits_can_be_tokens_of_their_own(tmp_path: Path) -> None:
    texts = [f"The population is {number}, the year {number % 97}." for number in range(3000)]
    single = Tokenizer.train(texts, 1024, digits=1)
    tokens = [single.decode([token]) for token in single.encode("the year 1987.25")]
    assert tokens[-7:] == ["1", "9", "8", "7", ".", "2", "5"]
    assert not [
        n for n in range(single.vocab_size) if len(single.token_bytes(n)) > 1 and single.token_bytes(n).isdigit()
    ]
    single.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.fingerprint == single.fingerprint != Tokenizer.train(texts, 1024).fingerprint
    asked = {"corpus_fingerprint": "the same", "cache_dir": tmp_path / "cache"}
    kept = [Tokenizer.cached(texts, 1024, digits=digits, **asked) for digits in (1, 3, 1)]
    assert [each.fingerprint == single.fingerprint for each in kept] == [True, False, True]


def test_too_small_a_vocabulary_is_refused_with_the_minimum() -> None:
    with pytest.raises(TokenizerError, match=rf"vocab_size=100 .*>= {MIN_VOCAB_SIZE}"):
        Tokenizer.train(TEXTS, 100)


def test_lone_surrogates_and_unknown_ids_are_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        TOKENIZER.encode("a\ud800")
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        TOKENIZER.decode([TOKENIZER.vocab_size])
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        TOKENIZER.decode([-1])


def test_training_is_deterministic_across_processes() -> None:
    script = (
        "from perilune.data import generated\n"
        "from perilune.data.tokenizer import Tokenizer\n"
        "texts = [text for _, text in generated.generate(seed=0, num_documents=60)]\n"
        "print(Tokenizer.train(texts, 400).fingerprint)\n"
    )
    source = str(Path(generated.__file__).parents[2])
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": source, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == TOKENIZER.fingerprint


def test_saved_tokenizer_loads_as_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "tokenizer.json"
    TOKENIZER.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert loaded.encode("a <think> b") == TOKENIZER.encode("a <think> b")
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]


def test_transformers_reads_the_saved_file(tmp_path: Path) -> None:
    import transformers  # here, because it takes a second

    TOKENIZER.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "<|im_user|>def f(x):\n    return 12345<|im_end|>"
    assert theirs.encode(text) == TOKENIZER.encode(text, allow_special=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "{}",
        lambda text: "[1, 2]",
        lambda text: text.replace("<|im_middle|>", "<|im_muddle|>"),
        lambda text: text.replace(r"\\p{N}{1,3}", r"\\p{N}{1,2}"),
        lambda text: json.dumps({**json.loads(text), "normalizer": {"type": "NFKC"}}),
        lambda text: json.dumps({**json.loads(text), "added_tokens": json.loads(text)["added_tokens"][:-1]}),
    ],
)
def test_wrong_or_corrupt_file_is_one_clear_error(tmp_path: Path, damage) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(damage(TOKENIZER.to_json()))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.* is not a tokenizer this version can use"):
        Tokenizer.load(path)


def test_missing_and_binary_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "binary.json")


def test_cache_is_keyed_by_content_and_heals(tmp_path: Path) -> None:
    def cached(texts, fingerprint="a", vocab_size=320):
        return Tokenizer.cached(texts, vocab_size, corpus_fingerprint=fingerprint, cache_dir=tmp_path)

    first = cached(TEXTS)
    assert cached(iter(())).fingerprint == first.fingerprint  # not trained again
    assert cached(TEXTS[:9], "b").fingerprint != first.fingerprint
    assert cached(TEXTS, vocab_size=330).vocab_size == 330
    (path,) = [p for p in tmp_path.iterdir() if Tokenizer.load(p).fingerprint == first.fingerprint]
    path.write_text("half a fi")
    assert cached(TEXTS).fingerprint == first.fingerprint
    assert Tokenizer.load(path).fingerprint == first.fingerprint
