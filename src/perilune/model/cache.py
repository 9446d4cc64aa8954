"""What a decoder remembers between tokens.

A KDA layer keeps a matrix state per head and the last inputs of its convolutions: constant size, whatever the length.
An MLA layer keeps one latent vector (and the shared key part) per token. Attention Residuals mix over depth, not time,
and keep nothing.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class KDACache:
    state: Tensor | None = None
    """[B, H, K, V] float32"""
    conv: Tensor | None = None
    """[B, 3 * H * D, width - 1]: the last raw inputs of the q, k and v convolutions, oldest first"""


@dataclass
class MLACache:
    """Latents of all tokens so far, in a buffer that doubles when full."""

    length: int = 0
    buffer: Tensor | None = None

    def append(self, latent_BTR: Tensor) -> Tensor:
        """Add new tokens; returns all latents so far, [B, length, R]. The cache keeps no gradients."""
        latent_BTR = latent_BTR.detach()
        end = self.length + latent_BTR.shape[1]
        if self.buffer is None or self.buffer.shape[1] < end:
            batch, _, rank = latent_BTR.shape
            grown = latent_BTR.new_empty(batch, max(64, 2 * end), rank)
            if self.buffer is not None:
                grown[:, : self.length] = self.buffer[:, : self.length]
            self.buffer = grown
        self.buffer[:, self.length : end] = latent_BTR
        self.length = end
        return self.buffer[:, :end]


@dataclass
class DecodeCache:
    """One entry per layer; made by `Decoder.new_cache()`."""

    layers: list[KDACache | MLACache]
    length: int = 0
    """Tokens seen so far, the position of the next one."""

    def num_bytes(self) -> int:
        tensors: list[Tensor | None] = []
        for layer in self.layers:
            tensors += [layer.state, layer.conv] if isinstance(layer, KDACache) else [layer.buffer]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
