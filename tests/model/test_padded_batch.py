"""Steps filled up to the shape of a bucket: what the same step gives without padding, on any path."""

import copy
import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import perilune.kernels.kda.triton
import perilune.model.kda
import perilune.model.mla
from perilune.kernels.kda import triton_tables
from perilune.kernels.triton_support import INTERPRETED
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, RopeConfig
from perilune.model.padded_batch import Bucket, padded_batch, padded_numbers
from perilune.model.paged import LatentPool, PagedBatch, PagedCache, StatePool
from perilune.model.paged_batch import page_table
from perilune.model.side_by_side import lay_side_by_side
from tests.model.paged_sequences import Pool, Tokens, in_row_order

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=("kda", "mla"),
    kda=KDAConfig(num_heads=2, head_dim=16),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    intermediate_size=48,
    residual="plain",
    initializer_range=0.1,
)
PAGE = 16
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
STEPS = ([(0, 70), (1, 20)], [(0, 1), (1, 14)], [(0, 17), (1, 2)], [(0, 2), (1, 1)])


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(300, (length,), generator=generator).tolist()) for length in (90, 37)]


def padded(
    bucket: Bucket, cache: PagedCache, runs: list[Tokens], *, wanted: tuple[int, ...] = (), late: Tensor | None = None
) -> PagedBatch:
    decodes = [run for run in runs if len(run.tokens) == 1]
    numbers = padded_numbers(
        bucket, decodes, runs[len(decodes) :], wanted=wanted, page_size=cache.page_size,
        scratch_row=cache.scratch_row, scratch_slot=num_slots(cache),
    )  # fmt: skip
    table = page_table(decodes, num_rows=bucket.decodes, width=bucket.width)
    ids = torch.zeros(4, dtype=torch.long) if late is None else late
    return padded_batch(bucket, torch.from_numpy(numbers), torch.from_numpy(table), ids)


def num_slots(cache: PagedCache) -> int:
    """Without the last, which belongs to nobody."""
    return cache.by_slot[0].shape[1] - 1


def new_pool(model: Decoder) -> Pool:
    pool = Pool.of(model, prompts(), page_size=PAGE, seed=1)
    assert all(sequence.slot < num_slots(pool.cache) for sequence in pool.sequences)
    return pool


def states(model: Decoder, bucket: Bucket | None) -> tuple[Tensor, PagedCache]:
    """Of all tokens of two sequences in four steps, chunks and decodes mixed; some chunks shorter than a window."""
    pool, found = new_pool(model), []
    for layer in pool.cache.layers:
        if isinstance(layer, StatePool):  # as it lies on a GPU
            object.__setattr__(layer, "conv", layer.conv.contiguous())
    for shares in STEPS:
        runs = in_row_order([pool.take(pool.sequences[index], count) for index, count in shares])
        if bucket is None:
            found.append(model.step(pool.batch(runs), pool.cache))
            continue
        num_decodes, num_tokens = sum(len(run.tokens) == 1 for run in runs), sum(len(run.tokens) for run in runs)
        rows = model.step(replace(padded(bucket, pool.cache, runs), wanted=None), pool.cache)
        found += [rows[:num_decodes], rows[bucket.decodes :][: num_tokens - num_decodes]]
    return torch.cat(found), pool.cache


def check_pools(found: PagedCache, right: PagedCache, **tolerances: float) -> None:
    """All but scratch."""
    for mine, other in zip(found.layers, right.layers, strict=True):
        if isinstance(mine, StatePool) and isinstance(other, StatePool):
            torch.testing.assert_close(mine.state[:-1], other.state[:-1], **tolerances)
            torch.testing.assert_close(mine.conv[:-1], other.conv[:-1], **tolerances)
        elif isinstance(mine, LatentPool) and isinstance(other, LatentPool):
            torch.testing.assert_close(mine.pages[:-1], other.pages[:-1], **tolerances)


@pytest.fixture
def model() -> Decoder:
    return built(CONFIG)


def built(config: ModelConfig) -> Decoder:
    """With weights as in the runner: what kernels read are parts of wider rows."""
    decoder = Decoder(config, seed=0).eval()
    lay_side_by_side(decoder)
    return decoder


# The lower bounds: as many tokens, runs and keys as the largest of the steps has.
BUCKETS = {
    "roomy": Bucket(tokens=96, decodes=4, runs=4, keys=160, width=16),
    "exact": Bucket(tokens=90, decodes=1, runs=2, keys=124, width=6),
}


CONFIGS = {"plain": CONFIG, "rope": replace(CONFIG, mla=replace(CONFIG.mla, rope=RopeConfig()))}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)
def test_padded_steps_give_every_row_and_every_pool_what_steps_without_padding_do(
    bucket: Bucket, config: ModelConfig
) -> None:
    model = built(config)
    right, pools = states(model, None)
    found, padded_pools = states(model, bucket)
    # float32 in another order, over some dozens of tokens.
    torch.testing.assert_close(found, right, **CLOSE)
    check_pools(padded_pools, pools, **CLOSE)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are tested there")
