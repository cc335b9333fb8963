"""First and higher derivatives against finite differences and the plain formula, in fp64."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp

import fastnorm
from fastnorm import functional
from fastnorm.semantics import SEMANTICS
from tests.contract.norms import KINDS, close, formula, operator, same, seeded

PRESENT = list(itertools.product([True, False], repeat=2))


def _fp64(kind: str, weight: bool = True, bias: bool = True, rows: int = 3, hidden: int = 5):
    """x, weight, bias as fp64 leaves; bias only where the kind has one."""
    bias = bias and SEMANTICS[kind].centered and kind != "layer_cohere"
    shapes = ((rows, hidden), (hidden,) if weight else None, (hidden,) if bias else None)
    return tuple(
        None if s is None else seeded(*s, seed=i, dtype=torch.float64).requires_grad_()
        for i, s in enumerate(shapes)
    )


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize(("weight", "bias"), PRESENT)
def test_functions_pass_gradcheck(kind: str, weight: bool, bias: bool) -> None:
    def f(x, w, b):
        return functional.norm(x, (5,), w, b, 1e-3, semantics=kind)

    assert gradcheck(f, _fp64(kind, weight, bias), check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize(("weight", "bias"), PRESENT)
def test_operators_pass_gradcheck(kind: str, weight: bool, bias: bool) -> None:
    """The wiring that GPUs use."""
    f = partial(operator, kind, eps=1e-3)
    assert gradcheck(lambda x, w, b: f(x, w, b), _fp64(kind, weight, bias))


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize("through", [operator, None], ids=["operators", "functions"])
def test_double_backward_passes_gradgradcheck(kind: str, through) -> None:
    """B66."""

    def f(x, w, b):
        if through is not None:
            return through(kind, x, w, b, 1e-3)
        return functional.norm(x, (5,), w, b, 1e-3, semantics=kind)

    assert gradgradcheck(f, _fp64(kind), check_fwd_over_rev=through is None)


@pytest.mark.parametrize("kind", KINDS)
def test_third_derivatives_through_the_operators_are_those_of_the_formula(kind: str) -> None:
    """B68: statistics are functions of x to any order."""
    v = seeded(1, 5, seed=9, dtype=torch.float64)

    def third(f):
        x, w, _ = _fp64(kind, bias=False)
        x.data *= 0.1
        value = (f(kind, x, w, None, 1e-1) ** 2).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = (g * v).sum()
        return value.detach()

    close(third(operator), third(formula))


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_higher_derivatives_are_torchs_bit_for_bit(kind: str) -> None:
    """B68, B69: decided: CPU tensors run torch's own operators, whose third LayerNorm derivative
    and nested forward mode torch 2.13 gets wrong; docs/compatibility.md says so."""
    x, w, _ = _fp64(kind, bias=False)
    torchs = F.layer_norm if kind == "layer" else F.rms_norm
    ours = fastnorm.layer_norm if kind == "layer" else fastnorm.rms_norm

    def nested(f):
        def inner(t):
            return jvp(lambda u: f(u, (5,), w, eps=0.25).square().sum(), (t,), (x,))[1]

        return jvp(inner, (x,), (x,))[1]

    same(nested(ours), nested(torchs))
