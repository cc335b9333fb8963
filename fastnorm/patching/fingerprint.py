"""Which kind of norm a layer is, found by what it computes and not by what it is called.

A stand-in of the layer runs on a few small inputs in six dtype pairs. A kind is accepted when its
reference gives the same bits everywhere, the same gradients, follows a changed eps, and nothing
about the layer is doubtful. See: docs/patching.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from fastnorm import reference
from fastnorm.autocast import AUTOCAST_TO_FP32
from fastnorm.patching.observation import (
    Observation,
    Seen,
    eps_attributes,
    normalized_shape,
    observe,
    run,
)
from fastnorm.patching.probes import (
    FLOAT,
    ON_CPU,
    PROBE_ERRORS,
    as_cuda_autocast,
    quiet,
    same_bits,
)
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.standin import StandIn
from fastnorm.semantics import SEMANTICS

WEIGHT_NAMES = ("weight", "scale", "gamma")
BIAS_NAMES = ("bias", "beta")
_FIXED_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
_OTHER_EPS = 0.25


def fingerprint(module: nn.Module) -> Recipe | Refusal:
    """The recipe whose results are the module's, bit for bit, or why there is none.

    Args:
        module: a leaf that `standin.obstacle` has nothing against.
    """
    with quiet() as generator:
        stand_in = StandIn(module, generator)
        observed = observe(stand_in, generator)
        if isinstance(observed, Refusal):
            return observed
        recipes = _agreeing(stand_in, observed)
        if not recipes:
            return Refusal(_nearest(stand_in, observed), unknown=True)
        if _per_head(recipes[0], stand_in):
            reason = f"{recipes[0].semantics} with a weight row per head: no kernel for it"
            return Refusal(reason, unknown=True)
        if not _same_gradients(recipes[0], stand_in, observed.first):
            return Refusal(f"has the values of {recipes[0].semantics}, not its gradients", True)
        return _fit_to_autocast(recipes, stand_in, observed.first.input)


def _per_head(recipe: Recipe, stand_in: StandIn) -> bool:
    """Whether the weight has more dimensions than are normalised, in a kind that takes one row."""
    if recipe.weight is None or recipe.shape is not None or recipe.semantics == "layer_cohere":
        return False
    return getattr(stand_in.module, recipe.weight).dim() > 1


def _agreeing(stand_in: StandIn, observed: Observation) -> list[Recipe]:
    """The recipes that give every output seen, by an eps read from the module if possible."""
    attributes = eps_attributes(stand_in.module)

    def matching(epses: Sequence[tuple[str | None, float | None]]) -> list[Recipe]:
        return [
            recipe
            for recipe in _hypotheses(stand_in, observed.channels_first, epses)
            if all(_agrees(recipe, stand_in, probe) for probe in observed.seen)
            and all(_follows(recipe, stand_in, observed.first, name) for name in attributes)
        ]

    fixed = dict.fromkeys((*attributes.values(), *_FIXED_EPS))
    return matching([(name, None) for name in attributes]) or matching(
        [(None, value) for value in fixed if value is not None]
    )


def _hypotheses(
    stand_in: StandIn, channels_first: bool, epses: Sequence[tuple[str | None, float | None]]
) -> Iterator[Recipe]:
    """Every way in which the module's attributes could feed a norm, likely ones first."""
    module = stand_in.module
    names = sorted(stand_in.tensor_names, key=lambda n: (n not in WEIGHT_NAMES, n))
    blank = Recipe(
        "layer",
        shape=None if normalized_shape(module) is None else "normalized_shape",
        parameter=list(inspect.signature(type(module).forward).parameters)[1],
        channels_first=channels_first,
    )
    for weight in (*names, None):
        biases = (*(n for n in names if n != weight), None) if weight else (None,)
        for bias, kind, (eps, fixed) in product(biases, SEMANTICS.values(), epses):
            if bias is None or kind.centered:
                yield replace(
                    blank, semantics=kind.name, weight=weight, bias=bias, eps=eps, fixed_eps=fixed
                )


def _predict(recipe: Recipe, module: nn.Module, x: Tensor) -> Tensor:
    kind = SEMANTICS[recipe.semantics]
    return recipe.run(module, x, partial(reference.norm, semantics=kind))


