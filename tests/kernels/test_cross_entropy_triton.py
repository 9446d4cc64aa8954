"""Cross entropy of a linear head: Triton's path against torch's cross entropy, and its promises on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from perilune.kernels.cross_entropy import IGNORED, linear_cross_entropy_sum
from perilune.kernels.triton_support import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")


def inputs(rows: int, vocabulary: int, width: int = 12, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(DEVICE)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[::3] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets.to(DEVICE)


def loss_and_gradients(hidden, weight, targets, **options):
    loss = linear_cross_entropy_sum(hidden, weight, targets, **options)
    return [loss, *torch.autograd.grad(2.5 * loss, [hidden, weight])]


def exact_of(hidden, weight, targets):
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(wide[0] @ wide[1].T, targets, ignore_index=IGNORED, reduction="sum")
    return [loss, *torch.autograd.grad(2.5 * loss, wide)]


@pytest.mark.parametrize("backend", ["dense", "triton"])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk_elements"), [(1, 2, None), (2, 1, None), (7, 61, 61 * 3), (6, 128, 128), (5, 300, 1)]
)
def test_loss_and_gradients_equal_those_of_all_logits(rows, vocabulary, chunk_elements, backend) -> None:
    tensors = inputs(rows, vocabulary)
    ours = loss_and_gradients(*tensors, chunk_elements=chunk_elements, backend=backend)
    for mine, right in zip(ours, exact_of(*tensors), strict=True):
        # Logits are float32 sums of 12 products of size 1; losses and gradients are of the size of the logits.
        torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=2e-5)


def test_a_vocabulary_longer_than_a_block_is_walked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.kernels.cross_entropy import triton

    monkeypatch.setattr(triton, "ONE_BLOCK", 16)
    monkeypatch.setattr(triton, "BLOCK", 16)
    for vocabulary in (17, 32, 75):
        tensors = inputs(4, vocabulary)
        ours = loss_and_gradients(*tensors, backend="triton")
        for mine, right in zip(ours, exact_of(*tensors), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=2e-5)


def test_large_logits_and_ignored_rows_stay_finite() -> None:
    hidden, weight, targets = inputs(6, 40)
    ours = loss_and_gradients((100 * hidden).detach().requires_grad_(), weight, targets, backend="triton")
    assert all(x.isfinite().all() for x in ours)
    nothing = torch.full_like(targets, IGNORED)
    loss, dhidden, dweight = loss_and_gradients(hidden, weight, nothing, backend="triton")
    assert loss == 0 and (dhidden == 0).all() and (dweight == 0).all()


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("wrong", [-1, -101, 40, 10_000])
def test_a_target_outside_of_the_vocabulary_makes_the_loss_nan(wrong, one_pass, monkeypatch) -> None:
    from perilune.kernels.cross_entropy import triton

    if not one_pass:
        monkeypatch.setattr(triton, "ONE_BLOCK", 16)
        monkeypatch.setattr(triton, "BLOCK", 16)
    hidden, weight, targets = inputs(6, 40)
    targets[4] = wrong
    assert linear_cross_entropy_sum(hidden, weight, targets, backend="triton").isnan()


def test_without_gradient_the_loss_is_the_same_and_no_rows_cost_nothing() -> None:
    hidden, weight, targets = inputs(6, 40)
    with torch.no_grad():
        without = linear_cross_entropy_sum(hidden, weight, targets, backend="triton")
    assert torch.equal(without, linear_cross_entropy_sum(hidden, weight, targets, backend="triton").detach())
    empty = loss_and_gradients(hidden[:0].detach().requires_grad_(), weight, targets[:0], backend="triton")
    assert empty[0] == 0 and (empty[2] == 0).all()


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, targets = inputs(6, 40)
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        linear_cross_entropy_sum(hidden, weight, targets, backend="fast")
    with pytest.raises(ValueError, match="got hidden torch.float64"):
        linear_cross_entropy_sum(hidden.double(), weight, targets, backend="triton")
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy_sum(hidden, weight[:, :5], targets, backend="triton")
    with pytest.raises(ValueError, match="expected 6 integers"):
        linear_cross_entropy_sum(hidden, weight, targets[:5], backend="triton")


def test_the_operator_passes_the_library_checks() -> None:
    # No gradient check: the operator hands out its gradients as outputs, which the generic check would differentiate.
    arguments = (*inputs(5, 7), True, None)
    torch.library.opcheck(
        torch.ops.perilune.linear_cross_entropy.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1000, 32768, 50001])
def test_bfloat16_stays_near_float64(vocabulary) -> None:
    hidden, weight, targets = inputs(600, vocabulary, width=256, dtype=torch.bfloat16)
    weight = (weight / 16).detach().requires_grad_()
    ours = loss_and_gradients(hidden, weight, targets)
    exact = exact_of(hidden, weight, targets)
    # The weight, the logits and their gradient are rounded to 8 bits: three independent roundings of at most 2^-9 RMS.
    for mine, right in zip(ours, exact, strict=True):
        assert (mine.double() - right).norm() / right.norm() < 3 * 2**-8


@pytest.mark.gpu
def test_the_same_bits_every_time_compiled_and_in_a_cuda_graph() -> None:
    tensors = inputs(5000, 32768, width=64, dtype=torch.bfloat16)
    first = loss_and_gradients(*tensors)
    # Leaves of its own: autograd ties a leaf to the stream that first used it, which is not the one that captures.
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:2]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradients(*leaves, tensors[2])
    graph.replay()
    compiled = torch.compile(lambda: linear_cross_entropy_sum(*tensors), fullgraph=True)()
    for other in (
        loss_and_gradients(*tensors),
        captured,
        [compiled, *torch.autograd.grad(2.5 * compiled, tensors[:2])],
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
