"""The same kernels in Triton's interpreter, on CPU tensors: what the tests run without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastnorm.kernels.backward import norm_backward
from fastnorm.kernels.compile import constants, finalize_constants
from fastnorm.kernels.finalize import norm_finalize
from fastnorm.kernels.forward import norm_forward

if TYPE_CHECKING:
    from fastnorm.operands import Rows
    from fastnorm.plan import Plan

_NOTHING = {"function": 0, "threads": 0, "shared_bytes": 0, "cooperative": False}


class InterpretedForward:
    """Stands where `launch.ForwardKernel` stands on a GPU."""

    def __init__(self, plan: Plan, sm_count: int) -> None:
        self.plan, self.route, self._sm_count = plan, plan.route, sm_count

    def facts(self) -> dict[str, Any]:
        """As `launch.Launch.facts`: nothing that a driver could launch."""
        return _NOTHING

    def __call__(self, rows: Rows, eps: float, y: Tensor, stats: Tensor) -> None:
        """As `launch.ForwardKernel`."""
        x = rows.x
        norm_forward[(self.plan.grid(rows.rows, self._sm_count),)](
            x,
            x if rows.weight is None else rows.weight,
            x if rows.bias is None else rows.bias,
            y,
            stats,
            rows.x_row_stride // self.plan.problem.stride_unit,
            rows.rows,
            eps,
            **constants(self.plan),
        )


class InterpretedBackward:
    """Stands where `launch.BackwardKernel` stands on a GPU."""

    def __init__(self, plan: Plan, sm_count: int) -> None:
        self.plan, self.route, self._sm_count = plan, plan.route, sm_count

    def facts(self) -> dict[str, Any]:
        """As `launch.Launch.facts`: nothing that a driver could launch."""
        return _NOTHING

    def __call__(
        self,
        rows: Rows,
        stats: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """As `launch.BackwardKernel`."""
        x, p = rows.x, self.plan.problem
        programs = self.plan.grid(rows.rows, self._sm_count)
        floats = programs * p.hidden
        partials = torch.empty(floats * p.accumulators + 1, dtype=torch.float32)
        reduction = (
            partials,
            partials[floats:] if p.needs_dw else partials,
            x if dw is None else dw,
            x if db is None else db,
        )
        unit = p.stride_unit
        norm_backward[(programs,)](
            rows.dy,
            x,
            x if rows.weight is None else rows.weight,
            stats,
            x if dx is None else dx,
            *reduction,
            partials,
            rows.dy_row_stride // unit,
            rows.x_row_stride // unit,
            rows.rows,
            **constants(self.plan),
        )
        if p.accumulators:
            tiles = -(-p.hidden // self.plan.final_tile()[1])
            norm_finalize[(tiles,)](*reduction, programs, **finalize_constants(self.plan))
