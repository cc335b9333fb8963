"""Devices, threads, and machines without Triton: section V of the public reports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fastnorm
from tests.conftest import Route
from tests.contract.norms import KINDS, close, pair, same, seeded
from tests.oracle import check
from tests.property.test_kernels import through_fastnorm
from tests.strategies import Case


def _python(program: str) -> str:
    """Run a program in a fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_touches_neither_triton_nor_a_gpu() -> None:
    out = _python(
        """
        import sys, torch, fastnorm
        heavy = [m for m in ("triton", "lightning", "pytorch_lightning", "torch._dynamo")
                 if m in sys.modules]
        print(heavy, torch.cuda.is_initialized())
        """
    )
    assert out.strip() == "[] False"


def test_everything_works_without_triton() -> None:
    """B93."""
    _python(
        """
        import sys
        sys.modules["triton"] = None
        import torch, fastnorm
        for norm in (fastnorm.LayerNorm(8), fastnorm.RMSNorm(8)):
            x = torch.randn(3, 8, requires_grad=True)
            norm(x).sum().backward()
            assert x.grad.isfinite().all() and norm.weight.grad is not None
        model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8))
        assert len(fastnorm.patch(model)) == 2
        model(torch.randn(3, 8)).sum().backward()
        try:
            with fastnorm.backend("triton"):
                model(torch.randn(3, 8))
        except fastnorm.KernelUnavailable as error:
            assert "cannot run" in str(error)
        else:
            raise AssertionError("kernels ran without Triton")
        """
    )


def test_a_forced_kernel_says_why_it_cannot_run() -> None:
    """On a machine without a GPU, with Triton installed."""
    x = seeded(3, 8)
    with pytest.raises(fastnorm.KernelUnavailable, match="input is on cpu"):
        fastnorm.layer_norm(x, (8,), backend="triton")
    with fastnorm.backend("triton"), pytest.raises(fastnorm.KernelUnavailable):
        fastnorm.RMSNorm(8)(x)
    with fastnorm.backend("triton"):
        same(fastnorm.RMSNorm(8, backend="torch")(x), nn.RMSNorm(8)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_elsewhere_raises_in_words(kind: str) -> None:
    """B92: meta stands for another device."""
    ours, _ = pair(kind, 8)
    with pytest.raises(RuntimeError, match="input on meta and weight on cpu"):
        ours(torch.empty(3, 8, device="meta"))


def test_threads_may_meet_new_shapes_at_once(route: Route) -> None:
    """B91: the first call of each kind may come from any thread."""
    widths = [17 + i for i in range(8)] * 2
    start = threading.Barrier(8)

    def work(width: int) -> None:
        start.wait(timeout=60)
        with fastnorm.backend("triton" if route.kernels else "auto"):
            case = Case((5,), (width,), "layer", torch.float32, torch.float32, torch.float32)
            inputs = case.build(route.device)
            check(through_fastnorm(inputs), inputs)

    if route.name == "interpreter":
        pytest.skip("the interpreter itself keeps one grid position for all threads")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, widths))


def test_the_backend_is_chosen_per_thread() -> None:
    seen = []

    def other() -> None:
        seen.append(fastnorm.LayerNorm(8)(seeded(3, 8)).isfinite().all())

    with fastnorm.backend("triton"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [torch.tensor(True)]


def test_backends_nest_and_are_put_back_after_errors() -> None:
    x = seeded(3, 8)
    with fastnorm.backend("triton"):
        with fastnorm.backend("torch"):
            fastnorm.rms_norm(x, (8,))
        with pytest.raises(fastnorm.KernelUnavailable):
            fastnorm.rms_norm(x, (8,))
    with pytest.raises(ZeroDivisionError), fastnorm.backend("triton"):
        raise ZeroDivisionError
    fastnorm.rms_norm(x, (8,))


def test_data_parallel_replicas_compute(route: Route) -> None:
    """B91: DataParallel's threads; on a CPU it runs the module itself."""
    ours, torchs = pair("layer", 8)
    ours.to(route.device), torchs.to(route.device)
    x = seeded(4, 8, device=route.device)
    close(nn.DataParallel(ours)(x), torchs(x))


def test_counters_count_passes(route: Route) -> None:
    module, x = fastnorm.LayerNorm(8).to(route.device), seeded(3, 8, device=route.device)
    with route.counted(forward=2, backward=1):
        module(x).sum().backward()
        with torch.no_grad():
            module(x)
    fastnorm.reset_stats()
    stats = fastnorm.stats()
    assert stats.forward == {} == stats.backward
