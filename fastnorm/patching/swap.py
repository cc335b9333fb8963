"""Giving one module another class, and its own back: the only thing that patching changes."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, cast

from torch import nn

from fastnorm.patching.recipe import Recipe, build_forward


class FastNormMixin:
    """Marks the classes made by `fast_class`; a patched module holds no state of fastnorm's."""

    _fastnorm_original: ClassVar[type[nn.Module]]
    _fastnorm_recipe: ClassVar[Recipe]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by naming the original class, as made classes cannot be imported."""
        # Recognition refuses classes with a pickling of their own, so this is object's: a
        # constructor, its arguments, and the state that matters.
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(max(int(protocol), 2)))
        return (_rebuild, (self._fastnorm_original, self._fastnorm_recipe), *state)


def fast_class(original: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    """The subclass of `original` whose forward follows `recipe`; the same one for the same pair.

    The name keeps the original's as its ending, since libraries choose a layer's initialisation
    by "LayerNorm" or "RMSNorm" in it.
    """
    # mypy takes a class for unhashable when its instances define __hash__.
    return cast(type[nn.Module], _made(cast(Any, original), recipe))


@cache
def _made(original: Any, recipe: Recipe) -> type:
    namespace = {
        "forward": build_forward(original, recipe),
        "__module__": original.__module__,
        "__qualname__": f"Fast{original.__name__}",
        "__doc__": original.__doc__,
        "_fastnorm_original": original,
        "_fastnorm_recipe": recipe,
    }
    return type(original)(f"Fast{original.__name__}", (FastNormMixin, original), namespace)


def _rebuild(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    made = fast_class(original, recipe)
    return made.__new__(made)


def is_patched(module: nn.Module) -> bool:
    """Whether the module has a class made here, be it under a parametrization."""
    return isinstance(module, FastNormMixin)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class a patched module had before."""
    return cast(type[nn.Module], vars(type(module))["_fastnorm_original"])


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a forward on the instance hides its class's.

    The class's own forward, bound to the instance, hides nothing: accelerate leaves it there when
    it takes its hooks off. A change of class removes it.
    """
    own = vars(module).get("forward")
    if own is None:
        return False
    bound = getattr(own, "__func__", None), getattr(own, "__self__", None)
    return bound[0] is not type(module).forward or bound[1] is not module


def swap(module: nn.Module, recipe: Recipe) -> None:
    """Make `module` compute by `recipe`. Parameters, hooks, buffers and attributes stay as is."""
    vars(module).pop("forward", None)
    module.__class__ = fast_class(type(module), recipe)


def restore(module: nn.Module, name: str) -> None:
    """Give a patched module its own class again; nothing happens to a module that has it.

    Raises:
        RuntimeError: its class was changed once more after patching.
    """
    check_restorable(module, name)
    if is_patched(module):
        vars(module).pop("forward", None)
        module.__class__ = original_class(module)


def check_restorable(module: nn.Module, name: str) -> None:
    """Raise RuntimeError where something else built on a patched module since."""
    if not is_patched(module):
        return
    shown = name or "(root)"
    if "_fastnorm_original" not in vars(type(module)):
        raise RuntimeError(
            f"layer {shown!r} became a {type(module).__name__} after it was patched; undo that "
            "first (for a parametrization: torch.nn.utils.parametrize.remove_parametrizations), "
            "then unpatch"
        )
    if has_forward_of_its_own(module):
        raise RuntimeError(
            f"layer {shown!r} got a forward of its own after it was patched, which may hold the "
            "patched one; take that off first (for accelerate: accelerate.hooks."
            "remove_hook_from_module), then unpatch"
        )
