"""The kernels on a GPU, against fp64: every width, every kind, every schedule."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import fastnorm
from fastnorm import device, routing
from fastnorm.functional import norm
from fastnorm.kernels.launch import WORKSPACE
from fastnorm.operands import backward_rows, forward_rows
from fastnorm.semantics import SEMANTICS
from tests.gpu.conftest import compile_ahead
from tests.oracle import Inputs, check, run

pytestmark = pytest.mark.gpu

HALF, FULL = torch.bfloat16, torch.float32
WIDTHS = [
    *(1, 2, 3, 5, 7, 8, 31, 48, 64, 100, 127, 128, 129, 255, 256, 257, 384, 512, 640, 768),
    *(1000, 1023, 1024, 1025, 1152, 1200, 1536, 2048, 2520, 2560, 3072, 3584, 4096, 5120, 5121),
    *(6144, 7168, 8191, 8192, 8193, 10240, 12288, 14336, 16384, 16385, 18432, 20480, 24576),
    *(32768, 50000, 65536, 65537, 102400, 131072),
]
#: A width for each schedule: tile, row with the weight kept and re-read, split with programs of
#: one warp, of two, and of four.
SCHEDULES = [
    *((768, HALF), (4096, HALF), (12288, HALF), (16384, HALF), (32768, HALF)),
    *((20480, FULL), (16384, FULL), (16385, FULL)),
]


def draw(
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    semantics: str = "layer",
    weight: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs with an offset, random weight and bias."""
    g = torch.Generator("cuda").manual_seed(seed)
    kind = SEMANTICS[semantics]
    parameter = weight or dtype

    def randn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=g).to(dtype)

    x = randn(rows, hidden, dtype=dtype) * 2 + 1
    bias = randn(hidden, dtype=parameter) if semantics in ("layer", "layer_offset") else None
    w = randn(hidden, dtype=parameter)
    y = fastnorm.reference.result_dtype(dtype, parameter, kind)
    return Inputs(x, w, bias, randn(rows, hidden, dtype=y), (hidden,), 1e-5, kind)


