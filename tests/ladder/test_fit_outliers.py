"""Runs that have not learnt yet what all others have: they neither bend the curve nor hide, and predictions go on from
an arm's own largest rung."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.ladder import LadderFit, Point, curve, fit_ladder
from perilune.ladder.curve import LIMIT as FAR
from perilune.ladder.curve import fit_curve
from perilune.ladder.fit import _curve_points
from perilune.ladder.losses import arranged
from perilune.ladder.settled import LIMIT, settled

RUNGS = {"w128": 1e15, "w192": 4e15, "w256": 1e16}
HORIZONS = {"short": 1.0, "long": 2.0}
ARMS = {"plain": 1.0, "a": 1.3, "b": 0.9}
FLOOR, EXPONENT = 1.2, 0.2


def _loss(arm: str, horizon: str, compute: float) -> float:
    return FLOOR + 2 * HORIZONS[horizon] ** 0.1 * (ARMS[arm] * compute / 1e15) ** -EXPONENT


def _points(*, seeds: int = 2, sd: float = 0.0, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(
            arm=arm, rung=rung, horizon=horizon, seed=number, compute=compute * HORIZONS[horizon],
            tokens=1e8 * HORIZONS[horizon],
            loss=_loss(arm, horizon, compute * HORIZONS[horizon]) + sd * float(random.standard_normal()),
        )
        for rung, compute in RUNGS.items()
        for arm in ARMS
        for number in range(seeds)
        for horizon in HORIZONS
    ]  # fmt: skip


def _moved(points: list[Point], by: float, **where: object) -> list[Point]:
    def is_meant(point: Point) -> bool:
        return all(getattr(point, name) == value for name, value in where.items())

    return [replace(point, loss=point.loss + by) if is_meant(point) else point for point in points]


def _fit(points: list[Point]) -> LadderFit:
    return fit_ladder(points, baseline="plain", seed_sd=0.003)


def test_a_run_far_off_moves_the_curve_no_further_than_one_at_the_limit(monkeypatch) -> None:
    points = _points(sd=0.002)
    where = {"arm": "b", "rung": "w128", "horizon": "short"}
    near, far, further = (_fit(_moved(points, by, **where)).curve.exponent.value for by in (0.0, 0.6, 1.2))
    assert further == pytest.approx(far, abs=1e-6)
    monkeypatch.setattr(curve, "LIMIT", 1e9)
    squares = _fit(_moved(points, 0.6, **where)).curve.exponent.value
    assert abs(far - near) < 0.25 * abs(squares - near)


def test_the_multiplier_of_the_other_arms_stays_when_one_run_is_far_off() -> None:
    points = _points(sd=0.002)
    far = _fit(_moved(points, 0.6, arm="b", rung="w128", horizon="short"))
    assert far.arm("a").rho.value == pytest.approx(_fit(points).arm("a").rho.value, rel=0.02)


def test_losses_within_the_limit_are_fitted_by_least_squares() -> None:
    """The same numbers come from a least squares that knows nothing of far points."""
    losses = arranged(_points(sd=0.004, seed=5), "plain")
    points = _curve_points(losses)
    found = fit_curve(points, floor=None)
    assert np.abs(found.residuals).max() < FAR
    design = points.linear_design
    start = np.array([found.floor, *found.log_amplitudes, found.exponent])
    arms = np.linalg.lstsq(
        design[:, 3:], np.log(points.loss - found.floor - found.residuals) - design[:, :3] @ start[1:], rcond=None
    )[0]
    parameters = np.concatenate([start, arms])
    jacobian = np.concatenate([np.ones((len(design), 1)), np.exp(design @ parameters[1:])[:, None] * design], axis=1)
    assert np.abs(jacobian.T @ found.residuals).max() < 1e-7


def test_a_far_point_has_no_influence_and_a_near_one_that_of_finite_differences() -> None:
    points = _moved(_points(sd=0.002), 0.5, arm="a", rung="w192", horizon="long", seed=1)
    losses = arranged(points, "plain")

    def exponent(points: list[Point]) -> float:
        return fit_curve(_curve_points(arranged(points, "plain")), floor=None).exponent

    influence = losses.dense(fit_curve(_curve_points(losses), floor=None).influence)[3]
    for place, point in enumerate(points):
        if place % 5 and point.loss - _loss(point.arm, point.horizon, point.compute) < 0.1:
            continue
        (where,) = np.argwhere(losses.loss == point.loss)
        step = 1e-5
        higher, lower = (
            exponent([*points[:place], replace(point, loss=point.loss + sign * step), *points[place + 1 :]])
            for sign in (1, -1)
        )
        # Gauss-Newton leaves out second derivatives times residuals.
        assert (higher - lower) / (2 * step) == pytest.approx(
            influence[tuple(where)], abs=0.02 * np.abs(influence).max()
        )
        if point.loss - _loss(point.arm, point.horizon, point.compute) > 0.1:
            assert influence[tuple(where)] == 0


def test_an_arm_without_a_point_near_the_curve_keeps_the_influence_of_its_far_ones() -> None:
    jacobian = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    found = curve._influence(jacobian, np.array([0.0, 0.01, 3 * FAR, -3 * FAR]))
    np.testing.assert_allclose(found @ jacobian, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(found[1], [-0.5, -0.5, 0.5, 0.5], atol=1e-12)
    near = curve._influence(jacobian, np.array([0.0, 0.01, 0.0, 3 * FAR]))
    np.testing.assert_allclose(near[1], [-0.5, -0.5, 1.0, 0.0], atol=1e-12)


def test_a_horizon_that_shows_nothing_of_the_curve_is_named() -> None:
    points = [point for point in _points() if point.horizon == "short" or (point.arm, point.rung) == ("a", "w128")]
    points = [point for point in points if point.arm != "a" or point.rung == "w128"]
    with pytest.raises(ValueError, match="the horizon 'long' was run on one rung"):
        _fit(points)


def test_a_horizon_without_repeated_seeds_is_said_to_have_the_noise_of_the_others() -> None:
    points = [point for point in _points(sd=0.002) if point.horizon == "short" or point.seed == 0]
    assert "no seed was repeated at long: it has the noise of the other horizons" in _fit(points).notes
    assert not any("no seed was repeated" in note for note in _fit(_points(sd=0.002)).notes)


@given(seed=st.integers(0, 10_000), sd=st.floats(0, LIMIT / 4))
@settings(max_examples=20, deadline=None)
def test_seeds_that_lie_close_together_are_all_fitted(seed: int, sd: float) -> None:
    points = _points(seeds=3, sd=sd, seed=seed)
    assert settled(points) == (points, [])


def test_one_seed_tells_nothing_of_what_is_settled() -> None:
    points = _moved(_points(seeds=1), 3.0, arm="a", rung="w128")
    assert settled(points) == (points, [])


@given(arm=st.sampled_from(sorted(ARMS)), rung=st.sampled_from(sorted(RUNGS)), by=st.floats(2 * LIMIT, 2))
@settings(max_examples=20, deadline=None)
def test_where_one_arms_seeds_lie_apart_the_point_is_left_out_for_all_arms(arm: str, rung: str, by: float) -> None:
    points = _moved(_points(sd=0.001), by, arm=arm, rung=rung, horizon="short", seed=1)
    kept, (note,) = settled(points)
    assert kept == [point for point in points if (point.rung, point.horizon) != (rung, "short")]
    assert note.startswith(f"{rung} at short is not settled: seeds of {arm} ") and note.endswith("left out of the fit")
    assert f"{by / math.sqrt(2):.2f}"[:3] in note


def test_the_arm_that_lies_furthest_apart_is_named() -> None:
    points = _moved(_points(), 0.3, arm="a", rung="w128", horizon="short", seed=1)
    points = _moved(points, 0.5, arm="b", rung="w128", horizon="short", seed=1)
    _, (note,) = settled(points)
    assert "seeds of b have a standard deviation of 0.35 nats" in note


def test_points_are_not_left_out_where_too_few_rungs_would_stay() -> None:
    points = _points()
    for horizon in HORIZONS:
        points = _moved(points, 0.4, arm="a", rung="w128", horizon=horizon, seed=1)
    kept, notes = settled(points)
    assert kept == points and len(notes) == 2 and all("fitted all the same" in note for note in notes)


def test_a_prediction_goes_on_from_the_arms_own_largest_rung() -> None:
    """An arm whose gain changes with size: the curve of all misses its largest rung, and the next by as much."""
    points = _moved(_points(sd=0.0005), 0.015, arm="a", rung="w256")
    compute = 2.4e16
    predicted = _fit(points).predict("a", compute=compute, horizon="long")
    assert predicted.value == pytest.approx(_loss("a", "long", compute) + 0.015, abs=0.006)
    assert predicted.low is not None and predicted.high is not None
    assert predicted.low < predicted.value < predicted.high


def test_a_prediction_of_the_largest_rung_itself_is_what_was_measured() -> None:
    points = _points(sd=0.01)
    compute = RUNGS["w256"] * HORIZONS["long"]
    there = [p.loss for p in points if (p.arm, p.rung, p.horizon) == ("b", "w256", "long")]
    found = _fit(points).predict("b", compute=compute, horizon="long")
    assert found.value == pytest.approx(sum(there) / len(there), abs=1e-12)


def test_an_arm_that_lacks_a_horizon_is_predicted_from_the_curve() -> None:
    points = [point for point in _points() if (point.arm, point.horizon) != ("a", "long")]
    compute = 2.4e16
    predicted = _fit(points).predict("a", compute=compute, horizon="long")
    assert predicted.value == pytest.approx(_loss("a", "long", compute), abs=1e-4)


def test_an_arm_of_one_rung_has_a_multiplier_and_no_say_in_the_curve() -> None:
    points = [point for point in _points(sd=0.003) if point.arm != "b" or point.rung == "w128"]
    without = _fit([point for point in points if point.arm != "b"])
    there = _fit(_moved(points, 0.02, arm="b", horizon="short"))
    assert there.curve.floor.value == pytest.approx(without.curve.floor.value, abs=1e-6)
    assert there.curve.exponent.value == pytest.approx(without.curve.exponent.value, abs=1e-6)
    assert there.arm("b").rho.value == pytest.approx(ARMS["b"], rel=0.05)
