"""Secrets: values that no model, journal, view or log may see, and the mask that keeps them out.

A registered value is found and replaced by `[secret NAME]` where a text holds it

    plain; in capital or small letters throughout; backwards
    percent-encoded, wholly or in part; with JSON or C escapes (\\", \\/, \\u0041, \\x41), wholly or in part
    as base64, standard or URL-safe, at any of the three alignments, with or without padding, also over several lines
    as hexadecimal digits of either case, also with colons, spaces, commas, line breaks, \\x or 0x between the bytes

and where one of the escapes is around any of these (a base64 text in a URL, JSON inside JSON). Lines of a value that
has several (a private key) are found alone as well.

Not found: a part of a value; a value with foreign signs in between or spread over several texts; what is compressed,
encrypted, encoded twice in base64, in UTF-16 or in another base. The mask stops what tools and servers echo. It does
not stop a program that hides a value on purpose: what must not be read must not be in the sandbox.

The search is a few passes over bytes in C (one per view of the text, one per form of a value); places are worked out
only when something was found.
"""

from __future__ import annotations

import base64
import bisect
import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

SHORTEST = 8
LOOKS_SECRET = re.compile(
    r"(?i)(^|_)(api_?key|key|token|secret|pass(word|wd|phrase)?|credentials?|auth|dsn|pat)(_|\d|$)"
)
NO_SECRET = re.compile(
    r"(?i)(_path|_file|_dir|_sock|_id|_url|_env|_name)$|^(xauthority|google_application_credentials)$"
)
URL_PASSWORD = re.compile(rf"://[^/\s:@]*:([^/\s@]{{{SHORTEST},}})@")
LEVELS = 2
"""How many escapes around each other are undone."""

BASE64_SIGNS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
BASE64_BREAKS = b"\r\n\t "
HEX_BREAKS = b"\r\n\t :,-"
URL_SAFE = bytes.maketrans(b"-_", b"+/")
LOWER = bytes.maketrans(b"ABCDEF", b"abcdef")
PERCENT = re.compile(rb"%([0-9A-Fa-f]{2})")
ESCAPE = re.compile(
    rb"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|x([0-9a-f]{2})|([\"\\/bfnrt']))", re.IGNORECASE
)
LONGEST_ESCAPE = 64
CONTROLS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
BYTE_MARKS = re.compile(rb"\\x|0[xX]")


class Span(NamedTuple):
    start: int
    end: int
    name: str


@dataclass(frozen=True)
class _Forms:
    """All that is searched for one value; each form in the view where it stands literally."""

    name: str
    plain: tuple[bytes, ...]
    base64: tuple[bytes, ...]
    hexadecimal: bytes


