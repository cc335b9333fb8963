"""Which kind of norm a layer is, found by what it computes and not by what it is called.

A stand-in of the layer runs on a few small inputs in six dtype pairs. A kind is accepted when its
reference gives the same bits everywhere, the same gradients, follows a changed eps, and nothing
about the layer is doubtful. See: docs/patching.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastnorm import reference
from fastnorm.patching.probes import (
    DTYPE_PAIRS,
    FLOAT,
    PROBE_ERRORS,
    ReadsValues,
    as_cuda_autocast,
    probe_input,
    quiet,
    same_bits,
)
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.standin import StandIn, own_attributes
from fastnorm.semantics import SEMANTICS

WEIGHT_NAMES = ("weight", "scale", "gamma")
BIAS_NAMES = ("bias", "beta")
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_FIXED_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
_OTHER_EPS = 0.25
_FREE_SIZES = (96, 80)
"""Feature counts to try where no parameter and no attribute fixes one."""


@dataclass(frozen=True)
class _Seen:
    """One probe: the input, the dtype of the parameters, and what came out (None: it raised)."""

    input: Tensor
    dtype: torch.dtype
    output: Tensor | None
    error: str = ""


def fingerprint(module: nn.Module) -> Recipe | Refusal:
    """The recipe whose results are the module's, bit for bit, or why there is none.

    Args:
        module: a leaf that `standin.obstacle` has nothing against.
    """
    with quiet() as generator:
        stand_in = StandIn(module, generator)
        seen: list[_Seen] | Refusal = Refusal("")
        for trailing in _trailing_shapes(stand_in.module, module):
            seen = _observe(stand_in, trailing, generator)
            if not isinstance(seen, Refusal):
                break
        if isinstance(seen, Refusal):
            return seen
        recipes = _agreeing(stand_in, seen)
        if not recipes:
            return Refusal(_nearest(stand_in, seen[0]), unknown=True)
        if not _same_gradients(recipes[0], stand_in, seen[0]):
            return Refusal(f"has the values of {recipes[0].semantics}, not its gradients", True)
        for recipe in recipes:
            if _fits_autocast(recipe, stand_in, seen[0].input):
                return recipe
        return replace(recipes[0], own_autocast=True)


def _agreeing(stand_in: StandIn, seen: list[_Seen]) -> list[Recipe]:
    """The recipes that give every output seen, by an eps read from the module if possible."""
    live = _hypotheses(stand_in, [(name, None) for name in _eps_attributes(stand_in.module)])
    found = [r for r in live if all(_agrees(r, stand_in, probe) for probe in seen)]
    recipes = [known for r in found if (known := _with_live_eps(r, stand_in, seen[0]))]
    if recipes:
        return recipes
    fixed = _hypotheses(stand_in, [(None, value) for value in _FIXED_EPS])
    return [r for r in fixed if all(_agrees(r, stand_in, probe) for probe in seen)]


def _trailing_shapes(stand_in: nn.Module, module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes that the last dimensions of an input may have."""
    shape = getattr(stand_in, "normalized_shape", None)
    if isinstance(shape, (tuple, list)) and shape and all(isinstance(n, int) for n in shape):
        return [tuple(shape)]
    tensors = (*module._parameters.values(), *module._buffers.values())
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    if shapes:
        return [max(shapes, key=len)]
    return [(n,) for n in _FREE_SIZES]


