"""The tolerance accepts torch and everything as accurate, and rejects known faults."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from tests.oracle import FP32_EPS, Inputs, Results, check, exact, theirs
from tests.strategies import Case, cases

LAYER = Case((9,), (100,), "layer", torch.float32, torch.float32, torch.float32)
RMS = dataclasses.replace(LAYER, kind="rms", bias_dtype=None)
OFFSET = dataclasses.replace(LAYER, kind_of_values="large offset")


@given(cases())
def test_torch_itself_is_accepted(case: Case) -> None:
    inputs = case.build()
    check(theirs(inputs), inputs)


@given(cases())
def test_fp64_rounded_once_is_accepted(case: Case) -> None:
    inputs = case.build()
    rounded = zip(exact(inputs), theirs(inputs), strict=True)
    check(tuple(None if r is None else r.to(t.dtype) for r, t in rounded), inputs)


def _with(results: Results, **changed: torch.Tensor) -> Results:
    return tuple(changed.get(n, r) for n, r in zip(("y", "dx", "dw", "db"), results, strict=True))


def _variance_without_mask(i: Inputs) -> Results:
    """Padded lanes add mean² to the variance (a row of 100 in a block of 128)."""
    mean = i.x.mean(-1, keepdim=True)
    variance = i.x.var(-1, correction=0, keepdim=True) + 28 / 100 * mean.square()
    return _with(theirs(i), y=(i.x - mean) * (variance + i.eps).rsqrt() * i.weight + i.bias)


def _variance_by_subtraction(i: Inputs) -> Results:
    """E[x²] - E[x]²."""
    mean = i.x.mean(-1, keepdim=True)
    variance = (i.x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return _with(theirs(i), y=(i.x - mean) * (variance + i.eps).rsqrt() * i.weight + i.bias)


def _unbiased_variance(i: Inputs) -> Results:
    centred = i.x - i.x.mean(-1, keepdim=True)
    return _with(
        theirs(i), y=centred * (i.x.var(-1, keepdim=True) + i.eps).rsqrt() * i.weight + i.bias
    )


def _eps_outside_the_root(i: Inputs) -> Results:
    return _with(theirs(i), y=i.x / (i.x.square().mean(-1, keepdim=True).sqrt() + i.eps) * i.weight)


def _half_statistics(i: Inputs) -> Results:
    rstd = i.x.bfloat16().square().mean(-1, keepdim=True).rsqrt().float()
    return _with(theirs(i), y=i.x * rstd * i.weight)


def _dx(i: Inputs, weight_power: int = 1, with_c2: bool = True) -> Results:
    mean = i.x.mean(-1, keepdim=True)
    rstd = (i.x.var(-1, correction=0, keepdim=True) + i.eps).rsqrt()
    x_hat, wdy = (i.x - mean) * rstd, i.dy * i.weight
    c1 = (x_hat * i.dy * i.weight**weight_power).mean(-1, keepdim=True)
    c2 = wdy.mean(-1, keepdim=True) if with_c2 else 0
    return _with(theirs(i), dx=(wdy - x_hat * c1 - c2) * rstd)


def _weight_twice_in_c1(i: Inputs) -> Results:
    return _dx(i, weight_power=2)


def _c2_forgotten(i: Inputs) -> Results:
    return _dx(i, with_c2=False)


def _last_row_missing_from_sums(i: Inputs) -> Results:
    right = theirs(i)
    return _with(right, db=i.dy[:-1].sum(0))


def _sums_in_bf16(i: Inputs) -> Results:
    return _with(theirs(i), db=i.dy.bfloat16().sum(0).float())


def _one_element_unwritten(i: Inputs) -> Results:
    y, *rest = (None if r is None else r.clone() for r in theirs(i))
    y[-1, -1] = torch.nan
    return y, *rest


def _rows_swapped(i: Inputs) -> Results:
    y, dx, dw, db = theirs(i)
    return y, dx.roll(1, 0), dw, db


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (OFFSET, _variance_without_mask),
        (OFFSET, _variance_by_subtraction),
        (LAYER, _unbiased_variance),
        (RMS, _eps_outside_the_root),
        (RMS, _half_statistics),
        (LAYER, _weight_twice_in_c1),
        (LAYER, _c2_forgotten),
        (LAYER, _last_row_missing_from_sums),
        (LAYER, _sums_in_bf16),
        (LAYER, _one_element_unwritten),
        (LAYER, _rows_swapped),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else v.kind,
)
def test_faults_are_rejected(case: Case, fault) -> None:
    inputs = case.build()
    with pytest.raises(AssertionError, match="of what is allowed"):
        check(fault(inputs), inputs)


def test_the_faultless_form_of_the_same_formulas_is_accepted() -> None:
    inputs = LAYER.build()
    check(_dx(inputs), inputs)


def test_a_hidden_nan_is_rejected() -> None:
    inputs = dataclasses.replace(LAYER, kind_of_values="one nan").build()
    y, *rest = theirs(inputs)
    with pytest.raises(AssertionError, match="y at group 4"):
        check((y.nan_to_num(0.0), *rest), inputs)


def test_inf_is_right_beyond_the_output_dtype_and_wrong_within() -> None:
    """A constant fp16 row at eps=1e-12 has gradients of a million, which fp16 does not hold."""
    case = dataclasses.replace(
        LAYER, x_dtype=torch.half, weight_dtype=torch.half, bias_dtype=torch.half
    )
    inputs = dataclasses.replace(case, kind_of_values="constant rows", eps=1e-12).build()
    y, dx, dw, db = (None if r is None else r.half() for r in exact(inputs))
    assert dx.isinf().any() and dx.isfinite().any()
    check((y, dx, dw, db), inputs)
    inputs = case.build()
    y, dx, dw, db = theirs(inputs)
    dx = dx.clone()
    dx[3, 3] = torch.inf
    with pytest.raises(AssertionError, match="dx at group 3"):
        check((y, dx, dw, db), inputs)


def test_wrong_dtype_and_shape_are_rejected() -> None:
    inputs = LAYER.build()
    y, *rest = theirs(inputs)
    with pytest.raises(AssertionError, match="float64, expected"):
        check((y.double(), *rest), inputs)
    with pytest.raises(AssertionError, match="shape"):
        check((y[:, :50], *rest), inputs)


@pytest.mark.parametrize("shift", [3, 12])
def test_an_error_of_a_few_ulp_in_one_row_shows_beside_rows_of_any_size(shift: int) -> None:
    """Rows are judged one by one: a large row must not hide a small one's error."""
    inputs = RMS.build()
    inputs = dataclasses.replace(inputs, dy=inputs.dy * (2.0**shift) ** torch.arange(9.0)[:, None])
    y, dx, dw, db = theirs(inputs)
    dx = dx.clone()
    dx[0] *= 1 + 1000 * FP32_EPS
    with pytest.raises(AssertionError, match="dx at group 0"):
        check((y, dx, dw, db), inputs)
