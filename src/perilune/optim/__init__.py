"""MuonClip: Muon for matrices, AdamW for the rest, QK-Clip after the step.

    optimizer = MuonClip.for_model(model, lr=1e-3)
    print(optimizer.table())

Modules say what they hold by `logical_matrices()` (matrices.py) and `qk_heads()` (heads.py); transformers' Llama and
DeepSeek-V3 are known as they are (adapters.py). `QKClip` also works after any other optimizer.
"""

from perilune.optim.heads import ClipsQK, MaxLogitRecorder, QKHeads, RowScaling, gqa_heads, mha_heads, mla_heads
from perilune.optim.matrices import Adam, ColumnBlocks, DeclaresMatrices, Layout, RowBlocks, Stacked, Whole
from perilune.optim.muon import MuonClip, clip_grad_norm_
from perilune.optim.qk_clip import ClipReport, QKClip

__all__ = [
    "Adam",
    "ClipReport",
    "ClipsQK",
    "ColumnBlocks",
    "DeclaresMatrices",
    "Layout",
    "MaxLogitRecorder",
    "MuonClip",
    "QKClip",
    "QKHeads",
    "RowBlocks",
    "RowScaling",
    "Stacked",
    "Whole",
    "clip_grad_norm_",
    "gqa_heads",
    "mha_heads",
    "mla_heads",
]
