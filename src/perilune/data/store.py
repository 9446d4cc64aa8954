"""Tokens on disk: a corpus tokenised once, memory-mapped afterwards.

One folder per (corpus, tokenizer), named by the hash of both:

    meta.json                 versions, fingerprints, counts, the size and sha256 of every other file, its own sha256
    train.bin, valid.bin      the tokens of all documents in corpus order, uint16 or uint32
    train.npy, valid.npy      int64 [documents + 1]: where each document begins in the .bin
    bytes_per_token.npy       int32 [vocab_size]
    valid.domains.json        what kind of text each held-out document is

A document is stored as [BOS] text [EOS]. With [BOS] as the first input every byte of the text is a target once, so bits
per byte is exact; with [EOS] as the last target a model learns where documents end.

The folder is written under a temporary name and renamed when complete. Several processes may build it at once: the
first rename wins and the others use it. A folder whose files have a wrong size or checksum is built again.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.corpus import Corpus, Document, Progress, Split
from perilune.data.tokenizer import Digits, Tokenizer
from perilune.data.turns import turn

VERSION = 2  # part of the folder's name: raise it when the same input gives other files
DOMAINS = "valid.domains.json"
SPLITS: tuple[Split, ...] = ("train", "valid")
MOST_DOMAINS = 12
UNNAMED = "text"
"""The domain of what comes without one."""
_BATCH_CHARACTERS = 4_000_000
_ABANDONED_SECONDS = 24 * 3600


class TokenStoreError(ValueError):
    """A token store that is incomplete, damaged or cannot be written."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The documents of one split; `tokens[offsets[n]:offsets[n + 1]]` is document n with its [BOS] and [EOS]."""

    tokens: np.ndarray
    offsets: np.ndarray
    bytes_per_token: np.ndarray
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    num_bytes: int
    domains: tuple[str, ...] = ()
    """What kind of text each document is; of held-out documents alone."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, number: int) -> np.ndarray:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def by_domain(self, most: int = MOST_DOMAINS) -> dict[str, "TokenStore"]:
        """Stores in memory, the largest domain first; the smallest are joined as "others" where there are more than
        `most`. Empty where nobody wrote down what the documents are."""
        sizes: dict[str, int] = {}
        for domain, size in zip(self.domains, np.diff(self.offsets).tolist(), strict=False):
            sizes[domain] = sizes.get(domain, 0) + size
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        return {
            label: TokenStore.from_documents(
                [self.document(number) for number, domain in enumerate(self.domains) if domain in members],
                bytes_per_token=self.bytes_per_token, **ids,
            )
            for label, members in domain_labels(sizes, most).items()
        }  # fmt: skip

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int] | np.ndarray],
        *,
        bytes_per_token: np.ndarray,
        bos_id: int,
        eos_id: int,
        pad_id: int,
    ) -> "TokenStore":
        """A store in memory from documents that are already tokens ([BOS] and [EOS] included)."""
        if any(len(document) == 0 for document in documents):
            raise TokenStoreError("a document has no tokens; store at least its [BOS]")
        offsets = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum([len(document) for document in documents], out=offsets[1:])
        vocab_size = len(bytes_per_token)
        parts = [np.asarray(document) for document in documents]
        tokens = np.concatenate([*parts, np.zeros(0, np.int64)]).astype(token_dtype(vocab_size))
        table = np.asarray(bytes_per_token, dtype=np.int32)
        digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes() + table.tobytes())
        digest.update(f"{bos_id} {eos_id} {pad_id}".encode())
        return cls(
            tokens=tokens,
            offsets=offsets,
            bytes_per_token=table,
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            fingerprint=digest.hexdigest(),
            num_bytes=int(table[tokens].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class TokenStores:
    """Both splits of a corpus."""

    train: TokenStore
    valid: TokenStore
    folder: Path
    fingerprint: str


def domain_labels(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Names to show -> the domains each stands for, the largest first; from the `most`-th on they are "others"."""
    order = sorted(sizes, key=lambda domain: -sizes[domain])
    if len(order) <= most:
        return {domain: [domain] for domain in order}
    return {**{domain: [domain] for domain in order[: most - 1]}, "others": order[most - 1 :]}


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def store_folder(corpus_fingerprint: str, tokenizer_fingerprint: str, cache_dir: str | Path) -> Path:
    key = hashlib.sha256(f"{VERSION}\n{corpus_fingerprint}\n{tokenizer_fingerprint}".encode()).hexdigest()
    return Path(cache_dir) / f"tokens-{key[:24]}"


def train_tokenizer(
    corpus: Corpus,
    vocab_size: int,
    *,
    cache_dir: str | Path,
    digits: Digits = 3,
    max_bytes: int = 200_000_000,
    progress: Progress | None = None,
    more_texts: Callable[[], Iterable[str]] | None = None,
    more_fingerprint: str = "",
) -> Tokenizer:
    """The tokenizer of a corpus' training documents (of their first `max_bytes`), from the cache when it is there.

    `more_texts` are learned from as well; `more_fingerprint` is what they are a function of.
    """

    def texts() -> Iterator[str]:
        size, total = 0, min(max_bytes, corpus.summary.num_bytes["train"])
        for document in corpus.documents("train"):
            size += len(document.text.encode())
            if size > max_bytes:
                break
            if progress is not None:
                progress("training the tokenizer", size, total)
            yield document.text
        yield from () if more_texts is None else more_texts()

    learned_from = f"{corpus.fingerprint} {max_bytes}" + (f" {more_fingerprint}" if more_fingerprint else "")
    return Tokenizer.cached(texts(), vocab_size, corpus_fingerprint=learned_from, cache_dir=cache_dir, digits=digits)


