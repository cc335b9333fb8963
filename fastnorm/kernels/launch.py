"""Typed launchers: from operands to a launch of a compiled plan. They decide nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastnorm.kernels.compile import constants, finalize_constants

if TYPE_CHECKING:
    from fastnorm.operands import Rows
    from fastnorm.plan import Plan

#: Slots of `kernels/exchange.py` that one program owns: RING steps, up to two sums each.
SLOTS_PER_PROGRAM = 8


class Scratch(NamedTuple):
    """What programs of a launch meet in, with addresses.

    Args:
        partials: fp32, `[P, N]` per accumulator.
        semaphore: int32 with nobody waiting (zero but for its top bit); launches leave it so.
        slots: int64 zeros; launches leave them so.
    """

    partials: Tensor
    semaphore: Tensor
    slots: Tensor
    partials_at: int
    semaphore_at: int
    slots_at: int

    @classmethod
    def make(cls, device: torch.device, floats: int, slots: int) -> Scratch:
        """Scratch of its own for one launch, or to be kept."""
        tensors = (
            torch.empty(floats, device=device, dtype=torch.float32),
            torch.zeros(1, device=device, dtype=torch.int32),
            torch.zeros(slots, device=device, dtype=torch.int64),
        )
        return cls(*tensors, *(t.data_ptr() for t in tensors))


#: For a launch with nothing to sum up and nobody to wait for: addresses that no kernel reads.
_NO_SCRATCH = Scratch(torch.empty(0), torch.empty(0), torch.empty(0), 0, 0, 0)


class Workspace:
    """Scratch that outlives a launch, per device and stream.

    Reuse is safe because launches of one stream run in order. A launch that is captured into a
    CUDA graph gets its own, since the graph may be replayed beside eager work of the stream that
    it was captured on.
    """

    #: Larger partials are allocated per call: they are few, and memory is worth more than 20 us.
    LARGEST_KEPT = 64 * 2**20

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Scratch] = {}

    def get(
        self, device: torch.device, index: int, stream: int, floats: int, slots: int
    ) -> Scratch:
        """Scratch with room for `floats` partials and so many slots."""
        if torch._C._cuda_isCurrentStreamCapturing() or floats * 4 > self.LARGEST_KEPT:
            return Scratch.make(device, floats, slots)
        kept = self._kept.get((index, stream))
        if kept is None or kept.partials.numel() < floats or kept.slots.numel() < slots:
            if kept is not None:
                floats = max(floats, kept.partials.numel())
                slots = max(slots, kept.slots.numel())
            kept = self._kept[index, stream] = _make_apart(device, floats, slots)
        return kept


def _make_apart(device: torch.device, floats: int, slots: int) -> Scratch:
    """Scratch to be kept, from the allocator's general pool and the current stream.

    A thread of its own asks for it: the calling thread's memory may come from a pool that is not
    there for things that stay. Inductor warms up its CUDA graphs so, and gives out again whatever
    is not among a graph's outputs.
    """
    stream = torch.cuda.current_stream(device)

    def make() -> Scratch:
        # Not `with`: leaving it would make device 0 current, and wake it up.
        torch.cuda.set_stream(stream)
        return Scratch.make(device, floats, slots)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


WORKSPACE = Workspace()


class Launch:
    """One compiled kernel on one device."""

    __slots__ = ("_compiled", "_function", "_metadata", "_run", "_tail")

    def __init__(self, compiled: Any, constexprs: dict[str, Any]) -> None:
        self._compiled, self._tail = compiled, tuple(constexprs.values())
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

    def facts(self) -> dict[str, Any]:
        """What a launch by the CUDA driver needs: the function's handle (0 where the kernel wants
        more than its arguments), threads, bytes of shared memory, whether all programs must be
        resident."""
        metadata = self._compiled.metadata
        more = metadata.global_scratch_size or metadata.profile_scratch_size
        return {
            "function": 0 if more else self._function,
            "threads": 32 * metadata.num_warps,
            "shared_bytes": metadata.shared,
            "cooperative": metadata.launch_cooperative_grid,
        }


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

    def facts(self) -> dict[str, Any]:
        """As `Launch.facts`."""
        return self._launch.facts()

    def __call__(self, rows: Rows, eps: float, y: Tensor, stats: Tensor) -> None:
        """Launch on the device's current stream.

        Args:
            rows: operands of the problem that was planned.
            eps: added to the variance.
            y: `[rows, N]` contiguous, written.
            stats: `[2, rows]` fp32 (RMS: `[1, rows]`), written: rstd, mean.
        """
        plan, index = self.plan, self._index
        stream = torch._C._cuda_getCurrentRawStream(index)
        programs = plan.grid(rows.rows, self._sm_count)
        x_at = rows.x.data_ptr()  # also stands in for what the plan's constexprs leave unread
        shared: tuple[int, ...] = ()
        if plan.tiling.split > 1:
            slots = programs * SLOTS_PER_PROGRAM
            scratch = WORKSPACE.get(rows.x.device, index, stream, 0, slots)
            shared = (scratch.semaphore_at, scratch.slots_at)
        args = (
            x_at,
            x_at if rows.weight is None else rows.weight.data_ptr(),
            x_at if rows.bias is None else rows.bias.data_ptr(),
            y.data_ptr(),
            stats.data_ptr(),
            *shared,
            rows.x_row_stride // self._unit,
            rows.rows,
            eps,
        )
        _on_device(index, self._launch, programs, stream, args)


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

    def facts(self) -> dict[str, Any]:
        """As `Launch.facts`; no function where a second kernel must follow."""
        facts = self._launch.facts()
        return facts if self._finalize is None else {**facts, "function": 0}

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
        stream = torch._C._cuda_getCurrentRawStream(index)
        programs = plan.grid(rows.rows, self._sm_count)
        split = plan.tiling.split > 1
        floats = plan.partial_rows(programs) * p.hidden
        if plan.cooperative:
            slots = programs * SLOTS_PER_PROGRAM if split else 0
            room = floats * p.accumulators
            scratch = WORKSPACE.get(rows.x.device, index, stream, room, slots)
        elif p.accumulators:
            # Not kept: another thread's launches may come between this kernel and its reduction.
            scratch = Scratch.make(rows.x.device, floats * p.accumulators, 0)
        else:
            scratch = _NO_SCRATCH
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
            *((scratch.slots_at,) if split else ()),
            rows.dy_row_stride // p.stride_unit,
            rows.x_row_stride // p.stride_unit,
            rows.rows,
        )
        _on_device(index, self._launch, programs, stream, args)
        if self._finalize is not None:
            tiles = -(-p.hidden // plan.final_tile()[1])
            reduction = (*partials, *results, programs)
            _on_device(index, self._finalize, tiles, stream, reduction)


def _on_device(
    index: int, launch: Launch, programs: int, stream: int, args: tuple[int | float, ...]
) -> None:
    """Launch on a stream of a device; make the device current if it is not."""
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
    return ForwardKernel(plan, sm_count, index, Launch(compiled, constants(plan)))


def backward_kernel(
    plan: Plan, sm_count: int, index: int, compiled: Any, finalize: Any | None
) -> BackwardKernel:
    """Make a compiled backward plan launchable on a device."""
    reduction = None if finalize is None else Launch(finalize, finalize_constants(plan))
    launch = Launch(compiled, constants(plan))
    return BackwardKernel(plan, sm_count, index, launch, reduction)
