"""Byte-level BPE, trained offline, with the special tokens of Kimi reserved from the start.

A text is cut by `SPLIT_PATTERN` into pieces (words with their leading space, digits in groups of at most three, or one
by one, punctuation, line break plus indentation), each piece is a string of UTF-8 bytes, and byte-pair merges (Sennrich
et al., arXiv:1508.07909) join frequent neighbours. Every string has an encoding because all 256 bytes are tokens.

Layout of the ids, for a vocabulary of V:

    0 .. 255          the bytes
    256 .. V - 33     merges (ids beyond the last merge the corpus offered are named <|unused_N|>)
    V - 32 .. V - 1   SPECIAL_TOKENS, in the order Kimi's tokenizer has them, [PAD] last

What this module promises:
  * decode(encode(text)) == text for every string that UTF-8 can hold;
  * text never becomes a special token unless the caller says `allow_special=True`, so a document or a user message that
    spells "<|im_end|>" cannot end a turn;
  * the same texts and size give the same tokenizer, and `fingerprint` names it;
  * the saved file is an ordinary tokenizer.json, which transformers reads too.

A vocabulary that was made elsewhere (data/tiktoken_vocabulary.py) has KIMI_PATTERN and its own block of special tokens
behind the merges; it is used as it is, if the block holds the names of REQUIRED_TOKENS.
"""

import codecs
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from perilune.data.turns import turn

VERSION = 1  # part of every cache key: raise it when the pattern, the layout or the training changes

NUM_RESERVED = 12
SPECIAL_TOKENS: tuple[str, ...] = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    *(f"<|reserved_{n}|>" for n in range(NUM_RESERVED)),
    "[UNK]",  # Kimi has one; a byte-level encoder never produces it
    "[PAD]",
)
REQUIRED_TOKENS = tuple(name for name in SPECIAL_TOKENS if not name.startswith("<|reserved_") and name != "[UNK]")
UNUSED = "<|unused_"
NUM_BYTES = 256
LONG_TEXT = 4096
"""Characters from which on a text is encoded without holding up other threads."""
PART = 1 << 16
"""Characters that are encoded at once, about: what the library makes of a text takes 150 times its size meanwhile."""
MIN_VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS) + 1

# A line break takes the indentation that follows it, but leaves one space to the word after it, so that " return" is
# one token at any depth: 2% fewer tokens on Python source than the usual pattern at a vocabulary of 2,048.
SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)(?!\p{L})",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s*[\r\n]+[ \t]*(?=[ \t]\S)",
        r"\s*[\r\n]+[ \t]*",
        r"\s+(?!\S)",
        r"\s+",
    )
)


DIGITS = r"\p{N}{1,3}"
SINGLE_DIGITS_PATTERN = SPLIT_PATTERN.replace(DIGITS, r"\p{N}")
"""The same with digits one by one: ten tokens that are met all the time, where groups of three are a thousand that a
small model has to learn to copy each by itself."""

KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How released Kimi models cut a text: runs of Chinese characters on their own, other words by their case."""

_BORDER = re.compile(r"[^\W_](?=[\s.,;:!?)\]}\"，。、；：！？])")
"""A letter or digit before something that no piece of either pattern holds behind one (an apostrophe may be): there a
piece ends whatever follows, and the next one begins whatever came before."""


Digits = Literal[1, 3]


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained, saved or loaded, with the reason and the fix."""


