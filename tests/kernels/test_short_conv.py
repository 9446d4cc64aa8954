"""The short convolution: the fast path against F.conv1d per document, in float64, with states and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.kernels.short_conv import short_conv, short_conv_step

SAME = 1e-12


def inputs(tokens: int, sequences: int, channels: int = 5, width: int = 4, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, tokens, channels), (channels, width), (sequences, channels, width - 1))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def outputs_and_gradients(x, weight, state, **options):
    y, final = short_conv(x, weight, initial_state=state, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(7)
    loss = (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
    loss = loss + (final * torch.randn(final.shape, generator=generator, dtype=final.dtype)).sum()
    return [y, final, *torch.autograd.grad(loss, [x, weight, state], materialize_grads=True)]


def assert_close(ours, right) -> None:
    for mine, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, expected, rtol=SAME, atol=SAME)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    width=st.integers(1, 5),
    activation=st.sampled_from(["silu", None]),
    seed=st.integers(0, 999),
)
@example(lengths=[0, 1, 2, 3, 0, 4], width=4, activation="silu", seed=0)
def test_fast_path_equals_one_convolution_per_document(lengths, width, activation, seed) -> None:
    borders = torch.tensor([0, *lengths]).cumsum(0)
    tensors = inputs(sum(lengths), len(lengths), width=width, seed=seed)
    options = {"cu_seqlens": borders, "activation": activation}
    assert_close(
        outputs_and_gradients(*tensors, **options), outputs_and_gradients(*tensors, **options, backend="reference")
    )


def test_definition_is_torch_conv1d_with_silu() -> None:
    x, weight, _ = inputs(11, 2, batch=2)
    y, _ = short_conv(x, weight)
    padded = F.pad(x.mT, (3, 0))
    expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=5)).mT
    assert_close([y], [expected])


@pytest.mark.parametrize("blocks", [1, 16 * 8])
def test_many_blocks_and_batches_equal_the_reference(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("perilune.kernels.short_conv.shifted", fromlist=["x"]).BLOCK_BYTES, "cpu", blocks)
    tensors = inputs(50, 3, batch=3)
    assert_close(outputs_and_gradients(*tensors), outputs_and_gradients(*tensors, backend="reference"))


def test_steps_and_continued_states_equal_the_whole_sequence() -> None:
    x, weight, state = inputs(10, 2, batch=2)
    whole, final = short_conv(x, weight, initial_state=state, output_final_state=True)
    pieces, running = [], state
    for t in range(10):
        y, running = short_conv_step(x[:, t], running, weight)
        pieces.append(y)
    assert_close([torch.stack(pieces, dim=1), running], [whole, final])
    first, middle = short_conv(x[:, :2], weight, initial_state=state, output_final_state=True)
    rest, end = short_conv(x[:, 2:], weight, initial_state=middle, output_final_state=True)
    assert_close([torch.cat([first, rest], dim=1), end], [whole, final])


def test_later_tokens_leave_earlier_outputs_bitwise_unchanged() -> None:
    x, weight, _ = inputs(20, 1)
    changed = x.detach().clone()
    changed[:, 9:] += 1.0
    assert torch.equal(short_conv(x, weight)[0][:, :9], short_conv(changed, weight)[0][:, :9])


def test_half_precision_computes_in_float32() -> None:
    x, weight, _ = inputs(40, 1)
    y, state = short_conv(x.bfloat16(), weight.float(), output_final_state=True)
    exact, _ = short_conv(x.bfloat16().double(), weight.float().double())
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - exact).norm() < torch.finfo(torch.bfloat16).eps * exact.norm()


def test_wrong_arguments_are_refused_with_name_value_and_expectation() -> None:
    x, weight, _ = inputs(6, 1)
    with pytest.raises(ValueError, match=r"weight has shape .*C=5"):
        short_conv(x, weight[:3])
    with pytest.raises(ValueError, match="activation='gelu' is unknown"):
        short_conv(x, weight, activation="gelu")
    with pytest.raises(ValueError, match=r"cu_seqlens=\(0, 7\) must rise"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="backend='fast' is not a path"):
        short_conv(x, weight, backend="fast")
    for tensors in ((x.long(), weight), (x, weight.long())):
        with pytest.raises(TypeError, match="has dtype torch.int64, expected a floating point dtype"):
            short_conv(*tensors)
    with pytest.raises(TypeError, match="x has dtype torch.int64"):
        short_conv_step(x[:, 0].long(), x.new_zeros(1, 5, 3), weight)


@pytest.mark.parametrize("backend", ["shifted", "reference"])
def test_no_documents_give_no_rows_and_no_states(backend: str) -> None:
    x, weight, _ = inputs(0, 0)
    y, state = short_conv(x, weight, cu_seqlens=torch.tensor([0]), output_final_state=True, backend=backend)
    assert y.shape == (1, 0, 5) and state.shape == (0, 5, 3)
