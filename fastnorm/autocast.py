"""The dtype that comes out of a norm, under autocast or not: what each version of torch gives, and
two opt-ins."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fastnorm import reference
from fastnorm.semantics import Semantics

#: What comes out under autocast: what torch's function gives, the input's dtype, or the dtype that
#: autocast casts the next linear layer's input to.
AutocastOutput = Literal["torch", "input", "autocast"]


def checked_autocast_output(choice: AutocastOutput) -> AutocastOutput:
    """The choice itself.

    Raises:
        ValueError: it is none of the three.
    """
    if choice not in ("torch", "input", "autocast"):
        raise ValueError(
            f"autocast_output must be one of {get_args(AutocastOutput)}, got {choice!r}"
        )
    return choice


def result_dtype(
    input: Tensor,
    weight: Tensor | None,
    kind: Semantics,
    autocast_output: AutocastOutput = "torch",
) -> torch.dtype:
    """The dtype of a norm of these tensors, here and now.

    Raises:
        ValueError: `autocast_output` is none of the three.
    """
    checked_autocast_output(autocast_output)
    place = input.device.type
    on = place in _AUTOCAST_DEVICES and torch.is_autocast_enabled(place)
    if on and input.dtype != torch.float64:
        if autocast_output == "autocast":
            return torch.get_autocast_dtype(place)
        if autocast_output == "torch" and place == "cuda" and kind.name in AUTOCAST_TO_FP32:
            return torch.float32
    return reference.result_dtype(input.dtype, None if weight is None else weight.dtype, kind)


#: Where autocast exists: elsewhere (meta) asking whether it is on raises, and the Dynamo of torch
#: 2.11 cannot trace the question whether one may ask.
_AUTOCAST_DEVICES = frozenset(
    place
    for place in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
    if torch.amp.is_autocast_available(place)
)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


#: Kinds whose torch function CUDA autocast runs in fp32: layer_norm always, rms_norm from torch
#: 2.12 on.
AUTOCAST_TO_FP32 = frozenset(
    {"layer", "layer_offset"} | ({"rms"} if _torch_version() >= (2, 12) else set())
)