def _observe(
    stand_in: StandIn, trailing: tuple[int, ...], generator: torch.Generator
) -> list[_Seen] | Refusal:
    """Run the stand-in on everything, looking for whatever makes it unfit.

    Returns:
        What was seen, beginning with fp32 input and parameters; or why the layer is refused.
    """
    if trailing[-1] < 2:
        return Refusal("it has one feature, which tells no kinds apart", unknown=True)
    eps = next((v for v in _eps_attributes(stand_in.module).values()), 1e-6)
    x = probe_input(2, trailing, eps, generator)
    seen = [_run(stand_in, x.to(dx), dw) for dx, dw in DTYPE_PAIRS]
    first = seen[0]
    if first.output is None:
        return Refusal(f"its forward failed on {list(x.shape)}: {first.error}", unknown=True)
    if first.output.shape != x.shape:
        shapes = f"{list(x.shape)} to {list(first.output.shape)}"
        return Refusal(f"its forward turns {shapes}", unknown=True)
    if all(probe.output is None for probe in seen[1:3]):
        return Refusal(f"its forward failed in bfloat16: {seen[1].error}", unknown=True)
    for leading in (1, 3):
        # Layers made for one number of dimensions may refuse others, but not compute otherwise.
        seen.append(_run(stand_in, probe_input(leading, trailing, eps, generator), FLOAT))
    doubt = _doubt(stand_in, first)
    return doubt or [probe for probe in seen if probe.output is not None]


def _run(stand_in: StandIn, x: Tensor, dtype: torch.dtype) -> _Seen:
    stand_in.use_dtype(dtype)
    try:
        output = stand_in.module.forward(x.clone())
    except PROBE_ERRORS as error:
        first_line = (str(error).splitlines() or [""])[0]
        return _Seen(x, dtype, None, f"{type(error).__name__} {first_line[:100]}".rstrip())
    if not isinstance(output, Tensor):
        return _Seen(x, dtype, None, f"it returned a {type(output).__name__}")
    return _Seen(x, dtype, output)


def _doubt(stand_in: StandIn, first: _Seen) -> Refusal | None:
    """Whether the layer is anything but a function of its input and parameters."""
    assert first.output is not None
    module = stand_in.module
    attributes = dict(own_attributes(module))
    again = _run(stand_in, first.input, FLOAT)
    if again.output is None or not same_bits(first.output, again.output):
        return Refusal("it gives different results for the same input", unknown=True)
    if not stand_in.is_unchanged(FLOAT, attributes):
        return Refusal("its forward changes its own state", unknown=True)
    module.train(not module.training)
    other_mode = _run(stand_in, first.input, FLOAT)
    module.train(not module.training)
    if other_mode.output is None or not same_bits(first.output, other_mode.output):
        return Refusal("it computes otherwise in train than in eval mode", unknown=True)
    x = first.input.clone()
    with ReadsValues() as reads:
        module.forward(x)
    if reads.seen:
        return Refusal("its forward decides by the values of its input", unknown=True)
    if not same_bits(x, first.input):
        return Refusal("its forward writes into its input", unknown=True)
    return None


def _eps_attributes(module: nn.Module) -> dict[str, float]:
    """Attributes that may hold eps, the usual names first."""
    found = {n: v for n, v in own_attributes(module).items() if isinstance(v, float) and 0 <= v < 1}
    return {n: found[n] for n in sorted(found, key=lambda n: (n not in EPS_NAMES, n))}


def _hypotheses(
    stand_in: StandIn, epses: Sequence[tuple[str | None, float | None]]
) -> Iterator[Recipe]:
    """Every way in which the module's attributes could feed a norm, likely ones first."""
    module = stand_in.module
    names = sorted(stand_in.tensor_names, key=lambda n: (n not in WEIGHT_NAMES, n))
    shape = "normalized_shape" if hasattr(module, "normalized_shape") else None
    parameter = list(inspect.signature(type(module).forward).parameters)[1]
    for weight in (*names, None):
        biases = (*(n for n in names if n != weight), None) if weight else (None,)
        for bias, kind, (eps, fixed) in product(biases, SEMANTICS.values(), epses):
            if bias is None or kind.centered:
                yield Recipe(kind.name, weight, bias, eps, fixed, shape, parameter)


def _predict(recipe: Recipe, module: nn.Module, x: Tensor) -> Tensor:
    return reference.norm(x, *recipe.arguments(module, x), SEMANTICS[recipe.semantics])


