"""`tiktoken.model`, the vocabulary of released Kimi models, as an ordinary tokenizer.json.

A line of the file is a token in base64 and its rank, which is its id. tiktoken cuts a text into pieces by a pattern and
joins, inside a piece, the two neighbours whose union has the lowest rank, until no union is a token. A piece that is a
token as a whole is that token.

The same as byte-pair merges: every way to cut a token in two that are tokens is a merge, in the order of the rank of
what it gives. Special tokens follow the last rank; `tokenizer_config.json` names some of them, the others are reserved.

What this module promises: the ids are those of tiktoken (tested against it), and a file that is not such a vocabulary
is one TokenizerError that names the line.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from perilune.data.tokenizer import BYTE_OF_CHARACTER, KIMI_PATTERN, Tokenizer, TokenizerError

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

ROUND_TRIPS = (
    "The quick brown fox can't jump over 12345.67 lazy dogs, isn't it?  HTTPServer2 camelCase",
    "月之暗面的模型会读中文，也会写English和日本語（にほんご）、한국어。",
    "👩‍👩‍👧‍👦 emoji 🇨🇳🚀 ẞ é é naïve Ελληνικά עברית العربية ไทย हिन्दी",
    "def f(x):\n\n\n        return  x\t\t# tabs\r\n\r\n   \n trailing   ",
    "\u00a0\u2003\u3000 odd spaces \x00\x01\x7f ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9d1\u200d\U0001f680",
    "",
)
"""Texts that a conversion must bring back; chosen to meet every part of the pattern."""


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """token -> rank, in the order of ranks."""
    ranks: dict[bytes, int] = {}
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"cannot read the vocabulary {str(path)!r}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{str(path)!r}, line {number}: {line[:60]!r} is not a token in base64 and its rank"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{str(path)!r} has {len(ranks)} tokens whose ranks are not 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"{str(path)!r} has no token for {len(missing)} bytes, e.g. {missing[0]:#04x}")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens whose union is one, in the order in which tiktoken joins them."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                yield left, right


LATER_NAMES = {
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
}
"""Kimi K2.5 gave names to ids that earlier models reserve, counted from the first special one. An earlier vocabulary
gets them too, unless a name is taken: its model has not learned these tokens, and text never becomes one."""


def special_names(path: str | Path, first: int, vocab_size: int) -> list[str]:
    """Names of the ids `first` to `vocab_size` - 1: those of tokenizer_config.json, of K2.5, or reserved ones."""
    named: dict[int, str] = {}
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        for token_id, token in settings.get("added_tokens_decoder", {}).items():
            named[int(token_id)] = str(token["content"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"cannot read the names of special tokens from {str(path)!r}: {error}") from error
    if named and min(named) < first:
        raise TokenizerError(
            f"{str(path)!r} gives the id {min(named)} to {named[min(named)]!r}, expected {first} or more: "
            "the ids before are the vocabulary's"
        )
    later = {first + place: name for place, name in LATER_NAMES.items() if name not in named.values()}
    named = {**later, **named}
    # Names of ids that the model has no embedding for are left out: nothing can mean them.
    names = [named.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(first, vocab_size)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise TokenizerError(f"{str(path)!r} gives the name {twice[0]!r} to several ids")
    return names


def convert(ranks: Mapping[bytes, int], specials: list[str], pattern: str = KIMI_PATTERN) -> tokenizers.Tokenizer:
    """The same vocabulary for the tokenizers library; `specials` get the ids after the last rank."""

    def characters(token: bytes) -> str:
        return "".join(CHARACTER_OF_BYTE[byte] for byte in token)

    vocabulary = {characters(token): rank for token, rank in ranks.items()}
    merges = [(characters(left), characters(right)) for left, right in merges_of(ranks)]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyrefly: ignore
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()  # pyrefly: ignore
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return core


def import_vocabulary(folder: str | Path, vocab_size: int, pattern: str = KIMI_PATTERN) -> Tokenizer:
    """The tokenizer of a folder with a tiktoken.model, for a model of so many ids; checked by round trips."""
    folder = Path(folder)
    ranks = read_ranks(folder / "tiktoken.model")
    if len(ranks) > vocab_size:
        raise TokenizerError(
            f"{str(folder / 'tiktoken.model')!r} has {len(ranks)} tokens, more than the model's vocab_size={vocab_size}"
        )
    specials = special_names(folder / "tokenizer_config.json", len(ranks), vocab_size)
    core = convert(ranks, specials, pattern)
    tokenizer = Tokenizer.from_json(core.to_str(), name=str(folder / "tiktoken.model"))
    check_round_trips(tokenizer, ranks, pattern)
    return tokenizer


def check_round_trips(tokenizer: Tokenizer, ranks: Mapping[bytes, int], pattern: str = KIMI_PATTERN) -> None:
    """TokenizerError unless texts come back as they were, with the ids of tiktoken where that package is installed."""
    for token, rank in ranks.items():
        if tokenizer.token_bytes(rank) != token:
            raise TokenizerError(f"the token {rank} became {tokenizer.token_bytes(rank)!r}, expected {token!r}")
    try:
        import tiktoken
    except ImportError:
        theirs = None
    else:
        theirs = tiktoken.Encoding("imported", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
    for text in ROUND_TRIPS:
        ids = tokenizer.encode(text)
        if tokenizer.decode(ids) != text:
            raise TokenizerError(f"the text {text!r} comes back as {tokenizer.decode(ids)!r}")
        if theirs is not None and theirs.encode(text, disallowed_special=()) != ids:
            raise TokenizerError(f"the text {text!r} has other ids than with tiktoken")
