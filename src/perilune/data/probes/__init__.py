"""Tasks that ask for memory and nothing else: generated rows whose answers follow from what came before.

    mqar         keys with values, then some of the keys again: what was the value?             (arXiv 2312.04927)
    palindrome   symbols, a separator, then the same symbols backwards
    stack        pushes to and pops from many stacks: what comes off the top?                    (arXiv 2510.26692)

Row n is a function of (task, length, vocabulary, seed, n) alone and no row is ever repeated, so what a model scores is
not what it has memorised. Only answers are targets; all other targets are IGNORED. A row is a document of its own, or
with `short_first`, among the first, several (rows.py).

    rows = ProbeRows(ProbeConfig(task="mqar"), seq_len=256, vocab_size=1024, seed=0)
    batch = rows.batch(first_row=0, count=8)             # a PackedBatch, as from a PackedDataset
"""

from perilune.data.probes.rows import TASKS, ProbeConfig, ProbeRows, Task

__all__ = ["TASKS", "ProbeConfig", "ProbeRows", "Task"]
