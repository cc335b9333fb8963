"""What launchers hand to a compiled kernel, without a GPU: as many values as it takes, and scratch
only where programs meet or partials are summed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from fastnorm.device import limits_for_target
from fastnorm.operands import backward_rows, forward_rows
from fastnorm.plan import decide

launch = pytest.importorskip("fastnorm.kernels.launch")

H100 = limits_for_target("sm_90")
NO_BARRIER = replace(H100, cooperative=False)


class Recorder:
    """Stands for a compiled kernel."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, programs, stream, *args):
        self.calls.append((programs, args))


@pytest.fixture
def scratch(monkeypatch):
    """What scratch was asked for: (floats, slots)."""
    asked = []

    def make(device, floats, slots):
        asked.append((floats, slots))
        return launch.Scratch(*(torch.empty(0) for _ in range(3)), 16, 32, 48)

    monkeypatch.setattr(launch.Scratch, "make", make)
    monkeypatch.setattr(launch, "WORKSPACE", launch.Workspace())
    for name, value in {
        "_cuda_getCurrentRawStream": lambda index: 7,
        "_cuda_getDevice": lambda: 0,
        "_cuda_isCurrentStreamCapturing": lambda: True,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    return asked


def tensors(rows, hidden):
    x, dy = torch.randn(rows, hidden), torch.randn(rows, hidden)
    return x, dy, torch.randn(hidden), torch.randn(hidden)


def parameters_of(plan):
    """Run-time parameters of a plan's kernel, in order."""
    from fastnorm.kernels.compile import _KERNELS, constants

    kernel = _KERNELS[plan.problem.direction, plan.tiling.split > 1]
    names = getattr(kernel, "arg_names", None) or list(kernel.signature.parameters)
    return [name for name in names if name not in constants(plan)]


@pytest.mark.parametrize("limits", [H100, NO_BARRIER])
@pytest.mark.parametrize("hidden", [64, 4096, 20480])
@pytest.mark.parametrize("mask", [(1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 1)])
def test_backward_launches_fit_their_kernel(mask, hidden, limits, scratch):
    x, dy, w, b = tensors(6, hidden)
    mask = tuple(map(bool, mask))
    rows = backward_rows(dy, x, w, b, hidden, "layer", mask)
    plan = decide(rows.problem, limits).plan
    if plan is None:
        pytest.skip("torch's without a grid barrier: too wide for one program")
    kernel, finalize = Recorder(), Recorder()
    summed = any(mask[1:]) and not plan.cooperative
    backward = launch.BackwardKernel(plan, 132, 0, kernel, finalize if summed else None)
    grads = [torch.empty_like(t) if m else None for t, m in zip((x, w, b), mask, strict=True)]
    backward(rows, torch.empty(2, 6), *grads)
    ((programs, args),) = kernel.calls
    named = dict(zip(parameters_of(plan), args, strict=True))
    assert named["M"] == 6 and programs == plan.grid(6, 132)
    for name, grad in zip(("dx_ptr", "dw_ptr", "db_ptr"), grads, strict=True):
        assert grad is None or named[name] == grad.data_ptr()
    floats = hidden * plan.partial_rows(programs)
    apart = named["db_partial_ptr"] - named["dw_partial_ptr"]
    assert apart == (4 * floats if mask[1] else 0)
    meets = any(mask[1:]) or plan.tiling.split > 1
    assert scratch == ([(floats * sum(mask[1:]), scratch[0][1])] if meets else [])
    assert len(finalize.calls) == int(summed)


@pytest.mark.parametrize("hidden", [64, 4096, 65536])
@pytest.mark.parametrize("semantics", ["layer", "rms"])
def test_forward_launches_fit_their_kernel(semantics, hidden, scratch):
    x, _, w, b = tensors(6, hidden)
    bias = b if semantics == "layer" else None
    rows = forward_rows(x, w, bias, hidden, semantics, torch.float32)
    plan = decide(rows.problem, H100).plan
    kernel = Recorder()
    y, stats = torch.empty_like(x), torch.empty(2, 6)
    launch.ForwardKernel(plan, 132, 0, kernel)(rows, 1e-5, y, stats)
    ((programs, args),) = kernel.calls
    named = dict(zip(parameters_of(plan), args, strict=True))
    assert named["y_ptr"] == y.data_ptr() and named["stats_ptr"] == stats.data_ptr()
    assert (named["M"], named["eps"], programs) == (6, 1e-5, plan.grid(6, 132))
    assert bool(scratch) == (plan.tiling.split > 1)


def test_kept_scratch_is_made_by_a_thread_of_its_own_on_the_launchs_stream(monkeypatch):
    """Inductor's CUDA graph trees send the calling thread's allocations to their pool, and give out
    again what stays there."""
    current = threading.local()

    def use(stream):
        current.stream = stream

    def make(device, floats, slots):
        made.append((threading.get_ident(), current.stream, floats, slots))
        return launch.Scratch(torch.empty(floats), torch.empty(1), torch.empty(slots), 16, 32, 48)

    made = []
    monkeypatch.setattr(launch.Scratch, "make", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the launch's")
    monkeypatch.setattr(torch.cuda, "set_stream", use)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    workspace, cpu = launch.Workspace(), torch.device("cpu")
    kept = workspace.get(cpu, 0, 7, 100, 0)
    assert workspace.get(cpu, 0, 7, 50, 0) is kept
    assert workspace.get(cpu, 0, 7, 50, 8) is not kept
    assert [call[1:] for call in made] == [("the launch's", 100, 0), ("the launch's", 100, 8)]
    assert threading.get_ident() not in [call[0] for call in made]
