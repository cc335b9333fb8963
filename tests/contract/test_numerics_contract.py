"""Numbers at the edges: section N of the public reports."""

from __future__ import annotations

import math

import pytest
import torch

import fastnorm
from fastnorm import functional
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route
from tests.contract.norms import KINDS, formula, pair, same, seeded
from tests.oracle import check, theirs
from tests.property.test_kernels import through_fastnorm
from tests.strategies import HALF_AND_SINGLE, Case

FP32 = torch.float32


def _y64(kind: str, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return formula(kind, x.double(), None, None, eps)


def _norm(kind: str, x: torch.Tensor, weight=None, bias=None, eps: float = 1e-5) -> torch.Tensor:
    return functional.norm(x, (x.shape[-1],), weight, bias, eps, semantics=kind)


@pytest.mark.parametrize("hidden", [1, 3, 100, 257, 1536])
@pytest.mark.parametrize("offset", [5.0, 100.0])
def test_padding_adds_nothing_to_the_variance(hidden: int, offset: float, route: Route) -> None:
    """B33, B34: widths that are no power of two, far from zero."""
    x = (seeded(3, hidden) + offset).to(route.device)
    error = (_norm("layer", x).double() - _y64("layer", x)).abs().max()
    assert error < 2e-4


def test_a_large_mean_does_not_cancel(route: Route) -> None:
    """B35."""
    x = (seeded(64, 4) + 2000).to(route.device)
    assert (_norm("layer", x).double() - _y64("layer", x)).abs().max() < 2e-3


def test_a_small_variance_around_a_large_mean(route: Route) -> None:
    """B36, in a wide row."""
    hidden = 32768 if route.thorough else 4096
    x = (0.01 * seeded(2, hidden) + 100).to(route.device)
    assert (_norm("layer", x).double() - _y64("layer", x)).abs().max() < 2e-3


@pytest.mark.parametrize("first", [40000.0, 80000.0])
def test_consecutive_large_integers(first: float, route: Route) -> None:
    """B37."""
    x = torch.arange(first, first + 4, device=route.device)[None]
    y = _norm("layer", x)
    assert y.isfinite().all() and (y.double() - _y64("layer", x)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_and_tiny_eps(kind: str, route: Route) -> None:
    """B38, B44: eps is not rounded to half; with eps=0 a zero row is NaN and its neighbours are
    not."""
    zeros = torch.zeros(2, 10, dtype=torch.half, device=route.device)
    same(_norm(kind, zeros, eps=1e-12), zeros)
    for dtype, eps in ((torch.half, 1e-6), (FP32, 1e-12)):
        # 1e6, the gradient of RMSNorm at eps=1e-12, is more than fp16 holds.
        leaf = torch.zeros(2, 10, dtype=dtype, device=route.device, requires_grad=True)
        _norm(kind, leaf, eps=eps).sum().backward()
        assert leaf.grad.isfinite().all()
    x = seeded(3, 10, device=route.device)
    clean = _norm(kind, x, eps=0.0)
    x[1] = 0
    dirty = _norm(kind, x, eps=0.0)
    assert dirty[1].isnan().all()
    same(dirty[::2], clean[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_negative_eps_is_torchs_nan_not_a_number(kind: str, route: Route) -> None:
    """B44: accepted as torch accepts it; the root of a negative number stays NaN."""
    torchs = torch.nn.functional.layer_norm if kind == "layer" else torch.nn.functional.rms_norm
    ours = fastnorm.layer_norm if kind == "layer" else fastnorm.rms_norm
    x = torch.full((2, 8), 0.01, device=route.device)
    assert torchs(x, (8,), eps=-1.0).isnan().all() and ours(x, (8,), eps=-1.0).isnan().all()


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE[1:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_half_results_are_rounded_once(kind: str, dtype: torch.dtype, route: Route) -> None:
    """B39, B41, B51: fp32 inside, then one rounding, with a half weight."""
    x, w = seeded(8, 96, dtype=dtype), seeded(96, seed=1, dtype=dtype)
    once = formula(kind, x.double(), w.double()).to(dtype)
    y = _norm(kind, x.to(route.device), w.to(route.device)).cpu()
    ulp = torch.finfo(dtype).eps * once.double().abs().clamp_min(1e-3)
    assert ((y.double() - once.double()).abs() <= ulp).all()
    # Rounding x_hat before the weight, too, moves a quarter of them.
    assert (y != once).double().mean() < 0.01
    small = (0.058 * seeded(4, 32)).to(dtype)
    y = fastnorm.rms_norm(small.to(route.device), (32,)).cpu()
    error = (y.double() - _y64("rms", small, torch.finfo(FP32).eps)).abs()
    assert (error <= torch.finfo(dtype).eps * y.double().abs()).all()


@pytest.mark.parametrize("value", [6e4, 300.0])
def test_squares_that_overflow_fp16(value: float, route: Route) -> None:
    """B40."""
    x = torch.full((2, 64), value, dtype=torch.half, device=route.device)
    same(fastnorm.rms_norm(x, (64,)), torch.ones_like(x))


def test_one_large_value_among_small_ones(route: Route) -> None:
    """B43: eps is not rescaled with the row."""
    x = torch.full((2, 64), 0.01)
    x[0, 7], x[1] = 1e4, 0
    inputs = Case((2,), (64,), "rms", FP32, FP32, None).build()
    inputs = type(inputs)(
        x.to(route.device),
        inputs.weight.to(route.device),
        None,
        inputs.dy.to(route.device),
        (64,),
        1e-5,
        inputs.kind,
    )
    check(through_fastnorm(inputs), inputs)


def test_eps_is_inside_the_root(route: Route) -> None:
    """B45: 1e-4 / sqrt(1e-8 + 1e-5), not 1e-4 / (1e-4 + 1e-5)."""
    y = fastnorm.rms_norm(torch.full((1, 8), 1e-4, device=route.device), (8,), eps=1e-5)
    torch.testing.assert_close(y, torch.full_like(y, 1e-4 / math.sqrt(1e-8 + 1e-5)))


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_shift_invariance(kind: str, route: Route) -> None:
    """B46, and LayerNorm's own: y(10x) = y(x), y(x + c) = y(x)."""
    x = 100 * seeded(5, 48, device=route.device)
    y = _norm(kind, x)
    torch.testing.assert_close(_norm(kind, 10 * x), y, rtol=1e-5, atol=1e-5)
    if kind == "layer":
        torch.testing.assert_close(_norm(kind, x + 64), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 8.5e37])
def test_what_is_not_finite_stays_in_its_row(kind: str, value: float, route: Route) -> None:
    """B47, B48: one bad row; every other row keeps its bits, the bad one is as torch's."""
    ours, torchs = pair(kind, 40)
    ours.to(route.device), torchs.to(route.device)
    x, dy = (seeded(4, 40, seed=s, device=route.device) for s in (0, 1))

    def results(module, x):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, module.weight], dy)]

    clean = results(ours, x)
    if value == 8.5e37:
        x[1] = value * (1 + 1e-6 * x[1])
    else:
        x[1, 3] = value
    y, dx, dw = results(ours, x)
    torch_y, torch_dx, torch_dw = results(torchs, x)
    others = torch.tensor([0, 2, 3], device=route.device)
    same(y[others], clean[0][others])
    same(dx[others], clean[1][others])
    if value != 8.5e37:
        assert (y[1].isfinite() == torch_y[1].isfinite()).all()
        assert (dw.isfinite() == torch_dw.isfinite()).all()


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_one_feature(dtype: torch.dtype, route: Route) -> None:
    """B49: x is its own mean, so y = bias and no gradient but db is left."""
    leaves = [
        torch.full(s, v, dtype=dtype, device=route.device, requires_grad=True)
        for s, v in (((5, 1), 1e4), ((1,), 2.0), ((1,), 3.0))
    ]
    y = fastnorm.layer_norm(leaves[0], (1,), *leaves[1:])
    same(y.detach(), torch.full_like(y, 3))
    dx, dw, db = torch.autograd.grad(y.sum(), leaves)
    same([dx, dw], [torch.zeros_like(dx), torch.zeros_like(dw)])
    same(db, torch.full_like(db, 5))
    x = torch.tensor([[-4.0], [9.0]], dtype=dtype, device=route.device)
    w = torch.tensor([2.0], dtype=dtype, device=route.device)
    torch.testing.assert_close(fastnorm.rms_norm(x, (1,), w), x.sign() * w)


def test_a_reciprocal_after_the_norm(route: Route) -> None:
    """B50: the norm itself is right to 2 ulp of its largest value, whatever follows."""
    x = seeded(16, 64, device=route.device)
    y, right = _norm("layer", x), _y64("layer", x)
    assert (y.double() - right).abs().max() <= 2 * torch.finfo(FP32).eps * right.abs().max()


def test_outliers_do_not_move_the_statistics(route: Route) -> None:
    """B52: five outliers of 1e3 in a bf16 row of 5,120: rstd right to 1e-5."""
    x = seeded(2, 5120, dtype=torch.bfloat16)
    x[:, torch.tensor([3, 700, 2049, 4000, 5119])] = 1e3
    y = functional.norm(
        x.to(route.device), (5120,), torch.ones(5120, device=route.device), semantics="rms_rounded"
    )
    stats = torch.ops.fastnorm.norm_forward(
        x.to(route.device), None, None, 1, 1e-5, "rms", torch.bfloat16
    )[1]
    rstd = torch.rsqrt(x.double().square().mean(-1) + 1e-5)
    torch.testing.assert_close(stats[0].flatten().double().cpu(), rstd, rtol=1e-5, atol=0)
    assert y.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_weights_and_subnormals(kind: str, route: Route) -> None:
    x = seeded(4, 40, device=route.device)
    w = seeded(40, seed=1, device=route.device)
    w[::3] = 0
    y = _norm(kind, x, w)
    assert (y[:, ::3] == 0).all() and (y[:, 1::3] != 0).all()
    assert _norm(kind, x * 1e-40, w).isfinite().all()
    assert _norm(kind, x * 1e-40, w, eps=1e-38).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_batch(kind: str, route: Route) -> None:
    """B14: a row has the same bits alone and in any batch; weight gradients of chunks agree to
    rounding, not in bits."""
    ours, _ = pair(kind, 40)
    ours.to(route.device)
    x, dy = (seeded(37, 40, seed=s, device=route.device) for s in (0, 1))

    def results(rows: slice):
        leaf = x[rows].clone().requires_grad_()
        y = ours(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *ours.parameters()], dy[rows])]

    y, dx, *sums = results(slice(None))
    chunks = [results(slice(start, start + 10)) for start in range(0, 37, 10)]
    same(torch.cat([c[0] for c in chunks]), y)
    same(torch.cat([c[1] for c in chunks]), dx)
    for i, whole in enumerate(sums, 2):
        torch.testing.assert_close(sum(c[i] for c in chunks), whole, rtol=1e-4, atol=1e-4)
    again = results(slice(None))
    same(again, [y, dx, *sums])


