"""Attention Residuals (arXiv 2603.15031) on any device: no stacking of the sources, hand-written backward.

The equations are in `reference.py`. With u = gain * query, x_i = dh . v_i and d the width, the backward of one mix is

    ds_i = p_i (x_i - sum_j p_j x_j + dlse)
    dv_i = p_i dh + ds_i r_i u - (ds_i s_i r_i^2 / d) v_i
    du   = sum over tokens and i of ds_i r_i v_i

For S queries over the same sources these are summed over the queries before they leave the operator: one gradient per
source and call, not S. Saved beside the sources themselves: scores and norms, (S + 1) numbers per source and token.
With one source p is exactly 1 and ds exactly 0, so the source comes back unchanged and query and gain get exact zeros.

Merging a mix (o, lse) with one more source b is a gate: z = sigmoid(s_b - lse), h = o + z (b - o), and backward
    do = (1 - z) dh,  ds_b = z (1 - z) dh . (b - o),  dlse = -ds_b,  db = z dh + ds_b r_b u - (ds_b s_b r_b^2 / d) b.

Legend: S queries, N tokens (all leading dimensions flattened), D width.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.precision import full_precision


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, softmax and sums are float32, or float64 for float64 sources."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inverse_rms(v_ND: Tensor, eps: float) -> Tensor:
    norm_N = torch.linalg.vector_norm(v_ND, dim=-1)
    return torch.rsqrt(norm_N.square_().div_(v_ND.shape[-1]).add_(eps))


def _score_gradient_to_source(
    grad_v_ND: Tensor, v_ND: Tensor, ds_SN: Tensor, score_SN: Tensor, inverse_rms_N: Tensor, u_SD: Tensor
) -> None:
    """grad_v += sum over queries of ds * d(score)/dv, where score = r (u . v) and r depends on v too."""
    ds_r_NS = (ds_SN * inverse_rms_N).mT
    if u_SD.shape[0] == 1:
        grad_v_ND.addcmul_(ds_r_NS, u_SD)
    else:
        grad_v_ND.addmm_(ds_r_NS, u_SD)
    shrink_N = (ds_SN * score_SN).sum(dim=0).mul_(inverse_rms_N.square()).div_(-v_ND.shape[-1])
    grad_v_ND.addcmul_(v_ND, shrink_N[:, None])


class _Mix(torch.autograd.Function):
    """(u [S, D], eps, *sources [..., D]) -> mixes [S, ..., D], lse [S, ...]."""

    @staticmethod
    def forward(ctx, u_SD: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        num_queries, width = u_SD.shape
        scores, inverse_rms = [], []
        for source in sources:
            v_ND = source.reshape(-1, width).to(u_SD.dtype)
            r_N = _inverse_rms(v_ND, eps)
            inverse_rms.append(r_N)
            scores.append((v_ND @ u_SD.mT).mul_(r_N[:, None]).mT.contiguous())
        score_ISN = torch.stack(scores)
        lse_SN = score_ISN.logsumexp(dim=0)
        p_ISN = score_ISN.softmax(dim=0)

        mix_SND = u_SD.new_empty(num_queries, lse_SN.shape[1], width)
        for index, source in enumerate(sources):
            v_ND = source.reshape(-1, width).to(u_SD.dtype)
            for query in range(num_queries):
                weight_N1 = p_ISN[index, query, :, None]
                if index == 0:
                    torch.mul(v_ND, weight_N1, out=mix_SND[query])
                else:
                    mix_SND[query].addcmul_(v_ND, weight_N1)

        ctx.save_for_backward(u_SD, score_ISN, torch.stack(inverse_rms), p_ISN, *sources)
        ctx.set_materialize_grads(False)
        leading = sources[0].shape[:-1]
        mixes = mix_SND.to(sources[0].dtype).reshape(num_queries, *leading, width)
        return mixes, lse_SN.reshape(num_queries, *leading)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_mixes: Tensor | None, grad_lse: Tensor | None):
        u_SD, score_ISN, r_IN, p_ISN, *sources = ctx.saved_tensors
        num_queries, width = u_SD.shape
        if grad_mixes is None and grad_lse is None:
            return None, None, *([None] * len(sources))

        ds_ISN = torch.zeros_like(p_ISN)
        dh_SND = None if grad_mixes is None else grad_mixes.reshape(num_queries, -1, width).to(u_SD.dtype)
        if dh_SND is not None:
            for index, source in enumerate(sources):
                v_ND = source.reshape(-1, width).to(u_SD.dtype)
                for query in range(num_queries):
                    torch.sum(dh_SND[query] * v_ND, dim=-1, out=ds_ISN[index, query])
            ds_ISN -= (p_ISN * ds_ISN).sum(dim=0)
        if grad_lse is not None:
            ds_ISN += grad_lse.reshape(num_queries, -1)
        ds_ISN *= p_ISN

        du_SD = torch.zeros_like(u_SD)
        grads: list[Tensor | None] = []
        for index, source in enumerate(sources):
            v_ND = source.reshape(-1, width).to(u_SD.dtype)
            if ctx.needs_input_grad[0]:
                du_SD.addmm_(ds_ISN[index] * r_IN[index], v_ND)
            if not ctx.needs_input_grad[2 + index]:
                grads.append(None)
                continue
            if dh_SND is None:
                dv_ND = torch.zeros_like(v_ND)
            else:
                dv_ND = dh_SND[0] * p_ISN[index, 0, :, None]
                for query in range(1, num_queries):
                    dv_ND.addcmul_(dh_SND[query], p_ISN[index, query, :, None])
            _score_gradient_to_source(dv_ND, v_ND, ds_ISN[index], score_ISN[index], r_IN[index], u_SD)
            grads.append(dv_ND.to(source.dtype).reshape(source.shape))
        return du_SD if ctx.needs_input_grad[0] else None, None, *grads


class _Merge(torch.autograd.Function):
    """(o [..., D], lse [...], running [..., D], u [1, D], eps) -> h [..., D]."""

    @staticmethod
    def forward(ctx, o: Tensor, lse: Tensor, running: Tensor, u_1D: Tensor, eps: float) -> Tensor:
        width = u_1D.shape[1]
        b_ND = running.reshape(-1, width).to(u_1D.dtype)
        o_ND = o.reshape(-1, width).to(u_1D.dtype)
        r_N = _inverse_rms(b_ND, eps)
        score_N = (b_ND @ u_1D[0]).mul_(r_N)
        share_N = torch.sigmoid(score_N - lse.reshape(-1))
        ctx.save_for_backward(o, running, u_1D, r_N, score_N, share_N)
        return torch.lerp(o_ND, b_ND, share_N[:, None]).to(running.dtype).reshape(running.shape)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_h: Tensor):
        o, running, u_1D, r_N, score_N, share_N = ctx.saved_tensors
        width = u_1D.shape[1]
        b_ND = running.reshape(-1, width).to(u_1D.dtype)
        o_ND = o.reshape(-1, width).to(u_1D.dtype)
        dh_ND = grad_h.reshape(-1, width).to(u_1D.dtype)
        ds_N = (b_ND - o_ND).mul_(dh_ND).sum(dim=-1).mul_(share_N).mul_(1 - share_N)
        do_ND = dh_ND * (1 - share_N)[:, None]
        db_ND = dh_ND * share_N[:, None]
        _score_gradient_to_source(db_ND, b_ND, ds_N[None], score_N[None], r_N, u_1D)
        du_1D = (ds_N * r_N)[None] @ b_ND
        return (
            do_ND.to(o.dtype).reshape(o.shape),
            -ds_N.reshape(running.shape[:-1]),
            db_ND.to(running.dtype).reshape(running.shape),
            du_1D,
            None,
        )


def dense_phase1(sources: list[Tensor], u_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mixes [S, ..., D] in the sources' dtype and their log-sum-exp [S, ...] in the computing dtype."""
    return _Mix.apply(u_SD, eps, *sources)


def dense_merge(o: Tensor, lse: Tensor, running: Tensor, u_1D: Tensor, eps: float) -> Tensor:
    """Fold `running` into the mix (o, lse)."""
    return _Merge.apply(o, lse, running, u_1D, eps)
