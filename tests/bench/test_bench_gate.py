"""The gate lets right answers through and nothing else, and what raises becomes a line."""

import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks.gate import Gate, formulas, poison_free_memory
from benchmarks.inputs import make_inputs
from benchmarks.measure import measure_all, to_compile
from benchmarks.provider import Provider, backward_of, forward_of
from benchmarks.providers import backward_formula, forward_formula, load, load_torch
from benchmarks.shapes import Case

_TORCH = load_torch()
# torch has no operator for the backward of rms_norm on a CPU; its autograd does.
NATIVE = dataclasses.replace(
    _TORCH, passes={**_TORCH.passes, ("bwd", "rms"): backward_of(_TORCH.functions["rms"])}
)
DTYPES = ("bf16", "fp16", "fp32")


def _judged(op: str, norm: str, dtype: str = "bf16", rows: int = 37, hidden: int = 48):
    case = Case(op, norm, dtype, rows, hidden)
    inputs = make_inputs(case, "cpu")
    baseline = NATIVE.build(case, inputs)()
    return case, inputs, baseline, Gate(op, inputs, baseline, chunk_elements=10 * hidden)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_oracle_agrees_with_autograd_in_float64(norm):
    inputs = make_inputs(Case("bwd", norm, "fp32", 7, 24), "cpu")
    wide = dataclasses.replace(
        inputs,
        **{
            f.name: getattr(inputs, f.name).double()
            for f in dataclasses.fields(inputs)
            if isinstance(getattr(inputs, f.name), Tensor)
        },
    )
    y, *grads = NATIVE.build(Case("both", norm, "fp32", 7, 24), wide)()
    exact = formulas(wide, slice(0, 7))
    torch.testing.assert_close(exact["y"], y)
    torch.testing.assert_close(exact["dx"], grads[0])
    torch.testing.assert_close(exact["dweight"].sum(0), grads[1])
    if norm == "layer":
        torch.testing.assert_close(exact["dbias"].sum(0), grads[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("op", ["fwd", "bwd", "both"])
def test_right_answers_of_other_code_pass(op, norm, dtype):
    _, i, _, gate = _judged(op, norm, dtype)
    y, mean, rstd = forward_formula(i.x, i.weight, i.bias, i.eps, norm == "layer")
    grads = backward_formula(i.dy, i.x, i.weight, i.bias, mean, rstd)
    outputs = {"fwd": (y,), "bwd": grads, "both": (y, *grads)}[op]
    verdict = gate.check(outputs)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("fault", ["nan", "last_row", "shifted", "shape", "dtype", "missing"])
@pytest.mark.parametrize("output", [0, 1, 2])
def test_each_fault_in_each_output_is_refused(fault, output):
    _, _, baseline, gate = _judged("bwd", "layer")
    outputs = [out.clone() for out in baseline]
    if fault == "nan":
        outputs[output].view(-1)[-1] = float("nan")
    elif fault == "last_row":
        outputs[output].view(-1)[-1] += 1.0
    elif fault == "shifted":
        outputs[output] = outputs[output].roll(1, -1)
    elif fault == "shape":
        outputs[output] = outputs[output].unsqueeze(0)
    elif fault == "dtype":
        outputs[output] = outputs[output].float()
    else:
        outputs[output] = None
    verdict = gate.check(tuple(outputs))
    assert not verdict.passed
    assert ("dx", "dweight", "dbias")[output] in verdict.reason


def test_a_bfloat16_accumulation_of_dweight_is_refused():
    case, inputs, (dx, dweight, dbias), gate = _judged("bwd", "rms", rows=2048, hidden=16)
    terms = formulas(inputs, slice(0, case.rows))["dweight"].bfloat16()
    low = torch.zeros_like(dweight)
    for term in terms:
        low += term
    assert not gate.check((dx, low, dbias)).passed


def test_what_torch_itself_gets_wrong_cannot_be_judged():
    case = Case("fwd", "layer", "bf16", 4, 8)
    inputs = make_inputs(case, "cpu")
    inputs.x[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        Gate("fwd", inputs, NATIVE.build(case, inputs)())


def _provider(function, name: str = "other") -> Provider:
    return Provider(
        name,
        "1",
        passes={("fwd", "layer"): forward_of(function), ("bwd", "layer"): backward_of(function)},
        functions={"layer": function},
    )


def _measured(provider: Provider, ops=("fwd", "bwd", "both")) -> dict[str, tuple]:
    cases = [Case(op, "layer", "fp32", 5, 16) for op in ops]
    outcomes = measure_all(cases, [provider], lambda case, call: 7.0, device="cpu")
    return {o.case.op: (o.us, o.correct) for o in outcomes}


def test_autograd_entry_points_serve_every_op():
    layer = NATIVE.functions["layer"]
    assert _measured(_provider(layer)) == {op: (7.0, "1") for op in ("fwd", "bwd", "both")}


def test_a_wrong_provider_is_recorded_and_never_timed():
    def without_bias(x, weight, bias, eps):
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias * 0, eps)

    assert _measured(_provider(without_bias), ["fwd"]) == {"fwd": (None, "0")}


class OwnError(Exception):
    """As Triton's and CuTe's errors: derived from Exception alone."""


@pytest.mark.parametrize("error", [NotImplementedError, AssertionError, OwnError])
def test_a_provider_that_raises_is_recorded_by_its_error(error):
    def refuses(x, weight, bias, eps):
        raise error("hidden size not served")

    provider = dataclasses.replace(_provider(refuses), errors=(OwnError,))
    assert _measured(provider, ["bwd"]) == {"bwd": (None, f"error:{error.__name__}")}


def test_an_error_nobody_declared_ends_the_run():
    def broken(x, weight, bias, eps):
        raise OwnError

    with pytest.raises(OwnError):
        _measured(_provider(broken), ["fwd"])


def test_ops_a_provider_does_not_have_are_left_out():
    provider = dataclasses.replace(_provider(NATIVE.functions["layer"]), functions={})
    assert set(_measured(provider)) == {"fwd", "bwd"}


def test_nothing_starts_after_the_deadline():
    cases = [Case("fwd", "layer", "fp32", 5, 16)]
    assert not list(measure_all(cases, [NATIVE], lambda *_: 1.0, device="cpu", deadline=0.0))


def test_a_peer_that_is_not_there_is_missing_with_the_reason(tmp_path):
    loaded = load(["torch", "flash-attn"], tmp_path / "layer_norm.py")
    assert [p.name for p in loaded.providers] == ["torch"]
    assert "flash_attn/ops/triton/layer_norm.py" in loaded.missing["flash-attn"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_poison_reaches_the_next_allocations():
    case = Case("bwd", "layer", "bf16", 512, 4096)
    inputs = make_inputs(case, "cuda")
    poison_free_memory(inputs)
    assert torch.empty_like(inputs.x).isnan().all()
    assert torch.empty_like(inputs.weight).isnan().all()


def test_what_did_not_compile_in_time_is_recorded_and_the_rest_goes_on():
    provider = _provider(NATIVE.functions["layer"])
    cases = [Case(op, "layer", "fp32", 5, 16) for op in ("fwd", "bwd")]
    outcomes = measure_all(
        cases, [provider], lambda *_: 7.0, device="cpu", given_up={(cases[0], "other")}
    )
    assert [(o.us, o.correct) for o in outcomes] == [(None, "error:TimeoutError"), (7.0, "1")]


def test_compiling_ahead_goes_provider_by_provider_and_leaves_out_what_needs_none():
    cases = [Case(op, "layer", "fp32", 5, 16) for op in ("fwd", "bwd", "host")]
    one, two = (_provider(NATIVE.functions["layer"], name) for name in ("one", "two"))
    expected = [(case, name) for name in ("one", "two") for case in cases[:2]]
    assert to_compile(cases, [NATIVE, one, two]) == expected
