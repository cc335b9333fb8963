"""Decisions are total, within budget and explained, for any problem on any GPU."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from fastnorm.budget import footprint, resident_programs
from fastnorm.device import DeviceLimits, known_targets, limits_for_target
from fastnorm.operands import row_stride
from fastnorm.plan import Rejection, candidates, decide, over_budget, unsuitable
from fastnorm.problem import NormProblem, stride_unit
from tests.strategies import devices, problems

H200 = limits_for_target("sm_90")


@settings(max_examples=300)
@given(problems(), devices())
def test_every_problem_has_a_plan_or_reasons(problem: NormProblem, device: DeviceLimits) -> None:
    decision = decide(problem, device)
    if decision.plan is None:
        assert decision.reasons and all(decision.reasons)
        return
    assert not decision.reasons
    assert decision.plan.problem == problem
    assert over_budget(decision.plan, device) is None
    assert all(r.value != r.limit for r in decision.rejections)


@settings(max_examples=300)
@given(problems(), devices())
def test_accepted_plans_fit_the_device(problem: NormProblem, device: DeviceLimits) -> None:
    plan = decide(problem, device).plan
    if plan is None:
        return
    tiling, use = plan.tiling, plan.footprint
    assert tiling.chunk & (tiling.chunk - 1) == 0
    assert tiling.chunk * tiling.chunks * tiling.split >= problem.hidden
    assert problem.hidden > tiling.chunk * (tiling.chunks - 1)
    assert use == footprint(problem, tiling)
    assert use.shared_bytes <= device.shared_bytes_per_program
    assert plan.max_registers <= device.max_registers_per_thread
    registers = min(use.registers, plan.max_registers)
    fit = resident_programs(device, tiling.warps, registers, use.shared_bytes)
    assert fit >= max(1, plan.programs_per_sm)


@settings(max_examples=300)
@given(problems(), devices(), st.integers(1, 2**40))
def test_grids_cover_the_rows_and_never_exceed_what_is_resident(
    problem: NormProblem, device: DeviceLimits, rows: int
) -> None:
    """B02, B11, B12: idle programs are not launched, and every row has its programs."""
    plan = decide(problem, device).plan
    if plan is None:
        return
    tiling = plan.tiling
    programs, blocks = plan.grid(rows, device.sm_count), -(-rows // tiling.block_m)
    assert tiling.split <= programs <= blocks * tiling.split
    assert programs % tiling.split == 0
    if plan.programs_per_sm:
        assert programs <= device.sm_count * plan.programs_per_sm
    else:
        assert programs == blocks and not plan.cooperative


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 7, 132])
@pytest.mark.parametrize("hidden", [1024, 16384, 20480, 32768, 65536, 131072])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_that_are_split_have_programs_on_any_gpu(
    multiprocessors: int, hidden: int, norm: str, direction: str
) -> None:
    """A row split over more programs than a small GPU holds would never be computed."""
    problem = NormProblem(direction, norm, hidden, "bf16", "bf16", "bf16", "bf16")
    device = dataclasses.replace(H200, sm_count=multiprocessors)
    plan = decide(problem, device).plan
    assert plan is None or plan.grid(5, multiprocessors) >= plan.tiling.split


@settings(max_examples=100)
@given(problems(), devices())
def test_refused_candidates_are_passed_over_until_none_is_left(
    problem: NormProblem, device: DeviceLimits
) -> None:
    assume(not unsuitable(problem, device))
    refused: tuple[Rejection, ...] = ()
    for _ in range(1 + len(list(candidates(problem, device)))):
        decision = decide(problem, device, refused)
        if decision.plan is None:
            break
        name = decision.plan.describe()
        assert name not in {r.candidate for r in refused}
        refused = (*refused, Rejection(name, "compiled spilled words", 1, 0))
    assert decision.plan is None and decision.reasons
    assert set(refused) <= set(decision.rejections)


@given(problems(), devices())
def test_no_plan_without_support(problem: NormProblem, device: DeviceLimits) -> None:
    device = dataclasses.replace(device, unsupported="no kernels on this machine")
    decision = decide(problem, device)
    assert decision.plan is None and "no kernels on this machine" in decision.reasons


@pytest.mark.parametrize("target", known_targets())
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_width_of_the_issue_has_a_backward_kernel(target: str, dtype: str) -> None:
    for hidden in (1, 7, 64, 100, 768, 1024, 1025, 4096, 8192, 12288, 16384):
        problem = NormProblem("backward", "layer", hidden, dtype, dtype, dtype, dtype)
        decision = decide(problem, limits_for_target(target))
        assert decision.plan is not None, (hidden, decision.reasons, decision.rejections)


@given(st.integers(1, 2**20), st.integers(2, 1000))
def test_the_plan_does_not_depend_on_the_batch(rows: int, other: int) -> None:
    """One plan for all batch sizes: `NormProblem` has no rows, only the grid does."""
    problem = NormProblem("backward", "rms", 1024, "bf16", "bf16", "bf16", needs_db=False)
    plan = decide(problem, H200).plan
    assert plan is not None and plan is decide(problem._replace(), H200).plan
    assert plan.grid(rows, 132) <= plan.grid(rows + other, 132)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_stride_unit_is_the_largest_common_power_of_two_up_to_16(strides: list[int]) -> None:
    unit = stride_unit(*strides)
    assert unit in (1, 2, 4, 8, 16)
    assert all(stride % unit == 0 for stride in strides)
    assert unit == 16 or any(stride % (2 * unit) for stride in strides)


@given(st.data())
def test_row_stride_addresses_every_element(data: st.DataObject) -> None:
    """B16 to B20: where a single row stride is found, it finds the elements of the tensor."""
    import torch

    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    steps = [data.draw(st.sampled_from([1, 1, 2])) for _ in sizes]
    storage = torch.arange(10_000)
    x = storage[: torch.Size([n * s for n, s in zip(sizes, steps, strict=True)]).numel()]
    x = x.view([n * s for n, s in zip(sizes, steps, strict=True)])
    x = x[tuple(slice(None, None, s) for s in steps)].permute(order)
    last = data.draw(st.integers(1, x.dim()))
    hidden = torch.Size(x.shape[x.dim() - last :]).numel()
    stride = row_stride(tuple(x.shape), x.stride(), hidden)
    if stride is None:
        assert not x.is_contiguous()
        return
    rows = x.numel() // hidden
    flat = storage.as_strided((rows, hidden), (stride, 1))
    assert torch.equal(flat, x.reshape(rows, hidden))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_wide_half_rows_have_a_plan_for_an_fp32_gradient(target, norm):
    """As autocast poses them; some widths had none."""
    bias = "fp32" if norm == "layer" else None
    for hidden in range(16392, 131073, 2000):
        unit = stride_unit(hidden)
        asked = (True, True, bias is not None)
        dtypes = ("bf16", "fp32", "fp32", bias)
        problem = NormProblem("backward", norm, hidden, *dtypes, *asked, unit)
        assert decide(problem, limits_for_target(target)).plan is not None, hidden
