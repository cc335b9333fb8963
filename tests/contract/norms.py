"""The modules under contract, each beside torch's own with the same random parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fastnorm
from fastnorm import autograd

OURS = {"layer": fastnorm.LayerNorm, "rms": fastnorm.RMSNorm}
TORCHS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
KINDS = tuple(OURS)


def pair(kind: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """fastnorm's module and torch's with the same parameters, which are never ones."""
    ours, torchs = OURS[kind](*args, **kwargs), TORCHS[kind](*args, **kwargs)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    torchs.load_state_dict(ours.state_dict())
    return ours, torchs


def seeded(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype | None = None):
    """Normal values of a seed, the same on every device."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device=device, dtype=dtype)


def operator(
    kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """A norm through the eager autograd.Function, which CPU tensors reach in no other way; in fp64
    its operators run torch's formulas, so that gradcheck can judge the wiring."""
    return autograd.apply(x, weight, bias, 1, eps, kind, x.dtype)


def formula(
    kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The definition in elementary operations, right to any order of differentiation."""
    if kind.startswith("layer"):
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def same(actual: Any, expected: Any) -> None:
    """Bit for bit, NaN equal to NaN, dtype and device too."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def close(actual: Any, expected: Any) -> None:
    """To the default tolerance of the dtype: for wiring, where accuracy is proven elsewhere."""
    torch.testing.assert_close(actual, expected)
