"""How the operators treat DTensors: rows may lie on several devices, a row may not.

Rows are independent, so any dimension that is not normalised can stay split; weights are needed
whole, and each device's weight gradient is a part of the sum. An input that is split along a
normalised dimension is gathered first, as torch does for its own operators.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

Placements = list[Any]


def ensure_registered(x: Tensor) -> None:
    """Register the rules below if `x` is a DTensor, whose package takes 0.7 s to import."""
    if type(x).__name__ == "DTensor":
        _register()


def register_if_loaded() -> None:
    """Register the rules where DTensor is in use: torch.compile traces operators that must have
    them, and cannot register any."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.fastnorm
    register_sharding(operators.norm_forward.default)(_forward_rules)
    register_sharding(operators.norm_backward.default)(_backward_rules)


def _forward_rules(
    x: Any,
    weight: Any,
    bias: Any,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    out_dtype: torch.dtype,
) -> list[tuple[Placements, Placements]]:
    """Acceptable (outputs, inputs): y and stats `[2, ...]`, for `norm_forward`'s arguments."""
    from torch.distributed.tensor import Replicate, Shard

    whole: Any = Replicate()
    options = [None] * 4
    parameters = [whole if t is not None else None for t in (weight, bias)]
    rules = [([whole, whole], [whole, *parameters, *options])]
    for dim in _row_dims(x, weight, normalized_ndim):
        split = Shard(dim)
        rules.append(([split, Shard(dim + 1)], [split, *parameters, *options]))
    return rules


def _backward_rules(
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stats: Any,
    normalized_ndim: int,
    semantics: str,
    output_mask: list[bool],
) -> list[tuple[Placements, Placements]]:
    """Acceptable (outputs, inputs): dx, dweight, dbias, for `norm_backward`'s arguments."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole: Any = Replicate()
    options = [None] * 3
    parameters = [whole if t is not None else None for t in (weight, bias)]
    rules = [([whole] * 3, [whole, whole, *parameters, whole, *options])]
    want_dx, *want_parameters = output_mask
    # What nobody asked for comes back as an empty tensor, the same on every device.
    sums = [Partial() if wanted else whole for wanted in want_parameters]
    for dim in _row_dims(x, weight, normalized_ndim):
        split = Shard(dim)
        outputs = [split if want_dx else whole, *sums]
        rules.append((outputs, [split, split, *parameters, Shard(dim + 1), *options]))
    return rules


def _row_dims(x: Any, weight: Any, normalized_ndim: int) -> range:
    """Dimensions along which rows may be split: neither normalised nor covered by the weight."""
    covered = max(normalized_ndim, 0 if weight is None else weight.ndim)
    return range(x.ndim - covered)