def tokenize_corpus(
    corpus: Corpus, tokenizer: Tokenizer, *, cache_dir: str | Path, progress: Progress | None = None
) -> TokenStores:
    """Open the token store of a corpus, building it first when the cache has no intact one.

    Of several processes that want the same store one builds it, and the others wait for it.
    """
    folder = store_folder(corpus.fingerprint, tokenizer.fingerprint, cache_dir)
    if (found := _intact(folder)) is not None:
        return found

    def waiting() -> None:
        if progress is not None:
            progress("waiting for another process that is tokenizing", 0, 1)

    with turn(folder, on_wait=waiting):
        if (found := _intact(folder)) is not None:
            return found
        temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(6)}.tmp")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder.parent)
            temporary.mkdir()
            _write(temporary, corpus, tokenizer, progress)
            _publish(temporary, folder)
        except OSError as error:
            raise TokenStoreError(f"cannot write the token store {str(folder)!r}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return open_stores(folder)


def _intact(folder: Path) -> TokenStores | None:
    if folder.exists():
        with contextlib.suppress(TokenStoreError):
            return open_stores(folder)
    return None


def open_stores(folder: str | Path, *, verify: bool = True) -> TokenStores:
    """Map an existing store. `verify` checks every file's sha256 (about a second per gigabyte), not only its size."""
    folder = Path(folder)
    try:
        content = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        meta = content["meta"]
        if content["sha256"] != _sha256_of_json(meta):
            raise TokenStoreError(f"{str(folder / 'meta.json')!r} was changed after it was written; delete its folder")
        if meta["version"] != VERSION:
            raise TokenStoreError(f"{str(folder)!r} has version {meta['version']!r}, this code reads {VERSION}")
        for name, expected in meta["files"].items():
            _check_file(folder / name, expected, verify)
        stores = {split: _open_split(folder, split, meta) for split in SPLITS}
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenStoreError(
            f"{str(folder)!r} is not a complete token store ({error!r}); delete it and run again"
        ) from error
    return TokenStores(train=stores["train"], valid=stores["valid"], folder=folder, fingerprint=meta["fingerprint"])


def _check_file(path: Path, expected: dict[str, Any], verify: bool) -> None:
    size = path.stat().st_size
    if size != expected["size"]:
        raise TokenStoreError(f"{str(path)!r} has {size} bytes instead of {expected['size']}; delete its folder")
    if verify and _sha256(path) != expected["sha256"]:
        raise TokenStoreError(f"{str(path)!r} does not have the checksum it was written with; delete its folder")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open_split(folder: Path, split: Split, meta: dict[str, Any]) -> TokenStore:
    path = folder / f"{split}.bin"
    dtype = np.dtype(meta["dtype"])
    # numpy cannot map an empty file
    tokens = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
    return TokenStore(
        tokens=tokens,
        offsets=np.load(folder / f"{split}.npy"),
        bytes_per_token=np.load(folder / "bytes_per_token.npy"),
        bos_id=meta["bos_id"],
        eos_id=meta["eos_id"],
        pad_id=meta["pad_id"],
        fingerprint=f"{meta['fingerprint']}/{split}",
        num_bytes=meta["num_bytes"][split],
        domains=tuple(json.loads((folder / DOMAINS).read_text(encoding="utf-8"))) if split == "valid" else (),
    )


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    offsets: dict[Split, list[int]] = {split: [0] for split in SPLITS}
    num_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    domains: list[str] = []
    total = sum(corpus.summary.num_documents.values())
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        for batch in _batches(corpus.documents_with_split()):
            for ids, (document, split) in zip(tokenizer.encode_batch([d.text for d, _ in batch]), batch, strict=True):
                tokens = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype=dtype)
                files[split].write(tokens.tobytes())
                offsets[split].append(offsets[split][-1] + len(tokens))
                num_bytes[split] += len(document.text.encode())
                if split == "valid":
                    domains.append(document.domain or UNNAMED)
            if progress is not None:
                progress("tokenizing", sum(len(starts) - 1 for starts in offsets.values()), total)
        for file in files.values():  # a store that survives a power cut is worth a second
            file.flush()
            os.fsync(file.fileno())
    for split in SPLITS:
        np.save(folder / f"{split}.npy", np.array(offsets[split], dtype=np.int64))
    np.save(folder / "bytes_per_token.npy", tokenizer.bytes_per_token)
    (folder / DOMAINS).write_text(json.dumps(domains), encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    meta = {
        "version": VERSION,
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "fingerprint": hashlib.sha256(f"{corpus.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest(),
        "dtype": np.dtype(dtype).str,  # with its byte order
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "num_documents": {split: len(offsets[split]) - 1 for split in SPLITS},
        "num_tokens": {split: offsets[split][-1] for split in SPLITS},
        "num_bytes": num_bytes,
        "files": {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names},
    }
    content = {"sha256": _sha256_of_json(meta), "meta": meta}
    (folder / "meta.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _batches(documents: Iterator[tuple[Document, Split]]) -> Iterator[list[tuple[Document, Split]]]:
    """Documents in groups large enough to keep all cores of the tokenizer busy."""
    batch: list[tuple[Document, Split]] = []
    characters = 0
    for document, split in documents:
        batch.append((document, split))
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the finished folder into place, unless another process has put an intact one there."""
    for _ in range(10):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        with contextlib.suppress(TokenStoreError):
            open_stores(folder)
            return
        damaged = folder.with_name(f"{folder.name}.{secrets.token_hex(6)}.tmp")
        with contextlib.suppress(FileNotFoundError):  # another process may move it first
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
    raise TokenStoreError(f"cannot replace the damaged token store {str(folder)!r}; delete it and run again")


def _remove_abandoned(cache_dir: Path) -> None:
    """Temporary folders of builders that were killed long ago."""
    for path in cache_dir.glob("tokens-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
