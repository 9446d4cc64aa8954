"""Absorbed MLA decoding over pages: every path against the definition, and what it promises about pages and lengths."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.mla_decode import gqa_decode, mla_decode
from perilune.kernels.triton_support import INTERPRETED

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (set where no GPU is)")

SCALE = 0.2
# A softmax over a few hundred tokens: the sums of two orders differ by that many float32 roundings at worst.
FLOAT32 = 1e-5


def paged(lengths: list[int], *, heads=5, latent=32, rope=16, page=16, spare=2, dtype=torch.float32, device="cpu"):
    """Queries, a cache whose unused rows are NaN, a table whose unused entries are far outside, and the lengths."""
    width = latent + rope
    blocks = [-(-length // page) for length in lengths]
    max_blocks = max(blocks, default=0) + spare
    order = torch.randperm(sum(blocks) + 3)
    cache = torch.full((len(order), page, width), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max_blocks), -(2**30), dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(lengths, blocks)):
        pages = order[used : used + count]
        used += count
        table[row, :count] = pages.int()
        tokens = torch.full((count * page, width), float("nan"), dtype=dtype)
        tokens[:length] = torch.randn(length, width, dtype=torch.float64).to(dtype)
        cache[pages] = tokens.view(count, page, width)
    q = torch.randn(len(lengths), heads, width, dtype=torch.float64).to(dtype)
    moved = (x.to(device) for x in (q, cache, table, torch.tensor(lengths, dtype=torch.int32)))
    return (*moved, latent)


def attend(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, latent: int, **options) -> tuple[Tensor, Tensor]:
    return mla_decode(q, cache, table, lengths, latent_dim=latent, scale=SCALE, **options)


def exactly(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    return attend(q.double(), cache.double(), table, lengths, latent, backend="reference")


def assert_close(
    ours: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], tolerance: float, lse_tolerance: float
) -> None:
    o, lse = ours
    assert o.shape == right[0].shape and o.isfinite().all()
    assert (o.double() - right[0].double()).norm() <= tolerance * right[0].double().norm()
    torch.testing.assert_close(lse.double(), right[1].double(), rtol=0, atol=lse_tolerance)


def test_definition_is_dense_attention_over_the_rows_of_a_sequence() -> None:
    q, cache, table, lengths, latent = paged([37], dtype=torch.float64)
    rows = torch.stack([cache[table[0, j // 16], j % 16] for j in range(37)])
    o = F.scaled_dot_product_attention(q, rows[None], rows[None, :, :latent], scale=SCALE)
    lse = torch.logsumexp(SCALE * (q @ rows.T), dim=-1)
    assert_close(attend(q, cache, table, lengths, latent, backend="reference"), (o, lse), 1e-12, 1e-12)


@pytest.mark.parametrize("page", [16, 64])
def test_dense_path_equals_the_definition(page: int) -> None:
    case = paged([0, 1, page, page + 1, 150], page=page, dtype=torch.float64)
    assert_close(attend(*case, backend="dense"), attend(*case, backend="reference"), 1e-12, 1e-12)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize(
    "page, options",
    [
        (16, {}),
        (64, {"heads": 17}),
        (1, {"heads": 1, "latent": 24, "rope": 8}),
        (48, {"heads": 70, "latent": 16, "rope": 0}),
    ],
)
def test_kernel_equals_the_definition(page: int, options: dict[str, int], num_splits: int | None) -> None:
    case = paged([0, 1, 64, 129, 200], page=page, **options)
    assert_close(attend(*case, backend="triton", num_splits=num_splits), exactly(*case), FLOAT32, FLOAT32)


@needs_interpreter
@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 180), min_size=1, max_size=3),
    page=st.sampled_from([1, 5, 16, 64]),
    num_splits=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_lengths_pages_and_splits_give_the_same_attention(lengths, page, num_splits, seed) -> None:
    torch.manual_seed(seed)
    case = paged(lengths, heads=2, latent=16, rope=16, page=page)
    assert_close(attend(*case, backend="triton", num_splits=num_splits), exactly(*case), FLOAT32, FLOAT32)


@needs_interpreter
@pytest.mark.parametrize("num_splits", [40, 1000])
def test_more_shares_than_tiles_leave_some_empty(num_splits: int) -> None:
    case = paged([70, 0], heads=2, latent=16, rope=16)
    assert_close(attend(*case, backend="triton", num_splits=num_splits), exactly(*case), FLOAT32, FLOAT32)


@needs_interpreter
def test_a_cache_that_begins_off_16_bytes_takes_the_path_without_the_copy_engine() -> None:
    from perilune.kernels.mla_decode.triton import run_mla_decode

    q, cache, table, lengths, latent = paged([70, 3])
    memory = torch.empty(cache.numel() + 4)
    offset = next(first for first in (0, 1) if memory[first:].data_ptr() % 16)
    moved = memory[offset : offset + cache.numel()].view_as(cache).copy_(cache)
    ours = run_mla_decode(q, moved, table, lengths, latent, SCALE, 2, True)
    assert_close(ours, exactly(q, cache, table, lengths, latent), FLOAT32, FLOAT32)


@needs_interpreter
def test_large_logits_do_not_overflow() -> None:
    q, cache, table, lengths, latent = paged([1, 100])
    case = (1e3 * q, cache, table, lengths, latent)
    right = exactly(*case)
    # Logits of some thousands: their float32 rounding is a share of themselves, in the lse and in every exponent.
    largest = float(right[1].abs().max())
    assert_close(attend(*case, backend="triton"), right, largest * FLOAT32, largest * FLOAT32)


@needs_interpreter
def test_operator_registration_is_sound() -> None:
    from perilune.kernels.mla_decode.triton import mla_decode_op

    q, cache, table, lengths, latent = paged([20, 40])
    torch.library.opcheck(mla_decode_op, (q, cache, table, lengths, latent, SCALE, 2, False))


@pytest.mark.parametrize("backend", ["reference", "dense", pytest.param("triton", marks=needs_interpreter)])
def test_nothing_to_attend_gives_zeros_and_minus_infinity(backend: str) -> None:
    for lengths, spare in (([], 1), ([0, 0], 1), ([0, 0], 0)):
        o, lse = attend(*paged(lengths, spare=spare), backend=backend)
        assert o.shape == (len(lengths), 5, 32) and not o.any()
        assert (lse == -math.inf).all()


def test_splits_fill_the_chip_and_respect_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = pytest.importorskip("perilune.kernels.mla_decode.triton", exc_type=ImportError)
    monkeypatch.setattr(splits, "num_sms", lambda _: 132)
    device = torch.device("cpu")
    for batch in (1, 2, 7, 8, 32, 100, 200):
        chosen = splits.choose_num_splits(batch, 1, 1 << 20, device)
        programs = chosen * batch
        assert programs / (132 * -(-programs // 132)) >= 0.75, (batch, chosen)
    assert splits.choose_num_splits(1, 1, 1 << 20, device) == 132
    assert splits.choose_num_splits(1, 1, 1000, device) <= 4
    assert splits.choose_num_splits(1, 1, 0, device) == 1
    assert splits.choose_num_splits(5000, 2, 1 << 20, device) == 1


def test_wrong_arguments_are_refused_with_name_value_and_expectation() -> None:
    q, cache, table, lengths, latent = paged([5, 6])
    with pytest.raises(ValueError, match=r"q \(2, 5, 47\) and cache .* do not fit"):
        attend(q[..., :-1], cache, table, lengths, latent)
    with pytest.raises(ValueError, match="latent_dim=49 must be in 1 .. D, and q has D = 48"):
        attend(q, cache, table, lengths, 49)
    with pytest.raises(ValueError, match="block_table is torch.int64"):
        attend(q, cache, table.long(), lengths, latent)
    with pytest.raises(ValueError, match=r"lengths is torch.int32 \(1,\), expected int32 \[B\] = \(2,\)"):
        attend(q, cache, table, lengths[:1], latent)
    with pytest.raises(ValueError, match="num_splits=0 must be at least 1"):
        attend(q, cache, table, lengths, latent, num_splits=0)
    with pytest.raises(ValueError, match="backend='fast' is not a path"):
        attend(q, cache, table, lengths, latent, backend="fast")
    with pytest.raises(ValueError, match="backend='hopper' cannot run here: it needs a GPU of compute capability 9.0"):
        attend(q, cache, table, lengths, latent, backend="hopper")


def test_grouped_query_step_equals_repeated_heads() -> None:
    q = torch.randn(3, 8, 16, dtype=torch.float64)
    k, v = torch.randn(3, 20, 2, 16, dtype=torch.float64), torch.randn(3, 20, 2, 24, dtype=torch.float64)
    for lengths in (None, torch.tensor([20, 1, 7])):
        o = gqa_decode(q, k, v, lengths, scale=0.3)
        for row, length in enumerate([20, 20, 20] if lengths is None else lengths.tolist()):
            keys, values = (x[row, :length].repeat_interleave(4, dim=1) for x in (k, v))
            weights = torch.einsum("hd,thd->ht", 0.3 * q[row], keys).softmax(-1)
            torch.testing.assert_close(o[row], torch.einsum("ht,thd->hd", weights, values))
    assert not gqa_decode(q, k, v, torch.tensor([0, 5, 0]))[[0, 2]].any()
    with pytest.raises(ValueError, match="q has 8 heads and k 3"):
        gqa_decode(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1))


# On the GPU -----------------------------------------------------------------------------------------------------------

# The weights are rounded to 8 bits before the second product, the result once more: 1.1e-3 root mean square each. The
# logits are float32 sums over 576 products.
BFLOAT16 = 5e-3
LOGITS = 1e-4


def gpu_backends(latent: int, rope: int) -> list[str]:
    is_hopper = torch.cuda.get_device_capability() == (9, 0) and (latent, rope) == (512, 64)
    return ["triton", "hopper"] if is_hopper else ["triton"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, latent, rope, page, backends",
    [
        (16, 512, 64, 64, ("hopper", "triton")),
        (16, 512, 64, 16, ("hopper",)),
        (32, 512, 64, 128, ("hopper",)),
        (32, 512, 64, 48, ("hopper",)),
        (64, 512, 64, 64, ("hopper", "triton")),
        (64, 512, 64, 16, ("hopper",)),
        (96, 512, 64, 64, ("hopper",)),
        (8, 64, 16, 16, ("triton",)),
    ],
)
def test_on_cuda_bfloat16_is_close_to_float64(heads, latent, rope, page, backends) -> None:
    lengths = [0, 1, 63, 64, 65, 4097, 999]
    case = paged(lengths, heads=heads, latent=latent, rope=rope, page=page, dtype=torch.bfloat16, device="cuda")
    right = exactly(*case)
    for backend in set(backends) & set(gpu_backends(latent, rope)):
        for num_splits in (None, 1, 7) if page == 64 else (None,):
            ours = attend(*case, backend=backend, num_splits=num_splits)
            assert not ours[0][0].any()
            assert_close(ours, right, BFLOAT16, LOGITS * float(right[1][1:].abs().max()))


@pytest.mark.gpu
def test_on_cuda_parts_of_larger_tensors_may_begin_anywhere() -> None:
    q, cache, table, lengths, latent = paged(
        [300, 77], heads=16, latent=512, rope=64, page=64, dtype=torch.bfloat16, device="cuda"
    )

    def moved(x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)

    right = exactly(q, cache, table, lengths, latent)
    for case in ((moved(q), cache), (q, moved(cache))):
        ours = attend(*case, table, lengths, latent)
        assert_close(ours, right, BFLOAT16, LOGITS * float(right[1].abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
def test_on_cuda_repeats_graph_replay_and_compiled_call_are_bitwise_equal(heads: int) -> None:
    q, cache, table, lengths, latent = paged(
        [3000, 77, 1], heads=heads, latent=512, rope=64, page=64, dtype=torch.bfloat16, device="cuda"
    )
    for backend in gpu_backends(512, 64):
        eager = attend(q, cache, table, lengths, latent, backend=backend)
        for _ in range(5):
            again = attend(q, cache, table, lengths, latent, backend=backend)
            assert all(torch.equal(a, b) for a, b in zip(again, eager))
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        again = compiled(q, cache, table, lengths, latent, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(again, eager))

        graph, own_lengths = torch.cuda.CUDAGraph(), lengths.clone()
        with torch.cuda.graph(graph):
            replayed = attend(q, cache, table, own_lengths, latent, backend=backend)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager))
        # The graph reads the lengths anew at every replay.
        own_lengths.copy_(torch.tensor([64, 0, 1]))
        graph.replay()
        shorter = attend(q, cache, table, own_lengths, latent, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(replayed, shorter))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_on_cuda_calls_in_a_row_see_what_was_written_before(heads: int) -> None:
    # A launch may overlap with the end of the one before it; waiting in between must not change anything.
    q, cache, table, lengths, latent = paged(
        [5000, 300], heads=heads, latent=512, rope=64, page=64, dtype=torch.bfloat16, device="cuda"
    )

    def steps(backend: str, pause: Callable[[], None]) -> list[Tensor]:
        own_q, own_lengths, outputs = q.clone(), lengths - 10, []
        for _ in range(10):
            o, _ = attend(own_q, cache, table, own_lengths, latent, backend=backend)
            pause()
            own_q[..., :latent] = o
            own_lengths += 1
            pause()
            again, lse = attend(own_q, cache, table, own_lengths, latent, backend=backend)
            pause()
            outputs += [o, again, lse]
        return outputs

    for backend in gpu_backends(512, 64):
        waiting = steps(backend, torch.cuda.synchronize)
        in_a_row = steps(backend, lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = steps(backend, lambda: None)
        graph.replay()
        for others in (in_a_row, replayed):
            assert all(torch.equal(a, b) for a, b in zip(others, waiting))


@pytest.mark.gpu
def test_on_cuda_grouped_query_step_is_close_to_float64() -> None:
    q = torch.randn(2, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1000, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for lengths in (None, torch.tensor([1000, 37], device="cuda")):
        o, right = gqa_decode(q, k, v, lengths), gqa_decode(q.double(), k.double(), v.double(), lengths)
        assert (o.double() - right).norm() <= BFLOAT16 * right.norm()
