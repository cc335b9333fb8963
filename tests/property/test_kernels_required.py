"""`backend="triton"` demands kernels for the passes that will run, and for no others."""

from __future__ import annotations

import pytest
import torch

from fastnorm import ops, routing
from fastnorm.plan import Decision


@pytest.fixture
def asked(monkeypatch):
    """Directions that a kernel is asked for; there is none for any."""
    directions = []

    def verified(problem, index):
        directions.append(problem.direction)
        return routing.Verified(Decision(None, (), ("no plan",)))

    monkeypatch.setattr(routing, "verified", verified)
    monkeypatch.setattr(routing.device, "interpreting", lambda: True)
    return directions


@pytest.mark.parametrize("recorded", [True, False])
def test_a_backward_kernel_is_demanded_only_where_autograd_records(asked, recorded):
    x, weight = torch.randn(2, 8), torch.ones(8, requires_grad=True)
    with torch.set_grad_enabled(recorded):
        reasons = ops.why_no_kernel(x, weight, None, 1, "rms", torch.float32)
    assert asked == ["forward", "backward"][: 1 + recorded]
    assert reasons == [f"{direction}: no plan" for direction in asked]
