"""Candidates in order, and the decision between them. Pure and cached: no torch, no GPU, no
compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fastnorm.budget import Footprint, Tiling, footprint, register_cap, resident_programs
from fastnorm.candidates import backward_candidates, forward_candidates
from fastnorm.device import DeviceLimits
from fastnorm.problem import ITEM_SIZE, NormProblem

#: Widest row that kernels take. Wider rows go to torch.
WIDEST = 131072
#: Programs of a grid without a bound, which CUDA's is beyond.
UNLIMITED = 2**62
#: What stands for torch's own kernel where candidates are named.
TORCH = "torch"
#: How far the register model may exceed the cap before a plan is refused unseen: ptxas finds 10%
#: more often than not, and what it does not find is refused by verification.
REGISTER_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run one problem on one kind of device.

    Args:
        problem: what is computed.
        schedule: "persistent tile", "persistent row", "split" or "looped".
        tiling: how a program holds its rows.
        programs_per_sm: programs launched per multiprocessor, all resident; 0: one program for each
            row or tile, however many fit.
        max_registers: registers per thread that the compiler may use.
        one_launch: the final reduction is part of the kernel, behind a grid barrier (backward).
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
        """Programs to launch for so many rows: no more than there is work and, where the plan keeps
        to a number per multiprocessor, no more than are resident at once."""
        blocks = -(-rows // self.tiling.block_m)
        return min(blocks, self.most_blocks(sm_count)) * self.tiling.split

    def most_blocks(self, sm_count: int) -> int:
        """Most rows or tiles of rows that are worked on at once, however many there are."""
        if self.programs_per_sm == 0:
            return UNLIMITED
        return sm_count * self.programs_per_sm // self.tiling.split

    def partial_rows(self, programs: int) -> int:
        """Rows of partials that so many programs leave: one per program, or per split row."""
        return programs // self.tiling.split

    @property
    def cooperative(self) -> bool:
        """Whether all programs must be resident at once, because they wait for each other."""
        return self.one_launch or self.tiling.split > 1

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
        return min(2048, 1024 * self.tiling.warps) // columns, columns

    def describe(self) -> str:
        """One line for people."""
        t = self.tiling
        shared = "" if t.split == 1 else f" of {t.split} sharing a row"
        held = "row kept" if t.keep_row else "row re-read"
        weight = (
            ""
            if self.problem.weight_dtype is None
            else (", weight kept" if t.keep_weight else ", weight re-read")
        )
        return (
            f"{self.schedule}: {t.block_m} x ({t.chunks} x {t.chunk}) per step{shared}, "
            f"{t.warps} warps, {t.stages} stages, {held}{weight}, "
            f"{self.programs_per_sm or 'unlimited'} programs/SM, {self.max_registers} registers"
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
    problem: NormProblem,
    limits: DeviceLimits,
    refused: tuple[Rejection, ...] = (),
    preferred: str = "",
) -> Decision:
    """The first candidate within budget.

    Args:
        problem: what is asked.
        limits: of the device.
        refused: what verification against the compiler has refused so far; those candidates are
            passed over.
        preferred: the candidate (in its own words) or "torch" that was measured fastest here; it
            goes first.

    Returns:
        A decision; its `plan` is None when torch should run it, and then `reasons` says why.
    """
    if reasons := unsuitable(problem, limits):
        return Decision(None, refused, reasons)
    if preferred == TORCH:
        return Decision(None, refused, ("measured: torch's kernel is the fastest here",))
    skip = {r.candidate for r in refused}
    rejections = list(refused)
    for plan in sorted(candidates(problem, limits), key=lambda plan: plan.describe() != preferred):
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
    if problem.hidden > WIDEST:
        reasons.append(
            f"hidden size {problem.hidden} > {WIDEST}, the widest {problem.direction} row"
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
    at_once = limits.sm_count * plan.programs_per_sm
    if plan.tiling.split > max(1, at_once):
        # They wait for each other, so a small GPU would launch none.
        return Rejection(plan.describe(), "programs sharing a row", plan.tiling.split, at_once)
    needed = max(1, plan.programs_per_sm)
    fit = resident_programs(limits, plan.tiling.warps, min(use.registers, cap), use.shared_bytes)
    if fit < needed:
        return Rejection(plan.describe(), "programs per SM", needed, fit)
    return None


def candidates(problem: NormProblem, limits: DeviceLimits) -> Iterator[Plan]:
    """Every plan worth trying, best first."""
    backward = problem.direction == "backward"
    seen = set()
    for candidate in (backward_candidates if backward else forward_candidates)(problem, limits):
        if candidate in seen:
            continue
        seen.add(candidate)
        schedule, tiling, programs_per_sm, resident = candidate
        yield Plan(
            problem,
            schedule,
            tiling,
            programs_per_sm,
            register_cap(limits, tiling.warps, resident),
            backward and limits.cooperative and problem.accumulators > 0,
            footprint(problem, tiling),
        )
