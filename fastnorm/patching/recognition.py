"""From a module to the recipe for it, or to the reason why there is none."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastnorm import modules
from fastnorm.patching import standin
from fastnorm.patching.fingerprint import BIAS_NAMES, WEIGHT_NAMES, fingerprint
from fastnorm.patching.observation import EPS_NAMES
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.swap import has_forward_of_its_own, is_patched
from fastnorm.semantics import SEMANTICS

_LAYER = Recipe("layer", weight="weight", bias="bias", shape="normalized_shape", exact=True)
_RMS = Recipe("rms", weight="weight", shape="normalized_shape", exact=True)
_OTHER_AXES = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)

Class = TypeVar("Class", bound=type[nn.Module])


@dataclass(frozen=True)
class _Registration:
    semantics: str
    weight: str | None
    bias: str | None
    eps: str | float | None
    parameter: str


_registered: dict[type[nn.Module], _Registration] = {}
_fingerprints: dict[tuple[object, ...], Recipe | Refusal] = {}


def register(
    cls: Class,
    *,
    semantics: str,
    weight: str | None = None,
    bias: str | None = None,
    eps: str | float | None = None,
) -> Class:
    """Say what a class computes, for `patch` to take it without looking.

    Nothing is compared: a class whose results differ from the kind named gets the kind's results.
    Subclasses are not covered.

    Args:
        cls: the norm class; its forward takes one tensor.
        semantics: a key of `fastnorm.semantics.SEMANTICS`, such as "rms_rounded".
        weight: attribute with the weight; None: "weight", "scale" or "gamma", if there.
        bias: attribute with the bias; None: "bias" or "beta", if there and the kind is centred.
        eps: attribute with eps, or its value; None: "eps", "variance_epsilon" or "epsilon".

    Returns:
        `cls`, so that the call can be used on a class statement's result.

    Raises:
        TypeError: `cls` is no module class.
        ValueError: the kind is unknown, or the forward takes more than one input.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register takes a subclass of torch.nn.Module; got {cls!r}")
    if semantics not in SEMANTICS:
        raise ValueError(f"no semantics {semantics!r}; known are {', '.join(SEMANTICS)}")
    parameters = list(inspect.signature(cls.forward).parameters)[1:]
    if len(parameters) != 1:
        raise ValueError(
            f"{cls.__name__}.forward takes {parameters}; a patched forward takes one tensor, so "
            "a gated or conditional norm cannot be registered"
        )
    _registered[cls] = _Registration(semantics, weight, bias, eps, parameters[0])
    return cls


def recognise(module: nn.Module) -> Recipe | Refusal | None:
    """The recipe for a module, a refusal for a norm-like one, None for anything else."""
    if is_patched(module):
        return Refusal("already patched")
    if isinstance(module, (modules.LayerNorm, modules.RMSNorm)):
        return Refusal("already fastnorm")
    cls = type(module)
    registration = _registered.get(cls)
    if registration is not None:
        return _swap_obstacle(module) or _registered_recipe(module, registration)
    if isinstance(module, _OTHER_AXES):
        return Refusal("normalises over a batch or groups of channels: another kind of layer")
    exact = exact_recipe(cls)
    if exact is None and not _looks_like_norm(module):
        return None
    obstacle = _swap_obstacle(module)
    if obstacle is not None or exact is not None:
        return obstacle or exact
    obstacle = standin.obstacle(module)
    if obstacle is not None:
        return obstacle
    key = standin.configuration(module)
    if key not in _fingerprints:
        _fingerprints[key] = fingerprint(module)
    return _fingerprints[key]


def exact_recipe(cls: type[nn.Module]) -> Recipe | None:
    """The recipe of torch's own two, and of subclasses that leave their forward alone."""
    if cls.__call__ is not nn.Module.__call__:
        return None
    for base, recipe in ((nn.LayerNorm, _LAYER), (nn.RMSNorm, _RMS)):
        if issubclass(cls, base) and cls.forward is base.forward:
            # Another tool may have put a forward of its own into torch's class.
            return recipe if base.forward.__module__ == base.__module__ else None
    return None


def _looks_like_norm(module: nn.Module) -> bool:
    """Whether to look closer: "norm" in the class's name, or an eps beside a few parameters."""
    if "norm" in type(module).__name__.lower():
        return True
    has_eps = any(isinstance(vars(module).get(name), float) for name in EPS_NAMES)
    return has_eps and not module._modules and 1 <= len(module._parameters) <= 2


def _swap_obstacle(module: nn.Module) -> Refusal | None:
    """What forbids a change of class, whatever the module computes."""
    if has_forward_of_its_own(module):
        return Refusal("its forward was replaced on the instance, by a hook or another tool")
    if parametrize.is_parametrized(module):
        return Refusal("it has parametrizations: patch before parametrizing")
    if isinstance(module, torch.jit.ScriptModule):
        return Refusal("it is a TorchScript module")
    cls = type(module)
    bases = (base for base in cls.__mro__[:-1] if base.__module__ != "typing")
    if any("__init_subclass__" in vars(base) for base in bases):
        return Refusal("its class reacts to being subclassed (__init_subclass__)", unknown=True)
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return Refusal("its class defines its own pickling", unknown=True)
    for parameter in module.parameters(recurse=False):
        kind = type(parameter).__name__
        # fully_shard and tensor parallelism leave the class and the forward alone (DTensor).
        if type(parameter) is not nn.Parameter and kind != "DTensor":
            return Refusal(f"its parameters are of type {kind}")
    return None


def _registered_recipe(module: nn.Module, registration: _Registration) -> Recipe:
    kind = SEMANTICS[registration.semantics]
    weight = registration.weight or _first_attribute(module, WEIGHT_NAMES)
    bias = registration.bias
    if bias is None and kind.centered:
        bias = _first_attribute(module, BIAS_NAMES)
    eps = registration.eps
    if eps is None:
        eps = _first_attribute(module, EPS_NAMES)
    if eps is None:
        raise ValueError(
            f"{type(module).__name__} was registered without eps and has none of the attributes "
            f"{', '.join(EPS_NAMES)}; name the attribute or the value: register(..., eps=1e-6)"
        )
    live, fixed = (eps, None) if isinstance(eps, str) else (None, float(eps))
    shape = _first_attribute(module, ("normalized_shape",))
    return Recipe(
        kind.name, weight, bias, live, fixed, shape=shape, parameter=registration.parameter
    )


def _first_attribute(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(module, name, None) is not None), None)
