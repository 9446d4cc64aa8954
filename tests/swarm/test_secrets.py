"""Secrets: no registered value leaves in any encoding the mask claims to know, however the text is cut."""

import base64
import json
import pickle
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.swarm.secrets import Secrets

CORPUS = json.loads((Path(__file__).parent / "corpora" / "canaries.json").read_text(encoding="utf-8"))
CANARIES: dict[str, str] = CORPUS["canaries"]
KEY = CANARIES["PLAIN_API_KEY"]


@pytest.mark.parametrize("case", CORPUS["cases"], ids=[case["id"] for case in CORPUS["cases"]])
def test_canaries_are_masked_in_every_covered_encoding_and_in_no_other(case: dict) -> None:
    secrets = Secrets(CANARIES)
    joined = case["text"].replace("\\n", "").replace("\n", "")
    assert case["leak"] in case["text"] or case["leak"] in joined, "the case holds what it claims to hold"
    masked = secrets.mask(case["text"])
    gone = case["leak"] not in masked and case["leak"] not in masked.replace("\\n", "").replace("\n", "")
    assert gone == case["covered"]
    assert (f"[secret {case['canary']}]" in masked) == case["covered"]
    assert secrets.mask(case["text"].encode()) == masked.encode()
    stream = secrets.stream()
    pieces = [stream.feed(case["text"][at : at + 7]) for at in range(0, len(case["text"]), 7)]
    assert "".join(pieces) + stream.end() == masked


SAFE = st.characters(exclude_categories=["Cs", "Cc", "Zs"])
VALUES = st.text(SAFE, min_size=8, max_size=40).filter(lambda text: len(text.strip()) >= 8)


def json_escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def part_escaped(text: str) -> str:
    return "".join(urllib.parse.quote(sign, safe="") if at % 2 or sign == "%" else sign for at, sign in enumerate(text))


ENCODINGS = {
    "plain": lambda text: text,
    "reversed": lambda text: text[::-1],
    "percent": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    "percent in part": part_escaped,
    "json": json_escaped,
    "json in json": lambda text: json_escaped(json_escaped(text)),
    "json in url": lambda text: urllib.parse.quote(json_escaped(text), safe=""),
    "hex": lambda text: text.encode().hex(),
    "HEX:": lambda text: text.encode().hex(":").upper(),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 lines": lambda text: base64.encodebytes(b"12345" + text.encode() * 2).decode(),
    "base64 in url": lambda text: urllib.parse.quote(base64.b64encode(b"." + text.encode()).decode(), safe=""),
}


@given(VALUES, st.sampled_from(sorted(ENCODINGS)), st.text(SAFE, max_size=10), st.text(SAFE, max_size=10))
@settings(max_examples=120)
def test_any_value_in_any_encoding_is_found_between_any_text(value: str, how: str, before: str, after: str) -> None:
    secrets = Secrets({"S": value})
    encoded = ENCODINGS[how](value)
    masked = secrets.mask(f"{before} {encoded}\n{after}")
    assert "[secret S]" in masked
    assert encoded not in masked or encoded in "[secret S]"


@given(
    st.lists(
        st.sampled_from(sorted(ENCODINGS)) | st.sampled_from(["%", "\\", "\\\\", "%5c", "a", "é", " ", "0x", "\n"]),
        max_size=8,
    ),
    st.lists(st.integers(1, 60), max_size=30),
)
@example(["\\", "json"], [1] * 30)
@settings(max_examples=80)
def test_a_stream_is_masked_as_the_whole_is_however_it_is_cut(parts: list[str], cuts: list[int]) -> None:
    value = 'k9/Q+"x~ß-Zp'
    secrets = Secrets({"S": value, "T": CANARIES["SHORT_TOKEN"]})
    text = "".join(ENCODINGS[part](value) if part in ENCODINGS else part * 3 for part in parts) * 2 + "tail " * 90
    for whole in (text, text.encode()):
        stream, pieces, at = secrets.stream(), [], 0
        for size in [*cuts, len(whole)]:
            pieces.append(stream.feed(whole[at : at + size]))
            at += size
        pieces.append(stream.end())
        assert type(whole)().join(pieces) == secrets.mask(whole)