def _agrees(recipe: Recipe, stand_in: StandIn, probe: Seen) -> bool:
    assert probe.output is not None
    stand_in.use_dtype(probe.dtype)
    try:
        predicted = _predict(recipe, stand_in.module, probe.input)
    except PROBE_ERRORS:
        return False
    return same_bits(predicted, probe.output)


def _follows(recipe: Recipe, stand_in: StandIn, first: Seen, attribute: str) -> bool:
    """Whether the recipe gives the layer's output after a change of one attribute as well."""
    module, before = stand_in.module, getattr(stand_in.module, attribute)
    setattr(module, attribute, _OTHER_EPS)
    moved = run(stand_in, first.input, FLOAT)
    follows = moved.output is not None and _agrees(recipe, stand_in, moved)
    setattr(module, attribute, before)
    return follows


def _same_gradients(recipe: Recipe, stand_in: StandIn, first: Seen) -> bool:
    """Whether autograd agrees within rounding: a layer may detach, or stop a gradient."""
    stand_in.use_dtype(FLOAT)
    module = stand_in.module
    x = first.input.nan_to_num(posinf=1.0).requires_grad_()
    inputs = [x, *module.parameters()]
    direction = torch.linspace(-1, 1, x.numel(), **ON_CPU).reshape(x.shape)
    ours, theirs = (
        torch.autograd.grad((y * direction).sum(), inputs, allow_unused=True)
        if y.requires_grad
        else ()
        for y in (_predict(recipe, module, x), module.forward(x))
    )
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal up to rounding, judged row by row: constant rows have gradients of another size."""
    if a is None or b is None:
        return a is b
    error, size = (t.abs() if t.dim() < 2 else t.abs().amax(-1) for t in (a - b, b))
    return bool((error <= 1e-3 * size + 1e-5 * size.mean() + 1e-6).all())


def _fit_to_autocast(recipes: list[Recipe], stand_in: StandIn, x: Tensor) -> Recipe:
    """The first recipe that gives the layer's result under autocast too, or what does there.

    Under CUDA autocast torch's two norms return fp32 while norms written out keep their dtype, and
    some cast torch's result back: kinds that agree everywhere else differ here.
    """
    for recipe in recipes:
        if _fits_autocast(recipe, stand_in, x):
            return recipe
    for kind in SEMANTICS:
        if _fits_autocast(replace(recipes[0], semantics=kind), stand_in, x):
            return replace(recipes[0], under_autocast=kind)
    return replace(recipes[0], under_autocast="original")


def _fits_autocast(recipe: Recipe, stand_in: StandIn, x: Tensor) -> bool:
    """Whether the recipe gives the layer's result under CUDA autocast, with fp32 parameters."""
    stand_in.use_dtype(FLOAT)
    for dtype in (FLOAT, torch.bfloat16):
        probe = x.to(dtype)
        try:
            with as_cuda_autocast():
                actual = stand_in.module.forward(probe.clone())
            in_fp32 = recipe.semantics in AUTOCAST_TO_FP32
            predicted = _predict(recipe, stand_in.module, probe.float() if in_fp32 else probe)
        except PROBE_ERRORS:
            return False
        if not same_bits(predicted, actual):
            return False
    return True


def _nearest(stand_in: StandIn, observed: Observation) -> str:
    """The refusal's wording: the kind that comes closest in fp32, and by how much it misses."""
    first = observed.first
    assert first.output is not None
    stand_in.use_dtype(FLOAT)
    epses: list[tuple[str | None, float | None]] = [(None, 1e-6)]
    epses = [(name, None) for name in eps_attributes(stand_in.module)] or epses
    misses: list[tuple[float, str]] = []
    for recipe in _hypotheses(stand_in, observed.channels_first, epses):
        try:
            predicted = _predict(recipe, stand_in.module, first.input)
        except PROBE_ERRORS:
            continue
        if predicted.shape == first.output.shape:
            misses.append((_miss(predicted, first.output), recipe.semantics))
    if not misses:
        return "it computes no kind of norm known here"
    off, kind = min(misses)
    where = (
        f"off by up to {off:.1e} in float32"
        if off
        else "equal for plain float32, not for all input"
    )
    return f"it computes no kind of norm known here; nearest: {kind}, {where}"


def _miss(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to 1 below and to the value above it; not where NaN."""
    gap = (a - b).abs() / b.abs().clamp_min(1)
    return float(gap.nan_to_num(0.0, 0.0).max())
