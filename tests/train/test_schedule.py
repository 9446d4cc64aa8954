"""Contracts of the learning-rate schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.schedule import ScheduleConfig, decay_steps, lr_at

configs = st.builds(
    ScheduleConfig,
    kind=st.sampled_from(["wsd", "cosine", "constant"]),
    warmup_steps=st.integers(0, 50),
    decay_fraction=st.floats(0, 1),
    decay_steps=st.none() | st.integers(0, 80),
    decay_shape=st.sampled_from(["linear", "one_minus_sqrt"]),
    final_fraction=st.floats(0, 1),
)


@given(configs, st.integers(1, 200), st.data())
def test_multiplier_rises_then_falls_within_its_bounds(config, total_steps, data):
    curve = [lr_at(step, config, total_steps) for step in range(total_steps + 3)]
    assert all(0.0 <= value <= 1.0 for value in curve)
    # A step inside the run is never wasted at lr 0.
    assert all(value > 0.0 for value in curve[:total_steps])
    peak = max(range(len(curve)), key=curve.__getitem__)
    rounding = 1e-12
    assert all(a <= b + rounding for a, b in zip(curve[:peak], curve[1 : peak + 1], strict=True))
    assert all(a + rounding >= b for a, b in zip(curve[peak:], curve[peak + 1 :], strict=False))


@given(configs, st.integers(1, 200))
def test_the_run_ends_at_the_final_fraction(config, total_steps):
    end = lr_at(total_steps, config, total_steps)
    flat = config.kind == "constant" or (config.kind == "wsd" and decay_steps(config, total_steps) == 0)
    if config.warmup_steps <= total_steps:
        assert end == pytest.approx(1.0 if flat else config.final_fraction, abs=1e-12)
        assert lr_at(total_steps + 100, config, total_steps) == end


@given(st.integers(10, 200), st.integers(1, 5), st.floats(0.1, 0.5))
def test_wsd_is_flat_between_warmup_and_decay(total_steps, warmup, fraction):
    config = ScheduleConfig(kind="wsd", warmup_steps=warmup, decay_fraction=fraction)
    for step in range(warmup - 1, total_steps - decay_steps(config, total_steps)):
        assert lr_at(step, config, total_steps) == 1.0


def test_shapes_at_half_of_the_decay():
    linear = ScheduleConfig(kind="wsd", decay_steps=10, decay_shape="linear", final_fraction=0.1)
    root = ScheduleConfig(kind="wsd", decay_steps=10, decay_shape="one_minus_sqrt", final_fraction=0.1)
    cosine = ScheduleConfig(kind="cosine", final_fraction=0.1)
    assert lr_at(95, linear, 100) == pytest.approx(0.55)
    assert lr_at(95, root, 100) == pytest.approx(1 - 0.9 * math.sqrt(0.5))
    assert lr_at(50, cosine, 100) == pytest.approx(0.55)


@pytest.mark.parametrize(
    "field",
    [{"kind": "step"}, {"warmup_steps": -1}, {"decay_fraction": 1.5}, {"final_fraction": -0.1}, {"decay_steps": -3}],
)
def test_a_bad_field_is_named(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        ScheduleConfig(**field)
