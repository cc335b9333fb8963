"""Layers are recognised by what they compute: the right kind, or refused with the right reason."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from norm_lookalikes import (
    REFUSED,
    DividingNorm,
    DropoutNorm,
    NoisyNorm,
    PerHeadRmsNorm,
    RegistryNorm,
)
from norm_zoo import (
    RECOGNISED,
    AutocastingLayerNorm,
    BufferNorm,
    CastBackLayerNorm,
    CohereLike,
    FixedEpsNorm,
    Fp32LayerNorm,
    GemmaLike,
    LlamaLike,
    N,
    OwnNamesNorm,
    ScaleNorm,
    SmallFixedEpsNorm,
    WeightlessNorm,
    input_for,
    randomized,
    sample,
)
from torch import nn

import fastnorm
from fastnorm import autocast, reference
from fastnorm.patching import recognition
from fastnorm.patching.probes import as_cuda_autocast, quiet
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.recognition import recognise
from fastnorm.semantics import SEMANTICS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def id_of(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("cls", "kind"), RECOGNISED.items(), ids=id_of)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
def test_patched_layer_gives_the_bits_of_its_class(
    cls: type[nn.Module], kind: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    """B51, B54, B72, B75, B79, B105, B109, B116, B118: any dtype pair the class itself takes."""
    module = randomized(cls(), dtype=w_dtype)
    original, x = copy.deepcopy(module), input_for(module, dtype=x_dtype)
    report = fastnorm.patch(module)
    assert [entry.semantics for entry in report.patched] == [kind]
    assert str(module) and module.state_dict().keys() == original.state_dict().keys()
    try:
        expected = original(x)
    except RuntimeError:
        pytest.skip("the class itself refuses this pair of dtypes")
    actual = module(x)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("cls", "reason"), REFUSED.items(), ids=id_of)
def test_doubtful_layer_is_left_alone_with_its_reason(cls: type[nn.Module], reason: str) -> None:
    """B46, B45, B52, B128: look-alikes, and layers that are more than a function of one input."""
    module = randomized(cls())
    with pytest.warns(UserWarning, match="no layer to patch"):
        report = fastnorm.patch(module)
    assert len(report) == 0
    assert type(module) is cls
    assert reason in report.skipped[0].reason


def test_recognition_runs_no_hook_and_draws_no_number() -> None:
    calls: list[str] = []
    module = LlamaLike()
    module.register_forward_pre_hook(lambda *_: calls.append("pre"))
    module.register_forward_hook(lambda *_: calls.append("post"))
    weight, version = module.weight, module.weight._version
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert isinstance(recognise(module), Recipe)
    assert calls == []
    for drawing in (NoisyNorm, DropoutNorm):
        assert isinstance(recognise(drawing()), Refusal)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert module.weight is weight and weight._version == version and weight.grad is None


def test_refused_layer_is_unchanged_by_the_attempt() -> None:
    """A layer that counts its calls, or keeps running means, has run on a stand-in only."""
    for cls in (*REFUSED, *RECOGNISED):
        module = randomized(cls())
        state = copy.deepcopy(module.state_dict())
        attributes = {k: repr(v) for k, v in vars(module).items() if not k.startswith("_")}
        recognise(module)
        assert attributes == {k: repr(v) for k, v in vars(module).items() if k in attributes}
        assert all(torch.equal(state[k], v) for k, v in module.state_dict().items())
    assert RegistryNorm.seen == []


def test_global_state_is_as_before() -> None:
    torch.set_num_threads(2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        recognise(ScaleNorm())
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("cls", RECOGNISED, ids=id_of)
def test_recognition_does_not_depend_on_the_caller_s_context(cls: type[nn.Module]) -> None:
    """Default dtype and device, inference mode and autocast are the caller's, not the probes'."""
    module = cls()
    expected = recognise(module)
    recognition._fingerprints.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            assert recognise(module) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cls", RECOGNISED, ids=id_of)
def test_layer_on_meta_is_recognised_as_on_the_cpu(cls: type[nn.Module]) -> None:
    """B129: a model is often patched before its weights exist."""
    assert recognise(cls().to("meta")) == recognise(cls())
    recognition._fingerprints.clear()
    assert recognise(cls().to("meta")) == recognise(cls())


@pytest.mark.parametrize("cls", [LlamaLike, ScaleNorm, OwnNamesNorm, CohereLike, Fp32LayerNorm])
def test_eps_is_read_from_the_module_at_each_call(cls: type[nn.Module]) -> None:
    """B116, B117: whatever the attribute is called, eps = 0.1 shows and a later change counts."""
    module = randomized(cls(eps=1e-1))
    original, x = copy.deepcopy(module), 0.3 * sample()
    fastnorm.patch(module)
    assert torch.equal(module(x), original(x))
    before = module(x)
    for name, value in vars(original).items():
        if isinstance(value, float) and name != "momentum":
            setattr(original, name, 0.7)
            setattr(module, name, 0.7)
    assert torch.equal(module(x), original(x))
    assert not torch.equal(module(x), before)


def test_attribute_that_only_looks_like_eps_is_not_taken_for_it() -> None:
    recipe = recognise(OwnNamesNorm(eps=1e-6))
    assert isinstance(recipe, Recipe) and recipe.eps == "tiny"


@pytest.mark.parametrize(("cls", "eps"), [(FixedEpsNorm, 1e-6), (SmallFixedEpsNorm, 1e-12)])
def test_eps_written_into_the_forward_is_found(cls: type[nn.Module], eps: float) -> None:
    recipe = recognise(cls())
    assert isinstance(recipe, Recipe)
    assert (recipe.eps, recipe.fixed_eps) == (None, eps)


def test_buffer_that_does_nothing_is_told_from_the_weight() -> None:
    recipe = recognise(BufferNorm())
    assert isinstance(recipe, Recipe) and recipe.weight == "weight"


def test_weight_row_per_head_is_applied_to_its_own_head() -> None:
    """B127: never row 0 for all."""
    module = randomized(CohereLike((4, N)))
    x = sample(shape=(2, 3, 4, N))
    original = copy.deepcopy(module)
    fastnorm.patch(module)
    y = module(x)
    assert torch.equal(y, original(x))
    assert not torch.equal(y[..., 1, :], y[..., 1, :] / module.weight[1] * module.weight[0])
    with pytest.warns(UserWarning):
        assert len(fastnorm.patch(PerHeadRmsNorm())) == 0


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.float64], ids=str)
def test_double_precision_stays_with_the_class(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """Llama's class computes fp64 input in fp32; a patched one must not be better by surprise."""
    module = randomized(LlamaLike(), dtype=w_dtype)
    original, x = copy.deepcopy(module), sample(dtype=x_dtype)
    fastnorm.patch(module)
    assert module(x).dtype == original(x).dtype
    assert torch.equal(module(x), original(x))