class Secrets:
    """Registered values. Its text and pickle never show them."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._forms: dict[bytes, _Forms] = {}
        self._longest = 0
        for name, value in (values or {}).items():
            self.register(name, value)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Secrets:
        """Values of variables whose names look like keys (API_KEY, TOKEN, PASSWORD, ...) and that are long enough;
        names of paths and identifiers are left out. Of a URL with a user and a password, the password."""
        secrets = cls()
        for name, value in environment.items():
            if inside := URL_PASSWORD.search(value):
                secrets.register(name, inside[1])
            if LOOKS_SECRET.search(name) and not NO_SECRET.search(name) and len(value.strip()) >= SHORTEST:
                secrets.register(name, value)
        return secrets

    def register(self, name: str, value: str) -> None:
        """Mask this value from now on as `[secret NAME]`. A value of fewer than 8 characters is refused: it would mask
        ordinary words."""
        whole = value.strip()
        if len(whole) < SHORTEST:
            raise ValueError(
                f"secret {name!r} has {len(whole)} characters, expected {SHORTEST} or more: a shorter value occurs in "
                "ordinary text and masking it would garble results"
            )
        lines = [line.strip() for line in whole.splitlines()]
        parts = [line for line in lines if len(line) >= 2 * SHORTEST and not line.startswith("-----")]
        for each in {whole, *(parts if len(lines) > 1 else ())}:
            data = each.encode("utf-8", "surrogatepass")
            self._forms.setdefault(data, _forms(name, data))
            self._longest = max(self._longest, len(data))

    def __len__(self) -> int:
        return len({forms.name for forms in self._forms.values()})

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted({forms.name for forms in self._forms.values()}))})"

    def __reduce__(self) -> Any:
        raise TypeError("secrets are not pickled: register them again where they are needed")

    @overload
    def mask(self, text: str) -> str: ...
    @overload
    def mask(self, text: bytes) -> bytes: ...
    def mask(self, text: str | bytes) -> str | bytes:
        """The text with every registered value replaced."""
        if not self._forms:
            return text
        if isinstance(text, str):
            data = text.encode("utf-8", "surrogatepass")
            spans = self.find(data)
            return _replaced(data, spans).decode("utf-8", "surrogatepass") if spans else text
        return _replaced(text, self.find(text))

    def find(self, data: bytes) -> list[Span]:
        """Where values stand, in order and without overlap."""
        return _merged(_spans(data, tuple(self._forms.values()), LEVELS)) if self._forms else []

    def stream(self) -> StreamMask:
        """A mask for a text that comes in pieces."""
        return StreamMask(self)

    @property
    def reach(self) -> int:
        """The longest run of bytes that a value may take in a stream: every byte as an escape of an escape, with room
        for the breaks of lines."""
        return 16 * self._longest


class StreamMask:
    """Masks a stream, whatever its pieces: what `feed` and `end` return together is the mask of the whole, for values
    that stand within `Secrets.reach` bytes. The last bytes wait until it is known that no value begins there."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._waiting = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._kind: type[str] | type[bytes] | None = None

    @overload
    def feed(self, piece: str) -> str: ...
    @overload
    def feed(self, piece: bytes) -> bytes: ...
    def feed(self, piece: str | bytes) -> str | bytes:
        if self._kind is not None and not isinstance(piece, self._kind):
            raise TypeError(f"the stream began as {self._kind.__name__}, then came {type(piece).__name__}")
        self._kind = type(piece)
        data = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        out = self._masked(self._waiting + data, keep=self._secrets.reach)
        return self._decoder.decode(out) if isinstance(piece, str) else out

    def end(self) -> str | bytes:
        """What is left; of the kind that was fed."""
        out = self._masked(self._waiting, keep=0)
        return out if self._kind is bytes else self._decoder.decode(out, final=True)

    def _masked(self, data: bytes, *, keep: int) -> bytes:
        cut = max(0, len(data) - keep)
        while 0 < cut < len(data) and data[cut - 1 : cut] == b"\\" and len(data) - cut < keep + LONGEST_ESCAPE:
            cut -= 1  # one half of a pair of backslashes would mean something else
        spans = self._secrets.find(data)
        for span in spans:
            if span.start < cut < span.end:
                cut = span.start
        self._waiting = data[cut:]
        return _replaced(data[:cut], [span for span in spans if span.end <= cut])


# Forms and views ------------------------------------------------------------------------------------------------------


def _forms(name: str, value: bytes) -> _Forms:
    text = value.decode("utf-8", "surrogatepass")
    variants = (text, text[::-1], text.upper(), text.lower())
    plain = tuple(dict.fromkeys(each.encode("utf-8", "surrogatepass") for each in variants))
    return _Forms(name, plain, tuple(_base64_core(value, offset) for offset in range(3)), value.hex().encode())


def _base64_core(value: bytes, offset: int) -> bytes:
    """The signs that depend on the value alone when `offset` bytes stand before it in the encoded text."""
    encoded = base64.b64encode(bytes(offset) + value).rstrip(b"=")
    is_end_mixed = (offset + len(value)) % 3 != 0
    return encoded[(0, 2, 3)[offset] : len(encoded) - is_end_mixed]


