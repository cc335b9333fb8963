"""Measured choice on a GPU: what is chosen is used, right, and no slower than the default."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fastnorm
from fastnorm import routing
from fastnorm.functional import norm
from tests.gpu.test_gpu_kernels import HALF, draw
from tests.oracle import check, run

pytestmark = pytest.mark.gpu


def test_a_models_norms_are_tuned_used_and_right(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), fastnorm.LayerNorm(1024), fastnorm.RMSNorm(1024)
    ).to("cuda", HALF)
    batch = torch.randn(2048, 64, device="cuda", dtype=HALF)
    cache = tmp_path / "tuned.json"
    tuned = fastnorm.tune(model, batch, cache=cache)
    assert len(tuned) == 4 and not any(t.cached for t in tuned)
    assert all(t.cached for t in fastnorm.tune(model, batch, cache=cache))
    for t in tuned:
        plan = routing.verified(t.problem, 0).decision.plan
        assert (plan.describe() if plan else "torch") == t.choice
        assert t.microseconds[t.choice] == min(t.microseconds.values())
    for semantics in ("layer", "rms"):
        inputs = draw(2048, 1024, HALF, semantics)
        check(run(inputs, partial(as_tuned, inputs)), inputs)


def as_tuned(inputs, x, weight, bias):
    """By the kernels that were chosen, or torch's."""
    name = inputs.kind.name
    return norm(x, inputs.shape, weight, bias, inputs.eps, semantics=name)