@pytest.mark.parametrize("cls", RECOGNISED, ids=id_of)
def test_kind_under_cuda_autocast_is_the_class_s_own(cls: type[nn.Module]) -> None:
    """B74: a norm written out keeps its dtype where autocast makes torch's return fp32."""
    module = randomized(cls())
    recipe = recognise(module)
    assert isinstance(recipe, Recipe)
    with quiet(), as_cuda_autocast():
        x = input_for(module, dtype=torch.bfloat16)
        own = module(x).dtype
        kind = recipe.kind(x)
    if kind != "original":
        weight = None if recipe.weight is None else torch.float32
        expected = reference.result_dtype(torch.bfloat16, weight, SEMANTICS[kind])
        assert own == (torch.float32 if kind in autocast.AUTOCAST_TO_FP32 else expected)


def test_layer_that_casts_back_is_fp32_inside_under_autocast() -> None:
    recipe = recognise(CastBackLayerNorm())
    assert isinstance(recipe, Recipe)
    assert (recipe.semantics, recipe.under_autocast) == ("layer", "layer_fp32")


def test_layer_of_no_kind_under_autocast_runs_its_own_forward_there() -> None:
    module = randomized(AutocastingLayerNorm())
    original, x = copy.deepcopy(module), sample()
    report = fastnorm.patch(module)
    assert report.patched[0].note == "its own forward under autocast"
    assert "layer_offset [48] float32, its own forward under autocast" in str(report)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fastnorm.reset_stats()
        y = module(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, original(x))
        assert fastnorm.stats().forward == {}
    module(x)
    assert fastnorm.stats().forward == {"torch": 1}


def test_second_layer_of_a_configuration_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    forward = LlamaLike.forward
    monkeypatch.setattr(
        LlamaLike,
        "forward",
        lambda self, hidden_states: runs.append(1) or forward(self, hidden_states),
    )
    first = recognise(LlamaLike())
    assert runs
    runs.clear()
    assert recognise(randomized(LlamaLike(), dtype=torch.bfloat16)) is first
    assert runs == []
    recognise(LlamaLike(eps=1e-5))
    assert runs, "another eps is another configuration"


def test_hundred_layers_of_ten_configurations_cost_under_a_second() -> None:
    model = nn.ModuleList(
        cls(eps=eps)
        for eps in (1e-5, 1e-6)
        for cls in (LlamaLike, GemmaLike, ScaleNorm, WeightlessNorm, Fp32LayerNorm)
        for _ in range(10)
    )
    start = time.perf_counter()
    assert len(fastnorm.patch(model)) == 100
    assert time.perf_counter() - start < 1.0


def test_refusal_names_the_nearest_kind() -> None:
    found = recognise(DividingNorm())
    assert isinstance(found, Refusal) and found.unknown
    assert "nearest: rms" in found.reason and "e-07 in float32" in found.reason
