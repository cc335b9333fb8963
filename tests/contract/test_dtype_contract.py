"""Output and gradient dtypes are the installed torch's, with and without autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastnorm
from fastnorm import functional
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route
from tests.contract.norms import KINDS, OURS, close, pair, seeded

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: torch's own rule for x, weight and bias of three dtypes: LayerNorm refuses most mixes, fastnorm
#: computes them all, in x's dtype.
TRIPLES = list(itertools.product(FLOATS, (*FLOATS, None), (*FLOATS, None)))


def _module(kind: str, weight: torch.dtype | None, bias: torch.dtype | None, device: str):
    module = pair(kind, 24, elementwise_affine=weight is not None)[0].to(device)
    if weight is not None:
        module.weight.data = module.weight.data.to(weight)
    if kind == "layer" and weight is not None:
        module.bias = None if bias is None else nn.Parameter(module.bias.data.to(bias))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_every_mix_of_dtypes(kind: str, route: Route) -> None:
    """B75: y in x's dtype, each gradient in its tensor's own; never an exception."""
    for x_dtype, weight, bias in TRIPLES:
        dtypes = {x_dtype, weight, bias}
        if route.name == "interpreter" and torch.float64 in dtypes:
            continue
        if (kind == "rms" or weight is None) and bias is not None:
            continue
        module = _module(kind, weight, bias, route.device)
        x = seeded(5, 24, device=route.device, dtype=x_dtype).requires_grad_()
        y = module(x)
        assert y.dtype == x_dtype, (x_dtype, weight, bias)
        y.sum().backward()
        assert x.grad.dtype == x_dtype
        for parameter in module.parameters():
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_where_torch_takes_a_mix_the_dtypes_are_its_own(kind: str, route: Route) -> None:
    torchs = F.layer_norm if kind == "layer" else F.rms_norm
    ours = fastnorm.layer_norm if kind == "layer" else fastnorm.rms_norm
    agreed = 0
    for x_dtype, weight in itertools.product(FLOATS[:3], (*FLOATS[:3], None)):
        x = seeded(5, 24, device=route.device, dtype=x_dtype)
        w = None if weight is None else seeded(24, device=route.device, dtype=weight)
        try:
            expected = torchs(x, (24,), w)
        except RuntimeError:
            continue
        assert ours(x, (24,), w).dtype == expected.dtype
        agreed += 1
    assert agreed >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_torchs_dtype(kind: str, route: Route) -> None:
    """B73, B74: the dtype of torch's module under autocast on this device, for fp32 and half
    input, with fp32 parameters."""
    ours, torchs = pair(kind, 24)
    ours.to(route.device), torchs.to(route.device)
    for x_dtype, cast in itertools.product(FLOATS[:3], (torch.bfloat16, torch.float16)):
        x = seeded(5, 24, device=route.device, dtype=x_dtype).requires_grad_()
        with torch.autocast(route.device, cast):
            y, expected = ours(x), torchs(x)
        assert y.dtype == expected.dtype
        y.sum().backward()
        assert x.grad.dtype == x_dtype


@pytest.mark.parametrize("kind", KINDS)
def test_the_dtypes_of_a_block_under_autocast(kind: str, route: Route) -> None:
    """B73, B77: linear -> norm -> linear, the same outcome with both modules."""
    results = []
    for norm in pair(kind, 24):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(24, 24), norm, nn.Linear(24, 24)).to(route.device)
        x = seeded(5, 24, device=route.device)
        with torch.autocast(route.device, torch.bfloat16):
            y = block(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in block.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05 * expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_kept_in_fp32_in_a_half_model(kind: str) -> None:
    """B77: patched or not, the next linear layer meets the same dtype."""
    for ours in (True, False):
        norm = pair(kind, 24)[0 if ours else 1].float()
        y = norm(seeded(5, 24, dtype=torch.bfloat16))
        assert y.dtype == torch.bfloat16
        nn.Linear(24, 3, dtype=torch.bfloat16)(y)


@pytest.mark.parametrize("kind", [k for k, s in SEMANTICS.items() if s.output == "promoted"])
def test_kinds_that_promote(kind: str, route: Route) -> None:
    """B72: Llama's and T5's give fp32 for bf16 input and an fp32 weight; nn.RMSNorm gives bf16."""
    x = seeded(5, 24, device=route.device, dtype=torch.bfloat16).requires_grad_()
    w = seeded(24, device=route.device).requires_grad_()
    y = functional.norm(x, (24,), w, semantics=kind)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32
    assert fastnorm.rms_norm(x, (24,), w).dtype == torch.bfloat16


def test_eps_none_is_that_of_fp32_for_half_input(route: Route) -> None:
    """B42: torch's default, not the half type's."""
    module, torchs = pair("rms", 8, elementwise_affine=False)
    for dtype in FLOATS if route.name != "interpreter" else FLOATS[:3]:
        x = torch.full((2, 8), 1e-4, dtype=dtype, device=route.device)
        close(module(x), torchs(x))
    half = torch.full((2, 8), 1e-4, dtype=torch.float16, device=route.device)
    assert 0.27 < float(module(half)[0, 0]) < 0.29


@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_raise_as_torchs_do(kind: str, dtype: torch.dtype, route: Route) -> None:
    ours, _ = pair(kind, 8)
    x = torch.ones(2, 8, device=route.device).to(dtype)
    with pytest.raises(RuntimeError, match=str(dtype).replace(".", r"\.")):
        ours.to(route.device)(x)


def test_scaled_gradients_unscale(route: Route) -> None:
    """GradScaler: fp16 gradients of a scaled loss, found and unscaled, overflow skipped."""
    if route.name == "interpreter":
        pytest.skip("nothing here that the CPU and CUDA routes do not cover")
    model = nn.Sequential(nn.Linear(24, 24), pair("layer", 24)[0], nn.Linear(24, 1))
    model.to(route.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(route.device, init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast(route.device, torch.float16):
        loss = model(seeded(5, 24, device=route.device)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    plain = torch.autograd.grad(
        model(seeded(5, 24, device=route.device)).square().mean(), list(model.parameters())
    )
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0.05, atol=0.05)
    scaler.step(optimizer)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model[1].weight.grad.fill_(torch.inf)
    scaler.update()
    scaler.scale(model(seeded(5, 24, device=route.device)).sum()).backward()
    frozen = model[1].weight.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(frozen, model[1].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_opt_ins_under_autocast(kind: str, route: Route) -> None:
    """ "input" keeps the input's dtype, "autocast" gives what the next linear layer casts to;
    without autocast neither changes anything."""
    for choice in ("torch", "input", "autocast"):
        module = OURS[kind](24, autocast_output=choice).to(route.device)
        for x_dtype in FLOATS[:3]:
            x = seeded(5, 24, device=route.device, dtype=x_dtype).requires_grad_()
            assert module(x).dtype == x_dtype
            with torch.autocast(route.device, torch.bfloat16):
                y = module(x)
            if choice != "torch":
                assert y.dtype == (x_dtype if choice == "input" else torch.bfloat16)
            y.float().square().sum().backward()
            assert x.grad.dtype == x_dtype and module.weight.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="autocast_output must be one of"):
        OURS[kind](24, autocast_output="half").to(route.device)(x)
