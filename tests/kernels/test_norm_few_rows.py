"""The RMSNorm of a few rows is the RMSNorm."""

import pytest
import torch

from perilune.kernels.norm.few_rows import inverse_norm, norm_few_rows
from perilune.kernels.norm.reference import reference_rms_norm

# A sum of 48 squares and a root, each rounded: some units in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_rows_are_normed_as_by_the_definition(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 48, generator=generator, dtype=dtype) * size
    weight = torch.randn(48, generator=generator, dtype=dtype)
    right = reference_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(norm_few_rows(x, weight, 1e-5), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_eps_stands_inside_the_root() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[(25 + 11) ** -0.5], [11**-0.5]], dtype=torch.float64)
    torch.testing.assert_close(inverse_norm(x, 11.0), right, rtol=1e-13, atol=0)
