"""What a corpus looks like after tokenising and packing, as one plain dict for `perilune data`."""

from typing import Any

import numpy as np

from perilune.data.corpus import Corpus
from perilune.data.packing import PackedDataset
from perilune.data.store import TokenStore, TokenStores
from perilune.data.tokenizer import Tokenizer

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def inspect(
    corpus: Corpus,
    tokenizer: Tokenizer,
    stores: TokenStores,
    *,
    seq_len: int,
    seed: int = 0,
    num_rows: int = 3,
    shown_tokens: int = 32,
) -> dict[str, Any]:
    """Counts, ratios, length quantiles and the first rows with their document borders; every value fits into JSON."""
    dataset = PackedDataset(stores.train, seq_len, seed)
    return {
        "source": corpus.config.source,
        "skipped": corpus.summary.skipped,
        "fingerprints": {
            "corpus": corpus.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "packing": dataset.fingerprint,
        },
        "folder": str(stores.folder),
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_ids,
        "splits": {"train": _split_numbers(stores.train), "valid": _split_numbers(stores.valid)},
        "seq_len": seq_len,
        "rows_per_epoch": round(dataset.rows_per_epoch, 2),
        "rows": [_row_numbers(dataset, tokenizer, index, shown_tokens) for index in range(num_rows)],
    }


def _split_numbers(store: TokenStore) -> dict[str, Any]:
    # [BOS] and [EOS] stand for no bytes: the ratio is about the text
    num_text_tokens = store.num_tokens - 2 * store.num_documents
    lengths = np.diff(store.offsets)
    return {
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "bytes_per_token": round(store.num_bytes / num_text_tokens, 4) if num_text_tokens else None,
        "document_tokens": {
            f"p{round(100 * q)}": int(np.quantile(lengths, q, method="lower")) for q in QUANTILES if len(lengths)
        },
    }


def _row_numbers(dataset: PackedDataset, tokenizer: Tokenizer, index: int, shown_tokens: int) -> dict[str, Any]:
    row = dataset.row(index)
    starts = {int(start) for start in row.starts}
    shown = [int(token) for token in row.tokens[:shown_tokens]]
    pieces = [tokenizer.special_name(token) or _readable(tokenizer.token_bytes(token)) for token in shown]
    return {
        "row": index,
        "starts": sorted(starts),
        "token_ids": shown,
        "tokens": pieces,
        # "|" where a document (or the rest of one) begins
        "text": " ".join(("| " if n in starts else "") + piece for n, piece in enumerate(pieces)),
    }


def _readable(token: bytes) -> str:
    """A token on one line: control characters and stray bytes escaped, a leading space shown as a dot."""
    text = token.decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() and c != " " else "·" if c == " " else repr(c)[1:-1] for c in text)
