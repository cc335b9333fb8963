"""Patched layers of every kind on kernels: forward, gradients, and that a kernel ran."""

from __future__ import annotations

import pytest
import torch
from norm_zoo import RECOGNISED, BufferNorm, ChannelsFirstNorm, N, input_for, randomized
from torch import nn

import fastnorm
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route
from tests.oracle import Inputs, check

CLASSES = {**RECOGNISED, nn.LayerNorm: "layer", nn.RMSNorm: "rms"}
del CLASSES[BufferNorm]  # Its weight is frozen; the oracle compares every gradient.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "kind"), CLASSES.items(), ids=lambda v: getattr(v, "__name__", v))
def test_patched_layer_is_as_accurate_as_its_class(
    cls: type[nn.Module], kind: str, dtype: torch.dtype, route: Route
) -> None:
    """B54, B78, B79, B122: each kind's rounding points, on the route of this session."""
    module = cls(N) if cls in (nn.LayerNorm, nn.RMSNorm) else cls()
    module = randomized(module, dtype=dtype).to(route.device)
    x = input_for(module, dtype=dtype).to(route.device).requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(route.device, dtype)
    fastnorm.patch(module)
    recipe = type(module)._fastnorm_recipe
    weight = None if recipe.weight is None else getattr(module, recipe.weight)
    bias = None if recipe.bias is None else getattr(module, recipe.bias)
    eps = recipe.fixed_eps if recipe.eps is None else getattr(module, recipe.eps)
    with route.counted():
        y = module(x)
        y.backward(dy)
    rows = (y, x.grad, x, dy)
    if isinstance(module, ChannelsFirstNorm):
        rows = tuple(t.movedim(1, -1) for t in rows)
    y, dx, x, dy = (t.detach() for t in rows)
    results = (y, dx, *(None if p is None else p.grad for p in (weight, bias)))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    parameters = (None if p is None else p.detach() for p in (weight, bias))
    check(results, Inputs(x, *parameters, dy, (N,), eps, SEMANTICS[kind]))
