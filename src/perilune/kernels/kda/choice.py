"""Which kernels of KDA are the fastest where: a table of measurements, so that nothing is tuned at run time.

cuDNN's time depends on the gates: where they decay weakly it warms up states over long stretches, up to ten times
slower. How weak they are is known on the device only, so a path counts with the worst of its times, and today our own
kernels are ahead in every row. Without a gate of bounded strength cuDNN is not exact; other chips, dtypes and widths
are not measured, and take our own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.kda.cudnn import why_not_cudnn
from perilune.kernels.kda.gates import BoundedGate


class Measured(NamedTuple):
    """Milliseconds of one call: bfloat16, K = V = 128, a bounded gate, with norms, gate and sigmoid on either side."""

    tokens: int
    heads: int
    with_backward: bool
    own: tuple[float, float]  # strong gates, weak gates
    cudnn: tuple[float, float]


# By compute capability; of an H200, from benchmarks/results/bench_kda.json.
TABLE: dict[tuple[int, int], tuple[Measured, ...]] = {
    (9, 0): (
        Measured(8192, 32, False, own=(0.49, 0.43), cudnn=(0.80, 1.76)),
        Measured(32768, 8, False, own=(0.62, 0.61), cudnn=(0.92, 6.48)),
        Measured(32768, 32, False, own=(1.55, 1.54), cudnn=(1.30, 6.99)),
        Measured(131072, 32, False, own=(6.26, 6.22), cudnn=(5.41, 28.3)),
        Measured(8192, 32, True, own=(1.99, 2.06), cudnn=(3.36, 3.26)),
        Measured(32768, 8, True, own=(2.20, 2.43), cudnn=(3.74, 8.10)),
        Measured(32768, 32, True, own=(6.50, 6.74), cudnn=(6.98, 12.7)),
        Measured(131072, 32, True, own=(26.1, 27.7), cudnn=(27.8, 50.7)),
    )
}


@lru_cache(maxsize=256)
def fastest(
    capability: tuple[int, int], dtype: torch.dtype, key_dim: int, value_dim: int, tokens: int, heads: int,
    *, is_bounded: bool, with_backward: bool,
) -> str:  # fmt: skip
    """ "triton" or "cudnn", as the row says that is nearest in tokens and heads."""
    rows = [row for row in TABLE.get(capability, ()) if row.with_backward == with_backward]
    if not rows or not is_bounded or dtype != torch.bfloat16 or (key_dim, value_dim) != (128, 128):
        return "triton"

    def distance(row: Measured) -> float:
        return abs(math.log(max(tokens, 1) / row.tokens)) + abs(math.log(max(heads, 1) / row.heads))

    nearest = min(rows, key=distance)
    return "triton" if max(nearest.own) <= max(nearest.cudnn) else "cudnn"


def own_or_library(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: dict[str, Any]) -> str:
    """The path of this call on a GPU, cuDNN only where it is there and exact. options: the keywords it would get."""
    batch, num_tokens, num_heads, key_dim = q.shape
    with_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta))
    name = fastest(
        torch.cuda.get_device_capability(q.device), q.dtype, key_dim, v.shape[-1], batch * num_tokens, num_heads,
        is_bounded=isinstance(options["gate"], BoundedGate), with_backward=with_backward,
    )  # fmt: skip
    return name if name == "triton" or why_not_cudnn(q, k, v, g, beta, **options) is None else "triton"
