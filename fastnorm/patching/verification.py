"""`verify`: what patching changes in a model's numbers, beside what rounding changes anyway."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fastnorm.patching.patcher import patch
from fastnorm.patching.recipe import rename_parameter
from fastnorm.patching.swap import is_patched, original_class

if TYPE_CHECKING:
    from rich.table import Table

_FACTOR = 4.0
"""A difference counts as rounding up to this multiple of the model's own noise. One other order
of summation is one draw of that noise; the largest of another draw is rarely over twice it."""


@dataclass(frozen=True)
class Difference:
    """One output or gradient.

    Args:
        name: "output.logits" or "grad layers.0.norm.weight".
        difference: largest absolute difference, patched against unpatched.
        noise: the same for the unpatched model with its norms summing in another order.
        floor: 8 units in the last place of the largest absolute value.
    """

    name: str
    difference: float
    noise: float
    floor: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains the difference: never one that is infinite or NaN."""
        allowed = _FACTOR * self.noise + self.floor
        return math.isfinite(self.difference) and self.difference <= allowed


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: true when every difference is rounding.

    Args:
        differences: outputs first, then gradients by parameter.
        patched: number of layers that ran on fastnorm.
    """

    differences: tuple[Difference, ...]
    patched: int

    @property
    def ok(self) -> bool:
        """Whether all differences are within rounding, and some layer was patched at all."""
        return self.patched > 0 and all(d.ok for d in self.differences)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """One line: what to make of it."""
        wrong = [d.name for d in self.differences if not d.ok]
        if not self.patched:
            return "no layer of this model is patched or could be: nothing to verify"
        if wrong:
            shown = ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")
            return f"NOT within rounding: {len(wrong)} of {len(self.differences)} differ ({shown})"
        exact = sum(d.difference == 0 for d in self.differences)
        return (
            f"{self.patched} norms patched; all {len(self.differences)} outputs and gradients "
            f"within rounding, {exact} of them equal bit for bit"
        )

    def worst(self, count: int = 10) -> list[Difference]:
        """The differences largest against what rounding allows."""

        def excess(d: Difference) -> float:
            allowed = _FACTOR * d.noise + d.floor
            return d.difference / allowed if allowed else float(d.difference > 0)

        return sorted(self.differences, key=excess, reverse=True)[:count]

    def __str__(self) -> str:
        lines = [self.verdict, f"{'difference':>10}  {'own noise':>10}"]
        lines += [
            f"{d.difference:>10.2e}  {d.noise:>10.2e}  {'ok ' if d.ok else 'BAD'} {d.name}"
            for d in self.worst()
        ]
        return "\n".join(lines)

    def table(self) -> Table:
        """The ten worst differences as a rich table (needs the optional package rich)."""
        from rich.table import Table

        table = Table(title=self.verdict)
        table.add_column("output or gradient")
        for heading in ("difference", "own noise"):
            table.add_column(heading, justify="right")
        for d in self.worst():
            style = "green" if d.ok else "red"
            table.add_row(d.name, f"{d.difference:.2e}", f"{d.noise:.2e}", style=style)
        return table


def verify(
    model: nn.Module,
    batch: object,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
) -> Verification:
    """Run one batch through a model with and without fastnorm, forward and backward.

    The model is used in place and left as it was: class of each layer, parameters, `.grad`,
    buffers, random state and mode. A patched model is compared with its unpatched self; an
    unpatched one is patched for the comparison only.

    Args:
        model: the model, on its device, in train or eval mode.
        batch: what it takes: a mapping of keyword arguments, a tuple or list of positional ones,
            or the one argument.
        loss: from the model's output to a scalar; None: the output's `loss` if it has one, else
            a fixed random weighting of its tensors.
        seed: for dropout, the random weighting and the other order of summation.

    Returns:
        Differences of every floating output and every parameter's gradient, each beside the
        model's own noise (the unpatched model, its norms summing in another order).

    Raises:
        TypeError: no tensor in the output is floating.
    """
    report = None
    if not any(is_patched(m) for m in model.modules()):
        with warnings.catch_warnings():
            # That nothing can be patched is in the verdict.
            warnings.simplefilter("ignore")
            report = patch(model)
    try:
        return _compare(model, batch, loss, seed)
    finally:
        if report is not None:
            report.undo()


def _compare(
    model: nn.Module, batch: object, loss: Callable[[Any], Tensor] | None, seed: int
) -> Verification:
    patched = sum(is_patched(m) for m in model.modules())
    with _kept(model):
        # One run's results at a time beside the plain ones: gradients can be as big as the model.
        with _originals(model):
            plain = _run(model, batch, loss, seed)
            noise = _distances(plain, _run(model, batch, loss, seed))
        with _originals(model, shuffled=seed + 1):
            shuffled = _distances(plain, _run(model, batch, loss, seed))
        ours = _distances(plain, _run(model, batch, loss, seed))
    differences = []
    for name, value in plain.items():
        largest = float(value.nan_to_num(0.0, 0.0, 0.0).abs().max()) if value.numel() else 0.0
        floor = 8 * torch.finfo(value.dtype).eps * largest
        own = max(noise[name], shuffled[name])
        differences.append(Difference(name, ours[name], own, floor))
    return Verification(tuple(differences), patched)


def _distances(plain: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Largest absolute difference by name; NaN against NaN is none, and a missing one is NaN."""
    found = dict.fromkeys(plain, float("nan"))
    for name, value in plain.items():
        theirs = other.get(name)
        if theirs is None or theirs.shape != value.shape or theirs.dtype != value.dtype:
            continue
        gap = (value.double() - theirs.double()).abs()
        same = (value == theirs) | (value.isnan() & theirs.isnan())
        found[name] = float(gap.masked_fill(same, 0.0).max()) if gap.numel() else 0.0
    return found


