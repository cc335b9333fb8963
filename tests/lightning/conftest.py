"""What a Lightning run leaves in the process is taken away after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_restored() -> Iterator[None]:
    """Launchers leave LOCAL_RANK and its like, which make a later run wait for other processes."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
