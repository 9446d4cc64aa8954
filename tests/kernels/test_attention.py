"""Attention over packed documents: every path against the dense definition, the definition against torch's SDPA."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.kernels.attention import attention, tiled
from perilune.kernels.attention.flex import _causal_mask, _mask_of, document_mask, why_not

# Sums of at most a few hundred float64 products of numbers around 1: 300 x 2.2e-16 with room for the exponential.
FLOAT64_RTOL = 1e-12


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny inputs already have many query tiles, key ranges and shared tiles."""
    _use_small_tiles(monkeypatch)


def _use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "QUERY_TILE", 8)
    monkeypatch.setattr(tiled, "KEY_TILE", 12)
    monkeypatch.setattr(tiled, "SHORT_DOCUMENT", 5)
    # The plan depends on these sizes and is cached.
    monkeypatch.setattr(tiled, "plan_tiles", tiled.plan_tiles.__wrapped__)


def inputs(
    num_queries: int,
    *,
    num_keys: int | None = None,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 6,
    value_width: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if num_keys is None else num_keys
    shapes = (
        (batch, num_queries, heads, width),
        (batch, num_keys, kv_heads, width),
        (batch, num_keys, kv_heads, value_width),
    )
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )
    return q, k, v


def outputs_and_gradients(q: Tensor, k: Tensor, v: Tensor, **options) -> list[Tensor]:
    o, max_logit, is_bound = attention(q, k, v, **options)
    assert is_bound.shape == max_logit.shape and not is_bound.any()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)
    gradients = torch.autograd.grad((o * weight).sum(), (q, k, v))
    return [o.detach(), max_logit, *gradients]


def assert_same(ours: list[Tensor], expected: list[Tensor], rtol: float = FLOAT64_RTOL) -> None:
    """Errors relative to the norm of each tensor: single entries may be close to zero by cancellation."""
    for mine, right in zip(ours, expected, strict=True):
        assert mine.shape == right.shape and mine.dtype == right.dtype
        assert torch.equal(mine.isfinite(), right.isfinite())
        difference = (mine - right).nan_to_num().double().norm()
        assert difference <= rtol * max(1.0, right.nan_to_num(neginf=0).double().norm())