def _agrees(recipe: Recipe, stand_in: StandIn, probe: _Seen) -> bool:
    assert probe.output is not None
    stand_in.use_dtype(probe.dtype)
    try:
        predicted = _predict(recipe, stand_in.module, probe.input)
    except PROBE_ERRORS:
        return False
    return same_bits(predicted, probe.output)


def _with_live_eps(recipe: Recipe, stand_in: StandIn, first: _Seen) -> Recipe | None:
    """The recipe, with eps fixed if the forward does not read the attribute; None on a doubt."""
    if recipe.eps is None:
        return recipe
    module, before = stand_in.module, getattr(stand_in.module, recipe.eps)
    setattr(module, recipe.eps, _OTHER_EPS)
    moved = _run(stand_in, first.input, FLOAT)
    agrees = moved.output is not None and _agrees(recipe, stand_in, moved)
    setattr(module, recipe.eps, before)
    if agrees:
        return recipe
    fixed = replace(recipe, eps=None, fixed_eps=before)
    return fixed if moved.output is not None and _agrees(fixed, stand_in, moved) else None


def _same_gradients(recipe: Recipe, stand_in: StandIn, first: _Seen) -> bool:
    """Whether autograd agrees within rounding: a layer may detach, or stop a gradient."""
    stand_in.use_dtype(FLOAT)
    module = stand_in.module
    x = first.input.clone().requires_grad_()
    inputs = [x, *module.parameters()]
    direction = torch.linspace(-1, 1, x.numel()).reshape(x.shape)
    ours, theirs = (
        torch.autograd.grad(y, inputs, direction, allow_unused=True) if y.requires_grad else ()
        for y in (_predict(recipe, module, x), module.forward(x))
    )
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal up to rounding, judged row by row: constant rows have gradients of another size."""
    if a is None or b is None:
        return a is b
    error, size = (t.abs() if t.dim() < 2 else t.abs().amax(-1) for t in (a - b, b))
    return bool((error <= 1e-3 * size + 1e-5 * size.mean() + 1e-6).all())


def _fits_autocast(recipe: Recipe, stand_in: StandIn, x: Tensor) -> bool:
    """Whether the recipe also gives the layer's result under autocast.

    Under CUDA autocast torch's two norms return fp32 while norms written out keep their dtype:
    kinds that agree everywhere else differ here.
    """
    stand_in.use_dtype(FLOAT)
    module = stand_in.module
    torchs = _TORCHS.get(recipe.semantics)
    for dtype in (FLOAT, torch.bfloat16):
        probe = x.to(dtype)
        try:
            with as_cuda_autocast():
                actual = module.forward(probe.clone())
                if torchs is not None:
                    predicted = torchs(probe, *recipe.arguments(module, probe))
            if torchs is None:
                predicted = _predict(recipe, module, probe)
        except PROBE_ERRORS:
            return False
        if not same_bits(predicted, actual):
            return False
    return True


def _rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


_TORCHS: dict[str, Callable[..., Tensor]] = {"layer": F.layer_norm, "rms": _rms_norm}


def _nearest(stand_in: StandIn, first: _Seen) -> str:
    """The refusal's wording: the kind that comes closest in fp32, and by how much it misses."""
    assert first.output is not None
    stand_in.use_dtype(FLOAT)
    epses: list[tuple[str | None, float | None]] = [(None, 1e-6)]
    epses = [(name, None) for name in _eps_attributes(stand_in.module)] or epses
    misses: list[tuple[float, str]] = []
    for recipe in _hypotheses(stand_in, epses):
        try:
            predicted = _predict(recipe, stand_in.module, first.input)
        except PROBE_ERRORS:
            continue
        if predicted.shape == first.output.shape:
            misses.append((float((predicted - first.output).abs().max()), recipe.semantics))
    if not misses:
        return "it computes no kind of norm known here"
    off, kind = min(misses)
    where = f"off by up to {off:.1e} in float32" if off else "equal in float32, not in other dtypes"
    return f"it computes no kind of norm known here; nearest: {kind}, {where}"
