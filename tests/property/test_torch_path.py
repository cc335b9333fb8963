"""The path without kernels against fp64: fp64 too, and modules as well as functions."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, example, given

import fastnorm
from fastnorm import functional, reference
from fastnorm.semantics import SEMANTICS
from tests.oracle import check, run
from tests.strategies import HALF_AND_SINGLE, Case, cases

ONE_FEATURE = Case((16,), (1,), "layer", torch.bfloat16, torch.bfloat16, torch.float32)
ALL_DTYPES = (*HALF_AND_SINGLE, torch.float64)


@given(cases(dtypes=ALL_DTYPES))
def test_functions_are_as_accurate_as_torch(case: Case) -> None:
    # Layers that write the formula out lose dx to underflow of rstd³ at 1e18, and the torch path
    # gives their bits; kernels do not (test_kernels.py).
    assume(case.kind_of_values != "huge" or case.kind in ("layer", "rms", "layer_fp32"))
    inputs = case.build()
    check(
        run(
            inputs,
            lambda x, w, b: functional.norm(x, inputs.shape, w, b, inputs.eps, semantics=case.kind),
        ),
        inputs,
    )


@given(cases(kinds=("layer", "rms"), dtypes=ALL_DTYPES))
@example(replace(ONE_FEATURE, kind_of_values="one nan"))
@example(replace(ONE_FEATURE, kind_of_values="one inf"))
def test_modules_are_as_accurate_as_torch(case: Case) -> None:
    inputs = case.build()
    norm = fastnorm.LayerNorm if case.kind == "layer" else fastnorm.RMSNorm
    assume(case.weight_dtype is not None or case.bias_dtype is None)
    arguments = {"bias": inputs.bias is not None} if case.kind == "layer" else {}
    affine = inputs.weight is not None

    def through_module(x, w, b):
        module = norm(inputs.shape, eps=inputs.eps, elementwise_affine=affine, **arguments)
        names = {"weight": w, "bias": b}
        given_parameters = {name: t for name, t in names.items() if t is not None}
        return torch.func.functional_call(module, given_parameters, (x,))

    check(run(inputs, through_module), inputs)


@given(cases(dtypes=ALL_DTYPES))
def test_the_written_out_backward_is_as_accurate_as_torch(case: Case) -> None:
    """What runs where neither a kernel nor torch's fused backward takes the dtypes."""
    inputs = case.build()
    kind, dims = SEMANTICS[case.kind], len(case.shape)
    y = functional.norm(
        inputs.x, inputs.shape, *inputs.parameters(), inputs.eps, semantics=case.kind
    )
    mean, rstd = reference.statistics(inputs.x, dims, inputs.eps, kind)
    mask = (True, inputs.weight is not None, inputs.bias is not None)
    grads = reference.norm_backward(
        inputs.dy, inputs.x, *inputs.parameters(), mean, rstd, dims, kind, mask
    )
    check((y, *grads), inputs)


@given(cases(dtypes=ALL_DTYPES))
def test_the_output_dtype_is_predicted(case: Case) -> None:
    inputs = case.build()
    y = reference.norm(
        inputs.x, inputs.shape, *inputs.parameters(), inputs.eps, SEMANTICS[case.kind]
    )
    weight = None if inputs.weight is None else inputs.weight.dtype
    assert y.dtype == reference.result_dtype(inputs.x.dtype, weight, SEMANTICS[case.kind])
