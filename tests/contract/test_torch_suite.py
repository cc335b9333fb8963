"""PyTorch's own samples of its norms, and its module tests' inputs, through fastnorm."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import settings
from torch import nn

import fastnorm
from tests.conftest import Route
from tests.contract.norms import OURS, same

PROFILE = settings.default
pytest.importorskip("expecttest")
with warnings.catch_warnings():
    # Importing torch's test machinery warns of its own deprecations.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

# torch's test machinery has loaded a hypothesis profile of its own, for the whole process.
settings.register_profile("as it was", parent=PROFILE)
settings.load_profile("as it was")

FUNCTIONS = {
    "nn.functional.layer_norm": fastnorm.layer_norm,
    "nn.functional.rms_norm": fastnorm.rms_norm,
}
OPINFOS = [op for op in op_db if op.name in FUNCTIONS]
MODULE_CLASSES = {nn.LayerNorm: OURS["layer"], nn.RMSNorm: OURS["rms"]}
MODULE_INFOS = [m for m in module_db if m.module_cls in MODULE_CLASSES]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_torch_still_ships_the_samples() -> None:
    assert {op.name for op in OPINFOS} == set(FUNCTIONS)
    assert {m.module_cls for m in MODULE_INFOS} == set(MODULE_CLASSES)


def _tensors(sample) -> list[torch.Tensor]:
    candidates = [sample.input, *sample.args, *sample.kwargs.values()]
    return [t for t in candidates if isinstance(t, torch.Tensor) and t.requires_grad]


@pytest.mark.parametrize("op", OPINFOS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opinfo_samples(op, dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients of every sample, bit for bit on a CPU; on a GPU, where kernels run,
    and at one feature, where torch returns rounding noise for zero, to a tolerance."""
    samples = list(op.sample_inputs(device, dtype, requires_grad=True))
    assert samples
    for sample in samples:
        call = (sample.input, *sample.args)
        expected, actual = op.op(*call, **sample.kwargs), FUNCTIONS[op.name](*call, **sample.kwargs)
        leaves = _tensors(sample)
        dy = torch.randn_like(expected)
        grads = [torch.autograd.grad(y, leaves, dy, allow_unused=True) for y in (actual, expected)]
        one_feature = torch.Size(sample.args[0]).numel() == 1 if sample.args else False
        if device == "cpu" and not one_feature:
            same(actual, expected)
            same(*grads)
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("op", OPINFOS, ids=lambda op: op.name)
def test_opinfo_samples_pass_gradcheck(op) -> None:
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        tensors = _tensors(sample)

        def call(*replaced, sample=sample, tensors=tensors):
            by_id = dict(zip(map(id, tensors), replaced, strict=True))
            swap = lambda v: by_id.get(id(v), v)  # noqa: E731
            kwargs = {k: swap(v) for k, v in sample.kwargs.items()}
            return FUNCTIONS[op.name](swap(sample.input), *map(swap, sample.args), **kwargs)

        assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("op", OPINFOS, ids=lambda op: op.name)
def test_opinfo_error_inputs_raise_at_least_as_early(op) -> None:
    """Where torch's sample says that an error must come, one comes."""
    if op.error_inputs_func is None:
        pytest.skip("torch lists no errors for it")
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            FUNCTIONS[op.name](sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("op", OPINFOS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opinfo_samples_on_kernels(op, dtype: torch.dtype, route: Route) -> None:
    if not route.kernels:
        pytest.skip("the torch path is compared bit for bit above")
    for sample in op.sample_inputs(route.device, dtype, requires_grad=True):
        call = (sample.input, *sample.args)
        expected, actual = op.op(*call, **sample.kwargs), FUNCTIONS[op.name](*call, **sample.kwargs)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("info", MODULE_INFOS, ids=lambda m: m.name)
@pytest.mark.parametrize("training", [True, False])
def test_module_inputs(info, training: bool) -> None:
    """torch's constructor and forward inputs of its module tests: the same outputs, gradients,
    state_dict, and device and dtype moves."""
    cls = MODULE_CLASSES[info.module_cls]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    assert samples
    for sample in samples:
        made = sample.constructor_input
        theirs = info.module_cls(*made.args, **made.kwargs).train(training)
        ours = cls(*made.args, **made.kwargs).train(training)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter)
        ours.load_state_dict(theirs.state_dict())
        call = sample.forward_input
        expected, actual = theirs(*call.args, **call.kwargs), ours(*call.args, **call.kwargs)
        same(actual, expected)
        leaves = [
            [t for t in call.args if t.requires_grad] + list(m.parameters()) for m in (ours, theirs)
        ]
        grads = [
            torch.autograd.grad(y.sum(), t) for y, t in zip((actual, expected), leaves, strict=True)
        ]
        same(*grads)
        assert repr(ours) == repr(theirs)
        assert all(p.dtype == torch.float64 for p in ours.double().parameters())
