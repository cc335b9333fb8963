"""The dtype under autocast is a choice; the numbers that the next linear layer sees are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastnorm


def layer_of(norm: str, choice: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    make = {"layer": fastnorm.LayerNorm, "rms": fastnorm.RMSNorm}[norm]
    layer = make(64, eps=1e-5, autocast_output=choice, device=device)
    nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_choice_gives_its_dtype(norm, dtype, route):
    x = torch.randn(8, 64, device=route.device, dtype=dtype)
    with torch.autocast(route.device, torch.bfloat16):
        theirs = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm](64, device=route.device)(x)
        given = {c: layer_of(norm, c, route.device)(x) for c in ("torch", "input", "autocast")}
    assert given["torch"].dtype == theirs.dtype
    assert given["input"].dtype == dtype
    assert given["autocast"].dtype == torch.bfloat16


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_next_linear_layer_sees_the_same_numbers(norm, route):
    x = torch.randn(8, 64, device=route.device)
    with torch.autocast(route.device, torch.bfloat16):
        wide = layer_of(norm, "torch", route.device)(x)
        narrow = layer_of(norm, "autocast", route.device)(x)
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("choice", ["torch", "input", "autocast"])
def test_without_autocast_the_choice_changes_nothing(norm, choice, route):
    x = torch.randn(8, 64, device=route.device, dtype=torch.bfloat16)
    given = layer_of(norm, choice, route.device)(x)
    assert given.dtype == torch.bfloat16
    assert torch.equal(given, layer_of(norm, "torch", route.device)(x))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradients_flow_through_the_narrow_output(norm, route):
    x = torch.randn(8, 64, device=route.device, requires_grad=True)
    head = nn.Linear(64, 8, device=route.device)
    grads = []
    for choice in ("torch", "autocast"):
        layer = layer_of(norm, choice, route.device)
        with torch.autocast(route.device, torch.bfloat16):
            loss = head(layer(x)).float().square().sum()
        grads.append(torch.autograd.grad(loss, (x, layer.weight)))
    for wide, narrow in zip(*grads, strict=True):
        assert wide.dtype == narrow.dtype
        torch.testing.assert_close(narrow, wide, rtol=2e-2, atol=2e-2 * float(wide.abs().max()))


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="got 'half'"):
        fastnorm.layer_norm(torch.zeros(2, 4), 4, autocast_output="half")
    with pytest.raises(ValueError, match="got 'half'"):
        fastnorm.RMSNorm(4, autocast_output="half")