class Tokenizer:
    """Text to token ids and back. Build one with `train`, `load` or `cached`."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        # Set once and never changed: the core treats special-token strings as ordinary text. `encode` puts special
        # tokens in by itself, so no mutable switch is shared between threads.
        core.encode_special_tokens = True
        self._core = core
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added = sorted(core.get_added_tokens_decoder().items())
        self.special_ids: dict[str, int] = {
            token.content: token_id for token_id, token in added if not token.content.startswith(UNUSED)
        }
        self.bos_id = self.special_ids["[BOS]"]
        self.eos_id = self.special_ids["[EOS]"]
        self.pad_id = self.special_ids["[PAD]"]
        self._special_splitter = re.compile("(" + "|".join(map(re.escape, self.special_ids)) + ")")
        self._special_names = {token_id: name for name, token_id in self.special_ids.items()}
        self._token_bytes = _token_bytes(core)

    # --- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, digits: Digits = 3) -> "Tokenizer":
        """Learn merges from `texts`; the result has exactly `vocab_size` ids. No token has more `digits`."""
        if vocab_size < MIN_VOCAB_SIZE:
            raise TokenizerError(
                f"vocab_size={vocab_size!r} is too small: {NUM_BYTES} bytes and {len(SPECIAL_TOKENS)} special tokens"
                f" need room for at least one merge; use vocab_size >= {MIN_VOCAB_SIZE}"
            )
        core = tokenizers.Tokenizer(models.BPE())
        core.pre_tokenizer = _pre_tokenizer(SINGLE_DIGITS_PATTERN if digits == 1 else SPLIT_PATTERN)  # pyrefly: ignore
        core.decoder = decoders.ByteLevel()  # pyrefly: ignore
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator(texts, trainer)
        taken = set(SPECIAL_TOKENS) & set(core.get_vocab())
        if taken:  # the pattern separates "<think" from ">", so this would be a bug in the pattern
            raise TokenizerError(f"merges spell the special tokens {sorted(taken)!r}")
        num_unused = vocab_size - len(SPECIAL_TOKENS) - core.get_vocab_size()
        names = [f"{UNUSED}{n}|>" for n in range(num_unused)] + list(SPECIAL_TOKENS)
        core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        return cls(core)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a file that `save` wrote; anything else is one TokenizerError."""
        path = Path(path)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read the tokenizer {str(path)!r}: {error}") from error
        return cls.from_json(content, name=str(path))

    @classmethod
    def from_json(cls, content: str, *, name: str = "tokenizer.json") -> "Tokenizer":
        try:
            core = tokenizers.Tokenizer.from_str(content)
            _check_layout(json.loads(content))
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerError(
                f"{name!r} is not a tokenizer this version can use ({error}); delete it to train it again, or point to"
                " the tokenizer.json of the run"
            ) from error
        return cls(core)

    @classmethod
    def cached(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        corpus_fingerprint: str,
        cache_dir: str | Path,
        digits: Digits = 3,
    ) -> "Tokenizer":
        """The tokenizer of these texts, trained once per (corpus, vocab_size, digits, VERSION) and kept in `cache_dir`.

        `texts` is read only when the cache has no usable file. A corrupt file is trained again. Of several processes
        that want the same tokenizer one trains it, and the others wait for it.
        """
        made_of = f"{VERSION}\n{corpus_fingerprint}\n{vocab_size}" + ("" if digits == 3 else f"\n{digits} digits")
        key = hashlib.sha256(made_of.encode()).hexdigest()[:24]
        path = Path(cache_dir) / f"tokenizer-{vocab_size}-{key}.json"
        if (found := cls._kept(path)) is not None:
            return found
        with turn(path):
            if (found := cls._kept(path)) is not None:
                return found
            tokenizer = cls.train(texts, vocab_size, digits=digits)
            tokenizer.save(path)
            return tokenizer

    @classmethod
    def _kept(cls, path: Path) -> "Tokenizer | None":
        if path.exists():
            try:
                return cls.load(path)
            except TokenizerError:
                path.unlink(missing_ok=True)
        return None

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json; the file appears complete or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.to_json(), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise TokenizerError(f"cannot write the tokenizer {str(path)!r}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def to_json(self) -> str:
        return self._core.to_str(pretty=False)

    # --- using it ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. Special-token strings are ordinary text unless `allow_special` is true.

        With `allow_special=True` every name of `special_ids` found in `text` becomes its id: only for strings the
        program itself wrote, such as a chat template.
        """
        if not allow_special:
            return self._encode_ordinary(text)
        ids: list[int] = []
        for n, part in enumerate(self._special_splitter.split(text)):
            if n % 2:
                ids.append(self.special_ids[part])
            elif part:
                ids.extend(self._encode_ordinary(part))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts as ordinary text, on all cores."""
        for text in texts:
            _require_utf8(text)
        return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _encode_ordinary(self, text: str) -> list[int]:
        _require_utf8(text)
        if len(text) < LONG_TEXT:
            return self._core.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for part in _parts(text):
            # `encode` keeps the interpreter lock: for seconds, with megabytes, in which no other thread would run.
            ids += self._core.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`. Special tokens appear by name, or not at all with `skip_special`.

        Bytes that are not UTF-8 become U+FFFD; a special token ends an incomplete character even when skipped.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for special and unused ids."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {int(token_id)!r} is outside the vocabulary of {self.vocab_size}")
        return self._token_bytes[token_id]

    def special_name(self, token_id: int) -> str | None:
        """The name of a special token, None for any other id."""
        return self._special_names.get(int(token_id))

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """int32 [vocab_size]: how many bytes of text each token stands for (0 for special tokens).

        Summed over targets it is the denominator of bits per byte, a loss that does not depend on the vocabulary.
        """
        table = np.array([len(token) for token in self._token_bytes], dtype=np.int32)
        table.setflags(write=False)
        return table

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pattern, merges, vocabulary and special tokens, in a form no library version can change."""
        parts = json.loads(self.to_json())
        content = {
            "version": VERSION,
            "pattern": _pattern(parts),
            "vocabulary": parts["model"]["vocab"],
            "merges": _merges(parts),
            "added": [(token["id"], token["content"]) for token in parts["added_tokens"]],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]!r})"


class StreamDecoder:
    """Decode token by token: text comes out as soon as its characters are complete.

    A character may be spread over several tokens; its bytes are held until the last one arrives. The concatenation of
    all `push` results and `finish` equals `Tokenizer.decode` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token_bytes(token_id)
        if token:
            return self._decoder.decode(token)
        held = self.finish()
        if self._skip_special:
            return held
        return held + (self._tokenizer.special_name(token_id) or "")

    def finish(self) -> str:
        """What was held back, as U+FFFD, and ready for a new stream."""
        held = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return held


# --- the byte alphabet and the file format ----------------------------------------------------------------------------


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a vocabulary: itself if printable in Latin-1, else 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in enumerate(_byte_characters())}


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _token_bytes(core: tokenizers.Tokenizer) -> list[bytes]:
    table = [b""] * core.get_vocab_size(with_added_tokens=True)
    for token, token_id in core.get_vocab(with_added_tokens=False).items():
        table[token_id] = bytes(BYTE_OF_CHARACTER[character] for character in token)
    return table


def _merges(parts: dict) -> list[list[str]]:
    """Merges as pairs; files of tokenizers < 0.20 hold them as "left right"."""
    return [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in parts["model"]["merges"]]


def _pattern(parts: dict) -> str:
    """The pattern that cuts a text into pieces; ValueError where something else than one pattern does."""
    # Only what matters is compared: other library versions may write more fields.
    steps = (parts["pre_tokenizer"] or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"] or list(steps[0]["pattern"]) != ["Regex"]:
        raise ValueError("its text is not cut by one pattern and then into bytes")
    if (
        steps[0]["behavior"] != "Isolated"
        or steps[0]["invert"]
        or steps[1]["add_prefix_space"]
        or steps[1]["use_regex"]
    ):
        raise ValueError("its pattern drops or joins text, or a second one cuts it again")
    if steps[0]["pattern"]["Regex"] not in (SPLIT_PATTERN, SINGLE_DIGITS_PATTERN, KIMI_PATTERN):
        raise ValueError("its pattern is neither this version's nor that of released Kimi models")
    return steps[0]["pattern"]["Regex"]


def _check_layout(parts: dict) -> None:
    """Raise ValueError unless the parsed tokenizer.json has one pattern, this alphabet and a block of specials."""
    _pattern(parts)
    if parts["normalizer"] is not None:
        raise ValueError("it has a normalizer, so decode(encode(text)) would not give the text back")
    vocabulary = parts["model"]["vocab"]
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("its token ids have gaps")
    if not set(BYTE_OF_CHARACTER) <= set(vocabulary):
        raise ValueError("some of the 256 bytes have no token")
    if any(character not in BYTE_OF_CHARACTER for token in vocabulary for character in token):
        raise ValueError("it holds tokens that are not byte strings")
    if any(left + right not in vocabulary for left, right in _merges(parts)):
        raise ValueError("a merge gives a token that is not in its vocabulary")
    added = [(token["id"], token["content"]) for token in parts["added_tokens"]]
    missing = set(REQUIRED_TOKENS) - {name for _, name in added}
    if missing:
        raise ValueError(f"it lacks the special tokens {', '.join(sorted(missing))}")
    if [token_id for token_id, _ in added] != list(range(len(vocabulary), len(vocabulary) + len(added))):
        raise ValueError("its special tokens are not at the end of the vocabulary")


def _parts(text: str) -> Iterator[str]:
    """A long text in parts whose tokens, one after the other, are those of the whole."""
    start = 0
    while len(text) - start > PART:
        border = _BORDER.search(text, start + PART)
        if border is None:
            break
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]


def _require_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text holds the lone surrogate {text[error.start]!r} at position {error.start}, which UTF-8 cannot"
            " express; clean it with text.encode('utf-8', 'replace').decode()"
        ) from error