def _run(
    model: nn.Module, batch: object, loss: Callable[[Any], Tensor] | None, seed: int
) -> dict[str, Tensor]:
    """Outputs and gradients of one forward and backward pass, by name."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        torch.manual_seed(seed)
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        outputs = dict(_floating(output, "output"))
        if not outputs:
            raise TypeError(
                "verify needs a model whose output holds a floating tensor (in tensors, "
                f"sequences or mappings); got {type(output).__name__}"
            )
        results = {name: tensor.detach() for name, tensor in outputs.items()}
        scalar = _scalar(output, outputs, seed) if loss is None else loss(output)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if scalar is None or not scalar.requires_grad or not named:
            return results
        # Not backward(): .grad, and hooks that step an optimizer, are the caller's.
        grads = torch.autograd.grad(scalar, list(named.values()), allow_unused=True)
    return results | {f"grad {n}": g for n, g in zip(named, grads, strict=True) if g is not None}


def _floating(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floating(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _floating(item, f"{name}.{i}")


def _scalar(output: object, outputs: dict[str, Tensor], seed: int) -> Tensor | None:
    """The output's own loss, or a weighting in which no norm's gradient cancels."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for tensor in outputs.values():
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            terms.append((tensor * weights).mean())
    return sum((term.to(terms[0].device) for term in terms[1:]), terms[0]) if terms else None


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics, caches) back afterwards."""
    before = [(b, b.clone()) for b in model.buffers() if b.device.type != "meta"]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def _originals(model: nn.Module, shuffled: int | None = None) -> Iterator[None]:
    """The model with its layers' own classes; with `shuffled`, summing in a random order."""
    with ExitStack() as stack:
        for module in model.modules():
            if is_patched(module):
                stack.callback(setattr, module, "__class__", type(module))
                own = original_class(module)
                made = own if shuffled is None else _shuffled_class(cast(Any, own), shuffled)
                module.__class__ = made
        yield


@cache
def _shuffled_class(original: Any, seed: int) -> type[nn.Module]:
    """A subclass of `original` that computes the same on its features in a random order."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        features = input.shape[-1]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(features, generator=generator).to(input.device)
        twin = object.__new__(original)
        vars(twin).update(vars(self))
        for kind in ("_parameters", "_buffers"):
            tensors = vars(self)[kind].items()
            vars(twin)[kind] = {n: t if t is None else t[..., order] for n, t in tensors}
        return original.forward(twin, input[..., order])[..., order.argsort()]

    rename_parameter(forward, list(inspect.signature(original.forward).parameters)[1])
    return type(original)(original.__name__, (original,), {"forward": forward})
