"""Modules are objects like torch's: copied, saved, initialised late, parametrised, averaged."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parametrize, skip_init
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastnorm
from tests.contract.norms import KINDS, OURS, TORCHS, close, pair, same, seeded

CONSTRUCTIONS = {
    "layer": [
        ((8,), {}),
        (((2, 4),), {"eps": 1e-3}),
        ((8, 1e-6, False), {}),
        ((8,), {"bias": False}),
        ((8,), {"dtype": torch.bfloat16, "device": "meta"}),
        (([8],), {"elementwise_affine": True}),
    ],
    "rms": [
        ((8,), {}),
        (((2, 4),), {"eps": 1e-3}),
        ((8, None, False), {}),
        ((8,), {"dtype": torch.float64}),
    ],
}


@pytest.mark.parametrize(
    ("kind", "args", "kwargs"), [(k, a, kw) for k in KINDS for a, kw in CONSTRUCTIONS[k]]
)
def test_constructors_keys_and_repr_are_torchs(kind: str, args: tuple, kwargs: dict) -> None:
    ours, torchs = OURS[kind](*args, **kwargs), TORCHS[kind](*args, **kwargs)
    assert isinstance(ours, TORCHS[kind])
    assert repr(ours) == repr(torchs) and ours.extra_repr() == torchs.extra_repr()
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for (name, p), (other, q) in zip(
        ours.named_parameters(), torchs.named_parameters(), strict=True
    ):
        assert (name, p.shape, p.dtype, p.device) == (other, q.shape, q.dtype, q.device)
        assert p.is_meta or torch.equal(p, q)
    for attribute in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(ours, attribute) == getattr(torchs, attribute)


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_begin_with_torchs(kind: str) -> None:
    """Tools look for `device` among the arguments (skip_init), or for all of them by name."""
    ours, torchs = (
        [(p.name, p.default) for p in inspect.signature(c).parameters.values()]
        for c in (OURS[kind], TORCHS[kind])
    )
    assert ours[: len(torchs)] == torchs


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_raise(kind: str) -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        OURS[kind](8, backend="fastest")
    with pytest.raises(TypeError):
        OURS[kind](8, epsilon=1e-5)
    with pytest.raises(ValueError, match="backend must be one of"):
        fastnorm.backend("gpu").__enter__()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save", "weights only"])
def test_copies_compute_the_same(kind: str, copier: str) -> None:
    ours, torchs = pair(kind, 8)
    ours.tag = "kept"
    if copier == "deepcopy":
        other = copy.deepcopy(ours)
    elif copier == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    else:
        buffer = io.BytesIO()
        torch.save(ours.state_dict() if copier == "weights only" else ours, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=copier == "weights only")
        other = loaded
        if copier == "weights only":
            other = OURS[kind](8)
            other.load_state_dict(loaded, strict=True)
            other.tag = "kept"
    x = seeded(3, 8)
    assert type(other) is OURS[kind] and other.tag == "kept"
    assert other.weight.data_ptr() != ours.weight.data_ptr()
    same(other(x), torchs(x))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_travel_both_ways(kind: str) -> None:
    """B119, B120: strict loading into torch's module and back, no extra state."""
    ours, torchs = pair(kind, 8)
    fresh = OURS[kind](8)
    fresh.load_state_dict(torchs.state_dict(), strict=True)
    TORCHS[kind](8).load_state_dict(ours.state_dict(), strict=True)
    same(dict(fresh.state_dict()), dict(torchs.state_dict()))
    meta = OURS[kind](8, device="meta")
    meta.load_state_dict(torchs.state_dict(), assign=True)
    same(meta(seeded(3, 8)), torchs(seeded(3, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_modules_materialise(kind: str) -> None:
    """B129: to_empty and reset_parameters; skip_init; shapes without memory."""
    meta = OURS[kind](8, device="meta")
    assert meta(torch.empty(3, 8, device="meta")).is_meta
    real = meta.to_empty(device="cpu")
    real.reset_parameters()
    assert (real.weight == 1).all() and (kind == "rms" or (real.bias == 0).all())
    skipped = skip_init(OURS[kind], 8)
    assert skipped.weight.shape == (8,) and not skipped.weight.is_meta
    with torch.device("meta"):
        assert OURS[kind](8).weight.is_meta


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", KINDS)
def test_parametrizations(kind: str) -> None:
    """A parametrised weight is computed at each call, and gradients reach its original."""
    results = []
    for module in pair(kind, 8):
        parametrize.register_parametrization(module, "weight", _Doubled())
        x = seeded(3, 8).requires_grad_()
        module(x).square().sum().backward()
        results.append([x.grad, module.parametrizations.weight.original.grad])
    same(*results)


def test_spectral_norm_beside_a_norm() -> None:
    results = []
    for norm in pair("layer", 8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), norm)
        results.append(model(seeded(3, 8)).detach())
    same(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_swap_tensors_keeps_the_module_working(kind: str) -> None:
    ours, torchs = pair(kind, 8)
    replacement = nn.Parameter(seeded(8, seed=7))
    torchs.weight.data = replacement.data.clone()
    torch.utils.swap_tensors(ours.weight, replacement)
    same(ours(seeded(3, 8)), torchs(seeded(3, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_changes_after_construction_take_effect(kind: str) -> None:
    """B117, B130: eps, weights and dtype are read at each call; nothing is cached."""
    ours, torchs = pair(kind, 8)
    x = seeded(3, 8)
    ours(x)
    for module in (ours, torchs):
        module.eps = 0.1
        module.weight.data = seeded(8, seed=5)
    same(ours(x), torchs(x))
    held = ours.weight.data.clone()
    ours.weight.data = torch.empty(0)
    ours.register_forward_pre_hook(lambda m, _: setattr(m.weight, "data", held))
    same(ours(x), torchs(x))
    same(ours.double()(x.double()), torchs.double()(x.double()))


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_weight_averaging(average) -> None:
    results = []
    for norm in pair("layer", 8):
        averaged = AveragedModel(norm, multi_avg_fn=average)
        for step in range(3):
            norm.weight.data += step
            averaged.update_parameters(norm)
        results.append(averaged(seeded(3, 8)).detach())
    same(*results)


def test_optimizer_groups_by_isinstance() -> None:
    """Weight decay is left off norms by `isinstance(m, nn.LayerNorm)`."""
    model = nn.Sequential(nn.Linear(8, 8), fastnorm.LayerNorm(8), fastnorm.RMSNorm(8))
    norms = [
        p
        for m in model.modules()
        if isinstance(m, (nn.LayerNorm, nn.RMSNorm))
        for p in m.parameters()
    ]
    assert len(norms) == 3


def test_lazy_neighbours() -> None:
    model = nn.Sequential(nn.LazyLinear(8), fastnorm.LayerNorm(8), nn.LazyLinear(2))
    model(seeded(3, 5)).sum().backward()
    assert model[0].weight.shape == (8, 5) and model[1].weight.grad is not None


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_encoder_layer_takes_our_norms(training: bool) -> None:
    """Also on torch's fast path for inference, which reads weight, bias and eps itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x = seeded(2, 5, 16)
    with torch.set_grad_enabled(training):
        expected = layer(x)
        for name in ("norm1", "norm2"):
            ours = fastnorm.LayerNorm(16)
            ours.load_state_dict(getattr(layer, name).state_dict())
            setattr(layer, name, ours)
        close(layer(x), expected)


def _child(module: nn.Module, x: torch.Tensor, results) -> None:
    results.put(module(x).detach().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_spawned_processes(kind: str) -> None:
    """A module is sent to a fresh process and computes there."""
    ours, torchs = pair(kind, 8)
    context = mp.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_child, args=(ours, seeded(3, 8), results))
    process.start()
    actual = torch.from_numpy(results.get(timeout=120))
    process.join(30)
    assert process.exitcode == 0
    close(actual, torchs(seeded(3, 8)).detach())


def test_subclasses_keep_their_forward() -> None:
    class Scaled(fastnorm.RMSNorm):
        def __init__(self, width: int, scale: float) -> None:
            super().__init__(width, eps=1e-3)
            self.scale = scale

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.scale * super().forward(input)

    module, x = Scaled(8, 3.0), seeded(3, 8)
    same(module(x), 3 * fastnorm.rms_norm(x, (8,), module.weight, 1e-3))
    assert copy.deepcopy(module).scale == 3.0
