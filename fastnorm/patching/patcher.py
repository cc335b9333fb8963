"""`patch` and `unpatch`: walking a model."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from fastnorm import sharding
from fastnorm.autocast import AutocastOutput, checked_autocast_output
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.recognition import recognise
from fastnorm.patching.report import Patched, Report, Skipped
from fastnorm.patching.selection import Selection, Selectors
from fastnorm.patching.standin import full_shape
from fastnorm.patching.swap import check_restorable, is_patched, restore, swap


def patch(
    model: nn.Module,
    *,
    include: Selectors = None,
    exclude: Selectors = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    strict: bool = False,
    autocast_output: AutocastOutput = "torch",
) -> Report:
    """Make the LayerNorm and RMSNorm layers of a model run on fastnorm, in place.

    Only the class of each layer changes, to a subclass of its own: Parameters, state_dict keys,
    hooks, buffers and attributes are the same objects as before. Patching twice is harmless.

    Args:
        model: any module; may be one norm layer itself, on any device including meta.
        include: layers to patch, as glob patterns over names, types, or functions
            `(name, module) -> bool`; one or a list. None: all.
        exclude: layers to leave alone, in the same form.
        filter_fn: called as `filter_fn(name, module)` for each layer that would be patched.
        strict: raise when a norm-like layer is not recognised.
        autocast_output: what the layers give under autocast: "torch" (what they give unpatched),
            "input" (the input's dtype) or "autocast" (the dtype that the next linear layer casts
            to anyway: the same numbers there, and no fp32 copy written, read and kept).

    Returns:
        What was patched, what was skipped and why; its `undo()` takes this call back.

    Raises:
        TypeError: `model` is no module, or a selector is of no known form.
        ValueError: `strict` and a norm-like layer is not recognised, or `autocast_output` is not
            one of the three; nothing is changed then.
    """
    checked_autocast_output(autocast_output)
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch takes a torch.nn.Module; got {type(model).__name__}")
    selection = Selection(include, exclude, filter_fn)
    chosen: list[tuple[str, nn.Module, Recipe]] = []
    skipped: list[Skipped] = []
    unknown: list[Skipped] = []
    for name, module in model.named_modules():
        found = recognise(module)
        if found is None:
            continue
        refusal = selection.refusal(name, module)
        if refusal is None and isinstance(found, Recipe):
            chosen.append((name, module, replace(found, autocast_output=autocast_output)))
            continue
        reason = refusal if refusal is not None else found.reason  # type: ignore[union-attr]
        entry = Skipped(name, type(module).__name__, reason)
        skipped.append(entry)
        if refusal is None and isinstance(found, Refusal) and found.unknown:
            unknown.append(entry)
    _warn_of_unmatched(selection, model)
    if strict and unknown:
        raise ValueError(_strict_message(unknown))
    return _apply(chosen, skipped)


def unpatch(model: nn.Module) -> int:
    """Give every patched layer of a model its own class back, whichever call patched it.

    Returns:
        The number of layers restored.

    Raises:
        RuntimeError: a patched layer was parametrized or sharded since; nothing is changed then.
    """
    patched = [(name, m) for name, m in model.named_modules() if is_patched(m)]
    for name, module in patched:
        check_restorable(module, name)
    for name, module in patched:
        restore(module, name)
    return len(patched)


def _apply(chosen: list[tuple[str, nn.Module, Recipe]], skipped: list[Skipped]) -> Report:
    entries = tuple(_entry(name, module, recipe) for name, module, recipe in chosen)
    sharding.register_if_loaded()
    for _, module, recipe in chosen:
        swap(module, recipe)
    if not chosen and not any(entry.reason.startswith("already") for entry in skipped):
        warnings.warn(
            f"fastnorm.patch found no layer to patch ({len(skipped)} norm-like layers skipped; "
            "print the report for the reasons)",
            stacklevel=3,
        )
    handles = tuple((name, weakref.ref(module)) for name, module, _ in chosen)
    return Report(entries, tuple(skipped), handles)


def _entry(name: str, module: nn.Module, recipe: Recipe) -> Patched:
    weight = None if recipe.weight is None else getattr(module, recipe.weight)
    shape = None if recipe.shape is None else getattr(module, recipe.shape)
    if shape is None and weight is not None:
        shape = full_shape(weight)[-1:]
    return Patched(
        name=name,
        class_name=type(module).__name__,
        semantics=recipe.semantics,
        hidden=None if shape is None else math.prod(shape),
        dtype=None if weight is None else str(weight.dtype).removeprefix("torch."),
        note="its own forward under autocast" if recipe.under_autocast == "original" else "",
    )


def _warn_of_unmatched(selection: Selection, model: nn.Module) -> None:
    unmatched = selection.unmatched(name for name, _ in model.named_modules())
    if unmatched:
        warnings.warn(
            f"fastnorm.patch: no module's name fits {', '.join(map(repr, unmatched))}; patterns "
            "are globs over dotted names such as '*.norm1'",
            stacklevel=3,
        )


def _strict_message(unknown: list[Skipped]) -> str:
    lines = [f"  {e.name or '(root)'} ({e.class_name}): {e.reason}" for e in unknown]
    return "\n".join(
        [
            f"strict: {len(unknown)} norm-like layers are not recognised:",
            *lines,
            "name their semantics with fastnorm.register(cls, semantics=...), exclude them, or "
            "patch with strict=False",
        ]
    )
