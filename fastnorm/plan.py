"""Candidates in order, and the decision between them. Pure and cached: no torch, no GPU, no
compiler.

Measurements cited here: backward and forward sweeps on one H200, docs/performance.md, "How the plan
    was found".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fastnorm.budget import Footprint, Tiling, footprint, register_cap, resident_programs
from fastnorm.device import DeviceLimits
from fastnorm.problem import ITEM_SIZE, NormProblem

#: Widest row that each direction takes. Wider rows go to torch.
WIDEST = {"forward": 131072, "backward": 16384}
#: Loads in flight per multiprocessor that saturate an H200, for tiles and for single rows (more
#: rows per step hide more of the reduction's latency). 10240 x 6144: 49 KB 115 us, 98 KB 110 us;
#: 32768 x 1024: 49 KB 61 us, 98 KB 64 us.
TILE_BYTES_IN_FLIGHT = 48 * 1024
ROW_BYTES_IN_FLIGHT = 60 * 1024
#: How far the register model may exceed the cap before a plan is refused unseen: ptxas finds 10%
#: more often than not, and what it does not find is refused by verification.
REGISTER_SLACK = 1.1
#: Bytes of x per step of a tile; 2 to 8 KB measured, 4 KB best or within 1% for N <= 1024.
TILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run one problem on one kind of device.

    Args:
        problem: what is computed.
        schedule: "persistent tile", "persistent row" or "looped".
        tiling: how a program holds its rows.
        programs_per_sm: programs launched per multiprocessor, all resident.
        max_registers: registers per thread that the compiler may use.
        one_launch: the final reduction is part of the kernel, behind a grid barrier.
        footprint: what the budget predicts.
    """

    problem: NormProblem
    schedule: str
    tiling: Tiling
    programs_per_sm: int
    max_registers: int
    one_launch: bool
    footprint: Footprint

    def grid(self, rows: int, sm_count: int) -> int:
        """Programs to launch for so many rows: never more than fit at once in backward, never more
        than there is work."""
        blocks = -(-rows // self.tiling.block_m)
        if self.problem.direction == "forward" and self.programs_per_sm == 0:
            return max(1, blocks)
        return max(1, min(blocks, sm_count * self.programs_per_sm))

    @property
    def route(self) -> str:
        """What counters call it."""
        return f"triton:{self.schedule}"

    def final_tile(self) -> tuple[int, int]:
        """Rows x columns of partials that a program sums at a time in the final reduction.

        Columns are spread over all programs (2048 x 1024: 8 columns 11.4 us, 32 columns 12.3 us),
        but no wider than 32 (8192 x 12288: 32 columns 166 us, 8 columns 180 us).
        """
        columns = 8
        while columns < 32 and columns * 256 < self.problem.hidden:
            columns *= 2
        return 2048 // columns, columns

    def describe(self) -> str:
        """One line for people."""
        t = self.tiling
        held = "row kept" if t.keep_row else "row re-read"
        weight = (
            ""
            if self.problem.weight_dtype is None
            else (", weight kept" if t.keep_weight else ", weight re-read")
        )
        return (
            f"{self.schedule}: {t.block_m} x ({t.chunks} x {t.chunk}) per step, {t.warps} warps, "
            f"{t.stages} stages, {held}{weight}, {self.programs_per_sm or 'all'} programs/SM"
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that was refused, by which condition, with the numbers."""

    candidate: str
    condition: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.candidate}: {self.condition} {self.value:g} > {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The accepted plan, or None for torch, with everything that was refused on the way and why."""

    plan: Plan | None
    rejections: tuple[Rejection, ...]
    reasons: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def decide(
    problem: NormProblem, limits: DeviceLimits, refused: tuple[Rejection, ...] = ()
) -> Decision:
    """The first candidate within budget.

    Args:
        problem: what is asked.
        limits: of the device.
        refused: what verification against the compiler has refused so far; those candidates are
            passed over.

    Returns:
        A decision; its `plan` is None when torch should run it, and then `reasons` says why.
    """
    if reasons := unsuitable(problem, limits):
        return Decision(None, refused, reasons)
    skip = {r.candidate for r in refused}
    rejections = list(refused)
    for plan in candidates(problem, limits):
        if plan.describe() in skip:
            continue
        rejection = over_budget(plan, limits)
        if rejection is None:
            return Decision(plan, tuple(rejections))
        rejections.append(rejection)
    return Decision(None, tuple(rejections), ("no candidate is within the budget",))


def unsuitable(problem: NormProblem, limits: DeviceLimits) -> tuple[str, ...]:
    """Reasons for which no kernel of ours serves the problem at all."""
    reasons = []
    if limits.unsupported:
        reasons.append(limits.unsupported)
    for name in ("x_dtype", "y_dtype", "weight_dtype", "bias_dtype"):
        dtype = getattr(problem, name)
        if dtype is not None and dtype not in ITEM_SIZE:
            reasons.append(f"{name} {dtype}: the kernels take {', '.join(ITEM_SIZE)}")
    widest = WIDEST[problem.direction]
    if problem.hidden > widest:
        reasons.append(
            f"hidden size {problem.hidden} > {widest}, the widest {problem.direction} row"
        )
    if problem.direction == "backward" and not (problem.needs_dx or problem.accumulators):
        reasons.append("no gradient is asked for")
    return tuple(reasons)


def over_budget(plan: Plan, limits: DeviceLimits) -> Rejection | None:
    """The first budget condition that a plan breaks, or None."""
    use, cap = plan.footprint, plan.max_registers
    if use.registers > REGISTER_SLACK * cap:
        return Rejection(plan.describe(), "predicted registers per thread", use.registers, cap)
    if use.shared_bytes > limits.shared_bytes_per_program:
        limit = limits.shared_bytes_per_program
        return Rejection(plan.describe(), "predicted shared bytes", use.shared_bytes, limit)
    needed = max(1, plan.programs_per_sm)
    fit = resident_programs(limits, plan.tiling.warps, min(use.registers, cap), use.shared_bytes)
    if fit < needed:
        return Rejection(plan.describe(), "programs per SM", needed, fit)
    return None


def candidates(problem: NormProblem, limits: DeviceLimits) -> Iterator[Plan]:
    """Every plan worth trying, best first."""
    options = _backward if problem.direction == "backward" else _forward
    seen = set()
    for schedule, tiling, programs_per_sm in options(problem):
        key = (schedule, tiling, programs_per_sm)
        if key in seen:
            continue
        seen.add(key)
        yield Plan(
            problem,
            schedule,
            tiling,
            programs_per_sm,
            register_cap(limits, tiling.warps, max(1, programs_per_sm)),
            limits.cooperative and problem.direction == "backward" and problem.accumulators > 0,
            footprint(problem, tiling),
        )


def chunking(hidden: int, widest: int) -> tuple[int, int]:
    """Chunk (a power of two, at most `widest`) and number of chunks covering `hidden` with at most
    1/8 wasted.

    Falls back on the least wasteful chunk that keeps to 16 chunks.
    """
    best = None
    chunk = min(widest, 1 << max(0, hidden - 1).bit_length())
    while chunk >= 1 and -(-hidden // chunk) <= 16:
        chunks = -(-hidden // chunk)
        waste = chunk * chunks / hidden - 1
        if waste <= 0.125:
            return chunk, chunks
        if best is None or waste < best[0] - 0.05:
            best = (waste, chunk, chunks)
        if chunk <= 64:
            break
        chunk //= 2
    if best is None:
        chunk = 1 << max(0, -(-hidden // 16) - 1).bit_length()
        return chunk, -(-hidden // chunk)
    return best[1], best[2]


def _vectors(problem: NormProblem) -> bool:
    """Whether asynchronous copies into shared memory work: 4 bytes or more, aligned, per access."""
    return problem.aligned and problem.stride_unit * ITEM_SIZE[problem.x_dtype] >= 8


def _backward(problem: NormProblem) -> Iterator[tuple[str, Tiling, int]]:
    """Backward candidates: few warps with many registers each, rows staged in shared memory."""
    n = problem.hidden
    staged = _vectors(problem)
    tiles = n <= 1024
    in_flight = TILE_BYTES_IN_FLIGHT if tiles else ROW_BYTES_IN_FLIGHT
    for block_m, chunk, chunks, warps, first_stages, keep_weight in (
        _tile_layouts(problem) if tiles else _row_layouts(problem)
    ):
        step = block_m * chunk * chunks * (ITEM_SIZE[problem.x_dtype] + ITEM_SIZE[problem.y_dtype])
        schedule = "persistent tile" if block_m > 1 else "persistent row"
        for stages in range(first_stages if staged else 1, 0, -1):
            flight = step * max(1, stages - 1)
            per_sm = 1
            while per_sm * warps < 8 and per_sm * flight < in_flight:
                per_sm *= 2
            for keep in (keep_weight, False) if keep_weight else (False,):
                tiling = Tiling(block_m, chunk, chunks, warps, stages, True, keep)
                yield schedule, tiling, per_sm
    if n > 1024:
        for warps in (8, 16):
            chunk, chunks = chunking(n, warps * 256)
            yield "looped", Tiling(1, chunk, chunks, warps, 1, False, False), 1


def _tile_layouts(problem: NormProblem) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """(block_m, chunk, chunks, warps, stages, keep weight) for rows of which several make a
    step."""
    n = problem.hidden
    chunk, chunks = chunking(n, 1024)
    width = chunk * chunks
    item = ITEM_SIZE[problem.x_dtype]
    rows = 1
    while rows * 2 * width * item <= TILE_BYTES:
        rows *= 2
    # 1048576 x 128: 4 warps, 4 stages 205 us, 2 warps, 3 stages 209 us; 131072 x 768: 1 warp 155
    # us, 2 warps 156 us; 32768 x 1024: 2 warps, 4 stages 58.8 us, 3 stages 59.9 us.
    if n <= 256:
        yield rows, chunk, chunks, 4, 4, True
        yield rows, chunk, chunks, 2, 3, True
    elif chunks > 1:
        yield rows, chunk, chunks, 1, 3, True
    yield rows, chunk, chunks, 2, 4, True
    yield max(1, rows // 2), chunk, chunks, 2, 4, True
    yield max(1, rows // 2), chunk, chunks, 4, 3, True


def _row_layouts(problem: NormProblem) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """(1, chunk, chunks, warps, stages, keep weight): 24 to 40 elements a thread, or up to 56 with
    the weight re-read."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    for warps in (2, 4, 8, 16):
        elements = n / (32 * warps)
        chunk, chunks = chunking(n, warps * 256)
        if n > 14336:
            # RMS 8192 x 16384: 16 warps, not staged 214 us, 8 warps, 2 stages 231 us; fp32: 8
            # warps, not staged 113 us.
            if elements == 64 and item == 4 or elements < 64:
                yield 1, chunk, chunks, warps, 1, False
        elif elements <= 40:
            yield 1, chunk, chunks, warps, 3, True
        elif warps >= 4 and elements <= 48 or warps >= 8 and elements <= 56:
            # 10240 x 6144: 4 warps, weight re-read 110 us, 8 warps, kept 114 us.
            yield 1, chunk, chunks, warps, 3, False


def _forward(problem: NormProblem) -> Iterator[tuple[str, Tiling, int]]:
    """Forward candidates: one program per row or tile, the row in registers; looped when it does
    not fit."""
    n = problem.hidden
    item = ITEM_SIZE[problem.x_dtype]
    if n <= 1024:
        chunk, chunks = chunking(n, 1024)
        rows = 1
        while rows * 2 * chunk * chunks * item <= TILE_BYTES:
            rows *= 2
        for block_m, warps in ((rows, 4), (max(1, rows // 2), 4), (1, 1)):
            schedule = "persistent tile" if block_m > 1 else "persistent row"
            yield schedule, Tiling(block_m, chunk, chunks, warps, 1, True, False), 0
    for warps in (4, 8, 16, 32):
        if n <= 1024 * warps:
            chunk, chunks = chunking(n, warps * 256)
            yield "persistent row", Tiling(1, chunk, chunks, warps, 1, True, False), 0
    chunk, chunks = chunking(n, 8192)
    yield "looped", Tiling(1, chunk, chunks, 16, 1, False, False), 0
