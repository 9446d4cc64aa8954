"""Stacks: symbols pushed to and popped from many stacks in turn; a popped symbol is the answer.

    push 3 x   push 1 y   push 3 z   pop 3 z   pop 1 y   pop 3 x

An operation is three tokens: what, which stack, which symbol. Which stack is uniform; a pop where nothing is left
becomes a push. So a model has to keep the contents of all stacks and the order in each, for as long as a stack waits.
"""

import numpy as np

from perilune.data.probes.draws import Draws

PADDING, PUSH, POP = 0, 1, 2
_FIRST = 3


def generate(
    draws: Draws, *, seq_len: int, vocab_size: int, num_stacks: int, num_used: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [N, seq_len + 1] and where the answers are among the targets, bool [N, seq_len].

    num_used: every row takes only so many of the stacks, any of them.
    """
    num_symbols = vocab_size - _FIRST - num_stacks
    if num_symbols < 2:
        raise ValueError(
            f"probe.num_stacks is {num_stacks}, which leaves {num_symbols} symbols of vocab_size={vocab_size}: "
            "lower it, or raise data.vocab_size"
        )
    count, num_operations = len(draws.rows), (seq_len + 1) // 3
    stack = draws.below(num_used or num_stacks, stream=1, count=num_operations)
    if num_used is not None:
        stack = np.take_along_axis(draws.choice(num_stacks, stream=4, count=num_used), stack, axis=1)
    wants_pop = draws.below(2, stream=2, count=num_operations) == 1
    symbol = draws.below(num_symbols, stream=3, count=num_operations)
    is_pop, top = _run(stack, wants_pop, symbol, num_stacks)

    tokens = np.full((count, seq_len + 1), PADDING, dtype=np.int64)
    operations = tokens[:, : 3 * num_operations].reshape(count, num_operations, 3)
    operations[..., 0] = np.where(is_pop, POP, PUSH)
    operations[..., 1] = _FIRST + stack
    operations[..., 2] = _FIRST + num_stacks + np.where(is_pop, top, symbol)
    tokens[:, : 3 * num_operations] = operations.reshape(count, -1)
    answers = np.zeros((count, seq_len), dtype=bool)
    answers[:, 1 : 3 * num_operations - 1 : 3] = is_pop  # the stack's number is the input, the symbol its target
    return tokens, answers


def _run(
    stack: np.ndarray, wants_pop: np.ndarray, symbol: np.ndarray, num_stacks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which operations pop, and the symbol they take.

    All stacks of all rows move at once: step t is the t-th operation of each stack, so a row of hundreds of operations
    takes a few dozen steps.
    """
    count, num_operations = stack.shape
    owner = (np.arange(count)[:, None] * num_stacks + stack).ravel()
    order = np.argsort(owner, kind="stable")  # operations by stack, in time's order in each
    sizes = np.bincount(owner, minlength=count * num_stacks)
    begins = np.cumsum(sizes) - sizes
    longest = int(sizes.max(initial=0))
    depth = np.zeros(len(sizes), dtype=np.int64)
    content = np.zeros((len(sizes), longest), dtype=np.int64)
    is_pop = np.zeros(count * num_operations, dtype=bool)
    top = np.zeros(count * num_operations, dtype=np.int64)
    wants_pop, symbol = wants_pop.ravel(), symbol.ravel()
    for step in range(longest):
        moving = np.flatnonzero(sizes > step)
        operation = order[begins[moving] + step]
        pops = wants_pop[operation] & (depth[moving] > 0)
        is_pop[operation] = pops
        popping, pushing = moving[pops], moving[~pops]
        depth[popping] -= 1
        top[operation[pops]] = content[popping, depth[popping]]
        content[pushing, depth[pushing]] = symbol[operation[~pops]]
        depth[pushing] += 1
    return is_pop.reshape(count, num_operations), top.reshape(count, num_operations)
