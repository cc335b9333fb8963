"""Gradients, hooks, checkpoints and frozen parameters work as with torch's own norms."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fastnorm
from tests.conftest import Route
from tests.contract.norms import KINDS, close, formula, operator, pair, same, seeded


@pytest.mark.parametrize("kind", KINDS)
def test_create_graph_changes_no_first_derivative(kind: str, route: Route) -> None:
    """B67: with a weight that is not one."""
    ours, _ = pair(kind, 33)
    ours.to(route.device)
    x = seeded(4, 33, device=route.device).requires_grad_()
    dy = seeded(4, 33, seed=1, device=route.device)
    inputs = [x, *ours.parameters()]
    plain = torch.autograd.grad(ours(x), inputs, dy)
    with_graph = torch.autograd.grad(ours(x), inputs, dy, create_graph=True)
    assert all(g.requires_grad for g in with_graph[:2])
    close(with_graph, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_reaches_the_parameters(kind: str, route: Route) -> None:
    """B66: never silent zeros."""
    ours, torchs = pair(kind, 33)

    def penalty_gradients(module):
        module = module.to(route.device)
        x = seeded(4, 33, device=route.device).requires_grad_()
        (g,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, module.weight])

    actual, expected = penalty_gradients(ours), penalty_gradients(torchs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_subsets_retained_graphs_and_accumulation(kind: str, route: Route) -> None:
    ours, _ = pair(kind, 24)
    ours.to(route.device)
    x = seeded(5, 24, device=route.device).requires_grad_()
    leaves = [x, *ours.parameters()]
    y = ours(x)
    everything = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    for leaf, expected in zip(leaves, everything, strict=True):
        (alone,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        same(alone, expected)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    for leaf, once in zip(leaves, everything, strict=True):
        same(leaf.grad, once + once)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_tensors_and_modules_fire_once(kind: str, route: Route) -> None:
    """B131."""
    ours, _ = pair(kind, 24)
    ours.to(route.device)
    fired = []
    ours.register_forward_pre_hook(lambda *a: fired.append("pre"))
    ours.register_forward_hook(lambda *a: fired.append("forward"))
    ours.register_full_backward_hook(lambda *a: fired.append("backward"))
    ours.weight.register_hook(lambda g: fired.append("weight"))
    x = seeded(5, 24, device=route.device).requires_grad_()
    x.register_hook(lambda g: fired.append("x") or 2 * g)
    plain = torch.autograd.grad(fastnorm.rms_norm(x, (24,)).sum(), x)[0]
    assert fired == ["x"]
    fired.clear()
    ours(x).sum().backward()
    assert sorted(fired) == ["backward", "forward", "pre", "weight", "x"]
    assert plain.isfinite().all()


def test_saved_tensors_changed_in_place_raise(route: Route) -> None:
    """torch's error, not a wrong gradient."""
    x = seeded(5, 24, device=route.device).requires_grad_()
    h = x * 1
    y = fastnorm.layer_norm(h, (24,), seeded(24, device=route.device).requires_grad_())
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensor_hooks_see_what_is_saved(route: Route) -> None:
    """CPU offload of activations and the like."""
    ours, _ = pair("layer", 24)
    ours.to(route.device)
    x = seeded(5, 24, device=route.device).requires_grad_()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.clone(), lambda t: t
    ):
        y = ours(x)
    expected = torch.autograd.grad(ours(x).sum(), [x, *ours.parameters()])
    actual = torch.autograd.grad(y.sum(), [x, *ours.parameters()])
    same(actual, expected)
    assert any(t.shape == x.shape for t in packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(kind: str, reentrant: bool, route: Route) -> None:
    """B103, B104: also under autocast, with a weight that is not one."""
    ours, _ = pair(kind, 24)
    model = nn.Sequential(nn.Linear(24, 24), ours, nn.Linear(24, 24)).to(route.device)
    x = seeded(5, 24, device=route.device)

    def gradients(run):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(route.device, torch.bfloat16):
            y = run(leaf)
        y.float().sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    again = gradients(lambda t: checkpoint(model, t, use_reentrant=reentrant))
    same(again, gradients(model))


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing_sees_the_operator(save: bool) -> None:
    """A policy can keep or recompute `fastnorm::norm_forward` like any operator."""
    x, w, b = (
        seeded(*s, seed=i, dtype=torch.float64).requires_grad_()
        for i, s in enumerate(((3, 5), (5,), (5,)))
    )
    wanted = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE
    calls = []

    def policy(ctx, op, *args, **kwargs):
        ours = op == torch.ops.fastnorm.norm_forward.default
        calls.append(ours)
        return wanted if ours else CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(
        partial(operator, "layer"),
        x,
        w,
        b,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    actual = torch.autograd.grad(y.square().sum(), (x, w, b))
    assert any(calls)
    same(actual, torch.autograd.grad(operator("layer", x, w, b).square().sum(), (x, w, b)))


def test_inference_mode_first_then_training(route: Route) -> None:
    """B71, B141: nothing made in inference mode is kept for training."""
    ours, torchs = pair("layer", 40)
    ours.to(route.device), torchs.to(route.device)
    x = seeded(3, 40, device=route.device)
    with torch.inference_mode():
        assert ours(x).is_inference()
    with torch.no_grad():
        assert not ours(x).requires_grad
    ours(x).sum().backward()
    torchs(x).sum().backward()
    close(ours.weight.grad, torchs.weight.grad)
    close(ours.bias.grad, torchs.bias.grad)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "neither"])
