"""Attention Residuals: mix earlier outputs by a softmax over depth instead of adding them (arXiv 2603.15031).

`mix` reads all sources in one pass. `phase1` and `merge` are the same sum in two steps: the S queries of a block
against the finished blocks at once, then a cheap merge with the running block sum. `reference.py` defines them,
`dense.py` runs on any device, `triton_mix.py` on CUDA. `fused_block_takes` says whether a network can use the operators
of `triton.py` that fuse both steps with the residual addition and the RMSNorm around them.

Triton is taken by default on a GPU that can run it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.kernels.attnres.dense import compute_dtype, dense_merge, dense_phase1
from perilune.kernels.attnres.reference import reference_merge, reference_mix, reference_phase1
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import INTERPRETED, why_not_triton

__all__ = ["fused_block_takes", "merge", "mix", "phase1"]

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SOURCES = 32
"""The Triton kernels hold all sources of a token at once: from 17 on not in registers alone."""


def _check(sources: Sequence[Tensor], query: Tensor, gain: Tensor | None, *, query_shape: str) -> None:
    name, dimensions = ("queries", 2) if query_shape == "[S, d]" else ("query", 1)
    if query.dim() != dimensions:
        raise ValueError(f"{name} has shape {tuple(query.shape)!r}, expected {query_shape}")
    if gain is not None and gain.shape != query.shape:
        raise ValueError(f"gain has shape {tuple(gain.shape)!r}, expected {query_shape} = {tuple(query.shape)!r}")
    width = query.shape[-1]
    if not sources:
        raise ValueError("sources=[] is empty: a mix needs at least one source (the embedding)")
    shape, dtype = sources[0].shape, sources[0].dtype
    if len(shape) and shape[-1] == width and all(source.shape == shape and source.dtype == dtype for source in sources):
        return
    for index, source in enumerate(sources):
        if source.shape != shape or source.dtype != dtype or source.shape[-1:] != query.shape[-1:]:
            raise ValueError(
                f"sources[{index}] is {source.dtype} {tuple(source.shape)}: expected {sources[0].dtype} "
                f"{(*sources[0].shape[:-1], width)}, as sources[0] and the width of the query say"
            )


def _why_not_triton(source: Tensor, num_sources: int) -> str | None:
    if source.dtype not in TRITON_DTYPES:
        return f"sources are {source.dtype}, the Triton kernels take bfloat16, float16 and float32"
    if num_sources > MAX_SOURCES:
        return f"{num_sources} sources are more than the {MAX_SOURCES} the Triton kernels hold at once"
    return why_not_triton(source)


_TAKEN: dict[tuple[torch.device, torch.dtype], bool] = {}


def fused_block_takes(source: Tensor, num_sources: int) -> bool:
    """Whether `triton_open` and `triton_merge_norm` of `triton.py` serve such sources; on CPU they do not."""
    if INTERPRETED or num_sources > MAX_SOURCES or not source.is_cuda:
        return False
    if torch.compiler.is_compiling():
        return _why_not_triton(source, num_sources) is None
    # Asked with every call, and properties of a device take the host as long as a launch.
    kind = (source.device, source.dtype)
    if kind not in _TAKEN:
        _TAKEN[kind] = _why_not_triton(source, num_sources) is None
    return _TAKEN[kind]


def _chosen(backend: str | None, source: Tensor, num_sources: int) -> str:
    if backend not in (None, "dense", "reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown: expected 'dense', 'reference', 'triton' or None to choose")
    if backend is None:
        return "triton" if fused_block_takes(source, num_sources) else "dense"
    if backend != "triton" or fused_block_takes(source, num_sources):
        return backend
    if (reason := _why_not_triton(source, num_sources)) is not None:
        raise ValueError(f"backend='triton' cannot run: {reason}")
    return backend


def _direction(query: Tensor, gain: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Only the product gain * query enters the scores; autograd carries its gradient to both."""
    query = query.to(compute_dtype(dtype))
    return query if gain is None else query * gain.to(query.dtype)


@full_precision
def phase1(
    sources: Sequence[Tensor], queries: Tensor, *, gain: Tensor | None = None, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Mix the sources once per query.

    sources: each [..., d]; queries [S, d]; gain [S, d] or None.
    Returns the mixes [S, ..., d] in the sources' dtype and the log-sum-exp of their scores [S, ...] in float32
    (float64 for float64 sources). Both carry gradient.
    """
    _check(sources, queries, gain, query_shape="[S, d]")
    backend = _chosen(backend, sources[0], len(sources))
    if backend == "reference":
        return reference_phase1(sources, queries, gain=gain, eps=eps)
    if backend == "triton":
        from perilune.kernels.attnres.triton_mix import triton_phase1

        return triton_phase1(list(sources), queries, gain, eps)
    return dense_phase1(list(sources), _direction(queries, gain, sources[0].dtype), eps)


@full_precision
def mix(
    sources: Sequence[Tensor], query: Tensor, *, gain: Tensor | None = None, eps: float, backend: str | None = None
) -> Tensor:
    """h [..., d] = sum_i softmax_i((gain * query) . RMSNorm_eps(source_i)) source_i.

    sources: each [..., d]; query [d]; gain [d] or None. A single source comes back unchanged.
    """
    _check(sources, query, gain, query_shape="[d]")
    backend = _chosen(backend, sources[0], len(sources))
    if backend == "reference":
        return reference_mix(sources, query, gain=gain, eps=eps)
    if backend == "triton":
        from perilune.kernels.attnres.triton_mix import triton_mix

        return triton_mix(list(sources), query, gain, eps)
    mixes, _ = dense_phase1(list(sources), _direction(query, gain, sources[0].dtype)[None], eps)
    return mixes.squeeze(0)


@full_precision
def merge(
    o: Tensor,
    lse: Tensor,
    running: Tensor,
    query: Tensor,
    *,
    gain: Tensor | None = None,
    eps: float,
    backend: str | None = None,
) -> Tensor:
    """Add one more source to a mix: h [..., d] over the sources behind (o, lse) and `running`.

    o [..., d] and lse [...] are one query's slice of phase1's result for the same query and gain [d].
    """
    _check([o, running], query, gain, query_shape="[d]")
    if lse.shape != o.shape[:-1]:
        raise ValueError(
            f"lse has shape {tuple(lse.shape)!r}, expected that of o without the width, {(*o.shape[:-1],)!r}"
        )
    backend = _chosen(backend, running, 1)
    if backend == "reference":
        return reference_merge(o, lse, running, query, gain=gain, eps=eps)
    if backend == "triton":
        from perilune.kernels.attnres.triton import triton_merge

        return triton_merge(o, lse, running, _direction(query, gain, running.dtype), eps)
    return dense_merge(o, lse, running, _direction(query, gain, running.dtype)[None], eps)