@pytest.mark.usefixtures("_small_tiles")
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_packed_tiles_equal_dense_in_output_maximum_and_gradient(lengths: list[int], kv_heads: int, seed: int) -> None:
    q, k, v = inputs(sum(lengths), kv_heads=kv_heads, seed=seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    options = {"cu_seqlens": cu_seqlens, "scale": 0.7}
    assert_same(
        outputs_and_gradients(q, k, v, backend="tiled", **options),
        outputs_and_gradients(q, k, v, backend="reference", **options),
    )


@pytest.mark.usefixtures("_small_tiles")
@given(num_queries=st.integers(0, 40), num_keys=st.integers(0, 40), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_batches_and_any_two_lengths_equal_dense(num_queries: int, num_keys: int, batch: int, seed: int) -> None:
    q, k, v = inputs(num_queries, num_keys=num_keys, batch=batch, seed=seed)
    assert_same(outputs_and_gradients(q, k, v, backend="tiled"), outputs_and_gradients(q, k, v, backend="reference"))


@pytest.mark.parametrize("length", [1, 127, 129, 300])
def test_tiled_at_its_real_tile_sizes_equals_dense(length: int) -> None:
    q, k, v = inputs(length + 170)
    cu_seqlens = torch.tensor([0, 3, 3, 40, 41, 170, 170 + length])
    assert_same(
        outputs_and_gradients(q, k, v, backend="tiled", cu_seqlens=cu_seqlens),
        outputs_and_gradients(q, k, v, backend="reference", cu_seqlens=cu_seqlens),
    )


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_packed_documents_equal_separate_documents(backend: str) -> None:
    lengths = [5, 70, 0, 1, 140]
    q, k, v = inputs(sum(lengths))
    packed = outputs_and_gradients(q, k, v, backend=backend, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))

    weight = torch.randn(packed[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = [attention(*x, backend=backend) for x in zip(*(y.split(lengths, dim=1) for y in (q, k, v)), strict=True)]
    o = torch.cat([o for o, *_ in parts], dim=1)
    max_logit = torch.stack([maximum for _, maximum, _ in parts]).amax(dim=0)
    assert_same(packed, [o.detach(), max_logit, *torch.autograd.grad((o * weight).sum(), (q, k, v))])


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_one_query_with_a_cache_equals_the_last_row_of_the_full_pass(backend: str) -> None:
    q, k, v = inputs(150, batch=2)
    full, *_ = attention(q, k, v, backend=backend)
    for count in (1, 3, 140):
        last, *_ = attention(q[:, -count:], k, v, backend=backend)
        torch.testing.assert_close(last, full[:, -count:], rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL)


@pytest.mark.usefixtures("_small_tiles")
def test_gradcheck() -> None:
    q, k, v = inputs(14, heads=2, kv_heads=1, width=3, value_width=2)
    cu_seqlens = torch.tensor([0, 2, 4, 14])
    assert torch.autograd.gradcheck(lambda *x: attention(*x, cu_seqlens=cu_seqlens, backend="tiled")[0], (q, k, v))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_torch_sdpa_agrees(backend: str) -> None:
    q, k, v = inputs(200, batch=2, heads=4, kv_heads=2, width=8, value_width=6)
    o, *_ = attention(q, k, v, backend=backend)
    oracle = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(o, oracle, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL)
    weight = torch.randn_like(o)
    ours = torch.autograd.grad((o * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((oracle * weight).sum(), (q, k, v))
    assert_same(list(ours), list(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_max_logit_is_the_dense_maximum_exactly(dtype: torch.dtype) -> None:
    # Small integers and a power-of-two scale: every product and sum is exact, so "exactly" holds for any sum order.
    q, k, v = (x.detach().mul(4).round().clamp(-8, 8).requires_grad_() for x in inputs(300, dtype=dtype))
    cu_seqlens = torch.tensor([0, 7, 20, 180, 300])
    _, ours, _ = attention(q, k, v, scale=0.25, cu_seqlens=cu_seqlens, backend="tiled")
    document = torch.bucketize(torch.arange(300), cu_seqlens[1:], right=True)
    allowed = (document[:, None] == document) & (torch.arange(300)[:, None] >= torch.arange(300))
    logits = 0.25 * torch.einsum("bihd,bjhd->hij", q.double(), k.double().repeat_interleave(2, dim=2))
    assert torch.equal(ours.double(), logits.masked_fill(~allowed, float("-inf")).amax(dim=(1, 2)))
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not ours.requires_grad


def test_max_logit_ignores_pairs_the_mask_forbids() -> None:
    q, k, v = (x.detach() for x in inputs(40, heads=1, kv_heads=1))
    # A pair that looks into the future and one that crosses documents are far larger than any allowed pair.
    k[0, 39] = 1e3 * q[0, 10]
    k[0, 5] = 1e3 * q[0, 30]
    cu_seqlens = torch.tensor([0, 20, 40])
    results = [attention(q, k, v, cu_seqlens=cu_seqlens, backend=name)[1] for name in ("tiled", "reference")]
    torch.testing.assert_close(results[0], results[1], rtol=FLOAT64_RTOL, atol=0)
    forbidden = q.shape[-1] ** -0.5 * 1e3 * q[0, 10].square().sum()
    assert results[0].item() < forbidden


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_queries_without_keys_give_zeros_and_no_nan(backend: str) -> None:
    q, k, v = inputs(6, num_keys=4)
    o, max_logit, *gradients = outputs_and_gradients(q, k, v, backend=backend)
    assert o[:, :2].eq(0).all() and gradients[0][:, :2].eq(0).all()
    assert all(x.isfinite().all() for x in (o, max_logit, *gradients))
    q, k, v = inputs(3, num_keys=0)
    o, max_logit, *gradients = outputs_and_gradients(q, k, v, backend=backend)
    assert o.eq(0).all() and max_logit.eq(float("-inf")).all() and gradients[0].eq(0).all()


def test_large_logits_stay_finite() -> None:
    q, k, v = (x.detach().requires_grad_() for x in inputs(140, dtype=torch.float32))
    for scale in (1e4, -1e4):
        results = outputs_and_gradients(q, k, v, scale=scale, backend="tiled")
        assert all(x.isfinite().all() for x in results)


def test_bf16_inputs_keep_float32_logits() -> None:
    q, k, v = inputs(160, dtype=torch.bfloat16)
    ours = outputs_and_gradients(q, k, v, backend="tiled")
    exact = outputs_and_gradients(*(x.detach().double().requires_grad_() for x in (q, k, v)), backend="reference")
    assert [x.dtype for x in ours] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    # Everything inside is float32; only the result (and the saved output) is rounded to 8 bits of mantissa.
    for mine, right in zip(ours, exact, strict=True):
        assert (mine.double() - right).norm() <= 2**-8 * right.norm()
    # A bfloat16 logit would be off by up to 2^-9 of its value.
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=1e-6, atol=0)


def test_later_tokens_do_not_change_earlier_rows() -> None:
    q, k, v = inputs(300, dtype=torch.float32)
    before = attention(q, k, v, backend="tiled")[0]
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[:, 200:] += 1
    v2[:, 200:] -= 1
    after = attention(q, k2, v2, backend="tiled")[0]
    assert torch.equal(before[:, :200], after[:, :200])


def test_expanded_and_strided_inputs_are_accepted() -> None:
    q, k, v = inputs(70, heads=4, kv_heads=4, width=6, value_width=6)
    shared = k[:, :, :1].detach().expand(-1, -1, 4, -1)
    both = torch.cat([q, v], dim=-1).detach()
    views = attention(both[..., :6], shared, both[..., 6:], backend="tiled")[:2]
    copies = attention(*(x.contiguous() for x in (both[..., :6], shared, both[..., 6:])), backend="tiled")[:2]
    assert_same(list(views), list(copies))


POISONS = [math.nan, math.inf, -math.inf]


def poisoned(name: str, position: int, poison: float, *, length: int) -> dict[str, Tensor]:
    """q, k, v and the gradient of the output, all finite but for one entry in every head."""
    q, k, v = (x.detach() for x in inputs(length, dtype=torch.float32))
    grad_o = torch.randn(1, length, 4, 5, generator=torch.Generator().manual_seed(1))
    tensors = {"q": q, "k": k, "v": v, "grad_o": grad_o}
    tensors[name][0, position, :, 2] = poison
    return tensors


def results_of(tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
    leaves = [tensors[name].clone().requires_grad_() for name in ("q", "k", "v")]
    o, *_ = attention(*leaves, cu_seqlens=cu_seqlens, backend="tiled")
    return [o.detach(), *torch.autograd.grad(o, leaves, tensors["grad_o"])]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["q", "k", "v", "grad_o"])
@pytest.mark.parametrize("lengths", [[10, 10, 12], [130, 200, 70], [3, 150, 20, 20]], ids=str)
def test_document_with_non_finite_values_leaves_other_documents_alone(
    lengths: list[int], name: str, poison: float
) -> None:
    start, stop = lengths[0], lengths[0] + lengths[1]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tensors = poisoned(name, start + lengths[1] // 2, poison, length=sum(lengths))
    healthy = {key: x.nan_to_num(0.0, 0.0, 0.0) for key, x in tensors.items()}
    for mine, right in zip(results_of(tensors, cu_seqlens), results_of(healthy, cu_seqlens), strict=True):
        # The broken document is cut into other tiles, the others keep theirs or lose their neighbours in a shared one:
        # a sum of at most 200 terms in another order.
        for part in (slice(0, start), slice(stop, None)):
            torch.testing.assert_close(mine[:, part], right[:, part], rtol=1e-5, atol=1e-5)
    if name != "grad_o":
        assert not results_of(tensors, cu_seqlens)[0][:, start:stop].isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["q", "k", "v", "grad_o"])
@pytest.mark.parametrize("position", [0, 37, 199])
def test_non_finite_tokens_reach_only_pairs_the_mask_allows(position: int, name: str, poison: float) -> None:
    tensors = poisoned(name, position, poison, length=200)
    healthy = {key: x.nan_to_num(0.0, 0.0, 0.0) for key, x in tensors.items()}
    (o, dq, dk, dv), right = results_of(tensors, None), results_of(healthy, None)
    own = torch.arange(200) == position
    before, after = torch.arange(200) < position, torch.arange(200) > position
    # A query or its gradient belongs to one row and sends gradient to its keys, which are not later; a key or value is
    # read by later rows, which send gradient to every key they read, and none of that comes from earlier rows' queries.
    untouched = {
        "q": [~own, ~own, after, after],
        "grad_o": [own | ~own, ~own, after, after],
        "k": [before, before, before & ~before, before & ~before],
        "v": [before, before, before & ~before, before & ~before],
    }[name]
    for mine, expected, rows in zip((o, dq, dk, dv), right, untouched, strict=True):
        torch.testing.assert_close(mine[:, rows], expected[:, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, huge", [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_forbidden_pairs_may_overflow(dtype: torch.dtype, huge: float) -> None:
    q, k, v = (x.detach() for x in inputs(20, heads=1, kv_heads=1, dtype=dtype))
    grad_o = torch.ones(1, 20, 1, 5, dtype=dtype)
    # Query 3 overflows with a later key and with one of the other document, output gradient 4 with a later value. The
    # pairs that are allowed stay small: zero queries, zero keys and one zero gradient.
    q[0, 3], k[0, 8], k[0, 15], q[0, 8:10], q[0, 15:], k[0, :4] = huge, huge, huge, 0.0, 0.0, 0.0
    grad_o[0, 4], v[0, 9], grad_o[0, 9] = huge, huge, 0.0
    cu_seqlens = torch.tensor([0, 10, 20])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, max_logit, _ = attention(*leaves, cu_seqlens=cu_seqlens, backend="tiled")
    expected, right, _ = attention(*leaves, cu_seqlens=cu_seqlens, backend="reference")
    torch.testing.assert_close(max_logit, right)
    torch.testing.assert_close(o, expected)
    assert max_logit.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(o, leaves, grad_o))


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return result


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_memory_grows_with_the_length_and_not_with_its_square(kv_heads: int) -> None:
    length, heads = 2048, 2
    q, k, v = inputs(length, heads=heads, kv_heads=kv_heads, dtype=torch.float32)
    # A tile of queries against one range of keys: the last range holds what KEY_TILE leaves over, and the diagonal.
    bound = heads * tiled.QUERY_TILE * (tiled.KEY_TILE + tiled.QUERY_TILE)
    assert bound < length * length / 10
    with LargestTensor() as mode:
        o, *_ = attention(q, k, v, backend="tiled")
        forward = mode.largest
        o.sum().backward()
    assert heads * tiled.QUERY_TILE * tiled.KEY_TILE <= forward <= bound and mode.largest <= bound


def test_an_empty_batch_gives_empty_results() -> None:
    q, k, v = inputs(7, batch=0)
    for backend in ("tiled", "reference"):
        o, max_logit, *gradients = outputs_and_gradients(q, k, v, backend=backend)
        assert o.shape == (0, 7, 4, 5) and max_logit.tolist() == [-math.inf] * 4
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": (1, 6, 2, 5)}, "do not fit"),
        ({"q": (1, 6, 3, 6)}, "multiple"),
        ({"q": (6, 4, 6)}, "q must be"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens"),
        ({"backend": "fast"}, "'fast'"),
        ({"backend": "flex"}, "CUDA"),
    ],
)
def test_wrong_input_is_named(change: dict, message: str) -> None:
    shapes = {"q": (1, 6, 4, 6), "k": (1, 6, 2, 6), "v": (1, 6, 2, 5)}
    tensors = {name: torch.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    options = {name: value for name, value in change.items() if name not in shapes}
    with pytest.raises(ValueError, match=message):
        attention(**tensors, **options)


@pytest.mark.parametrize("lengths", [[1], [128], [77, 51], [100, 28, 172, 0, 650, 50], [256, 256, 1]])
def test_flex_block_mask_allows_the_same_pairs_as_the_tokens(lengths: list[int]) -> None:
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document_mask(document)
    position = torch.arange(total)
    allowed = (document[:, None] == document) & (position[:, None] >= position)
    blocks = -(-total // 128)
    padded = F.pad(allowed, (0, blocks * 128 - total, 0, blocks * 128 - total))
    by_block = padded.view(blocks, 128, blocks, 128).transpose(1, 2).flatten(2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), by_block.any(-1))
    full = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()] = True
    # A full block skips the mask inside the kernel, so every pair of it must be allowed.
    assert by_block[full].all()
    assert torch.equal(mask.mask_mod(0, 0, position[:, None], position[None, :]), allowed)


# Every variant is compiled for many seconds: each shape in one dtype, and the widest in both.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, width, value_width",
    [
        (torch.float32, 8, 8, 48, 32),
        (torch.bfloat16, 8, 2, 64, 64),
        (torch.bfloat16, 4, 4, 192, 128),
        (torch.float32, 4, 4, 192, 128),
    ],
)
def test_flex_on_cuda_equals_dense(dtype: torch.dtype, heads: int, kv_heads: int, width: int, value_width: int) -> None:
    lengths = [5, 300, 0, 1, 706]
    options = {"heads": heads, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cpu = inputs(sum(lengths), dtype=dtype, **options)
    q, k, v = (x.detach().cuda().requires_grad_() for x in cpu)
    exact = tuple(x.detach().cuda().double().requires_grad_() for x in cpu)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    for borders in (None, cu_seqlens):
        right = outputs_and_gradients(*exact, cu_seqlens=borders, backend="reference")
        for backend in ("flex", "tiled", None) if why_not(q, k, v) is None else ("tiled", None):
            ours = outputs_and_gradients(q, k, v, cu_seqlens=borders, backend=backend)
            # bf16: weights and ds are rounded to 8 bits before the second matmul. float32: torch's default is IEEE.
            tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-4
            for mine, expected in zip(ours, right, strict=True):
                assert mine.isfinite().all()
                assert (mine.double() - expected).norm() <= tolerance * expected.norm()
            # Logits accumulate in float32 for both dtypes.
            torch.testing.assert_close(ours[1].double(), right[1], rtol=1e-4, atol=0)
            assert not ours[1].requires_grad


@pytest.mark.gpu
def test_flex_on_cuda_accepts_batches_and_changing_lengths() -> None:
    for length in (64, 200, 1000):
        q, k, v = (x.detach().cuda().requires_grad_() for x in inputs(length, batch=3, width=32, value_width=16))
        q, k, v = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
        ours = outputs_and_gradients(q, k, v, backend="flex")
        right = outputs_and_gradients(*(x.detach().double().requires_grad_() for x in (q, k, v)), backend="reference")
        for mine, expected in zip(ours, right, strict=True):
            assert (mine.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.gpu
def test_flex_on_cuda_takes_more_variants_than_dynamo_allows_by_default() -> None:
    for width in range(16, 16 + 9 * 8, 8):  # torch's limit is 8
        q, k, v = (x.detach().cuda().bfloat16() for x in inputs(40, width=width, value_width=16))
        assert attention(q, k, v, backend="flex")[0].isfinite().all()


def test_flex_block_masks_made_in_inference_mode_serve_training() -> None:
    _causal_mask.cache_clear()
    outside = torch.tensor([0, 3, 200])
    with torch.inference_mode():
        inside = torch.tensor([0, 3, 200])
        masks = [_causal_mask(200, inside.device), _mask_of(inside, 200), _mask_of(outside, 200)]
    assert _causal_mask(200, inside.device) is masks[0] and _mask_of(outside, 200) is masks[2]
    assert torch.equal(masks[1].to_dense(), masks[2].to_dense())
    for mask in (masks[0], masks[2]):
        tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        assert not any(tensor.is_inference() for tensor in tensors if tensor is not None)
