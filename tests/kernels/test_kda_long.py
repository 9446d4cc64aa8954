"""Long forms: sizes of real layers, and many more random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.kda import kda
from tests.kernels.test_kda import compare_with_reference, random_inputs, relative_error


@pytest.mark.long
@pytest.mark.parametrize("gates", ["weak", "mixed"])
def test_float32_at_the_size_of_a_layer_stays_within_rounding_of_the_float64_recurrence(gates: str) -> None:
    """4096 tokens, 4 heads of 128: the error of float32 does not grow with the length, because the state forgets."""
    inputs = random_inputs(1, 4096, 4, 128, 128, gates=gates)
    tensors = {name: value for name, value in inputs.tensors().items() if name != "initial_state"}
    exact, _ = kda(**tensors, qk_l2norm=True, backend="reference")
    ours, _ = kda(**{name: value.float() for name, value in tensors.items()}, qk_l2norm=True)
    # beta up to 2 makes reflections: nothing contracts, so weak gates keep all rounding errors of 4096 steps.
    assert relative_error(ours, exact) < 2e-5
    assert relative_error(ours[:, -64:], exact[:, -64:]) < 2e-5


@pytest.mark.long
@settings(max_examples=400)
@given(
    batch=st.integers(1, 4),
    tokens=st.integers(1, 300),
    heads=st.integers(1, 4),
    key_dim=st.integers(2, 40),
    value_dim=st.integers(1, 40),
    gates=st.sampled_from(["mixed", "weak", "none", "strongest"]),
    seed=st.integers(0, 10**6),
)
def test_any_shape_equals_the_recurrence(
    batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, gates: str, seed: int
) -> None:
    compare_with_reference(random_inputs(batch, tokens, heads, key_dim, value_dim, gates=gates, seed=seed))


@pytest.mark.long
@settings(max_examples=200)
@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12), seed=st.integers(0, 10**6))
def test_any_packing_equals_the_recurrence(lengths: list[int], seed: int) -> None:
    borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
    if borders[-1] == 0:
        return
    inputs = random_inputs(1, borders[-1], 2, 8, 6, sequences=len(lengths), seed=seed)
    compare_with_reference(inputs, borders=borders)
