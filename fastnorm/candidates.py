"""What each schedule proposes for a problem, best first. Pure.

Measurements cited here: sweeps of 6,200 configurations on one H200 (torch 2.11, Triton 3.6),
docs/performance.md, "How the plan was found".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastnorm.budget import Tiling
from fastnorm.device import DeviceLimits
from fastnorm.problem import ITEM_SIZE, NormProblem

#: Loads in flight per multiprocessor that saturate an H200, for tiles and for single rows (more
#: rows per step hide more of the reduction's latency). 10240 x 6144: 49 KB 115 us, 98 KB 110 us;
#: 32768 x 1024: 49 KB 62 us, 98 KB 66 us.
TILE_BYTES_IN_FLIGHT = 48 * 1024
ROW_BYTES_IN_FLIGHT = 60 * 1024
#: Bytes of x per step of a tile; 2 to 8 KB measured, 4 KB best or within 1% for N <= 1024.
TILE_BYTES = 4096


class Candidate(NamedTuple):
    """What a schedule proposes; `resident` programs per multiprocessor set the register cap."""

    schedule: str
    tiling: Tiling
    programs_per_sm: int
    resident: int


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


def backward_candidates(problem: NormProblem, limits: DeviceLimits) -> Iterator[Candidate]:
    """Backward candidates: few warps with many registers each, rows staged in shared memory."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    splits = list(_backward_splits(problem)) if limits.cooperative else []
    if _split_wins(problem):
        yield from splits
    staged = _vectors(problem)
    tiles = n <= 1024
    in_flight = TILE_BYTES_IN_FLIGHT if tiles else ROW_BYTES_IN_FLIGHT
    for block_m, chunk, chunks, warps, first_stages, keep_weight in (
        _tile_layouts(problem) if tiles else _row_layouts(problem)
    ):
        step = block_m * chunk * chunks * (item + ITEM_SIZE[problem.y_dtype])
        schedule = "persistent tile" if block_m > 1 else "persistent row"
        for stages in range(first_stages if staged else 1, 0, -1):
            flight = step * max(1, stages - 1)
            per_sm = 1
            while per_sm * warps < 8 and per_sm * flight < in_flight:
                per_sm *= 2
            for keep in (keep_weight, False) if keep_weight else (False,):
                tiling = Tiling(block_m, chunk, chunks, warps, stages, True, keep)
                yield Candidate(schedule, tiling, per_sm, per_sm)
    yield from splits
    if 1024 < n <= 16384:
        for warps in (8, 16):
            chunk, chunks = chunking(n, warps * 256)
            yield Candidate("looped", Tiling(1, chunk, chunks, warps, 1, False, False), 1, 1)


def _split_wins(problem: NormProblem) -> bool:
    """Whether a split row beats a whole one, where both fit.

    Microseconds split and whole, 2048 rows fp32: LayerNorm 10240 77 and 80, RMSNorm 14336 93 and
    110; 8192 rows bf16: LayerNorm 12288 217 and 167, 16384 254 and 307, RMSNorm 16384 226 and 214.
    """
    n, both = problem.hidden, problem.accumulators == 2
    if ITEM_SIZE[problem.x_dtype] == 4:
        return n >= 10240 if both else n > 10240
    return n > 14336 if both else n > 16384


def _backward_splits(problem: NormProblem) -> Iterator[Candidate]:
    """Split rows: programs of one warp need no barrier of their own, and many of them hide the
    exchange. 4096 x 32768 LayerNorm bf16: 1 warp 254 us, 2 warps 270 us, 4 warps 273 us.
    """
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    if n <= 8192:
        return
    one_warp = (1, 32, 2, True, 8)
    scattered = (4, 8, 1, False, 4)  # rows that allow no vectors: an address per element
    shapes: tuple[tuple[int, int, int, bool, int], ...]
    if not _vectors(problem):
        shapes = (scattered, (*scattered[:-1], 3))
    elif item == 4 and problem.accumulators == 2:
        # fp32 fills the registers: from 16384 on 2 warps with the weight re-read are ahead
        # (16384: 117 us, 1 warp 121 us; 32768: 217 and 223 us).
        one_warp = (1, 28, 2, True, 8)
        two_warps = (2, 32, 1, False, 4) if n <= 16384 else (2, 16, 1, False, 8)
        shapes = (one_warp, two_warps) if n < 16384 else (two_warps, one_warp)
    elif n <= 16384:
        shapes = ((1, 16, 2, True, 16), one_warp)
    else:
        shapes = (one_warp, (2, 16, 2, True, 8))
    if _vectors(problem):
        # Fewer programs of more registers, for dtypes that need them (bf16 rows with an fp32 dy).
        shapes = (*shapes, (2, 16, 2, True, 4))
    for warps, elements, stages, keep_weight, per_sm in shapes:
        tiling = _slices(n, warps, elements, item, stages, keep_weight)
        if tiling is not None:
            yield Candidate("split", tiling, per_sm, per_sm)