def ours(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Through the public function, on kernels: anything else raises."""
    before = fastnorm.stats()
    results = run(
        inputs,
        lambda x, w, b: norm(
            x, inputs.shape, w, b, inputs.eps, semantics=inputs.kind.name, backend="triton"
        ),
    )
    after = fastnorm.stats()
    assert after.forward.get("torch") == before.forward.get("torch")
    assert after.backward.get("torch") == before.backward.get("torch")
    return results


@pytest.fixture(scope="module", autouse=True)
def compiled_grid(pytestconfig: pytest.Config) -> None:
    if hasattr(pytestconfig, "workerinput"):
        return  # a worker of pytest-xdist: they compile beside each other as it is
    problems = []
    for hidden in WIDTHS:
        for dtype in (HALF, FULL):
            for semantics in ("layer", "rms"):
                i = draw(1, hidden, dtype, semantics)
                dy = torch.empty_like(i.dy)
                args = (i.weight, i.bias, hidden, semantics)
                mask = (True, True, i.bias is not None)
                problems.append(forward_rows(i.x, *args, dtype).problem)
                problems.append(backward_rows(dy, i.x, *args, mask).problem)
    compile_ahead(problems)


@pytest.mark.parametrize("semantics", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("hidden", WIDTHS)
def test_every_width_is_as_accurate_as_torch(hidden, dtype, semantics, poisoned):
    inputs = draw(max(5, min(300, 2**21 // hidden)), hidden, dtype, semantics)
    check(ours(inputs), inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 131, 132, 133, 265, 1057, 4097])
@pytest.mark.parametrize("hidden, dtype", [(64, HALF), *SCHEDULES])
def test_every_row_count_is_as_accurate_as_torch(rows, hidden, dtype, poisoned):
    inputs = draw(rows, hidden, dtype)
    check(ours(inputs), inputs)


@pytest.mark.parametrize("semantics", sorted(SEMANTICS))
@pytest.mark.parametrize("weight", [HALF, FULL])
@pytest.mark.parametrize("hidden", [256, 5120, 20480])
def test_every_kind_is_as_accurate_as_its_original(hidden, weight, semantics, poisoned):
    inputs = draw(150, hidden, HALF, semantics, weight)
    check(ours(inputs), inputs)


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
def test_repeated_runs_are_bitwise_equal(hidden, dtype):
    inputs = draw(1500, hidden, dtype)
    first = ours(inputs)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, ours(inputs), strict=True))


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
def test_launches_leave_the_workspace_as_they_found_it(hidden, dtype):
    ours(draw(1000, hidden, dtype))
    for scratch in WORKSPACE._kept.values():
        assert int(scratch.semaphore) & 0x7FFFFFFF == 0
        assert not scratch.slots.any()


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
def test_streams_do_not_meet(hidden, dtype):
    first, second = draw(700, hidden, dtype, seed=1), draw(900, hidden, dtype, seed=2)
    expected = ours(first), ours(second)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    results: list[list] = [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, inputs, kept in zip(streams, (first, second), results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(ours(inputs))
    torch.cuda.synchronize()
    for right, kept in zip(expected, results, strict=True):
        for got in kept:
            assert all(torch.equal(a, b) for a, b in zip(right, got, strict=True))


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
def test_a_graph_replays_beside_eager_work_of_its_stream(hidden, dtype):
    inputs, other = draw(600, hidden, dtype, seed=3), draw(600, hidden, dtype, seed=4)
    expected, expected_other = ours(inputs), ours(other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = ours(inputs)
    elsewhere = torch.cuda.Stream()
    for _ in range(5):
        for t in captured:
            t.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(elsewhere):
            graph.replay()
        with torch.cuda.stream(stream):
            beside = ours(other)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(expected_other, beside, strict=True))


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
def test_strided_rows_give_what_dense_rows_give(hidden, dtype):
    inputs = draw(200, hidden, dtype)
    wide = torch.full((200, 2 * hidden + 16), float("nan"), device="cuda", dtype=dtype)
    x, dy = wide[:, 16 : 16 + hidden], wide[:, 16 + hidden :]
    x.copy_(inputs.x)
    dy.copy_(inputs.dy)
    dense, apart = ours(inputs), ours(dataclasses.replace(inputs, x=x, dy=dy))
    check(apart, inputs)
    if hidden % 16 == 0:
        # Other rows pose another problem where they are strided: another kernel sums in its order.
        assert all(torch.equal(a, b) for a, b in zip(dense, apart, strict=True))


@pytest.mark.parametrize("hidden, dtype", SCHEDULES)
@pytest.mark.parametrize("mask", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_frozen_parts_change_nothing_else(hidden, dtype, mask):
    inputs = draw(300, hidden, dtype)
    whole = ours(inputs)[1:]
    leaves = [
        t.detach().requires_grad_(bool(wanted))
        for t, wanted in zip((inputs.x, inputs.weight, inputs.bias), mask, strict=True)
    ]
    norm(leaves[0], inputs.shape, *leaves[1:], inputs.eps, backend="triton").backward(inputs.dy)
    for leaf, wanted, right in zip(leaves, mask, whole, strict=True):
        if not wanted:
            assert leaf.grad is None
            continue
        error = (leaf.grad.double() - right.double()).norm()
        assert error <= (1e-2 if dtype is HALF else 1e-5) * right.double().norm()


@pytest.mark.parametrize("hidden, dtype", [(768, HALF), (4096, HALF), (12288, HALF)])
def test_two_launches_give_what_one_gives(hidden, dtype, monkeypatch):
    inputs = draw(500, hidden, dtype)
    one = ours(inputs)
    limits = dataclasses.replace(device.limits_for_device(0), cooperative=False)
    monkeypatch.setattr(routing, "limits", lambda index: limits)
    monkeypatch.setattr(routing, "_verified", {})
    two = ours(inputs)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_rows_of_a_million_sum_accurately(poisoned):
    inputs = draw(2**20 + 3, 64, HALF)
    check(ours(inputs), inputs)
