"""TextStream against decoding the whole and cutting it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.data import Tokenizer
from perilune.serve.text_stream import Piece, TextStream, whole_text

TOKENIZER = Tokenizer.train(["the cat sat on the mat, naïve café ☃ 漢字 " * 5], vocab_size=330)
SPECIAL = sorted(TOKENIZER.special_ids.values())
SMILE = TOKENIZER.encode("😀")

# Few letters, so that stop strings are found, overlap and nearly match.
short_texts = st.text(alphabet="abé😀\ufffd", min_size=1, max_size=5)
stop_strings = st.lists(short_texts | st.sampled_from(["<think>", "[EOS]"]), max_size=4).map(tuple)
pushed = st.lists(
    st.text(alphabet="abé😀", max_size=6).map(TOKENIZER.encode)
    | st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=3)
    | st.sampled_from([[token] for token in SPECIAL]),
    max_size=8,
).map(lambda parts: [token for part in parts for token in part])


def expected(ids: list[int], stop: tuple[str, ...], include_stop: bool) -> tuple[list[str | tuple[str]], str | None]:
    """Texts between special tokens, and special tokens as 1-tuples, up to the first stop; slowly and all at once."""
    segments: list[bytes | str] = [b""]
    for token in ids:
        if content := TOKENIZER.token_bytes(token):
            segments[-1] = segments[-1] + content  # pyrefly: ignore
        else:
            segments += [TOKENIZER.special_name(token) or "", b""]
    seen: list[str | tuple[str]] = []
    for segment in segments:
        if isinstance(segment, bytes):
            text = segment.decode("utf-8", "replace")
            ends = [(text.index(each) + len(each), -len(each), each) for each in stop if each in text]
            if ends:
                end, _, each = min(ends)
                return [*seen, text[:end] if include_stop else text[: end - len(each)]], each
            seen.append(text)
        elif segment in stop:
            return [*seen, *([(segment,)] if include_stop else [])], segment
        elif segment:
            seen.append((segment,))
    return seen, None


def joined(parts: list[str | tuple[str]]) -> list[str | tuple[str]]:
    """Neighbouring texts as one, empty ones gone."""
    result: list[str | tuple[str]] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        elif part:
            result.append(part)
    return result


def read(ids: list[int], stop: tuple[str, ...], include_stop: bool) -> tuple[list[Piece], str | None]:
    stream = TextStream(TOKENIZER, stop, include_stop)
    pieces = [piece for token in ids for piece in stream.push(token)]
    return pieces + stream.finish(), stream.matched


@given(ids=pushed, stop=stop_strings, include_stop=st.booleans())
@example(ids=TOKENIZER.encode("abababé"), stop=("ababé",), include_stop=False)
@example(ids=TOKENIZER.encode("aab"), stop=("aab", "ab", "b"), include_stop=False)
@example(ids=[*SMILE[:-1], SPECIAL[3], SMILE[-1]], stop=("\ufffd",), include_stop=True)
@example(ids=SMILE[:-1], stop=("\ufffd",), include_stop=False)
def test_any_tokens_and_stop_strings_give_the_whole_text_cut_at_the_first_stop(
    ids: list[int], stop: tuple[str, ...], include_stop: bool
) -> None:
    pieces, matched = read(ids, stop, include_stop)
    want, want_matched = expected(ids, stop, include_stop)
    assert all(bool(piece.text) != bool(piece.special) for piece in pieces)
    assert joined([piece.text or (piece.special or "",) for piece in pieces]) == joined(want)
    assert matched == want_matched


@given(ids=pushed)
def test_without_stop_strings_the_pieces_are_the_decoded_text(ids: list[int]) -> None:
    pieces, matched = read(ids, (), False)
    assert matched is None
    assert "".join(piece.text + (piece.special or "") for piece in pieces) == TOKENIZER.decode(ids)
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(ids, skip_special=True)


@given(texts=st.lists(st.text(alphabet="abé😀", max_size=4), max_size=6), stop=stop_strings)
def test_exactly_what_may_become_a_stop_string_or_a_character_waits(texts: list[str], stop: tuple[str, ...]) -> None:
    stream, out = TextStream(TOKENIZER, stop), ""
    content = b""
    for token in [token for text in texts for token in TOKENIZER.encode(text)]:
        out += "".join(piece.text for piece in stream.push(token))
        if stream.matched is not None:
            break
        content += TOKENIZER.token_bytes(token)
        characters = content.decode("utf-8", "ignore")  # all but a half one at the end
        beginnings = {text[:size] for text in stop for size in range(1, len(text))}
        waiting = max((size for size in range(len(characters) + 1) if characters[-size:] in beginnings), default=0)
        assert out == characters[: len(characters) - waiting]


def test_text_comes_as_soon_as_no_stop_string_can_begin_with_it() -> None:
    stream = TextStream(TOKENIZER, ("END",))
    texts = ["".join(piece.text for piece in stream.push(TOKENIZER.encode(letter)[0])) for letter in "xEN.END"]
    assert texts == ["x", "", "", "EN.", "", "", ""]
    assert stream.matched == "END" and stream.finish() == [] and stream.push(SPECIAL[0]) == []


def test_a_special_token_comes_by_name_and_sets_free_what_was_held() -> None:
    stream = TextStream(TOKENIZER, ("END",))
    pieces = [*stream.push(TOKENIZER.encode("E")[0]), *stream.push(TOKENIZER.special_ids["</think>"])]
    assert pieces == [Piece("E"), Piece("", "</think>")]
    pieces = [piece for token in TOKENIZER.encode("ND") for piece in stream.push(token)]
    assert "".join(piece.text for piece in pieces) == "ND" and stream.matched is None


def test_stop_strings_that_could_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stop is \('a', ''\)"):
        TextStream(TOKENIZER, ("a", ""))
    with pytest.raises(ValueError, match="stop is 'END'"):
        TextStream(TOKENIZER, "END")


@given(ids=pushed, stop=stop_strings)
@example(ids=[*SMILE[:-1], SPECIAL[3], SMILE[-1]], stop=())
def test_a_whole_text_is_what_a_stream_gives_in_the_end(ids, stop):
    for given_stop in (stop, ()):
        whole = [piece.text or (piece.special,) for piece in whole_text(TOKENIZER, ids, given_stop)]
        assert joined(whole) == joined(expected(ids, given_stop, False)[0])
    borders = sum(not TOKENIZER.token_bytes(token) for token in ids)
    assert len(whole) <= 2 * borders + 1, "without stop strings there is one piece of text between two borders"
