"""verify(): a verdict that is right about right and wrong patches, and leaves the model alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from norm_zoo import CohereLike, GemmaLike, LlamaLike, N, randomized, sample
from torch import Tensor, nn

import fastnorm
from fastnorm.patching.verification import Difference


class Net(nn.Module):
    """Norms, a BatchNorm with running statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(N, N)
        self.norms = nn.ModuleList([nn.LayerNorm(N), LlamaLike(), GemmaLike(), CohereLike()])
        self.batch = nn.BatchNorm1d(N)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        for norm in self.norms:
            x = x + self.drop(self.mix(norm(x)))
        pooled = self.batch(x.mean(1))
        return {"hidden": x * scale, "parts": [pooled, 3, None], "ids": torch.arange(3)}


@pytest.fixture
def net() -> nn.Module:
    model = randomized(Net())
    nn.init.constant_(model.batch.running_var, 1.5)
    return model


def test_right_patch_is_within_rounding_and_everything_is_compared(net: nn.Module) -> None:
    result = fastnorm.verify(net, sample())
    names = [d.name for d in result.differences]
    assert names[:2] == ["output.hidden", "output.parts.0"]
    assert set(names[2:]) == {f"grad {n}" for n, _ in net.named_parameters()}
    assert result and result.ok and result.patched == 4
    assert all(d.difference == 0 for d in result.differences), "the CPU route is the layers' own"
    assert all(d.noise > 0 for d in result.differences if "norms" in d.name)
    assert "4 norms patched; all" in result.verdict
    assert str(result).startswith(result.verdict)
    assert result.table().row_count == len(result.worst()) == 10


@pytest.mark.parametrize("semantics", ["layer", "rms_zero_centered", "layer_offset"])
def test_wrong_kind_is_found_out(net: nn.Module, semantics: str) -> None:
    """B78, B110: a formula of another class is no rounding."""
    fastnorm.register(LlamaLike, semantics=semantics)
    result = fastnorm.verify(net, sample())
    assert not result.ok
    assert result.verdict.startswith("NOT within rounding")
    assert "BAD output" in str(result)


def test_wrong_eps_is_found_out() -> None:
    """B117."""
    model = nn.Sequential(nn.Linear(N, N), LlamaLike(eps=1e-1))
    fastnorm.register(LlamaLike, semantics="rms_rounded", eps=1e-6)
    assert not fastnorm.verify(model, sample())


def test_other_rounding_is_accepted_as_rounding() -> None:
    """The fp32-weight kind in place of Llama's moves bf16 by a unit in the last place."""
    model = randomized(nn.Sequential(nn.Linear(N, N), LlamaLike()), dtype=torch.bfloat16)
    fastnorm.register(LlamaLike, semantics="rms_fp32")
    result = fastnorm.verify(model, sample(dtype=torch.bfloat16))
    assert any(d.difference > 0 for d in result.differences)
    assert result.ok, str(result)


def test_result_is_repeatable(net: nn.Module) -> None:
    """Dropout and the other order come from the seed, not from the caller's random state."""
    fastnorm.register(LlamaLike, semantics="rms_fp32")
    first = fastnorm.verify(net, sample())
    torch.rand(3)
    assert fastnorm.verify(net, sample()) == first
    assert fastnorm.verify(net, sample(), seed=1) != first


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_model_is_left_as_it_was(net: nn.Module, patched: bool, training: bool) -> None:
    net.train(training)
    if patched:
        fastnorm.patch(net)
    net.mix.weight.grad = torch.ones_like(net.mix.weight)
    classes = [type(m) for m in net.modules()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    versions = [p._version for p in net.parameters()]
    torch.manual_seed(4)
    random_state = torch.random.get_rng_state()
    assert fastnorm.verify(net, sample())
    assert [type(m) for m in net.modules()] == classes
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert [p._version for p in net.parameters()] == versions
    assert net.mix.weight.grad.eq(1).all() and net.mix.bias.grad is None
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert net.training is training


def test_model_is_left_as_it_was_when_it_raises(net: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        fastnorm.verify(net, sample(shape=(4, 5, N + 1)))
    assert type(net.norms[0]) is nn.LayerNorm
    fastnorm.patch(net)
    with pytest.raises(RuntimeError):
        fastnorm.verify(net, sample(shape=(4, 5, N + 1)))
    assert type(net.norms[0]).__name__ == "FastLayerNorm"


@pytest.mark.parametrize(
    "batch", [sample(), (sample(), 2.0), [sample()], {"x": sample(), "scale": 2.0}], ids=type
)
def test_batches_of_every_form(net: nn.Module, batch: object) -> None:
    assert fastnorm.verify(net, batch)


def test_own_loss_is_the_one_differentiated(net: nn.Module) -> None:
    result = fastnorm.verify(net, sample(), loss=lambda out: out["parts"][0].sum() * 0)
    gradients = [d for d in result.differences if d.name.startswith("grad")]
    assert gradients and all(d.noise == 0 and d.floor == 0 for d in gradients)


def test_model_without_norms_gets_no_verdict() -> None:
    result = fastnorm.verify(nn.Linear(N, N), sample())
    assert not result.ok
    assert "nothing to verify" in result.verdict


def test_output_without_tensors_is_an_error() -> None:
    class Counter(nn.Module):
        def forward(self, x: Tensor) -> int:
            return len(x)

    with pytest.raises(TypeError, match="floating tensor.*got int"):
        fastnorm.verify(Counter(), sample())


def test_frozen_model_is_compared_by_its_outputs(net: nn.Module) -> None:
    net.requires_grad_(False)
    result = fastnorm.verify(net, sample())
    assert result.ok
    assert [d.name for d in result.differences] == ["output.hidden", "output.parts.0"]


def test_difference_that_is_no_number_is_never_ok() -> None:
    assert Difference("x", 1e-7, 1e-7, 0.0).ok
    assert not Difference("x", 1e-5, 1e-7, 1e-6).ok
    assert not Difference("x", math.nan, 1.0, 1.0).ok


def test_nan_where_the_model_has_nan_is_no_difference(net: nn.Module) -> None:
    x = sample()
    x[0, 0, 0] = math.nan
    assert fastnorm.verify(net.eval(), x)
