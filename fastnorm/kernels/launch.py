"""Typed launchers: from a plan and tensors to a launch. They compile what the plan says and decide
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastnorm.kernels.backward import norm_backward
from fastnorm.kernels.finalize import norm_finalize
from fastnorm.kernels.forward import norm_forward

if TYPE_CHECKING:
    from fastnorm.plan import Plan

_POINTER = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", None: "*fp32"}
_ELEMENT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def backward_constants(plan: Plan) -> dict[str, Any]:
    """The constexprs of `norm_backward` under a plan."""
    p, t = plan.problem, plan.tiling
    return dict(
        N=p.hidden,
        STRIDE_UNIT=p.stride_unit,
        CENTERED=p.kind.centered,
        HAS_WEIGHT=p.weight_dtype is not None,
        WEIGHT_OFFSET=p.kind.weight_offset,
        NEEDS_DX=p.needs_dx,
        NEEDS_DW=p.needs_dw,
        NEEDS_DB=p.needs_db,
        BLOCK_M=t.block_m,
        CHUNK=t.chunk,
        CHUNKS=t.chunks,
        KEEP_ROW=t.keep_row,
        KEEP_WEIGHT=t.keep_weight,
        STAGES=t.stages,
        ONE_LAUNCH=plan.one_launch,
        FINAL_ROWS=plan.final_tile()[0],
        FINAL_COLUMNS=plan.final_tile()[1],
    )


def forward_constants(plan: Plan) -> dict[str, Any]:
    """The constexprs of `norm_forward` under a plan."""
    p, t = plan.problem, plan.tiling
    rounding = {"no": None, "input": p.x_dtype, "half_weight": p.weight_dtype}
    round_to = rounding[p.kind.rounds_normalized] if p.weight_dtype is not None else None
    return dict(
        N=p.hidden,
        STRIDE_UNIT=p.stride_unit,
        CENTERED=p.kind.centered,
        HAS_WEIGHT=p.weight_dtype is not None,
        HAS_BIAS=p.bias_dtype is not None,
        WEIGHT_OFFSET=p.kind.weight_offset,
        ROUND_TO=None if round_to is None else _ELEMENT[round_to],
        BLOCK_M=t.block_m,
        CHUNK=t.chunk,
        CHUNKS=t.chunks,
        KEEP_ROW=t.keep_row,
        STAGES=t.stages,
    )


def _pointer_types(plan: Plan) -> dict[str, str]:
    p = plan.problem
    x, y = _POINTER[p.x_dtype], _POINTER[p.y_dtype]
    weight, bias = _POINTER[p.weight_dtype], _POINTER[p.bias_dtype]
    common = {"x_ptr": x, "weight_ptr": weight, "mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
    if p.direction == "forward":
        return {**common, "bias_ptr": bias, "y_ptr": y, "eps": "fp32"}
    return {
        **common,
        "dy_ptr": y,
        "dx_ptr": x,
        "dw_ptr": weight,
        "db_ptr": bias,
        "dw_partial_ptr": "*fp32",
        "db_partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }


def compile_plan(plan: Plan, capability: int) -> Any:
    """Compile a plan's kernel for a target; no GPU needed.

    Args:
        plan: what to compile.
        capability: 90 for sm_90.

    Returns:
        Triton's compiled kernel; `asm["cubin"]` and `metadata.shared` are there at once, the rest
        once it is loaded.
    """
    forward = plan.problem.direction == "forward"
    kernel = norm_forward if forward else norm_backward
    constants = forward_constants(plan) if forward else backward_constants(plan)
    types = _pointer_types(plan)
    return _compile(
        kernel,
        constants,
        types,
        capability,
        aligned=plan.problem.aligned,
        num_warps=plan.tiling.warps,
        maxnreg=plan.max_registers,
        launch_cooperative_grid=plan.one_launch,
    )


def finalize_constants(plan: Plan) -> dict[str, Any]:
    """The constexprs of `norm_finalize` under a plan."""
    p = plan.problem
    rows, columns = plan.final_tile()
    return dict(N=p.hidden, NEEDS_DW=p.needs_dw, NEEDS_DB=p.needs_db, ROWS=rows, COLUMNS=columns)


def compile_finalize(plan: Plan, capability: int) -> Any:
    """Compile the separate final reduction of a plan that does not reduce in its own launch."""
    types = {k: v for k, v in _pointer_types(plan).items() if k.startswith(("dw", "db"))}
    constants = finalize_constants(plan)
    return _compile(norm_finalize, constants, types, capability, aligned=True, num_warps=4)


def _compile(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    capability: int,
    aligned: bool,
    **options: Any,
) -> Any:
    names = kernel.arg_names
    types = {"P": "i32", **types}
    signature = {n: "constexpr" if n in constants else types.get(n, "i64") for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in pointers} if aligned else {}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=attrs,
    )
    options = {k: v for k, v in options.items() if v}
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True, **options},
    )


class Workspace:
    """Scratch that outlives a launch: fp32 partials and the barrier's semaphore, one per device and
    stream.

    Reuse is safe because launches of one stream run in order. A launch that is being captured into
    a CUDA graph gets its own, since the graph may be replayed beside eager work of the stream that
    it was captured on.
    """

    #: Larger partials are allocated per call: they are few, and memory is worth more than 4 us.
    LARGEST_KEPT = 64 * 2**20

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def get(self, device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
        """Partials (at least `floats` long) and a semaphore with nobody waiting (zero but for its
        top bit)."""
        if torch.cuda.is_current_stream_capturing() or floats * 4 > self.LARGEST_KEPT:
            return (
                torch.empty(floats, device=device, dtype=torch.float32),
                torch.zeros(1, device=device, dtype=torch.int32),
            )
        key = (device.index, torch.cuda.current_stream(device).cuda_stream)
        kept = self._kept.get(key)
        if kept is None or kept[0].numel() < floats:
            semaphore = (
                torch.zeros(1, device=device, dtype=torch.int32) if kept is None else kept[1]
            )
            kept = (torch.empty(floats, device=device, dtype=torch.float32), semaphore)
            self._kept[key] = kept
        return kept


WORKSPACE = Workspace()


Launch = Callable[..., Any]


def launcher(kernel: Any, compiled: Any | None, constants: dict[str, Any]) -> Launch:
    """`launch(programs, *args)` for a compiled kernel, or for the interpreter where `compiled` is
    None."""
    if compiled is None:
        return lambda programs, *args: kernel[(programs,)](*args, **constants)
    tail = tuple(constants.values())
    return lambda programs, *args: compiled[(programs, 1, 1)](*args, *tail)


@dataclass(frozen=True, slots=True)
class ForwardKernel:
    """A compiled forward plan, ready to launch on one device."""

    plan: Plan
    sm_count: int
    launch: Launch
    compiled: Any = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rows: int,
        x_row_stride: int,
        y: Tensor,
        mean: Tensor,
        rstd: Tensor,
    ) -> None:
        """Launch.

        Args:
            x: viewed as `[rows, N]` with unit column stride and the given row stride (elements).
            weight, bias: `[N]` contiguous, or None.
            y: `[rows, N]` contiguous, written.
            mean, rstd: `[rows]` fp32, written (mean only by centred kinds).
        """
        self.launch(
            self.plan.grid(rows, self.sm_count),
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            mean,
            rstd,
            x_row_stride // self.plan.problem.stride_unit,
            rows,
            eps,
        )


@dataclass(frozen=True, slots=True)
class BackwardKernel:
    """A compiled backward plan, ready to launch on one device."""

    plan: Plan
    sm_count: int
    launch: Launch
    finalize: Launch | None
    compiled: Any = None

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        rows: int,
        dy_row_stride: int,
        x_row_stride: int,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch.

        Args:
            dy, x: viewed as `[rows, N]` with unit column stride and the given row strides
                (elements).
            weight: `[N]` contiguous, or None.
            mean, rstd: `[rows]` fp32.
            dx: `[rows, N]` contiguous; dw, db: `[N]`; written; None where the plan leaves them out.
        """
        plan = self.plan
        p = plan.problem
        programs = plan.grid(rows, self.sm_count)
        floats = programs * p.hidden
        if plan.one_launch:
            partials, semaphore = WORKSPACE.get(x.device, floats * p.accumulators)
        else:
            # Not kept: another thread's launches may come between this kernel and its reduction.
            partials = torch.empty(floats * p.accumulators, dtype=torch.float32, device=x.device)
            semaphore = partials
        db_partials = partials[floats:] if p.needs_dw else partials
        # x stands in for pointers that the plan's constexprs leave unread.
        dw = x if dw is None else dw
        db = x if db is None else db
        self.launch(
            programs,
            dy,
            x,
            x if weight is None else weight,
            mean,
            rstd,
            x if dx is None else dx,
            partials,
            db_partials,
            dw,
            db,
            semaphore,
            dy_row_stride // p.stride_unit,
            x_row_stride // p.stride_unit,
            rows,
        )
        if self.finalize is not None:
            tiles = -(-p.hidden // plan.final_tile()[1])
            self.finalize(tiles, partials, db_partials, dw, db, programs)


def forward_kernel(plan: Plan, sm_count: int, compiled: Any | None) -> ForwardKernel:
    """Make a forward plan launchable; `compiled` None means the interpreter."""
    launch = launcher(norm_forward, compiled, forward_constants(plan))
    return ForwardKernel(plan, sm_count, launch, compiled)


def backward_kernel(
    plan: Plan, sm_count: int, compiled: Any | None, compiled_finalize: Any | None
) -> BackwardKernel:
    """Make a backward plan launchable; `compiled` None means the interpreter."""
    launch = launcher(norm_backward, compiled, backward_constants(plan))
    finalize = None
    if plan.problem.accumulators and not plan.one_launch:
        finalize = launcher(norm_finalize, compiled_finalize, finalize_constants(plan))
    return BackwardKernel(plan, sm_count, launch, finalize, compiled)
