"""Borders are read from the device once, and never remembered past a change."""

import numpy as np
import pytest
import torch

from perilune.kernels.attention import attention
from perilune.kernels.documents import document_borders
from perilune.kernels.kda import kda
from perilune.kernels.short_conv import short_conv


def test_borders_follow_the_tensor_through_changes_in_place_and_new_tensors() -> None:
    borders = torch.tensor([0, 3, 10])
    assert document_borders(borders, batch=1, num_tokens=10) == (0, 3, 10)
    borders[1] = 7
    assert document_borders(borders, batch=1, num_tokens=10) == (0, 7, 10)
    assert document_borders(torch.tensor([0, 10]), batch=1, num_tokens=10) == (0, 10)
    with torch.inference_mode():
        inference = torch.tensor([0, 4, 10])
        assert document_borders(inference, batch=1, num_tokens=10) == (0, 4, 10)
        inference[1] = 5
        assert document_borders(inference, batch=1, num_tokens=10) == (0, 5, 10)


def test_borders_follow_host_memory_that_is_filled_anew() -> None:
    """A write through numpy does not raise the tensor's version."""
    buffer = np.array([0, 3, 10])
    borders = torch.from_numpy(buffer)
    assert document_borders(borders, batch=1, num_tokens=10) == (0, 3, 10)
    buffer[1] = 7
    assert document_borders(borders, batch=1, num_tokens=10) == (0, 7, 10)


class OnDevice(torch.Tensor):
    """A host tensor that says it lives elsewhere and counts how often the host asks for its values."""

    device = torch.device("meta")
    reads = 0

    def tolist(self) -> list[int]:
        self.reads += 1
        return super().tolist()


def test_the_same_tensor_on_a_device_is_read_once_until_it_changes() -> None:
    borders = torch.tensor([0, 2, 6]).as_subclass(OnDevice)
    for _ in range(3):
        assert document_borders(borders, batch=1, num_tokens=6) == (0, 2, 6)
    assert borders.reads == 1
    borders[1] = 5
    assert document_borders(borders, batch=1, num_tokens=6) == (0, 5, 6)
    other = torch.tensor([0, 1, 6]).as_subclass(OnDevice)
    assert document_borders(other, batch=1, num_tokens=6) == (0, 1, 6)
    assert (borders.reads, other.reads) == (2, 1)


def test_training_works_after_inference_mode_saw_the_same_documents() -> None:
    """What the operators remember of a packing must not be a tensor that autograd refuses."""
    borders = torch.tensor([0, 12, 19])

    def run_all(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 19, 2, 4)
        conv, _ = short_conv(x, x.new_ones(8, 4), cu_seqlens=borders)
        linear, _ = kda(
            heads, heads, heads, -heads.square(), heads[..., 0].sigmoid(), cu_seqlens=borders, qk_l2norm=True
        )
        softmax, *_ = attention(heads, heads, heads, cu_seqlens=borders)
        return conv.sum() + linear.sum() + softmax.sum()

    with torch.inference_mode():
        run_all(torch.randn(1, 19, 8))
    x = torch.randn(1, 19, 8, requires_grad=True)
    run_all(x).backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("borders", "batch", "message"),
    [
        ([0, 6], 2, "batch size 2"),
        ([[0, 6]], 1, r"shape \(1, 2\)"),
        ([0.0, 6.0], 1, "expected integers"),
        ([1, 6], 1, r"\(1, 6\) must rise from 0 to T=6"),
        ([0, 5], 1, r"\(0, 5\) must rise from 0 to T=6"),
        ([0, 4, 2, 6], 1, "without decreasing"),
    ],
)
def test_wrong_borders_are_refused(borders: list, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        document_borders(torch.tensor(borders), batch=batch, num_tokens=6)
