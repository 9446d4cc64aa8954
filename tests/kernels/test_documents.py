"""Borders are read from the device once, and never remembered past a change."""

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


def test_the_same_tensor_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or original(self))
    borders = torch.tensor([0, 2, 6])
    for _ in range(3):
        document_borders(borders, batch=1, num_tokens=6)
    assert len(reads) == 1


def test_training_works_after_inference_mode_saw_the_same_documents() -> None:
    """What the operators remember of a packing must not be a tensor that autograd refuses."""
    borders = torch.tensor([0, 12, 19])

    def run_all(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 19, 2, 4)
        conv, _ = short_conv(x, x.new_ones(8, 4), cu_seqlens=borders)
        linear, _ = kda(
            heads, heads, heads, -heads.square(), heads[..., 0].sigmoid(), cu_seqlens=borders, qk_l2norm=True
        )
        softmax, _ = attention(heads, heads, heads, cu_seqlens=borders)
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