def _slices(
    hidden: int, warps: int, elements: int, item: int, stages: int, keep_weight: bool
) -> Tiling | None:
    """A row cut into a power of two of slices, of about `elements` per thread each."""
    chunk = 32 * warps * min(elements, 16 // item)  # one 16-byte access per thread
    split = 2
    spare = 1.25 if item == 2 and elements > 8 else 1.0
    while hidden > split * 32 * warps * elements * spare:
        split *= 2
    if split > 128:
        return None
    return Tiling(1, chunk, -(-hidden // (split * chunk)), warps, stages, True, keep_weight, split)


def _tile_layouts(problem: NormProblem) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """(block_m, chunk, chunks, warps, stages, keep weight) for rows of which several make a
    step."""
    n = problem.hidden
    chunk, chunks = chunking(n, 1024)
    width = chunk * chunks
    rows = _rows_per_step(width, ITEM_SIZE[problem.x_dtype])
    # 1048576 x 128: 4 warps, 4 stages 205 us, 2 warps, 3 stages 209 us; 131072 x 768: 1 warp
    # 155 us, 2 warps 156 us; 32768 x 1024: 2 warps, 4 stages 58.8 us, 3 stages 59.9 us.
    if n <= 256:
        yield rows, chunk, chunks, 4, 4, True
        yield rows, chunk, chunks, 2, 3, True
    elif chunks > 1:
        yield rows, chunk, chunks, 1, 3, True
    yield rows, chunk, chunks, 2, 4, True
    yield max(1, rows // 2), chunk, chunks, 2, 4, True
    yield max(1, rows // 2), chunk, chunks, 4, 3, True


def _rows_per_step(width: int, item: int) -> int:
    """The power of two of rows that come to `TILE_BYTES`, at least one."""
    rows = 1
    while rows * 2 * width * item <= TILE_BYTES:
        rows *= 2
    return rows


def _row_layouts(problem: NormProblem) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """(1, chunk, chunks, warps, stages, keep weight): 24 to 40 elements a thread, or up to 56 with
    the weight re-read."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    for warps in (2, 4, 8, 16):
        elements = n / (32 * warps)
        chunk, chunks = chunking(n, warps * 256)
        if n > 16384:
            return
        if n > 14336:
            # RMS 8192 x 16384: 16 warps, not staged 214 us, 8 warps, 2 stages 231 us; fp32:
            # 8 warps, not staged 113 us.
            if elements == 64 and item == 4 or elements < 64:
                yield 1, chunk, chunks, warps, 1, False
        elif elements <= 40:
            yield 1, chunk, chunks, warps, 3, True
        elif warps >= 4 and elements <= 48 or warps >= 8 and elements <= 56:
            # 10240 x 6144: 4 warps, weight re-read 110 us, 8 warps, kept 114 us.
            yield 1, chunk, chunks, warps, 3, False


def forward_candidates(problem: NormProblem, limits: DeviceLimits) -> Iterator[Candidate]:
    """Forward candidates: one program per row or tile, the row in registers, as many resident as
    the registers allow; looped or split when a row does not fit."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    splits = list(_forward_splits(problem)) if limits.cooperative else []
    looped = list(_forward_looped(problem))
    if n <= 1024:
        yield from _forward_tiles(problem)
    if _looped_wins(problem):
        yield from looped
    if n * item > 131072:
        # fp32 1024 x 65536 LayerNorm: split 162 us, looped 167 us; RMSNorm: 143 and 164 us, bf16
        # 1024 x 131072: 156 and 171 us.
        yield from splits
    yield from _forward_rows(problem)
    yield from looped
    yield from splits


def _forward_rows(problem: NormProblem) -> Iterator[Candidate]:
    """Rows in registers: (warps, resident programs, widest chunk), then as many programs fewer."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    halves = n * item // 2
    layouts = []
    if item == 4 and 10240 < n <= 16384:
        # 2048 x 16384 fp32 LayerNorm: 8 warps, chunks of 4096 72 us, of 2048 74 us, 32 warps 80 us;
        # 2048 x 14336 RMSNorm: 4 warps 63 us, 32 warps 69 us.
        layouts += [(8, 2, 4096)] if problem.kind.centered else [(4, 3, 2048), (8, 2, 4096)]
    elif item == 2 and 20480 < n <= 28672 and not problem.kind.centered:
        layouts += [(8, 2, 4096)]  # 4096 x 24576 RMSNorm: 103 us, 32 warps 117 us
    # 8192 x 5120: 8 resident 47.5 us, uncapped 49.5 us; 8192 x 12288 LayerNorm: 3 resident 105 us,
    # 2 resident 117 us.
    for widest, warps, resident in (
        (2048, 2, 16),
        (6144, 4, 8),
        (10240, 8, 4),
        (14336, 8, 3),
        (20480, 16, 2),
        (65536, 32, 1),
    ):
        if halves <= widest:
            layouts.append((warps, resident, _widest_chunk(problem, warps)))
    for warps, resident, widest in layouts:
        chunk, chunks = chunking(n, widest)
        for cap in sorted({resident, max(1, resident // 2), 1}, reverse=True):
            tiling = Tiling(1, chunk, chunks, warps, 1, True, False)
            yield Candidate("persistent row", tiling, 0, cap)


def _widest_chunk(problem: NormProblem, warps: int) -> int:
    """Elements of a chunk of a forward row: one to a few 16-byte accesses of each thread.

    2048 x 32768 fp32 RMSNorm: chunks of 16384 134 us, of 8192 137 us, of 4096 145 us; LayerNorm: of
    16384 148.4 us, of 8192 147.7 us; bf16 2560 x 49152 RMSNorm: of 16384 126 us, of 8192 128 us.
    8192 x 12288 LayerNorm: of 4096 103.5 us, of 2048 104.9 us.
    """
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    if n > 16384:
        return 16384 if n * item > 65536 and not problem.kind.centered else 8192
    return warps * (1024 if 10240 < n <= 14336 else 512) // item


def _looped_wins(problem: NormProblem) -> bool:
    """Whether reading a row twice beats keeping it in registers or splitting it.

    Microseconds looped and otherwise, bf16: LayerNorm 4096 x 32768 152 and 157, 2560 x 49152 154
    and 160, 2048 x 65536 167 and 206; RMSNorm 4096 x 32768 138 and 139, 2560 x 49152 127 and 126,
    2048 x 65536 139 and 149.
    """
    n = problem.hidden
    if ITEM_SIZE[problem.x_dtype] == 4:
        return False
    return n > 20480 if problem.kind.centered else 28672 < n <= 32768 or 49152 < n <= 65536


def _forward_looped(problem: NormProblem) -> Iterator[Candidate]:
    """(warps, widest chunk, resident programs). Large chunks have many loads under way, small ones
    leave registers. 2048 x 65536 RMSNorm: chunks of 32768 139 us, of 16384 141 us; LayerNorm: of
    8192 167 us, of 16384 170 us; 1024 x 131072: of 16384 193 us, of 8192 spilled; 4096 x 32768
    LayerNorm: 8 warps 152 us, 32 warps 180 us.
    """
    n, centered = problem.hidden, problem.kind.centered
    shapes = [(32, 16384, 1), (16, 8192, 1), (16, 2048, 1)]
    if n <= 40960:
        shapes.insert(0, (8, 8192 if centered else 16384, 2))
    elif not centered:
        shapes.insert(0, (32, 32768, 1))
    elif 49152 < n <= 65536:
        shapes.insert(0, (32, 8192, 1))
    for warps, widest, resident in shapes:
        chunk, chunks = chunking(n, widest)
        tiling = Tiling(1, chunk, chunks, warps, 1, False, False)
        yield Candidate("looped", tiling, 0, resident)


def _forward_tiles(problem: NormProblem) -> Iterator[Candidate]:
    """Tiles of rows: 32 to 48 elements a thread. 1048576 x 128 LayerNorm: 1 warp 138 us, 2 warps
    142 us; 32768 x 1024: 2 warps 38.3 us, 1 warp 38.7 us; fp32 2048 x 1024 RMSNorm: 1 warp 8.5 us,
    2 warps 8.7 us.
    """
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    chunk, chunks = chunking(n, 1024)
    rows = _rows_per_step(chunk * chunks, item)
    two_first = n > 512 and chunks == 1 and (item == 2 or problem.kind.centered)
    for warps in (2, 1) if two_first else (1, 2):
        schedule = "persistent tile" if rows > 1 else "persistent row"
        tiling = Tiling(rows, chunk, chunks, warps, 1, True, False)
        yield Candidate(schedule, tiling, 0, 16 if warps == 1 or item == 4 else 12)
        yield Candidate(schedule, tiling, 0, 4)


def _forward_splits(problem: NormProblem) -> Iterator[Candidate]:
    """Split rows, forward: as backward, with nothing to accumulate."""
    n, item = problem.hidden, ITEM_SIZE[problem.x_dtype]
    if n <= 8192:
        return
    shapes: tuple[tuple[int, int, int, bool, int], ...] = ((4, 8, 1, False, 4),)
    if _vectors(problem):
        best = (4, 32 if item == 4 else 64, 2, item == 4 and not problem.kind.centered, 4)
        shapes = (best, (4, 32, 2, True, 4), (1, 32, 2, True, 8))
    for warps, elements, stages, keep_weight, per_sm in shapes:
        tiling = _slices(n, warps, elements, item, stages, keep_weight)
        if tiling is not None:
            yield Candidate("split", tiling, per_sm, per_sm)
