"""The seed noise of a ladder, measured from repeated seeds, and what it makes of any estimate.

A loss is  L[arm, rung, seed, horizon] = curve + u[rung, seed, horizon] + v[arm, rung, seed, horizon]:  u is what the
arms of one seed share (data order, initial weights), v is an arm's own. Horizons are branches of one run, so u and v
are vectors over the horizons with covariances S_u and S_v of any form; nothing counts them as independent.

An estimate is, to first order, a linear form  sum q[arm, rung, seed, horizon] e[...]  in the noise e = u + v. With
Q = sum of q over arms, its variance is

    sum over runs of  Q' S_mean Q  +  ( sum over arms of q' S_v q  -  Q' S_v Q / M ),        S_mean = S_u + S_v / M.

S_mean is the covariance over seeds of the mean of M arms and S_v half that of the paired differences; both are pooled
over rungs, and they are independent of each other. Where the arms weigh against each other (Q = 0, a paired
difference), only S_v remains: that is what pairing buys. The sum of the two parts is a Student variable with
Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perilune.ladder.student import two_sided_quantile

Array = np.ndarray

CONFIDENCE = 0.95
# Two differences to one baseline share its noise: correlation 1/2, and 1/4 between their squares.
_SHARED_SQUARES = 0.25


@dataclass(frozen=True, kw_only=True)
class Noise:
    """A covariance over horizons; zero degrees of freedom: not known, infinite: given."""

    covariance: Array
    degrees_of_freedom: float
    source: str

    @property
    def is_known(self) -> bool:
        return self.degrees_of_freedom > 0


@dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """`mean` is S_mean over `num_averaged` arms, `own` is S_v."""

    mean: Noise
    own: Noise
    num_averaged: float

    def parts(self, forms: Array) -> tuple[Array, Array]:
        """Covariances of linear forms [form, arm, rung, seed, horizon]: that of the mean, that of the arms' own."""
        runs = forms.sum(axis=1)
        own = _quadratic(forms, self.own.covariance) - _quadratic(runs, self.own.covariance) / self.num_averaged
        return _quadratic(runs, self.mean.covariance), own

    def new_run(self, horizon: int) -> tuple[float, float]:
        """Both parts of the variance of one more run's loss."""
        kept = 1 - 1 / self.num_averaged
        return float(self.mean.covariance[horizon, horizon]), float(kept * self.own.covariance[horizon, horizon])


def half_width(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Half of a 95% interval and its degrees of freedom, from (variance, degrees of freedom) of independent parts."""
    parts = [(max(variance, 0.0), degrees) for variance, degrees in parts]
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 0.0, max((degrees for _, degrees in parts), default=math.inf)
    spread = sum(variance**2 / degrees for variance, degrees in parts if variance > 0)
    degrees = total**2 / spread if spread > 0 else math.inf
    return two_sided_quantile(CONFIDENCE, degrees) * math.sqrt(total), degrees


def _quadratic(forms: Array, covariance: Array) -> Array:
    """Products of forms [form, ..., horizon] summed over all but the first axis, weighed by the covariance."""
    return (forms @ covariance).reshape(len(forms), -1) @ forms.reshape(len(forms), -1).T


def covariance_over_seeds(values: Array) -> tuple[Array, float]:
    """Covariance over horizons of values [rung, seed, horizon] within rungs; NaN marks what was not run."""
    present = np.isfinite(values)
    counts = present.sum(axis=1, keepdims=True)
    means = np.where(present, values, 0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    deviations = np.where(present, values - means, 0)
    return _pooled(deviations, present, np.ones(len(values)))


def covariance_over_runs(residuals: Array, *, num_fitted: float) -> tuple[Array, float]:
    """The same from residuals of a fit that used up `num_fitted` values per horizon, rungs taken together."""
    flat = residuals.reshape(1, -1, residuals.shape[-1])
    present = np.isfinite(flat)
    return _pooled(np.where(present, flat, 0), present, np.array([num_fitted]))


def _pooled(deviations: Array, present: Array, lost: Array) -> tuple[Array, float]:
    products = np.einsum("rsh,rsk->hk", deviations, deviations)
    together = np.einsum("rsh,rsk->rhk", present.astype(float), present.astype(float))
    degrees = np.maximum(together - lost[:, None, None], 0).sum(axis=0)
    measured = degrees.diagonal() > 0
    if not measured.any():
        return np.zeros_like(products), 0.0
    smallest = float(degrees.diagonal()[measured].min())
    covariance = products / np.maximum(degrees, 1)
    if np.all(degrees == smallest):
        return covariance, smallest
    # A horizon that was never repeated has the noise of the others, and two that never were together move as one.
    variances = np.where(measured, covariance.diagonal(), covariance.diagonal()[measured].mean())
    covariance = np.where(degrees > 0, covariance, np.sqrt(np.outer(variances, variances)))
    # Entries from different runs need not fit together; the nearest matrix without negative variances does.
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.maximum(values, 0)) @ vectors.T, smallest


def pooled_over_arms(noises: list[Noise], *, size: int, source: str) -> Noise:
    """The mean of the arms' covariances of `size` horizons, each weighing by its degrees of freedom."""
    known = [noise for noise in noises if noise.is_known]
    if not known:
        return Noise(covariance=np.zeros((size, size)), degrees_of_freedom=0.0, source="not known")
    total = sum(noise.degrees_of_freedom for noise in known)
    covariance = sum((noise.degrees_of_freedom / total) * noise.covariance for noise in known)
    degrees = total / (1 + _SHARED_SQUARES * (len(known) - 1))
    return Noise(covariance=np.asarray(covariance), degrees_of_freedom=degrees, source=source)
