"""Whole models of transformers, small from config: patched, trained, undone without a trace."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastnorm

transformers = pytest.importorskip("transformers", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SWIN = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
}
CONVNEXT = {"hidden_sizes": [16, 16, 24, 32], "depths": [1, 1, 1, 1], "num_stages": 4}
T5 = {
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 99,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {"image_size": 16, "patch_size": 8}
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bart": BART,
    "pegasus": BART,
    "mt5": T5,
    "t5": T5,
    "convnext": CONVNEXT,
    "convnextv2": CONVNEXT,
    "swin": SWIN,
    "clip_vision_model": SMALL | IMAGE,
    "dinov2": SMALL | IMAGE,
    "siglip_vision_model": SMALL | IMAGE,
    "vit": SMALL | IMAGE,
    "opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 99},
    "gpt_oss": SMALL | MOE,
    "qwen3_moe": SMALL | MOE,
    "mixtral": SMALL | MOE,
}
PLAIN = (
    "albert bert bloom cohere cohere2 deberta-v2 electra esm gemma gemma2 gemma3_text glm glm4 "
    "gpt2 gpt_neox granite helium llama mamba mistral modernbert mpnet nemotron olmo olmo2 phi "
    "phi3 qwen2 qwen3 roberta smollm3 stablelm starcoder2"
).split()
ARCHITECTURES = sorted({*PLAIN, *OVERRIDES})


def build(name: str) -> nn.Module:
    config = transformers.CONFIG_MAPPING[name](**OVERRIDES.get(name, SMALL))
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path.lower() or "ln_" in path:
                # Trained norms are neither ones nor zeros; a formula lost shows (B78, B105).
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (2, 8), generator=generator)
    if model.main_input_name == "input_ids":
        inputs = {"input_ids": ids}
    else:
        size = model.config.image_size if hasattr(model.config, "image_size") else 32
        inputs = {model.main_input_name: torch.randn(2, 3, size, size, generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :6]
    return inputs


def identity(model: nn.Module) -> dict[str, Any]:
    """All that must be the same objects, in the same places, before and after."""
    return {
        "keys": list(model.state_dict()),
        "parameters": [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False)],
        "modules": [(n, id(m)) for n, m in model.named_modules(remove_duplicate=False)],
        "attributes": [sorted(vars(m)) for m in model.modules()],
    }


def gradients(model: nn.Module) -> list[torch.Tensor]:
    output = model(**batch(model))[0]
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((output * weights).sum(), trained, allow_unused=True)
    return [g for g in found if g is not None]


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


def test_teacher_and_student_are_independent() -> None:
    """B107: patching one Llama leaves another, built later, alone."""
    teacher = build("llama")
    fastnorm.patch(teacher)
    student = build("llama")
    assert not any(type(m).__name__.startswith("Fast") for m in student.modules())
    assert type(student.norm).__name__ == "LlamaRMSNorm"


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


def test_t5_in_half_precision_after_patching() -> None:
    """B76: the whole model is cast after the patch."""
    model, plain = build("t5"), build("t5")
    fastnorm.patch(model)
    ours, theirs = (m.bfloat16()(**batch(m))[0] for m in (model, plain))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_gradient_checkpointing_of_transformers() -> None:
    model = build("llama").train()
    expected = gradients(model)
    fastnorm.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_deberta_is_refused_with_the_difference() -> None:
    """B128: its LayerNorm divides by sqrt and rounds before the weight."""
    model = build("deberta")
    with pytest.raises(ValueError, match="DebertaLayerNorm.*no kind of norm known here"):
        fastnorm.patch(model, strict=True)
    report = fastnorm.patch(model)
    assert len(report) == 0 and len(report.skipped) == 5


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