def test_dw_is_additive_over_row_splits(route: Route) -> None:
    inputs = Case((33,), (24,), "layer", FP32, FP32, FP32).build(route.device)
    check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_over_many_rows(kind: str, route: Route) -> None:
    """Accuracy of dw over many rows; tests/gpu has a million."""
    rows = 2**18 if route.thorough else 1000
    bias = FP32 if kind == "layer" else None
    inputs = Case((rows,), (8,), kind, FP32, FP32, bias).build(route.device)
    check(through_fastnorm(inputs), inputs)


def test_an_offset_of_one_is_added_in_fp32(route: Route) -> None:
    """B78, B79, B80: 1 + 15.8125 is no bf16; Gemma adds and multiplies in fp32 and rounds last."""
    x = seeded(4, 40, dtype=torch.bfloat16)
    w = torch.full((40,), 15.8125, dtype=torch.bfloat16)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    right = (x.float() * rstd * (1 + w.float())).bfloat16()
    y = functional.norm(
        x.to(route.device), (40,), w.to(route.device), eps=1e-6, semantics="rms_zero_centered"
    )
    # The sum of squares may be rounded in another order; 1 + w in bf16 moves 3 outputs in 4.
    assert (y.cpu() == right).float().mean() > 0.95
    torch.testing.assert_close(y.cpu().float(), right.float(), rtol=2**-7, atol=0)
    zero = functional.norm(
        x.to(route.device), (40,), 0 * w.to(route.device), eps=1e-6, semantics="rms_zero_centered"
    )
    torch.testing.assert_close(zero.cpu(), (x.float() * rstd).bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("weight", [torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("kind", SEMANTICS)
def test_each_kind_rounds_where_its_original_does(
    kind: str, weight: torch.dtype, route: Route
) -> None:
    """B51, B54, B72, B79: the bits of the layer it is named after. The oracle cannot see this:
    rounding less often is no less accurate. One wrong rounding moves a quarter of the results."""
    case = Case((16,), (96,), kind, torch.bfloat16, weight, None, seed=11)
    inputs = case.build(route.device)
    y = through_fastnorm(inputs)[0].cpu()
    original = theirs(case.build())[0]
    assert y.dtype == original.dtype
    # Sums in another order move rstd by an ulp of fp32, and a result in bf16 only at a tie.
    ulp = torch.finfo(y.dtype).eps if y.dtype != FP32 else 4 * torch.finfo(FP32).eps
    near = (y.double() - original.double()).abs() <= ulp * original.double().abs()
    assert (y == original if y.dtype != FP32 else near).double().mean() > 0.98
