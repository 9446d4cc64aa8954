"""Which rows of which parameters belong to which attention head, and where the head's largest logit is kept.

An attention module implements `ClipsQK`: it returns `QKHeads`, built by `mha_heads`, `gqa_heads` or `mla_heads` from
its q and k projections, and feeds a `MaxLogitRecorder` in its training forwards. qk_clip.py does the rest and explains
the exponents:

    mha_heads   sqrt(gamma) on q and k       gqa_heads   gamma on q, or balanced over q and the shared k
    mla_heads   sqrt(gamma) on the nope rows of q and k, gamma on the rope rows of q
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class MaxLogitRecorder:
    """Running per-head maximum of the attention logits since the last reset, in `value` [heads]; -inf where none was
    seen.

    An attention module holds one and calls `update` in its training forwards; eval forwards must not count. Give the
    module as `owner` and the recorder looks at its `training` flag itself. No autograd, no host synchronisation.

    `clip_threshold` tells the module how much is worth knowing: the exact maximum of heads above it, and of the others
    an upper bound that is not above it if that is cheaper. It is -inf, everything exact, until a QKClip sets its tau.
    `exact` [heads] is the running maximum without the bounds, so `value` is a bound where it is larger.
    """

    def __init__(self, num_heads: int, owner: nn.Module | None = None) -> None:
        self.value = torch.full((num_heads,), -torch.inf, device="cpu")
        self.exact = self.value
        self.clip_threshold = -math.inf
        self._owner = owner
        self._seen = False
        self._wanted = math.inf

    def want(self, threshold: float) -> None:
        """Ask for exact maxima above `threshold`. Of several who ask, the lowest counts."""
        self.clip_threshold = self._wanted = min(self._wanted, threshold)

    def update(self, max_logit: Tensor, is_bound: Tensor | None = None) -> None:
        """Take the elementwise maximum with `max_logit` [heads]; NaN (a broken micro-batch) erases nothing.

        is_bound [heads]: which entries are upper bounds; None: none of them.
        """
        if self._owner is not None and not self._owner.training:
            return
        if max_logit.shape != self.value.shape:
            raise ValueError(
                f"max_logit has shape {tuple(max_logit.shape)}; expected {tuple(self.value.shape)}, one entry a head"
            )
        max_logit = max_logit.detach()
        exact = max_logit if is_bound is None else max_logit.masked_fill(is_bound, -torch.inf)
        self.value = torch.fmax(self.value, max_logit) if self._seen else max_logit.clone()
        self.exact = torch.fmax(self.exact, exact) if self._seen else exact.clone()
        self._seen = True

    def reset(self) -> None:
        self.value = torch.full_like(self.value, -torch.inf)
        self.exact = self.value
        self._seen = False

    @property
    def has_seen(self) -> bool:
        """Whether a training forward came since the last reset."""
        return self._seen

    def continue_in(self, value: Tensor, exact: Tensor) -> None:
        """Go on from the maxima in these two tensors [heads]; NaN is "nothing seen yet"."""
        self.value, self.exact, self._seen = value, exact, True


class HeldMaxima:
    """The maxima of recorders in memory that stays where it is: what a CUDA graph reads and writes.

    Outside of a graph recorders make new tensors with every update. `take` brings what they hold into the memory and
    lets them go on there; `keep`, after forwards, writes what they came to back into it. Make it after a training
    forward: recorders have found their device and dtype then.
    """

    def __init__(self, recorders: Sequence[MaxLogitRecorder]) -> None:
        self._recorders = tuple(recorders)
        sizes = [recorder.value.numel() for recorder in self._recorders]
        like = self._recorders[0].value if self._recorders else torch.empty(0)
        self._memory = torch.full((2, sum(sizes)), torch.nan, dtype=like.dtype, device=like.device)
        values, exacts = (row.split(sizes) if sizes else () for row in self._memory)
        self._places = list(zip(values, exacts, strict=True))

    def take(self) -> None:
        if not any(recorder.has_seen for recorder in self._recorders):
            self._memory.fill_(torch.nan)  # the maximum of NaN and a number is the number, also where that is -inf
        else:
            for recorder, (value, exact) in zip(self._recorders, self._places, strict=True):
                if recorder.has_seen:
                    value.copy_(recorder.value)
                    exact.copy_(recorder.exact)
                else:
                    value.fill_(torch.nan)
                    exact.fill_(torch.nan)
        self.point()

    def keep(self) -> None:
        if self._recorders:
            places = [place for pair in self._places for place in pair]
            torch._foreach_copy_(places, [t for recorder in self._recorders for t in (recorder.value, recorder.exact)])
            self.point()

    def point(self) -> None:
        """Recorders go on from what the memory holds."""
        for recorder, (value, exact) in zip(self._recorders, self._places, strict=True):
            recorder.continue_in(value, exact)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowScaling:
    """How each row of a q or k parameter (weight or bias) is multiplied.

    Row r belongs to head h = head_of_row[r] (-1: untouched) and is multiplied by gamma_h ** exponent[r], and by
    g ** group_exponent[r] with g the smallest gamma in the key group of h.
    """

    parameter: nn.Parameter
    head_of_row: Tensor
    exponent: Tensor
    group_exponent: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class QKHeads:
    """The heads of one attention module. Build one by `mha_heads`, `gqa_heads` or `mla_heads`.

    `balanced_rows` is the second GQA rule where there is one, with `group_of_head` [num_heads]. `qk_norm=True` declares
    that q or k is normalised after the projection, which QK-Clip refuses; nobody guesses it from names.
    """

    num_heads: int
    rows: tuple[RowScaling, ...]
    recorder: MaxLogitRecorder
    balanced_rows: tuple[RowScaling, ...] = ()
    group_of_head: Tensor | None = None
    qk_norm: bool = False


@runtime_checkable
class ClipsQK(Protocol):
    """An attention module that QK-Clip can act on."""

    def qk_heads(self) -> QKHeads: ...


def mha_heads(
    q_weight: nn.Parameter,
    k_weight: nn.Parameter,
    *,
    num_heads: int,
    recorder: MaxLogitRecorder,
    q_bias: nn.Parameter | None = None,
    k_bias: nn.Parameter | None = None,
    qk_norm: bool = False,
) -> QKHeads:
    """Multi-head attention: rows of head h are contiguous in q_weight and k_weight [num_heads * head_dim, in].

    q and k may share a parameter: scaled once by sqrt(gamma), it enters the logit twice.
    """
    parameters = {id(each): each for each in (q_weight, k_weight, q_bias, k_bias) if each is not None}
    rows = tuple(
        RowScaling(
            parameter=parameter,
            head_of_row=(head := _contiguous_heads(parameter, num_heads)),
            exponent=_constant(head, 0.5),
        )
        for parameter in parameters.values()
    )
    return QKHeads(num_heads=num_heads, rows=rows, recorder=recorder, qk_norm=qk_norm)


def gqa_heads(
    q_weight: nn.Parameter,
    k_weight: nn.Parameter,
    *,
    num_heads: int,
    num_kv_heads: int,
    recorder: MaxLogitRecorder,
    q_bias: nn.Parameter | None = None,
    k_bias: nn.Parameter | None = None,
    qk_norm: bool = False,
) -> QKHeads:
    """Grouped-query attention: query head h reads key head h // (num_heads / num_kv_heads). One query a group is
    MHA."""
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads!r}; it must divide num_heads={num_heads!r}")
    if num_heads == num_kv_heads:
        return mha_heads(
            q_weight, k_weight, num_heads=num_heads, recorder=recorder, q_bias=q_bias, k_bias=k_bias, qk_norm=qk_norm
        )
    group_size = num_heads // num_kv_heads
    query_only, balanced = [], []
    for parameter in (q_weight, q_bias):
        if parameter is not None:
            head = _contiguous_heads(parameter, num_heads)
            query_only.append(RowScaling(parameter=parameter, head_of_row=head, exponent=_constant(head, 1.0)))
            balanced.append(
                RowScaling(
                    parameter=parameter,
                    head_of_row=head,
                    exponent=_constant(head, 1.0),
                    group_exponent=_constant(head, -0.5),
                )
            )
    for parameter in (k_weight, k_bias):
        if parameter is not None:
            # The first head of the group stands for it: only the group's factor is used.
            head = _contiguous_heads(parameter, num_kv_heads) * group_size
            balanced.append(
                RowScaling(
                    parameter=parameter,
                    head_of_row=head,
                    exponent=_constant(head, 0.0),
                    group_exponent=_constant(head, 0.5),
                )
            )
    return QKHeads(
        num_heads=num_heads,
        rows=tuple(query_only),
        recorder=recorder,
        balanced_rows=tuple(balanced),
        group_of_head=torch.arange(num_heads) // group_size,
        qk_norm=qk_norm,
    )


def mla_heads(
    q_weight: nn.Parameter,
    kv_b_weight: nn.Parameter,
    num_heads: int,
    nope: int,
    rope: int,
    v_dim: int,
    recorder: MaxLogitRecorder,
    *,
    q_bias: nn.Parameter | None = None,
    kv_b_bias: nn.Parameter | None = None,
    qk_norm: bool = False,
) -> QKHeads:
    """Multi-head latent attention.

    q_weight is the projection that ends in the heads (q_proj, or q_b_proj under query compression) with rows
    [num_heads, nope + rope]; kv_b_weight is the up-projection of the latent with rows [num_heads, nope + v_dim].
    """
    query = torch.tensor([0.5] * nope + [1.0] * rope).repeat(num_heads)
    key = torch.tensor([0.5] * nope + [0.0] * v_dim).repeat(num_heads)
    rows = []
    for parameter, exponent in ((q_weight, query), (q_bias, query), (kv_b_weight, key), (kv_b_bias, key)):
        if parameter is None:
            continue
        if parameter.shape[0] != len(exponent):
            raise ValueError(
                f"an MLA projection of {num_heads} heads has {parameter.shape[0]} rows; "
                f"expected {len(exponent)} from nope={nope}, rope={rope}, v_dim={v_dim}"
            )
        head = _contiguous_heads(parameter, num_heads)
        rows.append(RowScaling(parameter=parameter, head_of_row=head.where(exponent > 0, -1), exponent=exponent))
    return QKHeads(num_heads=num_heads, rows=tuple(rows), recorder=recorder, qk_norm=qk_norm)


def _contiguous_heads(parameter: nn.Parameter, num_heads: int) -> Tensor:
    rows = parameter.shape[0]
    if num_heads < 1 or rows % num_heads:
        raise ValueError(f"a projection with {rows} rows cannot hold num_heads={num_heads!r} heads of equal size")
    return torch.arange(num_heads).repeat_interleave(rows // num_heads)


def _constant(head_of_row: Tensor, value: float) -> Tensor:
    return torch.full(head_of_row.shape, value)