@pytest.mark.parametrize("pieces", [False, True], ids=["whole sequences", "sequences in pieces"])
def test_padding_changes_nothing_for_the_kernels_that_move_slots_in_place(
    pieces: bool, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, pools = states(model, None)
    monkeypatch.setattr(perilune.model.kda, "takes_slots", lambda *tensors: True)
    monkeypatch.setattr(perilune.model.mla, "takes_triton", lambda x: True)
    if pieces:
        monkeypatch.setattr(perilune.kernels.kda.triton, "CHECKPOINT_EVERY", 1)
        monkeypatch.setattr(perilune.kernels.kda.triton._Call, "piece", lambda call: 1)
    found, padded_pools = states(model, BUCKETS["roomy"])
    torch.testing.assert_close(found, right, **CLOSE)
    check_pools(padded_pools, pools, **CLOSE)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are tested there")
def test_layers_of_a_step_share_the_tables_of_its_borders_and_steps_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Decoder(replace(CONFIG, layer_types=("kda", "kda")), seed=0).eval()
    made = []
    tables = triton_tables._packed_tables
    monkeypatch.setattr(triton_tables, "_packed_tables", lambda *a: (made.append(1), tables(*a))[1])
    monkeypatch.setattr(perilune.model.kda, "takes_slots", lambda *tensors: True)
    pool = new_pool(model)
    for _ in range(2):
        runs = [pool.take(sequence, 5) for sequence in pool.sequences]
        model.step(padded(Bucket(tokens=12, runs=2), pool.cache, runs), pool.cache)
    assert len(made) == 2
    gc.collect()
    assert len(triton_tables._SHARED) == 0


def test_padding_alone_changes_nothing_but_scratch(model: Decoder) -> None:
    for bucket in BUCKETS.values():
        _, cache = states(model, None)
        kept = copy.deepcopy(cache)
        output = model.step(padded(bucket, cache, []), cache)
        assert output.shape == (bucket.num_wanted, 32) and output.isfinite().all()
        check_pools(cache, kept, rtol=0, atol=0)


def test_rows_are_wanted_in_the_order_of_the_step_without_padding(model: Decoder) -> None:
    pool = new_pool(model)
    model.step(pool.batch([pool.take(sequence, 9) for sequence in pool.sequences]), pool.cache)
    runs = in_row_order([pool.take(pool.sequences[0], 6), pool.take(pool.sequences[1], 1)])
    kept = copy.deepcopy(pool.cache)
    right = model.step(pool.batch(runs), pool.cache)
    found = model.step(padded(BUCKETS["roomy"], kept, runs, wanted=(6, 0, 3)), kept)
    torch.testing.assert_close(found[:3], right[[6, 0, 3]], **CLOSE)


def test_late_tokens_of_decodes_and_of_chunks_are_read_from_the_ids_of_the_step_before(model: Decoder) -> None:
    pool = new_pool(model)
    model.step(pool.batch([pool.take(sequence, 9) for sequence in pool.sequences]), pool.cache)
    runs = in_row_order([pool.take(pool.sequences[0], 3), pool.take(pool.sequences[1], 1)])
    kept = copy.deepcopy(pool.cache)
    right = model.step(pool.batch(runs), pool.cache)
    late = [
        replace(runs[0], tokens=(-1,), late_row=2),
        replace(runs[1], tokens=(*runs[1].tokens[:2], -1), late_row=0),
    ]
    ids = torch.tensor([runs[1].tokens[-1], 5, runs[0].tokens[0], 7])
    found = model.step(padded(BUCKETS["roomy"], kept, late, wanted=(0, 1, 2, 3), late=ids), kept)
    torch.testing.assert_close(found[:4], right, **CLOSE)


@given(
    tokens=st.integers(1, 40).map(lambda n: 4 * n), decodes=st.integers(0, 9).map(lambda n: 4 * n),
    runs=st.integers(1, 9), keys=st.integers(0, 99),
)  # fmt: skip
def test_parts_of_the_numbers_do_not_overlap_and_begin_at_multiples_of_16_bytes(
    tokens: int, decodes: int, runs: int, keys: int
) -> None:
    bucket = Bucket(tokens=tokens, decodes=decodes, runs=runs, keys=keys)
    numbers = np.zeros(bucket.num_numbers, np.int32)
    parts = bucket.parts(numbers)
    for part in parts.values():
        part += 1
        assert part.ctypes.data % 16 == numbers.ctypes.data % 16
    for row in parts["rows"]:
        assert row.ctypes.data % 16 == numbers.ctypes.data % 16
    assert numbers.max() == 1
    assert numbers.sum() == sum(part.size for part in parts.values())
    assert parts["borders"].shape == (runs + 2,) and parts["slots"].shape == (runs + 1,)
