"""Fabric has no callback hook before it wraps a model: `fastnorm.patch` comes before `setup`."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from lightning_models import ADVICE_IGNORED, WIDTH, patched_names
from torch import nn

import fastnorm

pytestmark = ADVICE_IGNORED


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_patched_model_is_set_up_once_with_its_weights(precision: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric.init_module():
        model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fastnorm.patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = fabric.setup(model, optimizer)
    assert len(report) == 1
    assert patched_names(model) == ["1"]
    assert list(wrapped.state_dict()) == list(before)
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, before[name])
    fastnorm.reset_stats()
    fabric.backward(wrapped(torch.randn(4, WIDTH, dtype=model[0].weight.dtype)).sum())
    optimizer.step()
    assert sum(fastnorm.stats().forward.values()) == 1
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_a_model_made_empty_is_patched_before_it_has_numbers() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with torch.device("meta"):
        model = _model()
    assert len(fastnorm.patch(model)) == 1
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    wrapped = fabric.setup(model)
    plain = _model()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, WIDTH)
    assert torch.equal(wrapped(x), plain(x))
