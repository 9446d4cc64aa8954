"""The held-out documents of a run, by domain and as one long text.

The long text is what long-context probes read. Single documents are rarely as long as a context, so documents of one
domain are put one after the other in the order of their names (files of one package are neighbours), with an empty line
between them and no border that the model would see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perilune.data import Corpus, CorpusConfig, Document, Progress, Tokenizer, TokenStore
from perilune.data.store import MOST_DOMAINS, UNNAMED, domain_labels


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    stores: Mapping[str, TokenStore]
    """Documents by domain; the largest domain first."""
    text: np.ndarray
    """int64: all of them, one after the other."""
    bytes_per_token: np.ndarray
    bos_id: int


def held_out(
    corpus: CorpusConfig, tokenizer: Tokenizer, *, max_domains: int = MOST_DOMAINS, progress: Progress | None = None
) -> HeldOut:
    """Of a corpus; the smallest domains are joined as "others" when there are more than `max_domains`."""
    documents = list(Corpus(corpus, progress=progress).documents("valid"))
    if not documents:
        raise ValueError(
            f"the corpus {corpus.source!r} holds nothing out (valid_fraction={corpus.valid_fraction!r}): "
            "give another with --corpus"
        )
    groups = _by_domain(documents, max_domains)
    encoded = {domain: tokenizer.encode_batch([d.text for d in members]) for domain, members in groups.items()}
    gap = tokenizer.encode("\n\n")
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    table = tokenizer.bytes_per_token
    return HeldOut(
        stores={
            domain: TokenStore.from_documents(
                [[tokenizer.bos_id, *row, tokenizer.eos_id] for row in rows], bytes_per_token=table, **ids
            )
            for domain, rows in encoded.items()
        },
        text=np.array([token for rows in encoded.values() for row in rows for token in [*row, *gap]], dtype=np.int64),
        bytes_per_token=table,
        bos_id=tokenizer.bos_id,
    )


def _by_domain(documents: Sequence[Document], max_domains: int) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = {}
    for document in sorted(documents, key=lambda document: (document.domain, document.id)):
        groups.setdefault(document.domain or UNNAMED, []).append(document)
    sizes = {domain: sum(len(document.text) for document in members) for domain, members in groups.items()}
    labels = domain_labels(sizes, max_domains)
    return {label: [document for domain in members for document in groups[domain]] for label, members in labels.items()}
