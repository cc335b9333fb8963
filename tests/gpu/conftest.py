"""GPU tests: skipped where there is none; kernels of the grid are compiled ahead, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from fastnorm import device
from fastnorm.plan import decide
from fastnorm.problem import NormProblem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def compile_ahead(problems: list[NormProblem]) -> None:
    """Fill Triton's cache on disk with what the first candidate of each problem needs."""
    limits = device.limits_for_device(0)
    plans = [decide(p, limits).plan for p in dict.fromkeys(problems)]
    jobs = [(plan, limits.capability) for plan in plans if plan is not None]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(_compile, jobs, chunksize=4))


def _compile(job: tuple) -> None:
    from fastnorm.kernels.compile import compile_plan

    compile_plan(*job)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fresh allocation is NaN (or -1): what a kernel does not write shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poison(*args: object, **kwargs: object) -> torch.Tensor:
        t = allocate(*args, **kwargs)
        return t.fill_(float("nan") if t.is_floating_point() else -1)

    return poison
