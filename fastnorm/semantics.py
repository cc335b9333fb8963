"""What a norm layer computes, as data: the kinds of LayerNorm and RMSNorm found in real models.

Two layers with the same `Semantics` give the same bits for the same input; the patcher recognises
layers by it, the reference evaluates it in PyTorch and the kernels take it as constexprs. See:
docs/math.md, "Kinds".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Semantics:
    """One kind of norm.

    Args:
        name: the key in `SEMANTICS`; also what operators carry.
        centered: the mean is subtracted (LayerNorm) or not (RMSNorm).
        weight_offset: what is added to the weight: nothing, 1 after conversion to fp32 (Gemma), or
            1 in the weight's own dtype before conversion (LayerNorm1P).
        rounds_normalized: x_hat is rounded before the weight is applied, to the input's dtype
            ("input", Llama), to the weight's when that is a half type ("half_weight", T5), or not
            at all ("no").
        output: dtype of the result: the input's ("input") or that of `x_hat * weight` under
            torch's promotion ("promoted"); autocast may override it for torch's own two kinds.
        source: where the definition comes from.
    """

    name: str
    centered: bool
    weight_offset: Literal["none", "fp32", "weight_dtype"] = "none"
    rounds_normalized: Literal["no", "input", "half_weight"] = "no"
    output: Literal["input", "promoted"] = "input"
    source: str = ""


LAYER = Semantics("layer", centered=True, source="torch.nn.functional.layer_norm")
RMS = Semantics("rms", centered=False, source="torch.nn.functional.rms_norm")
RMS_FP32 = Semantics(
    "rms_fp32",
    centered=False,
    source="transformers Olmo2RMSNorm: rms written out, which autocast does not touch",
)
RMS_ROUNDED = Semantics(
    "rms_rounded",
    centered=False,
    rounds_normalized="input",
    output="promoted",
    source="transformers LlamaRMSNorm",
)
RMS_ZERO_CENTERED = Semantics(
    "rms_zero_centered", centered=False, weight_offset="fp32", source="transformers GemmaRMSNorm"
)
RMS_ZERO_CENTERED_ROUNDED = Semantics(
    "rms_zero_centered_rounded",
    centered=False,
    weight_offset="weight_dtype",
    source="transformers MuseSparkTextCenteredRMSNorm",
)
RMS_T5 = Semantics(
    "rms_t5",
    centered=False,
    rounds_normalized="half_weight",
    output="promoted",
    source="transformers T5LayerNorm",
)
LAYER_FP32 = Semantics(
    "layer_fp32", centered=True, source="transformers OlmoLayerNorm; torchtune Fp32LayerNorm"
)
LAYER_COHERE = Semantics(
    "layer_cohere",
    centered=True,
    source="transformers CohereLayerNorm: layer_fp32 written out, "
    "which sums in another order; its weight may have a row per head",
)
LAYER_OFFSET = Semantics(
    "layer_offset",
    centered=True,
    weight_offset="weight_dtype",
    source="transformers NemotronLayerNorm1P",
)

SEMANTICS: dict[str, Semantics] = {
    s.name: s
    for s in (
        LAYER,
        RMS,
        RMS_FP32,
        RMS_ROUNDED,
        RMS_ZERO_CENTERED,
        RMS_ZERO_CENTERED_ROUNDED,
        RMS_T5,
        LAYER_FP32,
        LAYER_COHERE,
        LAYER_OFFSET,
    )
}
