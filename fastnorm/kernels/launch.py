"""Typed launchers: from a plan and tensors to a launch. They compile what the plan says and decide
nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
    from fastnorm.operands import Rows
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
    common = {"x_ptr": x, "weight_ptr": weight, "stats_ptr": "*fp32"}
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


class Scratch(NamedTuple):
    """Partials [P, N] per accumulator and a semaphore with nobody waiting (zero but for its top
    bit), with their addresses."""

    partials: Tensor
    semaphore: Tensor
    partials_at: int
    semaphore_at: int


def _scratch(device: torch.device, floats: int, semaphore: Tensor | None = None) -> Scratch:
    partials = torch.empty(floats, device=device, dtype=torch.float32)
    if semaphore is None:
        semaphore = torch.zeros(1, device=device, dtype=torch.int32)
    return Scratch(partials, semaphore, partials.data_ptr(), semaphore.data_ptr())


class Workspace:
    """Scratch that outlives a launch, per device and stream.

    Reuse is safe because launches of one stream run in order. A launch that is captured into a
    CUDA graph gets its own, since the graph may be replayed beside eager work of the stream that
    it was captured on.
    """

    #: Larger partials are allocated per call: they are few, and memory is worth more than 4 us.
    LARGEST_KEPT = 64 * 2**20

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Scratch] = {}

    def get(self, device: torch.device, index: int, stream: int, floats: int) -> Scratch:
        """Scratch with room for `floats` partials."""
        if torch._C._cuda_isCurrentStreamCapturing() or floats * 4 > self.LARGEST_KEPT:
            return _scratch(device, floats)
        kept = self._kept.get((index, stream))
        if kept is None or kept.partials.numel() < floats:
            kept = _scratch(device, floats, None if kept is None else kept.semaphore)
            self._kept[index, stream] = kept
        return kept


WORKSPACE = Workspace()


class Launch:
    """One compiled kernel on one device."""

    __slots__ = ("_compiled", "_function", "_metadata", "_run", "_tail")

    def __init__(self, compiled: Any, constants: dict[str, Any]) -> None:
        self._compiled, self._tail = compiled, tuple(constants.values())
        self._run, self._function = compiled.run, compiled.function
        self._metadata = compiled.packed_metadata

    def __call__(self, programs: int, stream: int, *args: int | float) -> None:
        """Launch on a stream; pointers are addresses."""
        hook = triton.knobs.runtime.launch_enter_hook
        if hook is None or not getattr(hook, "calls", True):
            # What `compiled[grid](...)` calls when no profiler is hooked in, at half its cost.
            nothing = (self._function, self._metadata, None, None, None)
            self._run(programs, 1, 1, stream, *nothing, *args, *self._tail)
        else:
            self._compiled[(programs, 1, 1)](*args, *self._tail)


class ForwardKernel:
    """A verified forward plan, ready to launch on one device.

    Args:
        plan: what was compiled.
        sm_count: multiprocessors of the device.
        index: of the device.
        launch: the compiled kernel.
    """

    __slots__ = ("_index", "_launch", "_sm_count", "_unit", "plan", "route")

    def __init__(self, plan: Plan, sm_count: int, index: int, launch: Launch) -> None:
        self.plan, self.route = plan, plan.route
        self._sm_count, self._index, self._launch = sm_count, index, launch
        self._unit = plan.problem.stride_unit

    def __call__(self, rows: Rows, eps: float, y: Tensor, stats: Tensor) -> None:
        """Launch on the device's current stream.

        Args:
            rows: operands of the problem that was planned.
            eps: added to the variance.
            y: `[rows, N]` contiguous, written.
            stats: `[2, rows]` fp32 (RMS: `[1, rows]`), written: rstd, mean.
        """
        x_at = rows.x.data_ptr()  # also stands in for what the plan's constexprs leave unread
        args = (
            x_at,
            x_at if rows.weight is None else rows.weight.data_ptr(),
            x_at if rows.bias is None else rows.bias.data_ptr(),
            y.data_ptr(),
            stats.data_ptr(),
            rows.x_row_stride // self._unit,
            rows.rows,
            eps,
        )
        programs = self.plan.grid(rows.rows, self._sm_count)
        _on_device(self._index, self._launch, programs, args)


class BackwardKernel:
    """A verified backward plan, ready to launch on one device.

    Args:
        plan: what was compiled.
        sm_count: multiprocessors of the device.
        index: of the device.
        launch: the compiled kernel.
        finalize: the separate final reduction, where the plan has one.
    """

    __slots__ = ("_finalize", "_index", "_launch", "_sm_count", "plan", "route")

    def __init__(
        self, plan: Plan, sm_count: int, index: int, launch: Launch, finalize: Launch | None
    ) -> None:
        self.plan, self.route = plan, plan.route
        self._sm_count, self._index = sm_count, index
        self._launch, self._finalize = launch, finalize

    def __call__(
        self,
        rows: Rows,
        stats: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch on the device's current stream.

        Args:
            rows: operands of the problem that was planned.
            stats: `[2, rows]` fp32 (RMS: `[1, rows]`): rstd, mean.
            dx: `[rows, N]` contiguous; dw, db: `[N]`; written; None where the plan leaves them out.
        """
        plan, index = self.plan, self._index
        p = plan.problem
        programs = plan.grid(rows.rows, self._sm_count)
        floats = programs * p.hidden
        if plan.one_launch:
            stream = torch._C._cuda_getCurrentRawStream(index)
            scratch = WORKSPACE.get(rows.x.device, index, stream, floats * p.accumulators)
        else:
            # Not kept: another thread's launches may come between this kernel and its reduction.
            scratch = _scratch(rows.x.device, floats * p.accumulators)
        x_at = rows.x.data_ptr()  # also stands in for what the plan's constexprs leave unread
        partials = scratch.partials_at, scratch.partials_at + (4 * floats if p.needs_dw else 0)
        results = x_at if dw is None else dw.data_ptr(), x_at if db is None else db.data_ptr()
        args = (
            rows.dy.data_ptr(),
            x_at,
            x_at if rows.weight is None else rows.weight.data_ptr(),
            stats.data_ptr(),
            x_at if dx is None else dx.data_ptr(),
            *partials,
            *results,
            scratch.semaphore_at,
            rows.dy_row_stride // p.stride_unit,
            rows.x_row_stride // p.stride_unit,
            rows.rows,
        )
        _on_device(index, self._launch, programs, args)
        if self._finalize is not None:
            tiles = -(-p.hidden // plan.final_tile()[1])
            _on_device(index, self._finalize, tiles, (*partials, *results, programs))


def _on_device(index: int, launch: Launch, programs: int, args: tuple[int | float, ...]) -> None:
    """Launch on a device's current stream; make the device current if it is not."""
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch._C._cuda_getDevice():
        launch(programs, stream, *args)
        return
    previous = torch.cuda._exchange_device(index)
    try:
        launch(programs, stream, *args)
    finally:
        torch.cuda._maybe_exchange_device(previous)


def forward_kernel(plan: Plan, sm_count: int, index: int, compiled: Any) -> ForwardKernel:
    """Make a compiled forward plan launchable on a device."""
    return ForwardKernel(plan, sm_count, index, Launch(compiled, forward_constants(plan)))


def backward_kernel(
    plan: Plan, sm_count: int, index: int, compiled: Any, finalize: Any | None
) -> BackwardKernel:
    """Make a compiled backward plan launchable on a device."""
    reduction = None if finalize is None else Launch(finalize, finalize_constants(plan))
    launch = Launch(compiled, backward_constants(plan))
    return BackwardKernel(plan, sm_count, index, launch, reduction)
