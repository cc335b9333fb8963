"""What a provider is: named functions that turn a case's inputs into a call to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.shapes import Case

# (y,) of "fwd"; (dx, dweight, dbias) of "bwd"; (y, dx, dweight, dbias) of "both" and "host".
Outputs = tuple[Tensor | None, ...]
Call = Callable[[], Outputs]
Builder = Callable[[Inputs], Call]
# (x, weight, bias, eps) -> y, with an autograd graph.
Function = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


@dataclass(frozen=True)
class Provider:
    """One implementation to measure.

    Args:
        name: what the CSV calls it.
        version: of the package it comes from.
        passes: builders by (op, norm) for "fwd" and "bwd", at operator level, so that neither
            autograd nor a module's own code is in the time.
        functions: eager autograd entry points by norm, for "both" and "host".
        errors: exception types it raises beside Python's and torch's own.
    """

    name: str
    version: str
    passes: Mapping[tuple[str, str], Builder]
    functions: Mapping[str, Function] = field(default_factory=dict)
    errors: tuple[type[Exception], ...] = ()

    def offers(self, case: Case) -> bool:
        """Whether it has this op of this norm at all, whatever the shape."""
        if case.op in ("both", "host"):
            return case.norm in self.functions
        return (case.op, case.norm) in self.passes

    def build(self, case: Case, inputs: Inputs) -> Call:
        """Do all that is not to be timed (statistics, copies) and return the call that is."""
        if case.op in ("both", "host"):
            return train_step(self.functions[case.norm], inputs)
        return self.passes[case.op, case.norm](inputs)


def train_step(function: Function, inputs: Inputs) -> Call:
    """Forward and backward through eager autograd, gradients dropped in between as in training."""
    x, weight = inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    dy = inputs.dy.clone()

    def step() -> Outputs:
        for leaf in leaves:
            leaf.grad = None
        y = function(x, weight, bias, inputs.eps)
        y.backward(dy)
        return (y.detach(), x.grad, weight.grad, None if bias is None else bias.grad)

    return step


def forward_of(function: Function) -> Builder:
    """The forward pass of an autograd entry point, for providers without operators of their own."""

    def build(inputs: Inputs) -> Call:
        def call() -> Outputs:
            with torch.no_grad():
                return (function(inputs.x, inputs.weight, inputs.bias, inputs.eps),)

        return call

    return build


def backward_of(function: Function) -> Builder:
    """The backward pass alone of an autograd entry point: one graph, walked again and again."""

    def build(inputs: Inputs) -> Call:
        parameters = (inputs.weight,) if inputs.bias is None else (inputs.weight, inputs.bias)
        leaves = [t.detach().requires_grad_() for t in (inputs.x, *parameters)]
        y = function(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, inputs.eps)

        def call() -> Outputs:
            grads = torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True)
            return (*grads, None) if len(grads) == 2 else grads

        return call

    return build


def package_version(distribution: str) -> str:
    """Version of an installed distribution; "source" where only its files are on the path."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "source"
