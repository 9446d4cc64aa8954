"""A tiktoken.model becomes a tokenizer.json with the same ids: held against the tiktoken package itself."""

import base64
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hub.released import NAMES, TEXTS, train_ranks, write_vocabulary

from perilune.data.tiktoken_vocabulary import (
    ROUND_TRIPS,
    check_round_trips,
    convert,
    import_vocabulary,
    merges_of,
    read_ranks,
    special_names,
)
from perilune.data.tokenizer import KIMI_PATTERN, Tokenizer, TokenizerError

tiktoken = pytest.importorskip("tiktoken")

SOURCES = [Path(module.__file__).read_text(encoding="utf-8") for module in (json, base64, random)]
"""Real text: code and its comments, tabs of blanks, numbers."""
CHINESE = "深度学习模型在训练过程中需要大量数据。月之暗面，Kimi K2.5 支持图像与视频理解，价格¥12.50起。" * 4
RANKS = train_ranks([*TEXTS, *SOURCES, CHINESE], 900)
THEIRS = tiktoken.Encoding("test", pat_str=KIMI_PATTERN, mergeable_ranks=RANKS, special_tokens={})
CORE = convert(RANKS, ["[BOS]"])


def ours(text: str) -> list[int]:
    CORE.encode_special_tokens = True
    return CORE.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", [*ROUND_TRIPS, *TEXTS, *SOURCES, CHINESE])
def test_real_text_has_the_ids_of_tiktoken(text: str) -> None:
    assert ours(text) == THEIRS.encode(text, disallowed_special=())
    assert CORE.decode(ours(text), skip_special_tokens=False) == text


PARTS = st.sampled_from(
    [
        *("the ", "writes", "reader", "'s", "'LL", "ABC", "Def", "_", "->", "{", "}", "123", "4", "<|im_end|>"),
        *("中文", "模型", "，", "。", "🚀", "👩\u200d🚀", "é", "e\u0301", "ﬁ", "ß", "İ", "ไทย", "한국"),
        *("\n", "\n\n", "  ", "\t", "\r\n", " ", "\u3000", "\xa0"),
    ]
)


@given(st.lists(PARTS | st.text(max_size=4), max_size=30).map("".join))
def test_any_text_has_the_ids_of_tiktoken_and_comes_back(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert ours(text) == THEIRS.encode(text, disallowed_special=())
    assert CORE.decode(ours(text), skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa", "aba", "abab", "bab"]), max_size=12).map("".join))
def test_every_cut_of_a_token_is_a_merge_where_ranks_compete(text: str) -> None:
    """Tokens that can be made in several ways: with one merge for each, some of these texts come out otherwise."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for number, token in enumerate((b"aa", b"ab", b"ba", b"aba", b"bab", b"abab", b"baab", b"aabaab")):
        ranks[token] = 256 + number
    theirs = tiktoken.Encoding("small", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    core = convert(ranks, ["[BOS]"])
    assert core.encode(text, add_special_tokens=False).ids == theirs.encode(text)


def test_merges_come_in_the_order_of_what_they_give() -> None:
    pairs = list(merges_of(RANKS))
    results = [RANKS[left + right] for left, right in pairs]
    assert results == sorted(results) and len(set(pairs)) == len(pairs) > len(RANKS) - 256


def test_an_imported_vocabulary_is_a_tokenizer_of_ours(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, RANKS, 940)
    tokenizer = import_vocabulary(tmp_path, 940)
    assert tokenizer.vocab_size == 940
    assert tokenizer.special_ids["[BOS]"] == tokenizer.bos_id == 900 and tokenizer.pad_id == 939
    assert {name: tokenizer.special_ids[name] - 900 for name in NAMES.values()} == {n: p for p, n in NAMES.items()}
    assert tokenizer.special_ids["<|media_pad|>"] == 921, "what later models name is where they have it"
    assert tokenizer.special_name(905) == "<|reserved_token_905|>"
    text = "a <|im_end|> 中文 🚀"
    assert tokenizer.encode(text) == THEIRS.encode(text, disallowed_special=()), "text never becomes a special token"
    assert tokenizer.encode("x<|im_end|>", allow_special=True)[-1] == 902
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.fingerprint == tokenizer.fingerprint and again.special_ids == tokenizer.special_ids


def test_an_own_tokenizer_keeps_its_specials_and_fingerprint() -> None:
    tokenizer = Tokenizer.train(TEXTS, 320)
    assert tokenizer.special_ids["[BOS]"] == 320 - 32 and tokenizer.pad_id == 319
    assert not any(name.startswith("<|unused_") for name in tokenizer.special_ids)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not base64! 7", "line 3"),
        (b"YWI=", "line 3"),
        (b"YWI= seven", "line 3"),
        (b"YWI= 900", "not 0 to"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path, RANKS, 940)
    lines = (tmp_path / "tiktoken.model").read_bytes().splitlines()
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(TokenizerError, match=message):
        read_ranks(tmp_path / "tiktoken.model")


def test_a_vocabulary_without_all_bytes_or_too_large_is_refused(tmp_path: Path) -> None:
    few = {token: rank for rank, token in enumerate(token for token in RANKS if token != b"\x00")}
    write_vocabulary(tmp_path, few, 940)
    with pytest.raises(TokenizerError, match="no token for 1 bytes, e.g. 0x00"):
        import_vocabulary(tmp_path, 940)
    write_vocabulary(tmp_path, RANKS, 940)
    with pytest.raises(TokenizerError, match="more than the model's vocab_size=800"):
        import_vocabulary(tmp_path, 800)


def test_names_of_special_tokens_must_lie_behind_the_vocabulary(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"added_tokens_decoder": {"5": {"content": "[BOS]"}}}))
    with pytest.raises(TokenizerError, match=r"gives the id 5 to '\[BOS\]'"):
        special_names(settings, 900, 940)
    settings.write_text(json.dumps({"added_tokens_decoder": {"901": {"content": "x"}, "902": {"content": "x"}}}))
    with pytest.raises(TokenizerError, match="'x' to several ids"):
        special_names(settings, 900, 940)
    settings.write_text("[]")
    with pytest.raises(TokenizerError, match="cannot read the names"):
        special_names(settings, 900, 940)
    assert special_names(tmp_path / "none.json", 900, 930)[:2] == ["<|reserved_token_900|>", "<|reserved_token_901|>"]


def test_a_conversion_that_changes_ids_is_noticed(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, RANKS, 940)
    tokenizer = import_vocabulary(tmp_path, 940)
    swapped = dict(RANKS)
    first, second = list(RANKS)[300:302]
    swapped[first], swapped[second] = RANKS[second], RANKS[first]
    with pytest.raises(TokenizerError, match="became"):
        check_round_trips(tokenizer, swapped)
