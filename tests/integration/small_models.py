"""Models of transformers, small from config, with what must stay the same when they are patched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", exc_type=ImportError)

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
