"""Tensors whose memory does not hold their values: a sign that is still to be turned, zeros that
were never written."""

from __future__ import annotations

import pytest
import torch

from fastnorm import ops
from tests.conftest import Route
from tests.contract.norms import KINDS, close, operator, seeded


def negated(t: torch.Tensor) -> torch.Tensor:
    """-t as a view, as the imaginary part of a conjugate is."""
    view = torch.complex(t, t).conj().imag
    assert view.is_neg()
    return view


def gradients(kind, x, weight, dy):
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = operator(kind, *leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("which", ["x", "weight", "dy"])
@pytest.mark.parametrize("kind", KINDS)
def test_signs_that_are_to_be_turned_are_turned(kind: str, which: str, route: Route) -> None:
    tensors = [
        seeded(*s, seed=i, device=route.device) for i, s in enumerate([(3, 8), (8,), (3, 8)])
    ]
    views = list(tensors)
    place = ["x", "weight", "dy"].index(which)
    views[place] = negated(tensors[place])
    tensors[place] = -tensors[place]
    close(gradients(kind, *views), gradients(kind, *tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_that_were_never_written_are_zeros(kind: str, route: Route) -> None:
    x, weight = seeded(3, 8, device=route.device), seeded(8, seed=1, device=route.device)
    dy = torch._efficientzerotensor((3, 8), device=route.device)
    _, *grads = gradients(kind, x, weight, dy)
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("lazy", [negated, lambda t: torch._efficientzerotensor(t.shape)])
def test_they_go_through_the_dispatcher(lazy, monkeypatch) -> None:
    """Which makes them what they stand for; no launcher may see their memory."""
    direct = []
    for name in ("forward", "backward"):
        original = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, f=original, n=name: direct.append(n) or f(*a))
    x, weight, dy = seeded(3, 8), seeded(8, seed=1), seeded(3, 8, seed=2)
    gradients("rms", x, weight, dy)
    assert direct == ["forward", "backward"]
    gradients("rms", x, weight, lazy(dy))
    assert direct == ["forward", "backward", "forward"]
    gradients("rms", lazy(x), lazy(weight), dy)
    assert direct == ["forward", "backward", "forward"]
