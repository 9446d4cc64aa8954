"""Text and pictures into training batches: corpus -> tokenizer -> token store -> packed rows. numpy only, no torch.

corpus = Corpus(CorpusConfig(source="stdlib"))
tokenizer = train_tokenizer(corpus, vocab_size=4096, cache_dir=cache)
stores = tokenize_corpus(corpus, tokenizer, cache_dir=cache)
batch = PackedDataset(stores.train, seq_len=512, seed=0).batch(first_row=0, count=8)
pictures = VisionRows(VisionDataConfig(), tokenizer, seq_len=512, seed=0).batch(first_row=0, count=2)
"""

from perilune.data.corpus import Corpus, CorpusConfig, CorpusError, CorpusSummary, Document
from perilune.data.fusion import Fusion, FusionConfig
from perilune.data.inspection import inspect
from perilune.data.packing import IGNORED, PackedBatch, PackedDataset, Row, ValidationSet, valid_batches
from perilune.data.readers import Progress
from perilune.data.store import TokenStore, TokenStoreError, TokenStores, open_stores, tokenize_corpus, train_tokenizer
from perilune.data.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer, TokenizerError
from perilune.data.vision_documents import VisionDataConfig
from perilune.data.vision_rows import VisionRows, VisionRowsError

__all__ = [
    "IGNORED",
    "SPECIAL_TOKENS",
    "Corpus",
    "CorpusConfig",
    "CorpusError",
    "CorpusSummary",
    "Document",
    "Fusion",
    "FusionConfig",
    "PackedBatch",
    "PackedDataset",
    "Progress",
    "Row",
    "StreamDecoder",
    "TokenStore",
    "TokenStoreError",
    "TokenStores",
    "Tokenizer",
    "TokenizerError",
    "ValidationSet",
    "VisionDataConfig",
    "VisionRows",
    "VisionRowsError",
    "inspect",
    "open_stores",
    "tokenize_corpus",
    "train_tokenizer",
    "valid_batches",
]
