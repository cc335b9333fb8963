"""A model with norms of several kinds, one of them shared, in nested containers."""

from __future__ import annotations

import torch
from norm_zoo import (
    CohereLike,
    GemmaLike,
    LlamaLike,
    N,
    T5Like,
)
from torch import nn

NORMS = 7


class Block(nn.Module):
    """Norms of several kinds, one of them shared, in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.LayerNorm(N)
        self.parts = nn.ModuleDict(
            {
                "a": nn.Sequential(nn.Linear(N, N), shared, nn.Sequential(LlamaLike())),
                "b": nn.ModuleList([nn.RMSNorm(N), GemmaLike(), CohereLike()]),
            }
        )
        self.again = shared
        self.vision = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N, bias=False), T5Like())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts["a"](x)
        for layer in self.parts["b"]:
            x = x + layer(x)
        return self.vision(self.again(x))


def fast(model: nn.Module) -> list[str]:
    """Names of the patched layers, by their classes' names."""
    return [name for name, m in model.named_modules() if type(m).__name__.startswith("Fast")]
