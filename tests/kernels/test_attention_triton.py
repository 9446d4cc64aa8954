"""Maximum logits from the log-sum-exp: the screen, the kernel behind it, and attention on CUDA that uses both."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from perilune.kernels.attention import attention, cudnn
from perilune.kernels.attention.reference import allowed_pairs
from perilune.kernels.attention.triton import MARGIN, TILING, max_logits
from perilune.kernels.triton_support import INTERPRETED

# float32 sums of at most 256 exact products: 256 x 2^-24 of the sum of magnitudes, which for random signs is less than
# ten times the largest logit.
RTOL = 10 * 256 * 2.0**-24
interpreted = pytest.mark.skipif(not INTERPRETED, reason="float32 tiles are made for Triton's interpreter")


def case(
    length: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    width: int = 16,
    scale: float = 0.3,
    borders: list[int] | None = None,
    gains: list[float] | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, the log-sum-exp of every row, the exact maxima (float64), and the borders; head h is louder by gains[h]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, length, heads, width, generator=generator)
    k = torch.randn(batch, length, kv_heads, width, generator=generator)
    if gains is not None:
        q = q * torch.tensor(gains)[:, None]
    cu_seqlens = None if borders is None else torch.tensor(borders)
    logits = dense_logits(q, k, scale, cu_seqlens)
    return q, k, logits.logsumexp(dim=-1).float(), logits.amax(dim=(0, 2, 3)), cu_seqlens


def dense_logits(q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None) -> Tensor:
    repeats = q.shape[2] // k.shape[2]
    logits = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(repeats, dim=2))
    allowed = allowed_pairs(q.shape[1], k.shape[1], cu_seqlens, q.device)
    return logits.masked_fill(~allowed, -math.inf)


def assert_exact(found: tuple[Tensor, Tensor], expected: Tensor) -> None:
    value, is_bound = found
    assert value.dtype == torch.float32 and is_bound.dtype == torch.bool and not is_bound.any()
    torch.testing.assert_close(value.double(), expected, rtol=RTOL, atol=0)


@interpreted
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("borders", [None, "packed"])
def test_maxima_are_those_of_the_dense_logits(length: int, borders: str | None) -> None:
    cuts = sorted({0, length // 3, length // 3 + 1, length - length // 4, length})
    q, k, lse, expected, cu_seqlens = case(length, borders=[0, *cuts, length] if borders else None)
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=-math.inf, cu_seqlens=cu_seqlens), expected)


@interpreted
@pytest.mark.parametrize("width", [16, 20, 48, 64, 80, 128, 192, 256])
def test_every_width_reads_all_its_channels(width: int) -> None:
    q, k, lse, expected, _ = case(40, width=width)
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=-math.inf), expected)


@interpreted
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_batches_of_grouped_heads_and_either_sign_of_the_scale(kv_heads: int, scale: float) -> None:
    q, k, lse, expected, _ = case(70, batch=3, heads=4, kv_heads=kv_heads, scale=scale)
    assert_exact(max_logits(q, k, lse, scale=scale, threshold=-math.inf), expected)


@interpreted
def test_strided_and_shared_inputs_are_read_in_place_or_copied() -> None:
    q, k, _, _, _ = case(70, heads=4, kv_heads=4, width=16)
    both = torch.cat([q, k], dim=-1)
    shared = k[:, :, :1].expand(-1, -1, 4, -1)
    odd = torch.cat([k, k[..., :1]], dim=-1)[..., :16]  # rows of 17: no multiple of 16 bytes
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query, key in ((both[..., :16], both[..., 16:]), (q, shared), (heads_first, odd)):
        logits = dense_logits(query, key, 0.3, None)
        lse_BTH = logits.logsumexp(dim=-1).float().transpose(1, 2).contiguous()
        found = max_logits(query, key, lse_BTH.transpose(1, 2), scale=0.3, threshold=-math.inf)
        assert_exact(found, logits.amax(dim=(0, 2, 3)))


@interpreted
def test_heads_at_or_below_the_threshold_get_their_bound_and_the_others_their_maximum() -> None:
    gains = [0.1, 5.0, 1.0, 40.0]
    q, k, lse, expected, cu_seqlens = case(130, heads=4, kv_heads=2, gains=gains, borders=[0, 40, 130])
    value, is_bound = max_logits(q, k, lse, scale=0.3, threshold=8.0, cu_seqlens=cu_seqlens)
    assert expected[1] > 8.0 < expected[3]
    highest_lse = lse.amax(dim=(0, 2))
    assert is_bound.tolist() == (highest_lse <= 8.0).tolist() == [True, False, True, False]
    torch.testing.assert_close(value[is_bound], highest_lse[is_bound] * (1 + MARGIN), rtol=1e-6, atol=0)
    torch.testing.assert_close(value[~is_bound].double(), expected[~is_bound], rtol=RTOL, atol=0)


@interpreted
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 0),
    gains=st.lists(st.sampled_from([0.01, 0.3, 1.0, 3.0, 30.0]), min_size=4, max_size=4),
    threshold=st.sampled_from([-math.inf, -1.0, 0.0, 1.0, 3.0, 10.0, 100.0, math.inf]),
    scale=st.sampled_from([0.25, -1.0]),
    seed=st.integers(0, 99),
)
def test_the_screen_never_misses_a_head_above_the_threshold(
    lengths: list[int], gains: list[float], threshold: float, scale: float, seed: int
) -> None:
    borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
    q, k, lse, expected, cu_seqlens = case(
        sum(lengths), heads=4, kv_heads=2, gains=gains, borders=borders, scale=scale, seed=seed
    )
    value, is_bound = max_logits(q, k, lse, scale=scale, threshold=threshold, cu_seqlens=cu_seqlens)
    for head in range(4):
        if is_bound[head]:
            assert expected[head] <= value[head] <= threshold
        else:
            torch.testing.assert_close(value[head].double(), expected[head], rtol=RTOL, atol=1e-6)


@interpreted
def test_pruned_tiles_change_no_bit() -> None:
    # Later rows are quieter, so that the tiles that come first leave little to do for some and everything for others.
    for loud in (slice(0, 30), slice(150, 170), slice(280, 300)):
        q, k, _, _, _ = case(300, heads=2)
        q[:, loud] *= 20
        lse = dense_logits(q, k, 0.3, None).logsumexp(dim=-1).float()
        pruned, _ = max_logits(q, k, lse, scale=0.3, threshold=-math.inf)
        everything, _ = max_logits(q, k, torch.full_like(lse, math.inf), scale=0.3, threshold=-math.inf)
        assert torch.equal(pruned, everything)


@interpreted
def test_a_tile_that_can_hold_a_slightly_larger_logit_is_not_pruned() -> None:
    # Documents of one token: the log-sum-exp is the logit itself. The last rows are looked at first, and the first ones
    # hold a logit that is larger by one part in a thousand, which is four times the margin.
    length = 3 * TILING[torch.float32][0]
    q, k, _, _, cu_seqlens = case(length, heads=1, kv_heads=1, borders=list(range(length + 1)))
    k = q.clone()
    for tile, size in enumerate((1.001, 0.9, 1.0)):
        token = tile * length // 3 + 5
        q[0, token] = k[0, token] = 3.0 * size**0.5
    logits = dense_logits(q, k, 0.3, cu_seqlens)
    lse, expected = logits.logsumexp(dim=-1).float(), logits.amax(dim=(0, 2, 3))
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=-math.inf, cu_seqlens=cu_seqlens), expected)
    assert RTOL < 5e-4


@interpreted
@pytest.mark.parametrize("borders", [[0, 50, 112, 150], [0, 63, 64, 150], [0, 5, 33, 97, 150]], ids=str)
def test_pairs_that_are_not_allowed_are_never_seen(borders: list[int]) -> None:
    q, k, _, _, cu_seqlens = case(150, borders=borders)
    # Behind each border stands a query, and before each token one, that would be by far the largest with a key it may
    # not read.
    for border in borders[1:-1]:
        k[0, border - 1] = 20 * q[0, border + 20]
    k[0, 149], k[0, 130] = 20 * q[0, 148], 20 * q[0, 129]
    logits = dense_logits(q, k, 0.3, cu_seqlens)
    lse, expected = logits.logsumexp(dim=-1).float(), logits.amax(dim=(0, 2, 3))
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=-math.inf, cu_seqlens=cu_seqlens), expected)


@interpreted
def test_a_log_sum_exp_rounded_down_misses_nothing() -> None:
    # Documents of one token: the log-sum-exp is the logit itself, and rounding may put it below.
    q, k, lse, expected, cu_seqlens = case(8, heads=1, kv_heads=1, borders=list(range(9)), gains=[50.0])
    rounded = lse - lse.abs() * MARGIN / 4
    threshold = float(expected.float() + rounded.max()) / 2
    assert rounded.max() < threshold < expected
    assert_exact(max_logits(q, k, rounded, scale=0.3, threshold=threshold, cu_seqlens=cu_seqlens), expected)


@interpreted
def test_rows_that_see_nothing_and_broken_rows_hide_no_maximum() -> None:
    q, k, _, _, _ = case(100)
    q[0, 50] *= 100
    logits = dense_logits(q, k, 0.3, None)
    lse, expected = logits.logsumexp(dim=-1).float(), logits.amax(dim=(0, 2, 3))
    lse[0, :, 50] = math.nan
    value, is_bound = max_logits(q, k, lse, scale=0.3, threshold=math.inf)
    assert value.eq(math.inf).all() and is_bound.all()  # infinity is not above infinity
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=100.0), expected)
    # A row without any key has a log-sum-exp of -inf; a head of such rows has no maximum, and knows it.
    value, is_bound = max_logits(q, k, torch.full_like(lse, -math.inf), scale=0.3, threshold=0.0)
    assert value.eq(-math.inf).all() and not is_bound.any()
    k[0, 10, 0, 3] = math.nan
    lse[0, :, 10:] = math.nan
    expected = dense_logits(q, k, 0.3, None).nan_to_num(-math.inf).amax(dim=(0, 2, 3))
    assert_exact(max_logits(q, k, lse, scale=0.3, threshold=100.0), expected)


@interpreted
def test_zero_logits_are_above_negative_ones() -> None:
    q, k, _, _, _ = case(70, heads=1, kv_heads=1)
    q, k = -q.abs(), k.abs()
    q[0, 3] = 0.0
    for scale in (0.3, -0.0):
        lse = dense_logits(q, k, scale, None).logsumexp(dim=-1).float()
        assert max_logits(q, k, lse, scale=scale, threshold=-math.inf)[0].item() == 0.0


@interpreted
def test_the_operator_is_sound_for_compilers() -> None:
    q, k, lse, _, cu_seqlens = case(40, borders=[0, 10, 40])
    torch.library.opcheck(torch.ops.perilune.max_logits, (q, k, lse, None, 0.3, 2.0))
    torch.library.opcheck(torch.ops.perilune.max_logits, (q, k, lse, cu_seqlens, 0.3, 2.0))


@interpreted
def test_nothing_to_attend_gives_minus_infinity() -> None:
    value, is_bound = max_logits(*(torch.zeros(0, 5, 2, 16),) * 2, torch.zeros(0, 2, 5), scale=1.0, threshold=0.0)
    assert value.tolist() == [-math.inf] * 2 and not is_bound.any()


@interpreted
@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(1, 6, 2, 16, dtype=torch.float64)}, "bfloat16"),
        ({"k": torch.zeros(1, 7, 2, 16)}, "as many queries as keys"),
        ({"q": torch.zeros(1, 6, 2, 18), "k": torch.zeros(1, 6, 2, 18)}, "16 bytes"),
        ({"q": torch.zeros(1, 6, 2, 320), "k": torch.zeros(1, 6, 2, 320)}, "320"),
        ({"lse_BHT": torch.zeros(1, 6, 2)}, r"\(1, 6, 2\)"),
    ],
)
def test_wrong_input_is_named(change: dict[str, Tensor], message: str) -> None:
    x = torch.zeros(1, 6, 2, 16)
    with pytest.raises(ValueError, match=message):
        max_logits(**{"q": x, "k": x, "lse_BHT": torch.zeros(1, 2, 6), **change}, scale=1.0, threshold=0.0)


# Attention over packed documents in Triton ---------------------------------------------------------------------------

# float32 sums over at most 200 keys and 256 channels, relative to the norm of the tensor.
FLOAT32_RTOL = 1e-5


def outputs_and_gradients(inputs: list[Tensor], **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, max_logit, is_bound = attention(*leaves, **options)
    assert not is_bound.any()
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [o.detach(), *torch.autograd.grad(o, leaves, weight), max_logit]


def assert_equals_dense(inputs: list[Tensor], **options) -> None:
    right = outputs_and_gradients([x.double() for x in inputs], backend="reference", **options)
    ours = outputs_and_gradients(inputs, backend="triton", **options)
    for mine, expected in zip(ours, right, strict=True):
        assert mine.shape == expected.shape and mine.isfinite().all()
        assert (mine.double() - expected).norm() <= FLOAT32_RTOL * max(1.0, expected.norm())
    torch.testing.assert_close(ours[4].double(), right[4], rtol=RTOL, atol=1e-7)


def random_inputs(
    length: int, *, batch: int = 1, heads: int = 2, kv_heads: int = 2, width: int = 16, value_width: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    return [torch.randn(batch, length, *shape, generator=generator) for shape in shapes]


@interpreted
@pytest.mark.parametrize("length", [1, 31, 32, 33, 90])
@pytest.mark.parametrize("packed", [False, True])
def test_packed_attention_equals_dense_in_output_maximum_and_gradient(length: int, packed: bool) -> None:
    cuts = sorted({0, length // 3, length // 3 + 1, length - length // 4, length})
    borders = torch.tensor([0, *cuts, length]) if packed else None
    assert_equals_dense(random_inputs(length), cu_seqlens=borders)


@interpreted
@pytest.mark.parametrize("width, value_width", [(16, 32), (48, 20), (80, 64), (192, 128), (160, 16)])
def test_packed_attention_takes_any_two_widths(width: int, value_width: int) -> None:
    inputs = random_inputs(40, width=width, value_width=value_width)
    assert_equals_dense(inputs, cu_seqlens=torch.tensor([0, 25, 40]))


@interpreted
@pytest.mark.parametrize("kv_heads, scale", [(1, 0.3), (2, -0.3), (2, 0.0), (4, 1.0)])
def test_packed_attention_takes_groups_batches_and_any_scale(kv_heads: int, scale: float) -> None:
    assert_equals_dense(random_inputs(33, batch=2, heads=4, kv_heads=kv_heads), scale=scale)


@interpreted
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 0))
def test_packed_attention_never_crosses_a_border(lengths: list[int]) -> None:
    inputs = random_inputs(sum(lengths), heads=1, kv_heads=1)
    assert_equals_dense(inputs, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))


@interpreted
def test_packed_attention_takes_strided_inputs_and_gradients() -> None:
    q, k, v = random_inputs(40, width=16, value_width=16)
    both = torch.cat([k, v], dim=-1)
    leaves = [q.clone().requires_grad_(), both.clone().requires_grad_()]
    o, _, _ = attention(leaves[0], leaves[1][..., :16], leaves[1][..., 16:], backend="triton")
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, _, _ = attention(*plain, backend="triton")
    weight = torch.randn(1, 2, 40, 16).transpose(1, 2)
    ours = torch.autograd.grad(o, leaves, weight)
    right = torch.autograd.grad(expected, plain, weight)
    assert torch.equal(o, expected) and torch.equal(ours[0], right[0])
    assert torch.equal(ours[1], torch.cat(right[1:], dim=-1))


@interpreted
def test_packed_attention_is_sound_for_compilers() -> None:
    inputs = [x.requires_grad_() for x in random_inputs(20, heads=1, kv_heads=1)]
    for borders in (None, torch.tensor([0, 7, 20])):
        torch.library.opcheck(torch.ops.perilune.packed_attention, (*inputs, borders, 0.3))


@interpreted
def test_packed_attention_of_nothing_is_empty() -> None:
    for inputs in (random_inputs(0), random_inputs(5, batch=0)):
        o, *gradients, max_logit = outputs_and_gradients(inputs, backend="triton")
        assert o.shape == inputs[0].shape and max_logit.eq(-math.inf).all()
        assert [x.shape for x in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 320}, "320"),
        ({"value_width": 144}, "144"),
        ({"width": 18}, "16 bytes"),
        ({"borders": torch.tensor([0.0, 6.0])}, "cu_seqlens is torch.float32"),
    ],
)
@interpreted
def test_what_packed_attention_does_not_take_is_named(change: dict, message: str) -> None:
    borders = change.pop("borders", None)
    with pytest.raises(ValueError, match=message):
        attention(*random_inputs(6, **change), cu_seqlens=borders, backend="triton")


# On CUDA -------------------------------------------------------------------------------------------------------------

LENGTHS = [5, 300, 0, 1, 718]
# (heads, kv_heads, width of q and k, width of v)
MLA, GROUPED, SMALL = (4, 4, 192, 128), (4, 2, 128, 128), (4, 4, 48, 32)


def on_cuda(shape: tuple[int, int, int, int], *, gain: float = 1.0) -> list[Tensor]:
    heads, kv_heads, width, value_width = shape
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, 2 * value_width))
    q, k, both = (torch.randn(1, sum(LENGTHS), *each, generator=generator) for each in shapes)
    # v is half of a wider tensor, as the up-projection of MLA leaves it.
    q, k, both = (x.cuda().bfloat16() for x in (q * gain, k, both))
    return [q, k, both[..., value_width:]]


def packed() -> Tensor:
    return torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)


def results(inputs: list[Tensor], **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, max_logit, is_bound = attention(*leaves, **options)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [o.detach(), *torch.autograd.grad(o, leaves, weight), max_logit, is_bound]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, documents", [(MLA, False), (MLA, True), (GROUPED, True), (SMALL, False)], ids=str)
def test_attention_on_cuda_equals_float64(shape: tuple[int, int, int, int], documents: bool) -> None:
    inputs, borders = on_cuda(shape), packed() if documents else None
    right = results([x.double() for x in inputs], cu_seqlens=borders, backend="reference")
    for backend in ("triton",) if documents else ("triton", "cudnn"):
        ours = results(inputs, cu_seqlens=borders, backend=backend)
        for mine, expected in zip(ours[:4], right[:4], strict=True):
            # Weights and their gradients are rounded to 8 bits of mantissa before the second product.
            assert mine.isfinite().all()
            assert (mine.double() - expected).norm() <= 2**-7 * expected.norm()
        assert_exact((ours[4], ours[5]), right[4])


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_bounds_on_cuda_are_above_the_maximum_and_at_most_the_threshold(documents: bool) -> None:
    inputs, borders = on_cuda(MLA), packed() if documents else None
    inputs[0][:, :, 1:3] *= 30
    expected = dense_logits(inputs[0], inputs[1], 192**-0.5, borders).amax(dim=(0, 2, 3))
    _, value, is_bound = attention(*inputs, cu_seqlens=borders, clip_threshold=30.0)
    # Packed documents take a path that knows the exact maxima anyway.
    assert is_bound.tolist() == ([False] * 4 if documents else [True, False, False, True])
    assert (value[is_bound] >= expected[is_bound]).all() and (value[is_bound] <= 30.0).all()
    torch.testing.assert_close(value[~is_bound].double(), expected[~is_bound], rtol=RTOL, atol=0)
    _, value, is_bound = attention(*inputs, cu_seqlens=borders, clip_threshold=None)
    assert (value >= expected.float() * (1 - RTOL)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_attention_compiles_whole_and_equals_eager(documents: bool) -> None:
    inputs, borders = on_cuda(MLA, gain=4.0), packed() if documents else None
    compiled = torch.compile(lambda *x: attention(*x, cu_seqlens=borders, clip_threshold=10.0), fullgraph=True)
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, max_logit, is_bound = compiled(*leaves)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    ours = [o.detach(), *torch.autograd.grad(o, leaves, weight), max_logit, is_bound]
    for mine, expected in zip(ours, results(inputs, cu_seqlens=borders, clip_threshold=10.0), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_attention_replays_in_a_cuda_graph(documents: bool) -> None:
    inputs, borders = on_cuda(MLA), packed() if documents else None
    loud = [inputs[0] * 20, *inputs[1:]]
    static = [x.clone().requires_grad_() for x in inputs]
    weight = torch.randn(1, sum(LENGTHS), 4, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        o, max_logit, is_bound = attention(*static, cu_seqlens=borders, clip_threshold=30.0)
        return [o, *torch.autograd.grad(o, static, weight), max_logit, is_bound]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for source in (inputs, loud, inputs):  # the decision for or against an exact maximum is taken anew in each replay
        with torch.no_grad():
            for x, new in zip(static, source, strict=True):
                x.copy_(new)
        graph.replay()
        replayed = [x.clone() for x in captured]
        eager = step()
        assert replayed[-1].all() == (source is inputs and not documents)
        assert torch.equal(replayed[-1], eager[-1]) and torch.equal(replayed[-2], eager[-2])
        for mine, expected in zip(replayed[:4], eager[:4], strict=True):
            torch.testing.assert_close(mine, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_maxima_and_outputs_on_cuda_repeat_bit_by_bit() -> None:
    inputs = on_cuda(MLA, gain=20.0)
    for borders in (None, packed()):
        first, second = (results(inputs, cu_seqlens=borders) for _ in range(2))
        assert torch.equal(first[0], second[0]) and torch.equal(first[4], second[4])
    torch.use_deterministic_algorithms(True)
    try:
        assert cudnn.why_not(*inputs, None) is not None
        first, second = (results(inputs) for _ in range(2))
        assert all(torch.equal(mine, again) for mine, again in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_the_host_never_waits() -> None:
    inputs, borders = on_cuda(MLA), packed()
    for options in ({}, {"cu_seqlens": borders}):
        attention(*inputs, clip_threshold=30.0, **options)  # compile, and build what is kept
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(*inputs, clip_threshold=30.0, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
