"""Typed launchers: from a plan and tensors to a launch. They compile what the plan says and decide
nothing."""

from __future__ import annotations

from collections.abc import Callable
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


class Workspace:
    """Scratch that outlives a launch: fp32 partials and the barrier's semaphore, per device and
    stream.

    Reuse is safe because launches of one stream run in order. A launch that is captured into a
    CUDA graph gets its own, since the graph may be replayed beside eager work of the stream that
    it was captured on.
    """

    #: Larger partials are allocated per call: they are few, and memory is worth more than 4 us.
    LARGEST_KEPT = 64 * 2**20

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def get(self, device: torch.device, stream: int, floats: int) -> tuple[Tensor, Tensor]:
        """Partials (at least `floats` long) and a semaphore with nobody waiting (zero but for its
        top bit)."""
        if torch._C._cuda_isCurrentStreamCapturing() or floats * 4 > self.LARGEST_KEPT:
            return _partials(device, floats), _semaphore(device)
        key = (device.index, stream)
        kept = self._kept.get(key)
        if kept is None or kept[0].numel() < floats:
            semaphore = _semaphore(device) if kept is None else kept[1]
            self._kept[key] = kept = (_partials(device, floats), semaphore)
        return kept


def _partials(device: torch.device, floats: int) -> Tensor:
    return torch.empty(floats, device=device, dtype=torch.float32)


def _semaphore(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, dtype=torch.int32)


WORKSPACE = Workspace()


class Launch:
    """One kernel on one device, compiled or (where `compiled` is None) in Triton's interpreter."""

    __slots__ = ("_compiled", "_constants", "_function", "_kernel", "_metadata", "_run", "_tail")

    def __init__(self, kernel: Any, compiled: Any | None, constants: dict[str, Any]) -> None:
        self._kernel, self._compiled, self._constants = kernel, compiled, constants
        self._tail = tuple(constants.values())
        if compiled is not None:
            self._run, self._function = compiled.run, compiled.function
            self._metadata = compiled.packed_metadata

    def __call__(self, programs: int, stream: int, *args: Any) -> None:
        """Launch on a stream; tensors may be given as their addresses where compiled."""
        if self._compiled is None:
            self._kernel[(programs,)](*args, **self._constants)
        elif _hooked():
            self._compiled[(programs, 1, 1)](*args, *self._tail)
        else:
            # What `compiled[grid](...)` calls when nothing is hooked in, at half its cost.
            self._run(
                programs,
                1,
                1,
                stream,
                self._function,
                self._metadata,
                None,
                None,
                None,
                *args,
                *self._tail,
            )


def _hooked() -> bool:
    """Whether a profiler wants to see launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


class _Kernel:
    """What forward and backward share: a plan, made launchable on one device.

    Args:
        plan: what was compiled.
        sm_count: multiprocessors of the device.
        index: of the device, or None for the interpreter.
        launch: the kernel.
        finalize: the separate final reduction, where the plan has one.
    """

    __slots__ = ("address", "finalize", "index", "launch", "plan", "route", "sm_count")

    def __init__(
        self,
        plan: Plan,
        sm_count: int,
        index: int | None,
        launch: Launch,
        finalize: Launch | None = None,
    ) -> None:
        self.plan, self.sm_count, self.index = plan, sm_count, index
        self.route = plan.route
        self.launch, self.finalize = launch, finalize
        self.address: Callable[[Tensor], Any] = _itself if index is None else Tensor.data_ptr

    def _stream(self) -> int:
        return 0 if self.index is None else torch._C._cuda_getCurrentRawStream(self.index)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class ForwardKernel(_Kernel):
    """A compiled forward plan, ready to launch on one device."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rows: int,
        x_row_stride: int,
        y: Tensor,
        stats: Tensor,
    ) -> None:
        """Launch on the device's current stream; the device must be current.

        Args:
            x: viewed as `[rows, N]` with unit column stride and the given row stride (elements).
            weight, bias: `[N]` contiguous, or None.
            y: `[rows, N]` contiguous, written.
            stats: `[2, rows]` fp32 (RMS: `[1, rows]`), written: rstd, mean.
        """
        at = self.address
        x_at = at(x)
        self.launch(
            self.plan.grid(rows, self.sm_count),
            self._stream(),
            x_at,
            x_at if weight is None else at(weight),
            x_at if bias is None else at(bias),
            at(y),
            at(stats),
            x_row_stride // self.plan.problem.stride_unit,
            rows,
            eps,
        )


class BackwardKernel(_Kernel):
    """A compiled backward plan, ready to launch on one device."""

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        rows: int,
        dy_row_stride: int,
        x_row_stride: int,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch on the device's current stream; the device must be current.

        Args:
            dy, x: viewed as `[rows, N]` with unit column stride and the given row strides
                (elements).
            weight: `[N]` contiguous, or None.
            stats: `[2, rows]` fp32 (RMS: `[1, rows]`): rstd, mean.
            dx: `[rows, N]` contiguous; dw, db: `[N]`; written; None where the plan leaves them out.
        """
        at, plan = self.address, self.plan
        p = plan.problem
        programs, stream = plan.grid(rows, self.sm_count), self._stream()
        floats = programs * p.hidden
        if plan.one_launch:
            partials, semaphore = WORKSPACE.get(x.device, stream, floats * p.accumulators)
        else:
            # Not kept: another thread's launches may come between this kernel and its reduction.
            partials = semaphore = _partials(x.device, floats * p.accumulators)
        x_at = at(x)  # also stands in for what the plan's constexprs leave unread
        dw_partials = at(partials)
        db_partials = dw_partials
        if p.needs_dw and p.needs_db:
            db_partials = at(partials[floats:]) if self.index is None else dw_partials + 4 * floats
        dw_at = x_at if dw is None else at(dw)
        db_at = x_at if db is None else at(db)
        self.launch(
            programs,
            stream,
            at(dy),
            x_at,
            x_at if weight is None else at(weight),
            at(stats),
            x_at if dx is None else at(dx),
            dw_partials,
            db_partials,
            dw_at,
            db_at,
            at(semaphore),
            dy_row_stride // p.stride_unit,
            x_row_stride // p.stride_unit,
            rows,
        )
        if self.finalize is not None:
            tiles = -(-p.hidden // plan.final_tile()[1])
            self.finalize(tiles, stream, dw_partials, db_partials, dw_at, db_at, programs)


def forward_kernel(
    plan: Plan, sm_count: int, index: int | None, compiled: Any | None
) -> ForwardKernel:
    """Make a forward plan launchable; `index` and `compiled` are None for the interpreter."""
    launch = Launch(norm_forward, compiled, forward_constants(plan))
    return ForwardKernel(plan, sm_count, index, launch)


def backward_kernel(
    plan: Plan, sm_count: int, index: int | None, compiled: Any | None, finalize: Any | None
) -> BackwardKernel:
    """Make a backward plan launchable; `index` and what is compiled are None for the
    interpreter."""
    launch = Launch(norm_backward, compiled, backward_constants(plan))
    reduction = None
    if plan.problem.accumulators and not plan.one_launch:
        reduction = Launch(norm_finalize, finalize, finalize_constants(plan))
    return BackwardKernel(plan, sm_count, index, launch, reduction)
