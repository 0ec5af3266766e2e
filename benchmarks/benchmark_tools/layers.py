"""Layers, and a loss, that models of several benchmarks have."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "by_token"]


class Block(nn.Module):
    """A transformer block with causal attention: one layer with many parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and transform, each beside a shortcut."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def by_token(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of texts, over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
