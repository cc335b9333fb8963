"""Which layers a caller means: by name pattern, by type, by function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Selectors = Selector | Iterable[Selector] | None


class Selection:
    """The layers chosen by `include`, less those chosen by `exclude` or refused by `filter_fn`.

    A string is a glob over dotted names that also covers everything below a match
    ("encoder", "*.q_norm", "layers.[0-3]"); a type covers its subclasses; a function takes the
    name and the module.

    Args:
        include: one selector or several; None: every layer.
        exclude: one selector or several; None: no layer.
        filter_fn: a last word, `filter_fn(name, module) -> bool`.

    Raises:
        TypeError: a selector is none of these.
    """

    def __init__(
        self,
        include: Selectors,
        exclude: Selectors,
        filter_fn: Callable[[str, nn.Module], bool] | None,
    ) -> None:
        self._include = None if include is None else _as_list("include", include)
        self._exclude = [] if exclude is None else _as_list("exclude", exclude)
        self._filter_fn = filter_fn

    def refusal(self, name: str, module: nn.Module) -> str | None:
        """Why this layer is not chosen; None: it is."""
        if self._include is not None and not any(_chooses(s, name, module) for s in self._include):
            return "not in include"
        for selector in self._exclude:
            if _chooses(selector, name, module):
                return f"excluded by {_shown(selector)}"
        if self._filter_fn is not None and not self._filter_fn(name, module):
            return f"refused by {_shown(self._filter_fn)}"
        return None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Name patterns that fit no module at all: likely mistyped."""
        known = list(names)
        patterns = [s for s in [*(self._include or []), *self._exclude] if isinstance(s, str)]
        return [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]


def _as_list(argument: str, selectors: Selector | Iterable[Selector]) -> list[Selector]:
    single = isinstance(selectors, str) or callable(selectors)
    listed: list[Selector] = [selectors] if single else list(selectors)  # type: ignore[arg-type, list-item]
    for selector in listed:
        if not (isinstance(selector, str) or callable(selector)):
            raise TypeError(
                f"{argument} takes name patterns, module types and functions (name, module) -> "
                f"bool, one or a list of them; got {selector!r}"
            )
    return listed


def _chooses(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return any(fnmatchcase(prefix, selector) for prefix in _prefixes(name))
    if isinstance(selector, type):
        return isinstance(module, selector)
    return selector(name, module)


def _prefixes(name: str) -> Iterator[str]:
    """ "a.b.c" gives "a", "a.b", "a.b.c"."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _shown(selector: Selector) -> str:
    return repr(selector) if isinstance(selector, str) else getattr(selector, "__name__", "filter")
