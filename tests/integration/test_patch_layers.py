"""A patched layer keeps what its class promises: eps, parameters, dtypes, shapes, keywords."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_zoo import (
    RECOGNISED,
    CohereLike,
    GemmaLike,
    LlamaLike,
    N,
    T5Like,
    input_for,
    randomized,
    sample,
)
from torch import nn

import fastnorm


@pytest.mark.parametrize("eps", [1e-12, 1e-1])
def test_eps_is_kept_and_followed(eps: float) -> None:
    """B117: for torch's own two; test_fingerprint.py has the others."""
    for cls in (nn.LayerNorm, nn.RMSNorm):
        module = randomized(cls(N, eps=eps))
        original, x = copy.deepcopy(module), 1e-2 * sample()
        fastnorm.patch(module)
        assert torch.equal(module(x), original(x))
        module.eps = original.eps = 0.3
        assert torch.equal(module(x), original(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(N, elementwise_affine=False),
        nn.RMSNorm(N, elementwise_affine=False),
        nn.LayerNorm(N, bias=False),
        nn.LayerNorm((5, N)),
        nn.RMSNorm((5, N), eps=1e-3),
    ],
    ids=str,
)
def test_parameters_that_do_not_exist_are_not_made(module: nn.Module) -> None:
    """B118, B119, B120: no weight, no bias, several dimensions; strict loading both ways."""
    randomized(module)
    original, x = copy.deepcopy(module), sample()
    fastnorm.patch(module)
    assert torch.equal(module(x), original(x))
    assert module.state_dict().keys() == original.state_dict().keys()
    module.load_state_dict(original.state_dict(), strict=True)
    original.load_state_dict(module.state_dict(), strict=True)


def test_weight_is_applied_once() -> None:
    """B122: twice the weight is twice the output."""
    module = nn.RMSNorm(N)
    fastnorm.patch(module)
    once = module(sample())
    with torch.no_grad():
        module.weight.fill_(2.0)
    assert torch.equal(module(sample()), 2 * once)


def test_parameter_attributes_stay() -> None:
    """B125: distributed optimizers keep marks on the Parameter object."""
    module = nn.LayerNorm(N)
    module.weight.sequence_parallel = True
    module.weight.requires_grad_(False)
    fastnorm.patch(module)
    assert module.weight.sequence_parallel is True
    assert not module.weight.requires_grad


def test_meta_model_is_patched_then_made_and_reset() -> None:
    """B129: ones for LayerNorm, zeros where the class starts from zeros."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(N), GemmaLike(), nn.RMSNorm(N))
    assert len(fastnorm.patch(model)) == 3
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    assert torch.equal(model[0].weight, torch.ones(N)) and not model[0].bias.any()
    assert not model[1].weight.any()
    assert model(sample()).isfinite().all()


@pytest.mark.parametrize("cls", [nn.LayerNorm, LlamaLike])
def test_weight_that_exists_only_within_the_call(cls: type[nn.Module]) -> None:
    """B130, B131: ZeRO-3 gathers in a pre-hook and releases in a hook; each fires once."""
    module, full, fired = randomized(cls(N)), torch.randn(N), []
    plain = copy.deepcopy(module)
    plain.weight.data = full

    def gather(layer: nn.Module, args: object) -> None:
        fired.append("gather")
        layer.weight.data = full

    def release(layer: nn.Module, args: object, output: object) -> None:
        fired.append("release")
        layer.weight.data = torch.empty(0)

    module.weight.data = torch.empty(0)
    module.weight.ds_shape = torch.Size([N])
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    assert fastnorm.patch(module).patched[0].hidden == N
    y = module(sample())
    assert fired == ["gather", "release"]
    assert torch.equal(y, plain(sample()))
    assert module.weight.numel() == 0


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norm_kept_in_fp32_in_a_bf16_model_behaves_as_before() -> None:
    """B72, B76, B77, B82: dtypes of results and parameters are the class's."""
    for cls in (LlamaLike, T5Like, nn.RMSNorm):
        norm = randomized(cls(N)).float()
        model = nn.Sequential(norm, nn.Linear(N, N, dtype=torch.bfloat16))
        plain, x = copy.deepcopy(model), sample(dtype=torch.bfloat16)
        fastnorm.patch(model)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
        assert model[0](x).dtype == plain[0](x).dtype
        assert torch.equal(model[0](x), plain[0](x))
        if plain[0](x).dtype == torch.float32:
            with pytest.raises(RuntimeError):
                plain(x)
            with pytest.raises(RuntimeError):
                model(x)


def test_offset_weight_rounds_where_gemma_rounds() -> None:
    """B78, B80: 1 + 15.8125 in fp32; and zeros are the neutral weight."""
    module = GemmaLike().bfloat16()
    x = sample(dtype=torch.bfloat16)
    fastnorm.patch(module)
    assert module(x).any(), "a lost offset would give zeros"
    nn.init.constant_(module.weight, 15.8125)
    original = GemmaLike().bfloat16()
    original.load_state_dict(module.state_dict())
    assert torch.equal(module(x), original(x))


@pytest.mark.parametrize("cls", RECOGNISED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_under_cpu_autocast_is_the_class_s(cls: type[nn.Module], dtype: torch.dtype) -> None:
    """B74: fp32 parameters, as mixed precision has them."""
    module = randomized(cls())
    original, x = copy.deepcopy(module), input_for(module, dtype=dtype)
    fastnorm.patch(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = module(x), original(x)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 2), (2, 1, 3, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm, LlamaLike, GemmaLike, CohereLike])
def test_input_of_any_number_of_dimensions(cls: type[nn.Module], leading: tuple[int, ...]) -> None:
    """B81: one vector, no row at all, five dimensions; bf16 weight."""
    module = randomized(cls(N), dtype=torch.bfloat16)
    original, x = copy.deepcopy(module), sample(dtype=torch.bfloat16, shape=(*leading, N))
    fastnorm.patch(module)
    assert torch.equal(module(x), original(x))


def test_keyword_argument_keeps_its_name() -> None:
    module = LlamaLike()
    fastnorm.patch(module)
    module(hidden_states=sample())
    with pytest.raises(TypeError):
        module(input=sample())


@pytest.mark.parametrize("choice", ["torch", "input", "autocast"])
def test_the_dtype_under_autocast_is_what_patch_was_told(choice):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.RMSNorm(16))
    fastnorm.patch(model, autocast_output=choice)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = {layer(x).dtype for layer in model[1:]}
    assert dtypes == {torch.bfloat16 if choice == "autocast" else torch.float32}
    assert model[1](x).dtype == torch.float32


def test_an_unknown_dtype_choice_changes_nothing():
    model = nn.Sequential(nn.LayerNorm(16))
    with pytest.raises(ValueError, match="got 'half'"):
        fastnorm.patch(model, autocast_output="half")
    assert type(model[0]) is nn.LayerNorm