def test_frozen_parameters_get_no_gradient(frozen: str, route: Route) -> None:
    """B61, B62, B64."""
    ours, torchs = pair("layer", 24)
    x = seeded(5, 24, device=route.device)
    for module in (ours, torchs):
        module.to(route.device)
        module.weight.requires_grad_(frozen not in ("weight", "both"))
        module.bias.requires_grad_(frozen not in ("bias", "both"))
    for needs_dx in (True, False):
        if frozen == "both" and not needs_dx:
            continue
        grads = []
        for module in (ours, torchs):
            module.zero_grad()
            leaf = x.clone().requires_grad_(needs_dx)
            module(leaf).square().sum().backward()
            grads.append([leaf.grad, module.weight.grad, module.bias.grad])
        for actual, expected in zip(*grads, strict=True):
            assert (actual is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 400])
def test_no_affine_parameters(kind: str, rows: int, route: Route) -> None:
    """B65."""
    ours, torchs = pair(kind, 8, elementwise_affine=False)
    dy = seeded(rows, 8, seed=1, device=route.device)
    grads = []
    for module in (ours, torchs):
        x = seeded(rows, 8, device=route.device).requires_grad_()
        module(x).backward(dy)
        grads.append(x.grad)
    close(*grads)


@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_flow_upstream(contiguous: bool, route: Route) -> None:
    """B63."""
    linear, (norm, _) = nn.Linear(16, 48).to(route.device), pair("rms", 24)
    norm.to(route.device)
    h = linear(seeded(5, 16, device=route.device))
    h = h[:, :24] if contiguous else h[:, ::2]
    norm(h).square().sum().backward()
    assert linear.weight.grad.abs().sum() > 0 and norm.weight.grad.abs().sum() > 0


def test_dx_multiplies_by_the_weight_once(route: Route) -> None:
    """B55: the gradient of the plain formula, with a weight far from one."""
    x = seeded(6, 64, device=route.device).requires_grad_()
    w = 3 * seeded(64, seed=1, device=route.device)
    dy = seeded(6, 64, seed=2, device=route.device)
    (dx,) = torch.autograd.grad(fastnorm.rms_norm(x, (64,), w, 1e-5), x, dy)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(formula("rms", wide, w.double()), wide, dy.double())
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_and_incoming_gradients_stay_untouched(
    kind: str, dtype: torch.dtype, route: Route
) -> None:
    """B56, B57, B59: dy is not written to, and gradients share no storage with it."""
    ours, _ = pair(kind, 33, dtype=dtype)
    ours.to(route.device)
    x = seeded(4, 33, device=route.device, dtype=dtype)
    before, dy = x.clone(), seeded(4, 33, seed=1, device=route.device, dtype=dtype)
    dy_before = dy.clone()
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for leaf in leaves:
        ours(leaf).backward(dy)
    with torch.no_grad():
        ours(x)
    same(x, before)
    same(dy, dy_before)
    storages = {t.untyped_storage().data_ptr() for t in (dy, *[leaf.grad for leaf in leaves])}
    assert len(storages) == 3


def test_a_residual_beside_the_norm_gets_its_own_gradient(route: Route) -> None:
    """B56: z = n2(n1(h)) + n1(h)."""
    (n1, t1), (n2, t2) = pair("rms", 24), pair("layer", 24)
    results = []
    for first, second in ((n1, n2), (t1, t2)):
        first.to(route.device), second.to(route.device)
        h = seeded(5, 24, device=route.device).requires_grad_()
        middle = first(h)
        (second(middle) + middle).square().sum().backward()
        results.append([h.grad, first.weight.grad, second.weight.grad])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_anomaly_mode_and_detect_nan(kind: str, route: Route) -> None:
    ours, _ = pair(kind, 6)
    ours.to(route.device)
    x = seeded(3, 6, device=route.device).requires_grad_()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        ours(x).sum().backward()
    assert x.grad.isfinite().all()


#: Gradients of y that are written nowhere as they are.
UNWRITTEN = {
    "negated": lambda dy: torch._neg_view(dy),
    "zero": lambda dy: torch._efficientzerotensor(dy.shape, device=dy.device),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_lazy_tensors_count_as_what_they_stand_for(name: str, route: Route) -> None:
    ours, _ = pair("layer", 24)
    ours.to(route.device)
    x, dy = (seeded(5, 24, seed=s, device=route.device) for s in (0, 1))
    lazy = UNWRITTEN[name](dy)
    leaf = x.clone().requires_grad_()
    inputs = [leaf, *ours.parameters()]
    short, long = (torch.autograd.grad(ours(leaf), inputs, g) for g in (lazy, lazy + 0 * dy))
    close(short, long)
    close(ours(torch._neg_view(x)), ours(-x))
    w, b = ours.weight.detach(), ours.bias.detach()
    for weight, bias in ((torch._neg_view(w), b), (w, torch._neg_view(b))):
        resolved = weight.resolve_neg(), bias.resolve_neg()
        same(fastnorm.layer_norm(x, (24,), weight, bias), fastnorm.layer_norm(x, (24,), *resolved))


def test_a_batch_of_gradients_in_one_call(route: Route) -> None:
    ours, _ = pair("layer", 24)
    ours.to(route.device)
    leaf = seeded(5, 24, device=route.device).requires_grad_()
    inputs, dys = [leaf, *ours.parameters()], seeded(3, 5, 24, seed=1, device=route.device)
    batched = torch.autograd.grad(ours(leaf), inputs, dys, is_grads_batched=True)
    looped = [torch.autograd.grad(ours(leaf), inputs, dy) for dy in dys]
    close(batched, tuple(map(torch.stack, zip(*looped, strict=True))))
