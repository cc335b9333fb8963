"""Fixtures of the tests on patching."""

from __future__ import annotations

import pytest
from block import Block
from norm_zoo import randomized
from torch import nn

from fastnorm.patching import recognition


@pytest.fixture
def block() -> nn.Module:
    """A fresh model, no two layers alike."""
    return randomized(Block())


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers or recognises is forgotten after it."""
    monkeypatch.setattr(recognition, "_registered", {})
    monkeypatch.setattr(recognition, "_fingerprints", {})
