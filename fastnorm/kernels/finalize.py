"""Sum the fp32 partials [P, N] of dweight and dbias over programs, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_columns(
    partial_ptr,
    out_ptr,
    P,
    N: tl.constexpr,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[c] = sum over p of partial[p, c] for COLUMNS columns; row r of the tile adds p = r,
    r+ROWS, ... in turn."""
    columns = first_column + tl.arange(0, COLUMNS)
    in_row = columns < N
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, P, ROWS):
        programs = start + tl.arange(0, ROWS)
        total += tl.load(
            partial_ptr + programs.to(tl.int64)[:, None] * N + columns[None, :],
            mask=(programs < P)[:, None] & in_row[None, :],
            other=0.0,
            # Written by other programs of the same launch when called behind a grid barrier: skip
            # L1.
            cache_modifier=".cg",
        )
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def norm_finalize(
    dw_partial_ptr,
    db_partial_ptr,
    dw_ptr,
    db_ptr,
    P,
    N: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The reduction as a launch of its own: one program per COLUMNS columns. See: docs/math.md,
    "Partials"."""
    first_column = tl.program_id(0) * COLUMNS
    if NEEDS_DW:
        sum_columns(dw_partial_ptr, dw_ptr, P, N, first_column, ROWS, COLUMNS)
    if NEEDS_DB:
        sum_columns(db_partial_ptr, db_ptr, P, N, first_column, ROWS, COLUMNS)
