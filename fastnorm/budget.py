"""The register, shared-memory and co-residency model. Pure arithmetic; standard library only.

It proposes; the compiler's own figures dispose (routing.py). See: docs/design.md, "Budget".
"""

from __future__ import annotations

from dataclasses import dataclass

from fastnorm.device import DeviceLimits
from fastnorm.problem import ITEM_SIZE, NormProblem


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one program holds its rows.

    Args:
        block_m: rows per step.
        chunk: columns per chunk, a power of two.
        chunks: chunks per row, or per slice of a split row.
        warps: warps per program.
        stages: steps whose rows are in flight or in use at once (1: no staging in shared memory).
        keep_row: x and dy stay in registers between the reduction and the output (else they are
            read again).
        keep_weight: the weight stays in registers for all rows (else it is read again for each).
        split: programs that share a row, a power of two.
    """

    block_m: int
    chunk: int
    chunks: int
    warps: int
    stages: int
    keep_row: bool
    keep_weight: bool
    split: int = 1

    @property
    def elements_per_thread(self) -> int:
        """Elements of one row-sized buffer per thread, padding included."""
        return max(1, -(-self.block_m * self.chunk * self.chunks // (32 * self.warps)))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one program is predicted to use: registers per thread, shared bytes."""

    registers: int
    shared_bytes: int


#: fp32 temporaries per element, by direction and by whether the inputs are fp32 already.
_TEMPORARIES = {
    ("backward", False): 1.2,
    ("backward", True): 0.7,
    ("forward", False): 0.6,
    ("forward", True): 0.3,
}


def footprint(problem: NormProblem, tiling: Tiling) -> Footprint:
    """Predict what a program of this tiling uses.

    Registers per thread: 16 + E·(x + dy + accumulators + temporaries + weight), in 32-bit words
    per element. Backward's temporaries were fitted to about 2,100 compiled plans (ptxas
    12.8, sm_90), forward's set from a few of its sweeps.
    """
    e = tiling.elements_per_thread
    backward = problem.direction == "backward"
    row_inputs = [problem.x_dtype] + ([problem.y_dtype] if backward else [])
    words = sum(ITEM_SIZE[d] for d in row_inputs) / 4
    temporaries = _TEMPORARIES[problem.direction, words == len(row_inputs)]
    per_element: float = problem.accumulators if backward else 0
    if tiling.keep_row:
        # A split row is kept for one more step, beside the next one.
        per_element += words * (1 if tiling.split == 1 else 2) + temporaries
        held = e * per_element
    else:
        sums = 2 if problem.kind.centered else 1
        at_once = words + 2 * temporaries if backward else sums + temporaries
        held = e * per_element + e / tiling.chunks * at_once
    if tiling.keep_weight and problem.weight_dtype is not None:
        columns = max(1, tiling.chunk * tiling.chunks // (32 * tiling.warps))
        held += min(e, columns) * ITEM_SIZE[problem.weight_dtype] / 4
        if not backward and problem.bias_dtype is not None:
            held += min(e, columns) * ITEM_SIZE[problem.bias_dtype] / 4
    staged = sum(ITEM_SIZE[d] for d in row_inputs) * tiling.block_m * tiling.chunk * tiling.chunks
    shared = (tiling.stages - 1) * staged if tiling.stages > 1 else 0
    if tiling.stages > 1 and not tiling.keep_weight and problem.weight_dtype is not None:
        # Re-read weights are staged like the rows, once for the sums and once for dx.
        columns = 2 * tiling.chunk * tiling.chunks * (tiling.stages - 1)
        shared += columns * ITEM_SIZE[problem.weight_dtype]
    # Scratch of cross-warp reductions.
    shared += 64 * tiling.warps
    return Footprint(
        registers=round(16 + held),
        shared_bytes=shared,
    )


def register_cap(limits: DeviceLimits, warps: int, programs_per_sm: int) -> int:
    """Registers per thread that let so many programs share a multiprocessor, rounded down to the
    unit of 8."""
    fair = limits.registers_per_sm // (32 * warps * programs_per_sm)
    return min(limits.max_registers_per_thread, fair // 8 * 8)


def resident_programs(limits: DeviceLimits, warps: int, registers: int, shared_bytes: int) -> int:
    """Programs of this size that one multiprocessor holds at once."""
    # Registers are handed out to warps in units of 256 (8 a thread); 1 KiB of shared memory a
    # program is the system's.
    per_warp = 32 * (-(-registers // 8) * 8)
    by_registers = limits.registers_per_sm // (per_warp * warps)
    by_shared = limits.shared_bytes_per_sm // (shared_bytes + 1024)
    return min(by_registers, by_shared, limits.max_warps_per_sm // warps, 32)
