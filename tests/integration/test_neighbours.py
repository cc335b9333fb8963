"""Models that other libraries wrap, quantise or define, and parts of models left out."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import IMAGE, SMALL, batch, build, gradients, identity
from torch import nn

import fastnorm

transformers = pytest.importorskip("transformers", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


TIMM_MODELS = (
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_atto",
    "convnextv2_atto",
    "mixer_s32_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "maxvit_rmlp_pico_rw_256",
)


def test_lora_wrapped_before_and_after_patching() -> None:
    """Adapters stay trainable, and both copies under modules_to_save are patched."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], r=2)
    wrapped = peft.get_peft_model(build("llama"), settings)
    plain = copy.deepcopy(wrapped)
    report = fastnorm.patch(wrapped)
    names = [entry.name for entry in report.patched]
    saved = [n for n, m in plain.named_modules() if type(m).__name__ == "ModulesToSaveWrapper"]
    assert len(saved) == 5, "peft takes a name for the end of one"
    assert {f"{n}.modules_to_save.default" for n in saved} <= set(names)
    assert {f"{n}.original_module" for n in saved} <= set(names)
    assert len(report) == 2 * len(saved)
    assert torch.equal(wrapped(**batch(plain))[0], plain(**batch(plain))[0])
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    wrapped(**batch(plain))[0].sum().backward()
    assert {n for n, p in wrapped.named_parameters() if p.grad is not None} == trained

    patched_first = build("llama")
    fastnorm.patch(patched_first)
    later = peft.get_peft_model(patched_first, settings)
    merged = later.merge_and_unload()
    assert fastnorm.unpatch(merged) >= 5
    assert torch.equal(merged(**batch(plain))[0], build("llama")(**batch(plain))[0])


def test_neighbours_of_another_kind_are_not_touched() -> None:
    """Linear layers quantised to int8 beside the norms keep class and result."""
    model = torch.ao.quantization.quantize_dynamic(build("llama"), {nn.Linear}, dtype=torch.qint8)
    expected = model(**batch(model))[0]
    classes = {n: type(m) for n, m in model.named_modules() if "norm" not in n}
    assert len(fastnorm.patch(model)) == 5
    assert classes == {n: type(m) for n, m in model.named_modules() if "norm" not in n}
    assert torch.equal(model(**batch(model))[0], expected)


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_timm_model(name: str) -> None:
    """timm imports torchvision, whose build on PyPI does not import beside a CPU build of torch."""
    timm = pytest.importorskip("timm", exc_type=ImportError, reason="timm or torchvision missing")
    model = timm.create_model(name, pretrained=False).eval()
    before, shown = identity(model), repr(model)
    x = torch.randn(1, *model.default_cfg["input_size"])
    with torch.no_grad():
        expected = model(x)
        report = fastnorm.patch(model)
        assert len(report) > 0
        assert torch.equal(model(x), expected)
    report.undo()
    assert identity(model) == before and repr(model) == shown


def test_vision_tower_can_be_left_out() -> None:
    """B113: by the tower's name, of a model with two towers."""
    vision = transformers.CLIPVisionConfig(**(SMALL | IMAGE))
    text = transformers.CLIPTextConfig(**SMALL)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
    )
    report = fastnorm.patch(model, exclude="vision_model")
    assert len(report) > 0
    assert {entry.name.split(".")[0] for entry in report.patched} == {"text_model"}
    assert all(entry.reason == "excluded by 'vision_model'" for entry in report.skipped)


def test_teacher_and_student_are_independent() -> None:
    """B107: patching one Llama leaves another, built later, alone."""
    teacher = build("llama")
    fastnorm.patch(teacher)
    student = build("llama")
    assert not any(type(m).__name__.startswith("Fast") for m in student.modules())
    assert type(student.norm).__name__ == "LlamaRMSNorm"


def test_deberta_is_refused_with_the_difference() -> None:
    """B128: its LayerNorm divides by sqrt and rounds before the weight."""
    model = build("deberta")
    with pytest.raises(ValueError, match="DebertaLayerNorm.*no kind of norm known here"):
        fastnorm.patch(model, strict=True)
    report = fastnorm.patch(model)
    assert len(report) == 0 and len(report.skipped) == 5


def test_gradient_checkpointing_of_transformers() -> None:
    model = build("llama").train()
    expected = gradients(model)
    fastnorm.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
