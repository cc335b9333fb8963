"""How a layer's attributes feed `functional.norm`: what recognition finds and the swap uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn

from fastnorm import functional
from fastnorm.autocast import AutocastOutput
from fastnorm.semantics import SEMANTICS

PROBED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the fingerprint compares. transformers' classes compute fp64 input in fp32: theirs to do."""


@dataclass(frozen=True)
class Recipe:
    """Where a class keeps what a norm needs; everything is read from the module at each call.

    Args:
        semantics: a key of `fastnorm.semantics.SEMANTICS`.
        weight: attribute with the weight, or None: the kind without one.
        bias: attribute with the bias, or None.
        eps: attribute with eps, or None: the class writes `fixed_eps` into its forward.
        fixed_eps: eps where no attribute holds it.
        shape: attribute with the normalised shape, or None: the last dimension of the input.
        parameter: the name of the forward's one parameter, for callers that pass it by keyword.
        exact: the class is torch's own LayerNorm or RMSNorm, or does not override their forward.
        under_autocast: the kind it is under autocast: "same", another key of `SEMANTICS` (a class
            may cast torch's fp32 result back), or "original": its own forward runs there.
        channels_first: the features are dimension 1 of the input, not the last.
        autocast_output: the dtype under autocast, see `fastnorm.layer_norm`; what `patch` was told.
    """

    semantics: str
    weight: str | None = None
    bias: str | None = None
    eps: str | None = "eps"
    fixed_eps: float | None = None
    shape: str | None = None
    parameter: str = "input"
    exact: bool = False
    under_autocast: str = "same"
    channels_first: bool = False
    autocast_output: AutocastOutput = "torch"

    def run(self, module: nn.Module, input: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        """`norm(x, shape, weight, bias, eps)` of the input by the module's attributes now."""
        x = input.movedim(1, -1) if self.channels_first else input
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        eps = self.fixed_eps if self.eps is None else getattr(module, self.eps)
        if eps is None:
            eps = functional.default_eps(x)
        shape = x.shape[-1:] if self.shape is None else getattr(module, self.shape)
        y = norm(x, shape, weight, bias, eps)
        return y.movedim(-1, 1) if self.channels_first else y

    def kind(self, input: Tensor) -> str:
        """The semantics for this call, or "original"."""
        if self.under_autocast != "same" and torch.is_autocast_enabled(input.device.type):
            return self.under_autocast
        return self.semantics

    def defers(self, module: nn.Module, input: object) -> bool:
        """Whether this call is outside what recognition compared and stays with the original."""
        if not isinstance(input, Tensor) or torch.jit.is_tracing():
            # torch.fx (with proxies) and torch.jit.trace record what they would without fastnorm.
            return True
        if self.exact:
            return False
        if self.kind(input) == "original" or input.dtype not in PROBED_DTYPES:
            return True
        weight = None if self.weight is None else getattr(module, self.weight)
        return weight is not None and weight.dtype not in PROBED_DTYPES


@dataclass(frozen=True)
class Refusal:
    """Why a norm-like layer is left alone.

    Args:
        reason: for the report.
        unknown: a norm that fastnorm does not know: `strict=True` raises on it.
    """

    reason: str
    unknown: bool = False


def build_forward(
    original: type[nn.Module], recipe: Recipe
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The forward of a patched class.

    Args:
        original: the class whose forward it stands for, and which it calls where it defers.
        recipe: what to compute.

    Returns:
        A function of the module and the input, whose second parameter has the original's name.
    """

    # Interned, as a recipe that was unpickled is not: the compiled shortcut knows words by address.
    output = cast(AutocastOutput, sys.intern(recipe.autocast_output))
    norms = {
        kind: partial(functional.norm, semantics=sys.intern(kind), autocast_output=output)
        for kind in {recipe.semantics, recipe.under_autocast} & set(SEMANTICS)
    }

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if recipe.defers(self, input):
            return original.forward(self, input)
        return recipe.run(self, input, norms[recipe.kind(input)])

    rename_parameter(forward, recipe.parameter)
    return forward


def rename_parameter(forward: Callable[..., Tensor], name: str) -> None:
    """Let callers pass the second parameter of `forward` as `name`, and as nothing else.

    Bytecode refers to locals by their position, so the function computes what it did.
    """
    function = cast(FunctionType, forward)
    code = function.__code__
    names = (code.co_varnames[0], name, *code.co_varnames[2:])
    function.__code__ = code.replace(co_varnames=names)
