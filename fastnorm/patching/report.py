"""What a call of `patch` did: what runs on fastnorm, what does not and why, and the way back."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fastnorm.patching.swap import check_restorable, restore

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Patched:
    """A layer that now runs on fastnorm.

    Args:
        name: dotted name in the model, "" for the model itself; shared layers have their first.
        class_name: the layer's own class.
        semantics: the kind of norm it was recognised as.
        hidden: features that share one mean and variance; None: fixed by no parameter.
        dtype: of the weight ("bfloat16"); None: without weight.
        note: when fastnorm does not run it after all; "" for most.
    """

    name: str
    class_name: str
    semantics: str
    hidden: int | None
    dtype: str | None
    note: str = ""


@dataclass(frozen=True)
class Skipped:
    """A norm-like layer that was left as it was, and why."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of `fastnorm.patch`: `len(report)` layers were patched.

    Also a context manager that undoes the patch on exit. Pickled or copied reports keep the
    entries and lose the way back.

    Args:
        patched: the layers patched by this call, in the model's order.
        skipped: norm-like layers left alone, with reasons.
    """

    patched: tuple[Patched, ...]
    skipped: tuple[Skipped, ...]
    _modules: tuple[tuple[str, weakref.ref[nn.Module]], ...] | None = field(
        default=None, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.patched)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __getstate__(self) -> dict[str, Any]:
        return {"patched": self.patched, "skipped": self.skipped, "_modules": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def counts(self) -> dict[str, int]:
        """Number of patched layers by semantics."""
        return dict(Counter(entry.semantics for entry in self.patched))

    def undo(self) -> None:
        """Give the layers patched by this call their own classes back; a second time does nothing.

        Raises:
            RuntimeError: a layer's class was changed by something else since, or the report is a
                copy. No layer is changed then.
        """
        if self._modules is None:
            raise RuntimeError(
                "a copied or unpickled report cannot undo its patch; use fastnorm.unpatch(model)"
            )
        alive = [(name, ref()) for name, ref in self._modules]
        for name, module in alive:
            if module is not None:
                check_restorable(module, name)
        for name, module in alive:
            if module is not None:
                restore(module, name)

    def __str__(self) -> str:
        total = f"fastnorm: {len(self)} patched, {len(self.skipped)} skipped"
        rows = _grouped((e.class_name, _describe(e), e.name) for e in self.patched)
        rows += _grouped((e.class_name, f"skipped: {e.reason}", e.name) for e in self.skipped)
        width = max((len(row[1]) for row in rows), default=0)
        lines = [
            f"{count:>5} x {name:<{width}}  {what}  ({first})" for count, name, what, first in rows
        ]
        return "\n".join([total, *lines])

    def table(self) -> Table:
        """The same as a rich table (needs the optional package rich)."""
        from rich.table import Table

        table = Table(title=f"fastnorm: {len(self)} patched, {len(self.skipped)} skipped")
        for heading in ("layers", "class", "kind, or why not", "first"):
            table.add_column(heading, justify="right" if heading == "layers" else "left")
        for count, name, what, first in _grouped(
            (e.class_name, _describe(e), e.name) for e in self.patched
        ):
            table.add_row(str(count), name, what, first, style="green")
        for count, name, what, first in _grouped(
            (e.class_name, e.reason, e.name) for e in self.skipped
        ):
            table.add_row(str(count), name, what, first, style="yellow")
        return table


def _describe(entry: Patched) -> str:
    size = "any size" if entry.hidden is None else str(entry.hidden)
    shown = f"{entry.semantics} [{size}] {entry.dtype or 'no weight'}"
    return f"{shown}, {entry.note}" if entry.note else shown


def _grouped(rows: Iterable[tuple[str, str, str]]) -> list[tuple[int, str, str, str]]:
    """Equal (class, description) pairs as one row: count, class, description, first name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for class_name, what, name in rows:
        groups.setdefault((class_name, what), []).append(name or "(root)")
    return [(len(names), *key, names[0]) for key, names in groups.items()]
