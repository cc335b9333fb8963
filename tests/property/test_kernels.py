"""Kernels against fp64: every kind, dtype, layout and value, forward and backward.

These run in Triton's interpreter (`pytest --route interpreter`) and on a GPU (`--route cuda`).
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, example, given

from fastnorm import functional, ops, routing
from fastnorm.budget import Tiling
from fastnorm.plan import Plan, decide
from fastnorm.problem import NormProblem
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route, forget_interpreted, multiprocessors
from tests.oracle import Inputs, Results, check, run
from tests.strategies import HALF_AND_SINGLE, Case, cases

pytestmark = pytest.mark.kernels

SINGLE = Case((9,), (100,), "layer", torch.float32, torch.float32, torch.float32)


def through_fastnorm(inputs: Inputs) -> Results:
    """y, dx, dw, db of `functional.norm`."""
    return run(
        inputs,
        lambda x, w, b: functional.norm(
            x, inputs.shape, w, b, inputs.eps, semantics=inputs.kind.name
        ),
    )


@given(case=cases(), count=st.sampled_from([1, 2, 4, 132]))
def test_kernels_are_as_accurate_as_torch(case: Case, count: int, route: Route) -> None:
    inputs = case.build(route.device)
    launches = int(inputs.x.numel() > 0)
    with multiprocessors(count):
        if launches:
            with route.counted():
                check(through_fastnorm(inputs), inputs)
        else:
            check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize("x_dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("weight_dtype", [*HALF_AND_SINGLE, None], ids=str)
def test_every_kind_takes_every_pair_of_dtypes(
    kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype | None, route: Route
) -> None:
    bias_dtype = x_dtype if SEMANTICS[kind].centered and kind != "layer_cohere" else None
    case = Case((5,), (33,), kind, x_dtype, weight_dtype, bias_dtype, seed=3)
    inputs = case.build(route.device)
    with route.counted():
        check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("hidden", [1025, 1536, 3072, 4097, 8191, 12288, 16384])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_wide_rows(hidden: int, kind: str, route: Route) -> None:
    dtype = torch.bfloat16 if hidden % 2 else torch.float32
    bias_dtype = dtype if kind == "layer" else None
    inputs = Case((2,), (hidden,), kind, dtype, dtype, bias_dtype).build(route.device)
    with route.counted():
        check(through_fastnorm(inputs), inputs)


@st.composite
def tilings(draw: st.DrawFn, hidden: int) -> Tiling:
    """Any way to hold a row of this width, sensible or not."""
    chunk = draw(st.sampled_from([c for c in (1, 4, 16, 64, 128) if -(-hidden // c) <= 9]))
    return Tiling(
        block_m=draw(st.sampled_from([1, 2, 4, 32])),
        chunk=chunk,
        chunks=-(-hidden // chunk),
        warps=1,
        stages=draw(st.integers(1, 3)),
        keep_row=draw(st.booleans()),
        keep_weight=draw(st.booleans()),
    )


@pytest.mark.parametrize("apart", [0.0, 1.0, 3e4])
def test_statistics_of_a_streamed_row_do_not_hang_on_its_first_chunk(
    apart: float, route: Route
) -> None:
    """Its mean is the pivot of the sums: the worst row has all its variance between that chunk and
    the rest."""
    x = torch.randn(3, 24576, generator=torch.Generator().manual_seed(0))
    x[:, :8192] += apart
    x[2] = 7.0
    x = x.to(route.device, torch.bfloat16)
    with route.counted(1, 0):
        _, stats = ops.forward(x, None, None, 1, 1e-5, "layer", torch.bfloat16)
    assert list(routing.stats().forward) == ["triton:looped"]
    wide = x.double()
    variance = wide.var(-1, correction=0)
    torch.testing.assert_close(stats[0].double(), (variance + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(stats[1].double(), wide.mean(-1), rtol=1e-6, atol=1e-6)


@given(data=st.data(), case=cases(widths=(1, 3, 5, 16, 33, 64, 100, 129)))
def test_every_tiling_computes_the_same(data: st.DataObject, case: Case, route: Route) -> None:
    """Also tilings that the plan would not choose here: they are chosen at widths that the
    interpreter is too slow for."""
    if route.name != "interpreter":
        pytest.skip("a GPU compiles one kernel per example; there the plan's own choice is tested")
    from fastnorm.kernels import interpret

    inputs = case.build()
    assume(inputs.x.numel())
    tiling = data.draw(tilings(inputs.hidden))
    per_sm = data.draw(st.integers(1, 3))

    def forced(problem: NormProblem, index: int) -> routing.Verified:
        limits = routing.limits(index)
        decision = decide(problem, limits)
        assert decision.plan is not None
        programs = per_sm if problem.direction == "backward" else 0
        plan = dataclasses.replace(decision.plan, tiling=tiling, programs_per_sm=programs)
        interpreted = (
            interpret.InterpretedBackward
            if problem.direction == "backward"
            else interpret.InterpretedForward
        )
        return routing.Verified(decision, interpreted(plan, limits.sm_count))

    forget_interpreted()
    with mock.patch.object(routing, "verified", forced), route.counted():
        check(through_fastnorm(inputs), inputs)


@given(
    case=cases(kinds=("layer", "rms"), rows=(1, 3, 17), widths=(2, 24, 33)),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example(case=SINGLE, wanted=(False, True, False))
@example(case=SINGLE, wanted=(False, False, True))
@example(case=SINGLE, wanted=(True, False, False))
def test_gradients_nobody_asks_for_are_none_and_change_no_other(
    case: Case, wanted: tuple[bool, bool, bool], route: Route
) -> None:
    """Frozen weight, frozen bias, input without gradient: B61, B64."""
    inputs = case.build(route.device)
    leaves = [None if t is None else t.detach() for t in (inputs.x, inputs.weight, inputs.bias)]
    for leaf, flag in zip(leaves, wanted, strict=True):
        if leaf is not None:
            leaf.requires_grad_(flag)
    asked = [t for t in leaves if t is not None and t.requires_grad]
    assume(asked)
    everything = through_fastnorm(inputs)
    with route.counted():
        y = functional.norm(leaves[0], inputs.shape, *leaves[1:], inputs.eps, semantics=case.kind)
        grads = iter(torch.autograd.grad(y, asked, inputs.dy))
    partial = [
        whole if t is None or not t.requires_grad else next(grads)
        for t, whole in zip(leaves, everything[1:], strict=True)
    ]
    check((y.detach(), *partial), inputs)


@given(case=cases(kinds=("layer", "rms"), rows=(17, 33)), seed=st.integers(0, 99))
def test_rows_do_not_depend_on_their_neighbours(case: Case, seed: int, route: Route) -> None:
    """A permutation of the rows permutes y and dx bit for bit; NaN and inf stay in their row."""
    inputs = dataclasses.replace(case, layouts=("contiguous",) * 3, lead=(17,)).build(route.device)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(seed)).to(route.device)
    permuted = dataclasses.replace(inputs, x=inputs.x[order], dy=inputs.dy[order])
    y, dx, *_ = through_fastnorm(inputs)
    permuted_y, permuted_dx, *_ = through_fastnorm(permuted)
    torch.testing.assert_close(permuted_y, y[order], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(permuted_dx, dx[order], rtol=0, atol=0, equal_nan=True)


@given(case=cases())
def test_runs_are_bitwise_repeatable_and_touch_nothing(case: Case, route: Route) -> None:
    """B14, B56, B59: two runs agree bit for bit; x, dy and the parameters stay as they were."""
    inputs = case.build(route.device)
    given_tensors = [inputs.x, inputs.weight, inputs.bias, inputs.dy]
    before = [None if t is None else t.clone() for t in given_tensors]
    first, second = through_fastnorm(inputs), through_fastnorm(inputs)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    for a, b in (*zip(first, second, strict=True), *zip(before, given_tensors, strict=True)):
        if a is not None:
            torch.testing.assert_close(a, b, **same)


@given(case=cases(kinds_of_values=("normal",), rows=(3, 9)))
def test_strided_equals_contiguous(case: Case, route: Route) -> None:
    """B16 to B20: a layout changes no bit of any result."""
    inputs = case.build(route.device)
    dense = Inputs(
        inputs.x.contiguous(),
        None if inputs.weight is None else inputs.weight.contiguous(),
        inputs.bias,
        inputs.dy.contiguous(),
        inputs.shape,
        inputs.eps,
        inputs.kind,
    )
    for ours, expected in zip(through_fastnorm(inputs), through_fastnorm(dense), strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_what_a_kernel_does_not_write_is_nan(route: Route) -> None:
    """The poison works: a plan that forgets rows is seen."""
    inputs = SINGLE.build(route.device)
    if route.name != "interpreter":
        pytest.skip("replaces a plan's grid, which the interpreter reads at each launch")
    with mock.patch.object(Plan, "grid", lambda self, rows, sm_count: 1):
        y = through_fastnorm(inputs)[0]
    covered = ops.backward and y.isfinite().all(1)
    assert covered.any()
    forget_interpreted()
