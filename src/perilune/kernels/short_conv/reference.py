"""Causal depthwise convolution over documents: the definition.

    y_t = activation( sum_{d=0}^{W-1} weight[:, W-1-d] * x_{t-d} )        per channel, weights laid out as in F.conv1d

where x before a document's first token is its initial state (zero by default). The state after a document is its last
W-1 raw inputs, oldest first, which may still hold rows of the initial state when the document is shorter than that.

Shape letters: B batch, T tokens, C channels, W width, N sequences (B, or the number of packed documents).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_short_conv(x_BTC: Tensor, weight_CW: Tensor, *, initial_state_NCW: Tensor | None, borders: list[int],
                         activation: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One F.conv1d per document of the flattened row of B * T tokens; `borders` [N + 1] holds the document borders."""
    num_channels, width = weight_CW.shape
    x_CT = x_BTC.flatten(0, 1).to(dtype).T
    weight = weight_CW.to(dtype).unsqueeze(1)
    outputs, states = [], []
    for n, (start, stop) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
        before = (
            x_CT.new_zeros(num_channels, width - 1) if initial_state_NCW is None else initial_state_NCW[n].to(dtype)
        )
        context = torch.cat((before, x_CT[:, start:stop]), dim=1)
        if stop > start:
            outputs.append(F.conv1d(context.unsqueeze(0), weight, groups=num_channels).squeeze(0))
        states.append(context[:, context.shape[1] - width + 1 :])
    y_CT = torch.cat(outputs, dim=1) if outputs else x_CT
    y_CT = F.silu(y_CT) if activation == "silu" else y_CT
    state_NCW = torch.stack(states) if states else x_CT.new_zeros(0, num_channels, width - 1)
    return y_CT.T.reshape(x_BTC.shape).to(x_BTC.dtype), state_NCW
