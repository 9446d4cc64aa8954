"""Attention of a run of queries after cached keys: both paths against the definition."""

import pytest
import torch

from perilune.kernels.attention import attention
from perilune.kernels.attention.continued import continued_attention


def inputs(queries: int, keys: int, *, device: str = "cpu", dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((1, queries, 3, 24), (1, keys, 3, 24), (1, keys, 3, 16))
    return (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)


@pytest.mark.parametrize("backend", ["flash", "tiled", None])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 40), (7, 40), (40, 40), (130, 300)])
def test_every_path_computes_the_definition(queries: int, keys: int, backend: str | None) -> None:
    q, k, v = inputs(queries, keys)
    right, _, _ = attention(q, k, v, scale=0.3, backend="reference")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = continued_attention(q, k, v, scale=0.3, backend=backend)
        torch.testing.assert_close(found.clone(), right, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("queries, keys", [(1, 40), (7, 40), (130, 300), (64, 4096)])
def test_half_precision_on_cuda_stays_near_the_definition(queries: int, keys: int) -> None:
    q, k, v = inputs(queries, keys, device="cuda", dtype=torch.bfloat16)
    right, _, _ = attention(q.double(), k.double(), v.double(), scale=0.3, backend="reference")
    found = continued_attention(q, k, v, scale=0.3)
    # Weights and outputs are rounded to 8 bits.
    assert (found.double() - right).norm() < 1e-2 * right.norm()


def test_more_queries_than_keys_are_refused() -> None:
    q, k, v = inputs(5, 4)
    with pytest.raises(ValueError, match="no more queries than keys"):
        continued_attention(q, k, v, scale=1.0)
