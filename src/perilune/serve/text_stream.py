"""Token ids into text as it becomes certain, with special tokens by name and stop strings cut away.

    stream = TextStream(tokenizer, stop=("\\n\\n",))
    for token_id in ids:
        pieces = stream.push(token_id)
        if stream.matched is not None: break
    pieces = stream.finish()

What is promised:
  * joined, the texts are the decoded text up to the first stop string, whatever the tokens it came in;
  * the first stop string is the one that is complete first; of two that end together, the longer;
  * nothing that may still become part of a stop string, and no half character, is given out before `finish`;
  * a special token is a border: no character and no stop string reaches across it. A stop string that is the name of a
    special token matches that token.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from perilune.data.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Some text, or one special token by name (then `text` is empty)."""

    text: str
    special: str | None = None


class TextStream:
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {stop!r}, expected a sequence of strings that are not empty")
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        # Longest first: of two that end at the same character, the longer is found.
        self._searches = [_Search(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; whatever is pushed after it is ignored."""

    def push(self, token_id: int) -> list[Piece]:
        """What became certain with this token."""
        if self.matched is not None:
            return []
        content = self._tokenizer.token_bytes(token_id)
        if content:
            return self._read(self._decoder.decode(content))
        pieces = self._flush()
        name = self._tokenizer.special_name(token_id)
        if self.matched is not None or name is None:
            return pieces
        if any(search.text == name for search in self._searches):
            self.matched = name
        if self.matched is None or self._include_stop:
            pieces.append(Piece("", name))
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back: nothing follows it. A half character becomes U+FFFD."""
        return [] if self.matched is not None else self._flush()

    def _flush(self) -> list[Piece]:
        pieces = self._read(self._decoder.decode(b"", final=True))
        if self.matched is None:
            pieces += _pieces(self._held)
            self._held = ""
            for search in self._searches:
                search.length = 0
        return pieces

    def _read(self, text: str) -> list[Piece]:
        if not self._searches:
            return _pieces(text)
        held = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = [search.text for search in self._searches if search.read(character)]
            if found:
                self.matched, self._held = found[0], ""
                return _pieces(held[: position if self._include_stop else position - len(found[0])])
        keep = max((search.length for search in self._searches), default=0)
        certain, self._held = held[: len(held) - keep], held[len(held) - keep :]
        return _pieces(certain)


def whole_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[Piece]:
    """All that a stream gives for these tokens; without stop strings one piece of text between two special tokens."""
    pieces: list[Piece] = []
    if stop:
        stream = TextStream(tokenizer, stop)
        for token_id in token_ids:
            pieces += stream.push(token_id)
        return pieces + stream.finish()
    run: list[bytes] = []
    for token_id in token_ids:
        content = tokenizer.token_bytes(token_id)
        if content:
            run.append(content)
            continue
        pieces += _pieces(b"".join(run).decode(errors="replace"))
        run.clear()
        if (name := tokenizer.special_name(token_id)) is not None:
            pieces.append(Piece("", name))
    return pieces + _pieces(b"".join(run).decode(errors="replace"))


class _Search:
    """Knuth-Morris-Pratt: `length` is how much of `text` the characters read so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._shorter = [0, 0]
        """[n]: length of the longest proper prefix of text[:n] that is also its suffix"""
        length = 0
        for character in text[1:]:
            length = self._extended(length, character)
            self._shorter.append(length)

    def read(self, character: str) -> bool:
        """Whether `text` is complete with this character; nothing may be read after that."""
        self.length = self._extended(self.length, character)
        return self.length == len(self.text)

    def _extended(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._shorter[length]
        return length + 1 if self.text[length] == character else 0


def _pieces(text: str) -> list[Piece]:
    return [Piece(text)] if text else []
