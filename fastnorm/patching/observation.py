"""What a layer does when it is shown the probes, and whatever makes it unfit for recognition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastnorm.patching.probes import (
    DTYPE_PAIRS,
    FLOAT,
    PROBE_ERRORS,
    ReadsValues,
    probe_input,
    same_bits,
)
from fastnorm.patching.recipe import Refusal
from fastnorm.patching.standin import StandIn, own_attributes

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_FREE_SIZES = (96, 80)
"""Feature counts to try where no parameter and no attribute fixes one."""


@dataclass(frozen=True)
class Seen:
    """One probe: the input, the dtype of the parameters, and what came out (None: it failed)."""

    input: Tensor
    dtype: torch.dtype
    output: Tensor | None
    error: str = ""


@dataclass(frozen=True)
class Observation:
    """All probes that the layer took.

    Args:
        seen: outputs, beginning with fp32 input and parameters.
        channels_first: the layer takes `[B, C, ...]` and normalises dimension 1.
    """

    seen: tuple[Seen, ...]
    channels_first: bool

    @property
    def first(self) -> Seen:
        """fp32 input and parameters."""
        return self.seen[0]


def observe(stand_in: StandIn, generator: torch.Generator) -> Observation | Refusal:
    """Show the stand-in every probe, features last and, where that fails, features second."""
    refusal: Refusal | None = None
    for trailing, channels_first in _layouts(stand_in):
        found = _observe(stand_in, trailing, channels_first, generator)
        if isinstance(found, Observation):
            return found
        # The plainest layout's failure says most.
        refusal = refusal or found
    assert refusal is not None
    return refusal


def eps_attributes(module: nn.Module) -> dict[str, float | None]:
    """Attributes that may hold eps, the usual names first; None is torch's own default for RMS."""
    found = {
        name: value
        for name, value in own_attributes(module).items()
        if (isinstance(value, float) and 0 <= value < 1) or (value is None and name in EPS_NAMES)
    }
    return {n: found[n] for n in sorted(found, key=lambda n: (n not in EPS_NAMES, n))}


def normalized_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The attribute of that name, if it is one as torch's LayerNorm has it."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)) and shape and all(isinstance(n, int) for n in shape):
        return tuple(shape)
    return None


def run(stand_in: StandIn, x: Tensor, dtype: torch.dtype) -> Seen:
    """One call of the stand-in's forward with parameters of `dtype`."""
    stand_in.use_dtype(dtype)
    try:
        output = stand_in.module.forward(x.clone())
    except PROBE_ERRORS as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Seen(x, dtype, None, f"{type(error).__name__} {first_line[:100]}".rstrip())
    if not isinstance(output, Tensor):
        return Seen(x, dtype, None, f"it returned a {type(output).__name__}")
    return Seen(x, dtype, output)


def _layouts(stand_in: StandIn) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The last dimensions an input may have, and whether they belong in second place."""
    shape = normalized_shape(stand_in.module)
    if shape is not None:
        trailing = [shape]
    elif stand_in.shapes:
        trailing = [max(stand_in.shapes, key=len)]
    else:
        sizes = [v for v in own_attributes(stand_in.module).values() if type(v) is int and v > 1]
        trailing = [(n,) for n in (*sizes, *_FREE_SIZES)]
    yield from ((t, False) for t in trailing)
    yield from ((t, True) for t in trailing if len(t) == 1)


def _observe(
    stand_in: StandIn, trailing: tuple[int, ...], channels_first: bool, generator: torch.Generator
) -> Observation | Refusal:
    if trailing[-1] < 2:
        return Refusal("it has one feature, which tells no kinds apart", unknown=True)
    eps = next((v for v in eps_attributes(stand_in.module).values() if v), 1e-6)

    def probe(leading: int) -> Tensor:
        x = probe_input(leading, trailing, eps, generator)
        return x.movedim(-1, 1).contiguous() if channels_first else x

    # Layers made for one number of dimensions may refuse others, but not compute otherwise.
    others = [
        run(stand_in, probe(leading), FLOAT) for leading in ((3,) if channels_first else (1, 3))
    ]
    x = probe(2)
    seen = [run(stand_in, x.to(dx), dw) for dx, dw in DTYPE_PAIRS]
    if seen[0].output is None and others[-1].output is not None:
        x = others[-1].input
        seen = [run(stand_in, x.to(dx), dw) for dx, dw in DTYPE_PAIRS]
    # Equal values with other strides (channels_last, where features come second).
    others.append(run(stand_in, x.movedim(1, -1).contiguous().movedim(-1, 1), FLOAT))
    first = seen[0]
    if first.output is None:
        return Refusal(f"its forward failed on {list(x.shape)}: {first.error}", unknown=True)
    if first.output.shape != x.shape:
        shapes = f"{list(x.shape)} to {list(first.output.shape)}"
        return Refusal(f"its forward turns {shapes}", unknown=True)
    if all(probe.output is None for probe in seen[1:3]):
        return Refusal(f"its forward failed in bfloat16: {seen[1].error}", unknown=True)
    taken = tuple(probe for probe in (*seen, *others) if probe.output is not None)
    return _doubt(stand_in, first) or Observation(taken, channels_first)


def _doubt(stand_in: StandIn, first: Seen) -> Refusal | None:
    """Whether the layer is anything but a function of its input and parameters."""
    module = stand_in.module
    if not _repeats(stand_in, first):
        return Refusal("it gives different results for the same input", unknown=True)
    if not stand_in.is_unchanged(FLOAT):
        return Refusal("its forward changes its own state", unknown=True)
    with torch.no_grad():
        if not _repeats(stand_in, first):
            return Refusal("it computes otherwise without gradients", unknown=True)
    module.train(not module.training)
    same_in_other_mode = _repeats(stand_in, first)
    module.train(not module.training)
    if not same_in_other_mode:
        return Refusal("it computes otherwise in train than in eval mode", unknown=True)
    x = first.input.clone()
    with ReadsValues() as reads:
        module.forward(x)
    if reads.seen:
        return Refusal("its forward decides by the values of its input", unknown=True)
    if not same_bits(x, first.input):
        return Refusal("its forward writes into its input", unknown=True)
    return None


def _repeats(stand_in: StandIn, first: Seen) -> bool:
    again = run(stand_in, first.input, FLOAT).output
    return again is not None and first.output is not None and same_bits(first.output, again)
