"""Attention Residuals (arXiv 2603.15031): the definition, by stacking the sources and letting autograd differentiate.

    r_i = 1 / sqrt(mean(v_i^2) + eps)
    s_i = (gain * query) . (r_i v_i)
    p   = softmax_i(s)
    h   = sum_i p_i v_i

v_i [..., d] are the sources (the embedding and raw sublayer outputs, or block sums); keys are their RMS-normalised
form, values are raw. Scores, softmax and sums are float32 (float64 for float64 sources); h has the sources' dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_phase1(
    sources: Sequence[Tensor], queries: Tensor, *, gain: Tensor | None = None, eps: float
) -> tuple[Tensor, Tensor]:
    """All S queries [S, d] against all sources: the mixes [S, ..., d] and their log-sum-exp [S, ...]."""
    compute_dtype = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
    values = torch.stack(list(sources)).to(compute_dtype)
    keys = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    directions = queries.to(compute_dtype) if gain is None else queries.to(compute_dtype) * gain.to(compute_dtype)
    scores = torch.einsum("n...d,sd->sn...", keys, directions)
    mixes = torch.einsum("sn...,n...d->s...d", scores.softmax(dim=1), values)
    return mixes.to(sources[0].dtype), scores.logsumexp(dim=1)


def reference_mix(sources: Sequence[Tensor], query: Tensor, *, gain: Tensor | None = None, eps: float) -> Tensor:
    """One query [d] against all sources: h [..., d]."""
    mixes, _ = reference_phase1(sources, query[None], gain=None if gain is None else gain[None], eps=eps)
    return mixes[0]


def reference_merge(
    o: Tensor, lse: Tensor, running: Tensor, query: Tensor, *, gain: Tensor | None = None, eps: float
) -> Tensor:
    """Add one more source, `running`, to a mix `o` whose scores have log-sum-exp `lse`: h [..., d]."""
    running_alone, running_score = reference_phase1(
        [running], query[None], gain=None if gain is None else gain[None], eps=eps
    )
    compute_dtype = running_score.dtype
    share = torch.sigmoid(running_score[0] - lse.to(compute_dtype))[..., None]
    return ((1 - share) * o.to(compute_dtype) + share * running_alone[0].to(compute_dtype)).to(running.dtype)
