"""The tensors of a case: random, never ones or zeros, the same for every provider."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import Case

EPS = 1e-5


@dataclass(frozen=True)
class Inputs:
    """What every provider is given.

    Args:
        norm: "layer" or "rms".
        x: `[M, N]`, contiguous.
        weight: `[N]`.
        bias: `[N]`, None for "rms".
        dy: `[M, N]`, contiguous. Read-only for providers: one that writes into it takes a copy.
        eps: added to the variance.
    """

    norm: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    eps: float = EPS

    @property
    def shape(self) -> list[int]:
        """`normalized_shape` as torch's operators take it."""
        return [self.x.shape[-1]]


def make_inputs(case: Case, device: str | torch.device, seed: int = 0) -> Inputs:
    """Draw the tensors of a case.

    Rows have a mean of 0.5 and a deviation of 1.5, so a LayerNorm that forgets the mean, or either
    norm that forgets rstd, cannot pass the gate.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        out = torch.empty(*shape, device=device, dtype=case.torch_dtype)
        return out.normal_(mean, std, generator=generator)

    matrix = (case.rows, case.hidden)
    return Inputs(
        norm=case.norm,
        x=normal(*matrix, mean=0.5, std=1.5),
        weight=normal(case.hidden, mean=1.0, std=0.25),
        bias=normal(case.hidden, std=0.25) if case.norm == "layer" else None,
        dy=normal(*matrix),
    )
