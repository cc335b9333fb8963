"""The Python half of the shortcut: it decides, once per kind of call, what norm.cpp then repeats.

`norm` is None until a built library is found; `fastnorm.functional` asks it first for everyday
calls and serves itself whatever it answers None to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastnorm import autograd, operands, ops, routing
from fastnorm.autocast import AutocastOutput, result_dtype
from fastnorm.native import library
from fastnorm.operands import Mask
from fastnorm.problem import NormProblem
from fastnorm.semantics import SEMANTICS
from fastnorm.validation import validate

#: `norm(input, shape, weight, bias, eps, semantics, autocast_output)`: y, or None where Python is
#: to serve the call; it raises nothing of its own.
norm: Callable[..., Tensor | None] | None = None

#: An answer to norm.cpp: facts of a kernel, or None where Python serves such calls.
Answer = dict[str, Any] | None


def connect(cache: Path = library.CACHE) -> bool:
    """Use the built library from now on, if there is one; whether there is."""
    global norm
    built = library.load(cache)
    if built is None:
        return False
    built.connect(
        resolve_forward,
        resolve_backward,
        ops.forward,
        autograd.call_backward,
        autograd.differentiable_backward,
        _scratch,
    )
    routing.follow(built)
    norm = built.norm
    return True


def disconnect() -> None:
    """Leave every call to Python."""
    global norm
    norm = None
    routing.follow(None)


def resolve_forward(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    semantics: str,
    autocast_output: AutocastOutput,
) -> Answer:
    """What serves forward calls like this one. Arguments as `fastnorm.functional.norm`."""
    kind = validate(x, shape, weight, bias, semantics)
    out_dtype = result_dtype(x, weight, kind, autocast_output)
    hidden = operands.hidden_size(x, len(shape))
    if ops.why_torch(x, weight, hidden):
        return None
    rows = operands.forward_rows(x, weight, bias, hidden, semantics, out_dtype)
    return _facts(rows.problem, x, rows.x_row_stride, out_dtype)


def resolve_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    semantics: str,
    mask: Mask,
) -> Answer:
    """What serves backward calls like this one. Arguments as `fastnorm.ops.backward`."""
    rows = operands.backward_rows(dy, x, weight, bias, hidden, semantics, mask)
    return _facts(rows.problem, x, rows.x_row_stride, x.dtype)


def _facts(problem: NormProblem, x: Tensor, row_stride: int, out_dtype: torch.dtype) -> Answer:
    index = ops.device_index(x)
    found = routing.verified(problem, index)
    if found.kernel is None:
        return None
    plan = found.kernel.plan
    return {
        **found.kernel.facts(),
        "rows_per_block": plan.tiling.block_m,
        "most_blocks": plan.most_blocks(routing.limits(index).sm_count),
        "split": plan.tiling.split,
        "hidden": problem.hidden,
        "row_stride": row_stride // problem.stride_unit,
        "accumulators": problem.accumulators,
        "centered": SEMANTICS[problem.semantics].centered,
        "out_dtype": out_dtype,
        "route": plan.route,
    }


def _scratch(x: Tensor, stream: int, floats: int, slots: int) -> Any:
    """Scratch kept for a stream of x's device, which norm.cpp keeps, too."""
    from fastnorm.kernels.launch import WORKSPACE

    return WORKSPACE.get(x.device, x.device.index, stream, floats, slots)


connect()
