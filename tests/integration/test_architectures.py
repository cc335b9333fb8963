"""Whole models of transformers, small from config: patched, trained, undone without a trace."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from small_models import ARCHITECTURES, batch, build, gradients, identity

import fastnorm

transformers = pytest.importorskip("transformers", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_patched_computes_the_same_and_undo_restores_everything(name: str) -> None:
    """B105, B108, B109, B110, B112, B120, B132; also B105 on trained weights."""
    model = build(name)
    fired: list[str] = []
    norms = [n for n, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    model.get_submodule(norms[0]).register_forward_hook(lambda *_: fired.append("hook"))
    before, shown = identity(model), repr(model)
    classes = [type(m) for m in model.modules()]
    with torch.no_grad():
        expected = model(**batch(model))[0]
        start = time.perf_counter()
        report = fastnorm.patch(model, strict=True)
        assert time.perf_counter() - start < 1.0
        assert len(report) >= 3 and report.skipped == ()
        assert identity(model) == before
        assert sum(type(m).__name__.startswith("Fast") for m in model.modules()) == len(report)
        fired_once = len(fired)
        assert torch.equal(model(**batch(model))[0], expected)
        assert len(fired) == 2 * fired_once > 0
    report.undo()
    assert identity(model) == before
    assert [type(m) for m in model.modules()] == classes
    assert repr(model) == shown


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_the_unpatched_model(name: str) -> None:
    model = build(name)
    expected = gradients(model)
    fastnorm.patch(model)
    actual = gradients(model)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


def test_at_least_twenty_five_architectures() -> None:
    assert len(ARCHITECTURES) >= 25


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3_text", "t5"])
def test_train_step_in_bf16_agrees_within_rounding(name: str) -> None:
    """B54, B79: verify() judges it, by the model's own noise."""
    model = build(name).train().bfloat16()
    result = fastnorm.verify(model, batch(model))
    assert result.ok, str(result)
    assert result.patched == len(fastnorm.patch(model))


def test_unpatched_norm_classes_are_none_in_qwen3() -> None:
    """B112: q_norm and k_norm inside attention count as well."""
    model = build("qwen3")
    report = fastnorm.patch(model)
    total = sum(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    assert len(report) == total == 2 * 4 + 1
    assert {"layers.0.self_attn.q_norm", "layers.1.self_attn.k_norm"} <= {
        entry.name for entry in report.patched
    }


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_weight_initialisation_knows_patched_layers(name: str) -> None:
    """B111: transformers chooses by isinstance and by the class's name."""
    model, plain = build(name), build(name)
    fastnorm.patch(model)
    for made in (model, plain):
        for layer in made.modules():
            torch.manual_seed(3)
            made._init_weights(layer)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_saved_from_patched_loads_into_unpatched_and_back(name: str, tmp_path: Path) -> None:
    """B120, B121: no extra keys, no shared-tensor complaint, equal outputs."""
    model = build(name)
    fastnorm.patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch(model))[0], model(**batch(model))[0])
    fastnorm.patch(loaded)
    loaded.load_state_dict(model.state_dict(), strict=True, assign=True)
    assert torch.equal(loaded(**batch(model))[0], model(**batch(model))[0])


def test_t5_in_half_precision_after_patching() -> None:
    """B76: the whole model is cast after the patch."""
    model, plain = build("t5"), build("t5")
    fastnorm.patch(model)
    ours, theirs = (m.bfloat16()(**batch(m))[0] for m in (model, plain))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