def _spans(data: bytes, forms: Sequence[_Forms], levels: int) -> list[Span]:
    """Spans in `data` of all forms, found in the data itself and in its views."""
    spans = [span for each in forms for form in each.plain for span in _found(data, form, each.name)]
    spans += _in_base64(data, forms)
    spans += _in_hexadecimal(data, forms)
    if levels:
        for pattern, decode in ((PERCENT, _percent), (ESCAPE, _escape)):
            if pattern.search(data) is not None:
                inner = _spans(pattern.sub(decode, data), forms, levels - 1)
                spans += _placed(inner, data, pattern, decode)
    return spans


def _in_base64(data: bytes, forms: Sequence[_Forms]) -> list[Span]:
    view = data.translate(URL_SAFE, BASE64_BREAKS)
    found = [span for each in forms for form in each.base64 for span in _found(view, form, each.name)]
    # The signs next to it hold bits of the value as well.
    wider = [
        Span(
            span.start - (span.start > 0 and view[span.start - 1] in BASE64_SIGNS),
            span.end + (span.end < len(view) and view[span.end] in BASE64_SIGNS),
            span.name,
        )
        for span in found
    ]
    return _with_dropped(wider, data, BASE64_BREAKS)


def _in_hexadecimal(data: bytes, forms: Sequence[_Forms]) -> list[Span]:
    spans = []
    for source in (data, BYTE_MARKS.sub(b"", data)) if BYTE_MARKS.search(data) else (data,):
        view = source.translate(LOWER, HEX_BREAKS)
        found = [span for each in forms for span in _found(view, each.hexadecimal, each.name)]
        found = _with_dropped(found, source, HEX_BREAKS)
        spans += found if source is data else _placed(found, data, BYTE_MARKS, lambda _: b"")
    return spans


def _with_dropped(spans: list[Span], data: bytes, dropped: bytes) -> list[Span]:
    """Spans of a view that lacks some bytes, as spans of the data."""
    if not spans:
        return []
    places = [at for at, byte in enumerate(data) if byte not in dropped]
    return [Span(places[span.start], places[span.end - 1] + 1, span.name) for span in spans]


def _placed(
    spans: list[Span], data: bytes, pattern: re.Pattern[bytes], decode: Callable[[re.Match[bytes]], bytes]
) -> list[Span]:
    """Spans of a view in which every match was replaced, as spans of the data."""
    if not spans:
        return []
    ends: list[int] = []  # of the pieces in the view
    sources: list[tuple[int, int]] = []
    here = there = 0
    for match in pattern.finditer(data):
        for start, end, size in ((here, match.start(), match.start() - here), (*match.span(), len(decode(match)))):
            there += size
            ends.append(there)
            sources.append((start, end))
        here = match.end()
    ends.append(there + len(data) - here)
    sources.append((here, len(data)))

    def origin(at: int) -> tuple[int, int]:
        """The bytes that one byte of the view comes from."""
        piece = bisect.bisect_right(ends, at)
        start, end = sources[piece]
        if piece % 2:
            return start, end
        return end - (ends[piece] - at), end - (ends[piece] - at) + 1

    return [Span(origin(span.start)[0], origin(span.end - 1)[1], span.name) for span in spans]


def _percent(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 16)])


def _escape(match: re.Match[bytes]) -> bytes:
    high, low, sign, byte, letter = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)).encode()
    if sign:
        return chr(int(sign, 16)).encode("utf-8", "surrogatepass")
    return bytes([int(byte, 16)]) if byte else CONTROLS.get(letter, letter)


def _found(data: bytes, needle: bytes, name: str) -> list[Span]:
    spans = []
    at = data.find(needle)
    while at >= 0:
        spans.append(Span(at, at + len(needle), name))
        at = data.find(needle, at + len(needle))
    return spans


def _merged(spans: list[Span]) -> list[Span]:
    """In order; those that overlap become one with the name of the first."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end), last.name)
        else:
            merged.append(span)
    return merged


def _replaced(data: bytes, spans: list[Span]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for span in spans:
        parts += [data[at : span.start], f"[secret {span.name}]".encode()]
        at = span.end
    return b"".join([*parts, data[at:]])


__all__ = ["Secrets", "Span", "StreamMask"]
