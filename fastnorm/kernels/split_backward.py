"""Backward for rows too wide for one program: SPLIT programs share a row and exchange its sums.

Sums are published one step before they are needed, so that nobody waits for the exchange. Needs a
cooperative launch. See: docs/math.md, "Split rows".
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastnorm.kernels.common import widen_weight
from fastnorm.kernels.exchange import RING, collect, grid_barrier, leave_clean, peek, publish
from fastnorm.kernels.finalize import sum_columns
from fastnorm.kernels.slices import load_slice_columns, load_slices, store_slice, zero_slices


@triton.jit
def slice_weight(
    weight,
    weight_ptr,
    first,
    k: tl.constexpr,
    N: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The factor of chunk k, fp32 [CHUNK]: from registers where kept, else from memory."""
    if KEEP_WEIGHT:
        return widen_weight(weight[k], WEIGHT_OFFSET)
    else:
        return widen_weight(load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN), WEIGHT_OFFSET)


@triton.jit
def slice_sums(
    x,
    dy,
    weight,
    weight_ptr,
    mean,
    first,
    N: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Sums over a slice of (x - mean)·wdy and, where centred, of wdy."""
    sum_x_wdy = tl.zeros([CHUNK], tl.float32)
    sum_wdy = tl.zeros([CHUNK], tl.float32)
    for k in tl.static_range(CHUNKS):
        x_k, wdy = x[k].to(tl.float32), dy[k].to(tl.float32)
        if HAS_WEIGHT:
            wdy = wdy * slice_weight(
                weight, weight_ptr, first, k, N, WEIGHT_OFFSET, CHUNK, KEEP_WEIGHT, EVEN
            )
        if CENTERED:
            x_k = x_k - mean
            sum_wdy += wdy
        sum_x_wdy += x_k * wdy
    return tl.sum(sum_x_wdy, 0), tl.sum(sum_wdy, 0)


@triton.jit
def norm_backward_split(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    dw_ptr,
    db_ptr,
    semaphore_ptr,
    slots_ptr,
    dy_row_stride: tl.int64,
    x_row_stride: tl.int64,
    M: tl.int64,
    N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FINAL_ROWS: tl.constexpr,
    FINAL_COLUMNS: tl.constexpr,
):
    """As `norm_backward`. Partials are [P / SPLIT, N]; slots are [P / SPLIT, RING, SUMS, SPLIT]."""
    P = tl.num_programs(0)
    program = tl.program_id(0)
    part = program % SPLIT
    group = program // SPLIT
    groups = P // SPLIT
    first = part * (CHUNK * CHUNKS)
    EVEN: tl.constexpr = SPLIT * CHUNK * CHUNKS == N
    SUMS: tl.constexpr = 2 if CENTERED else 1
    slots_ptr += group * (RING * SUMS * SPLIT)
    dy_row_stride *= STRIDE_UNIT
    x_row_stride *= STRIDE_UNIT

    weight = ()
    dw = ()
    db = ()
    if HAS_WEIGHT and KEEP_WEIGHT and NEEDS_DX:
        for k in tl.static_range(CHUNKS):
            weight = weight + (load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN),)
    if NEEDS_DW:
        dw = zero_slices(tl.float32, CHUNK, CHUNKS)
    if NEEDS_DB:
        db = zero_slices(tl.float32, CHUNK, CHUNKS)
    x = zero_slices(x_ptr.dtype.element_ty, CHUNK, CHUNKS)
    dy = zero_slices(dy_ptr.dtype.element_ty, CHUNK, CHUNKS)
    rstd = 0.0
    mean = 0.0
    row = group.to(tl.int64)

    # Step i loads row i and publishes its sums, then finishes row i - 1, which it still holds.
    steps = (M - group + groups - 1) // groups
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        in_rows = row < M
        if NEEDS_DX:
            ready_ptr = slots_ptr + ((step + RING - 1) % RING) * (SUMS * SPLIT)
            ready = peek(ready_ptr, SUMS * SPLIT, WARPS)
        next_x = load_slices(x_ptr, row, x_row_stride, in_rows, first, N, CHUNK, CHUNKS, EVEN)
        next_dy = load_slices(dy_ptr, row, dy_row_stride, in_rows, first, N, CHUNK, CHUNKS, EVEN)
        next_rstd = tl.load(stats_ptr + row, mask=in_rows, other=0.0)
        next_mean = 0.0
        if CENTERED:
            next_mean = tl.load(stats_ptr + M + row, mask=in_rows, other=0.0)
        if NEEDS_DX:
            sum_x_wdy, sum_wdy = slice_sums(
                next_x,
                next_dy,
                weight,
                weight_ptr,
                next_mean,
                first,
                N,
                CENTERED,
                HAS_WEIGHT,
                WEIGHT_OFFSET,
                CHUNK,
                CHUNKS,
                KEEP_WEIGHT,
                EVEN,
            )
            slot_ptr = slots_ptr + (step % RING) * (SUMS * SPLIT) + part
            publish(slot_ptr, sum_x_wdy, step + 1)
            if CENTERED:
                publish(slot_ptr + SPLIT, sum_wdy, step + 1)

        if step > 0:
            if NEEDS_DX:
                sums = collect(ready, ready_ptr, step, SUMS * SPLIT, WARPS)
                if CENTERED:
                    c1, c2 = tl.split(tl.sum(tl.reshape(sums, [2, SPLIT]), 1))
                    c2 = c2 * (1.0 / N)
                else:
                    c1 = tl.sum(sums, 0)
                c1 = c1 * (1.0 / N) * rstd
            for k in tl.static_range(CHUNKS):
                x_k, dy_k = x[k].to(tl.float32), dy[k].to(tl.float32)
                x_hat = (x_k - mean) * rstd if CENTERED else x_k * rstd
                if NEEDS_DX:
                    wdy = dy_k
                    if HAS_WEIGHT:
                        wdy = dy_k * slice_weight(
                            weight, weight_ptr, first, k, N, WEIGHT_OFFSET, CHUNK, KEEP_WEIGHT, EVEN
                        )
                    dx = wdy - x_hat * c1
                    if CENTERED:
                        dx = dx - c2
                    store_slice(dx_ptr, row - groups, dx * rstd, first, k, N, CHUNK, EVEN)
                if NEEDS_DW:
                    dw = dw[:k] + (dw[k] + dy_k * x_hat,) + dw[k + 1 :]
                if NEEDS_DB:
                    db = db[:k] + (db[k] + dy_k,) + db[k + 1 :]
        x = next_x
        dy = next_dy
        rstd = next_rstd
        mean = next_mean
        row += groups

    for k in tl.static_range(CHUNKS):
        columns = first + k * CHUNK + tl.arange(0, CHUNK)
        partial = group.to(tl.int64) * N + columns
        if NEEDS_DW:
            tl.store(dw_partial_ptr + partial, dw[k], mask=columns < N)
        if NEEDS_DB:
            tl.store(db_partial_ptr + partial, db[k], mask=columns < N)
    grid_barrier(semaphore_ptr, program, P)
    leave_clean(slots_ptr, part, RING * SUMS, SPLIT)
    for column in range(program * FINAL_COLUMNS, N, P * FINAL_COLUMNS):
        if NEEDS_DW:
            sum_columns(dw_partial_ptr, dw_ptr, groups, N, column, FINAL_ROWS, FINAL_COLUMNS)
        if NEEDS_DB:
            sum_columns(db_partial_ptr, db_ptr, groups, N, column, FINAL_ROWS, FINAL_COLUMNS)