def test_a_stream_gives_out_what_can_hold_no_secret_any_more() -> None:
    secrets = Secrets({"S": KEY})
    stream = secrets.stream()
    given_out = stream.feed("a" * 10_000)
    assert len(given_out) == 10_000 - secrets.reach
    assert given_out + stream.end() == "a" * 10_000
    with pytest.raises(TypeError, match="the stream began as str, then came bytes"):
        stream.feed(b"bytes")
    assert secrets.stream().end() == ""


def test_a_piece_is_not_given_out_while_a_secret_may_begin_in_it() -> None:
    stream = Secrets({"S": KEY}).stream()
    out = stream.feed("x" * 9000 + KEY[:10])
    assert KEY[:10] not in out
    out += stream.feed(KEY[10:] + "y" * 9000)
    assert out + stream.end() == "x" * 9000 + "[secret S]" + "y" * 9000


@pytest.mark.parametrize("backslashes", range(6))
def test_a_cut_between_backslashes_changes_nothing(backslashes: int) -> None:
    secrets = Secrets({"S": "abcdefgh"})
    text = "\\" * backslashes + "".join(f"\\u{ord(sign):04x}" for sign in "abcdefgh") + "." * 2 * secrets.reach
    stream = secrets.stream()
    assert "".join([stream.feed(sign) for sign in text]) + stream.end() == secrets.mask(text)


def test_ordinary_text_is_left_alone() -> None:
    secrets = Secrets(CANARIES)
    text = "Plain prose, %41 and \\u0041, 0xdeadbeef, aGVsbG8gd29ybGQ=, canary, KEY. \ud800 \x00"
    assert secrets.mask(text) is text
    assert Secrets().mask(text) is text and Secrets().find(b"x") == []
    assert secrets.mask(bytes(range(256)) * 4) == bytes(range(256)) * 4


def test_the_signs_beside_a_base64_value_are_masked_as_they_hold_bits_of_it() -> None:
    for offset in range(3):
        encoded = base64.b64encode(b"x" * (offset + 3) + KEY.encode() + b"zzzz").decode()
        masked = Secrets({"S": KEY}).mask(encoded)
        left = masked.split("[secret S]")
        known = base64.b64encode(b"x" * (offset + 3)).decode().rstrip("=")
        assert len(left) == 2 and known.startswith(left[0])


def test_a_private_key_is_found_as_a_whole_and_line_by_line() -> None:
    lines = [
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
        "BKcwggSjAgEAAoIBAQC7",
        "-----END PRIVATE KEY-----",
    ]
    secrets = Secrets({"PEM": "\n".join(lines)})
    assert secrets.mask("\n".join(lines)) == "[secret PEM]"
    indented = secrets.mask("".join(f"    {line}\r\n" for line in lines))
    assert lines[1] not in indented and lines[2] not in indented and lines[0] in indented
    assert len(secrets) == 1


def test_a_short_value_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="secret 'PIN' has 4 characters, expected 8 or more: a shorter value occurs"):
        Secrets().register("PIN", " 1234 \n")


def test_keys_are_taken_from_the_environment_by_their_names() -> None:
    secrets = Secrets.from_environment(
        {
            "OPENAI_API_KEY": "canary-open-ai",
            "GITHUB_TOKEN": "canary-git-hub",
            "DB_PASSWORD": "canary-data-base",
            "SSH_AUTH_SOCK": "/run/agent.socket",
            "TOKENIZERS_PARALLELISM": "false-false",
            "KEYBOARD": "us-international",
            "AWS_ACCESS_KEY_ID": "identifier-123",
            "SHORT_KEY": "abc",
            "DATABASE_URL": "postgres://user:canary-in-url@host/db",
            "HOME": "/home/somebody",
        }
    )
    assert repr(secrets) == "Secrets(DATABASE_URL, DB_PASSWORD, GITHUB_TOKEN, OPENAI_API_KEY)"
    assert secrets.mask("postgres://user:canary-in-url@host/db") == "postgres://user:[secret DATABASE_URL]@host/db"


def test_secrets_show_and_pickle_no_values() -> None:
    secrets = Secrets(CANARIES)
    assert not any(value in repr(secrets) for value in CANARIES.values())
    with pytest.raises(TypeError, match="secrets are not pickled"):
        pickle.dumps(secrets)
