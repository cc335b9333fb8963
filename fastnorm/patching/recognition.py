"""From a module to the recipe for it, or to the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastnorm import modules
from fastnorm.patching.recipe import Recipe
from fastnorm.patching.swap import is_patched

_LAYER = Recipe("layer", weight="weight", bias="bias", shape="normalized_shape", exact=True)
_RMS = Recipe("rms", weight="weight", shape="normalized_shape", exact=True)


@dataclass(frozen=True)
class Refusal:
    """Why a norm-like layer is left alone.

    Args:
        reason: for the report.
        unknown: a norm that may well be one of the known kinds: `strict=True` raises on it.
    """

    reason: str
    unknown: bool = False


def recognise(module: nn.Module) -> Recipe | Refusal | None:
    """The recipe for a module, a refusal for a norm-like one, None for anything else."""
    if is_patched(module):
        return Refusal("already patched")
    if isinstance(module, (modules.LayerNorm, modules.RMSNorm)):
        return Refusal("already fastnorm")
    exact = _exact(type(module))
    if exact is None:
        return None
    return _obstacle(module) or exact


def _exact(cls: type[nn.Module]) -> Recipe | None:
    if cls.__call__ is not nn.Module.__call__:
        return None
    if issubclass(cls, nn.LayerNorm) and cls.forward is nn.LayerNorm.forward:
        return _LAYER
    if issubclass(cls, nn.RMSNorm) and cls.forward is nn.RMSNorm.forward:
        return _RMS
    return None


def _obstacle(module: nn.Module) -> Refusal | None:
    """What forbids a class swap whatever the module computes."""
    if "forward" in vars(module):
        return Refusal("its forward was replaced on the instance, by a hook or another tool")
    if parametrize.is_parametrized(module):
        return Refusal("has parametrizations; patch before parametrizing")
    if isinstance(module, torch.jit.ScriptModule):
        return Refusal("is a TorchScript module")
    for parameter in module.parameters(recurse=False):
        kind = type(parameter).__name__
        if kind == "DTensor":
            return Refusal("its parameters are sharded (DTensor); patch before fully_shard")
        if type(parameter) is not nn.Parameter:
            return Refusal(f"its parameters are of type {kind}")
    return None
