"""Naming a class's kind by hand, and insisting that every norm is recognised."""

from __future__ import annotations

import pytest
import torch
from norm_lookalikes import EpsOutsideRootNorm, GatedNorm
from norm_zoo import LlamaLike, N, randomized, sample
from torch import nn

import fastnorm
from fastnorm.patching.recognition import recognise


def test_registered_class_is_taken_without_looking() -> None:
    class Dividing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(N))
            self.tiny = 1e-6

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            root = (hidden.pow(2).mean(-1, keepdim=True) + self.tiny).sqrt()
            return hidden / root * self.gain

    module = randomized(Dividing())
    expected = module(sample())
    assert recognise(module) is None
    assert fastnorm.register(Dividing, semantics="rms", weight="gain", eps="tiny") is Dividing
    assert fastnorm.patch(module).counts() == {"rms": 1}
    torch.testing.assert_close(module(hidden=sample()), expected)
    module.tiny = 0.5
    assert not torch.allclose(module(sample()), expected)


def test_register_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="subclass of torch.nn.Module; got 3"):
        fastnorm.register(3, semantics="rms")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="no semantics 'rsm'; known are layer, rms"):
        fastnorm.register(LlamaLike, semantics="rsm")
    with pytest.raises(ValueError, match="gated or conditional norm cannot be registered"):
        fastnorm.register(GatedNorm, semantics="rms")

    class NoEpsNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    fastnorm.register(NoEpsNorm, semantics="rms")
    with pytest.raises(ValueError, match="register"):
        fastnorm.patch(NoEpsNorm())


def test_strict_raises_on_an_unknown_norm_and_changes_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(N), randomized(EpsOutsideRootNorm()))
    with pytest.raises(ValueError, match=r"1 \(EpsOutsideRootNorm\): it computes no kind"):
        fastnorm.patch(model, strict=True)
    assert type(model[0]) is nn.LayerNorm
    assert len(fastnorm.patch(model, strict=True, exclude="1")) == 1


def test_strict_accepts_layers_that_are_no_target() -> None:
    model = nn.Sequential(nn.LayerNorm(N), nn.BatchNorm1d(N), nn.GroupNorm(2, N), nn.Linear(N, N))
    report = fastnorm.patch(model, strict=True)
    assert len(report) == 1
    assert [entry.class_name for entry in report.skipped] == ["BatchNorm1d", "GroupNorm"]
