"""torch.func transforms and forward mode give what they give for torch's own norms."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fastnorm
from tests.conftest import Route
from tests.contract.norms import KINDS, close, pair, same, seeded

TRANSFORMS = {
    "grad": lambda f, x: grad(lambda t: f(t).square().sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda t: f(t).square().sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of a strided batch": lambda f, x: vmap(f, in_dims=1)(x.unsqueeze(1)),
    "vmap of grad": lambda f, x: vmap(grad(lambda t: f(t).square().sum()))(x),
    "grad of vmap": lambda f, x: grad(lambda t: vmap(f)(t).square().sum())(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(x.expand(2, *x.shape)),
    "jvp of vjp": lambda f, x: jvp(lambda t: vjp(f, t)[1](x)[0], (x,), (x.sin(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_func_transforms_are_torchs(name: str, kind: str) -> None:
    """B70 and its compositions: bit for bit what torch's module gives."""
    ours, torchs = pair(kind, 6, dtype=torch.float64)
    x = seeded(3, 6, dtype=torch.float64)
    same(TRANSFORMS[name](ours, x), TRANSFORMS[name](torchs, x))


@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_weight_gradients_equal_a_loop(kind: str) -> None:
    """B70."""
    ours, _ = pair(kind, 6, dtype=torch.float64)
    parameters = {k: v.detach() for k, v in ours.named_parameters()}
    x = seeded(4, 3, 6, dtype=torch.float64)

    def loss(p, sample):
        return functional_call(ours, p, (sample,)).square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    looped = [grad(loss)(parameters, sample) for sample in x]
    for name in parameters:
        close(batched[name], torch.stack([g[name] for g in looped]))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_tangents_are_torchs(kind: str) -> None:
    import torch.autograd.forward_ad as fwAD

    ours, torchs = pair(kind, 6, dtype=torch.float64)
    x, tangent = (seeded(3, 6, seed=s, dtype=torch.float64) for s in (0, 1))
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, tangent)
        same(fwAD.unpack_dual(ours(dual)).tangent, fwAD.unpack_dual(torchs(dual)).tangent)


def test_kernels_refuse_transforms_in_words(route: Route) -> None:
    if route.name != "interpreter":
        pytest.skip('asks for backend="triton" where nothing else is allowed')
    x = seeded(3, 6)
    with pytest.raises(fastnorm.KernelUnavailable, match="torch.func transform"):
        grad(lambda t: fastnorm.rms_norm(t, (6,)).sum())(x)
