"""Rows too wide for one program: SPLIT programs share a row and exchange its sums.

Sums are published one step before they are needed, so that nobody waits for the exchange. Needs a
cooperative launch. See: docs/math.md, "Split rows".
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastnorm.kernels.common import widen_weight
from fastnorm.kernels.exchange import RING, collect, grid_barrier, leave_clean, peek, publish
from fastnorm.kernels.finalize import sum_columns


@triton.jit
def load_slice(
    ptr,
    row,
    row_stride,
    in_rows,
    first,
    k: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Chunk k of a program's slice of one row, [CHUNK]; zero beyond N and M."""
    columns = first + k * CHUNK + tl.arange(0, CHUNK)
    if EVEN:
        return tl.load(ptr + row * row_stride + columns, mask=in_rows, other=0.0)
    return tl.load(ptr + row * row_stride + columns, mask=in_rows & (columns < N), other=0.0)


@triton.jit
def load_slice_columns(
    ptr, first, k: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr
):
    """Chunk k of a program's slice of a weight or bias, [CHUNK], in its own dtype."""
    columns = first + k * CHUNK + tl.arange(0, CHUNK)
    if EVEN:
        return tl.load(ptr + columns)
    return tl.load(ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def store_slice(
    ptr,
    row,
    value,
    first,
    k: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write such a chunk to a contiguous [M, N] result, rounded to its dtype."""
    columns = first + k * CHUNK + tl.arange(0, CHUNK)
    value = value.to(ptr.dtype.element_ty)
    if EVEN:
        tl.store(ptr + row * N + columns, value)
    else:
        tl.store(ptr + row * N + columns, value, mask=columns < N)


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
    x = ()
    dy = ()
    for k in tl.static_range(CHUNKS):
        if HAS_WEIGHT and KEEP_WEIGHT and NEEDS_DX:
            weight = weight + (load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN),)
        if NEEDS_DW:
            dw = dw + (tl.zeros([CHUNK], tl.float32),)
        if NEEDS_DB:
            db = db + (tl.zeros([CHUNK], tl.float32),)
        x = x + (tl.zeros([CHUNK], x_ptr.dtype.element_ty),)
        dy = dy + (tl.zeros([CHUNK], dy_ptr.dtype.element_ty),)
    rstd = 0.0
    mean = 0.0
    row = group.to(tl.int64)

    # Step i loads row i and publishes its sums, then finishes row i - 1, which it still holds.
    steps = (M - group + groups - 1) // groups
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        in_rows = row < M
        if NEEDS_DX:
            ready_ptr = slots_ptr + ((step + RING - 1) % RING) * (SUMS * SPLIT)
            ready = peek(ready_ptr, SUMS * SPLIT)
        next_x = ()
        next_dy = ()
        for k in tl.static_range(CHUNKS):
            next_x = next_x + (
                load_slice(x_ptr, row, x_row_stride, in_rows, first, k, N, CHUNK, EVEN),
            )
            next_dy = next_dy + (
                load_slice(dy_ptr, row, dy_row_stride, in_rows, first, k, N, CHUNK, EVEN),
            )
        next_rstd = tl.load(stats_ptr + row, mask=in_rows, other=0.0)
        next_mean = 0.0
        if CENTERED:
            next_mean = tl.load(stats_ptr + M + row, mask=in_rows, other=0.0)
        if NEEDS_DX:
            sum_x_wdy = tl.zeros([CHUNK], tl.float32)
            sum_wdy = tl.zeros([CHUNK], tl.float32)
            for k in tl.static_range(CHUNKS):
                x_k, wdy = next_x[k].to(tl.float32), next_dy[k].to(tl.float32)
                if HAS_WEIGHT:
                    if KEEP_WEIGHT:
                        w_k = weight[k]
                    else:
                        w_k = load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN)
                    wdy = wdy * widen_weight(w_k, WEIGHT_OFFSET)
                if CENTERED:
                    x_k = x_k - next_mean
                    sum_wdy += wdy
                sum_x_wdy += x_k * wdy
            slot_ptr = slots_ptr + (step % RING) * (SUMS * SPLIT) + part
            publish(slot_ptr, tl.sum(sum_x_wdy, 0), step + 1)
            if CENTERED:
                publish(slot_ptr + SPLIT, tl.sum(sum_wdy, 0), step + 1)

        if step > 0:
            if NEEDS_DX:
                sums = collect(ready, ready_ptr, step, SUMS * SPLIT)
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
                        if KEEP_WEIGHT:
                            w_k = weight[k]
                        else:
                            w_k = load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN)
                        wdy = dy_k * widen_weight(w_k, WEIGHT_OFFSET)
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


@triton.jit
def slice_moments(
    x,
    in_slice,
    first,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Mean (0 for RMS) and sum of squared deviations from it of a slice, two passes over registers.

    `in_slice` is how many of its columns lie within the row.
    """
    total = tl.zeros([CHUNK], tl.float32)
    mean = 0.0
    if CENTERED:
        for k in tl.static_range(CHUNKS):
            total += x[k].to(tl.float32)
        mean = tl.sum(total, 0) / tl.maximum(in_slice, 1)
        total = tl.zeros([CHUNK], tl.float32)
    for k in tl.static_range(CHUNKS):
        d = x[k].to(tl.float32)
        if CENTERED:
            d = tl.where(first + k * CHUNK + tl.arange(0, CHUNK) < N, d - mean, 0.0)
        total += d * d
    return mean, tl.sum(total, 0)


@triton.jit
def norm_forward_split(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    semaphore_ptr,
    slots_ptr,
    x_row_stride: tl.int64,
    M: tl.int64,
    eps: tl.float32,
    N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUND_TO: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `norm_forward`. Slices' means and squared deviations are joined as Chan et al. do."""
    P = tl.num_programs(0)
    program = tl.program_id(0)
    part = program % SPLIT
    group = program // SPLIT
    groups = P // SPLIT
    WIDTH: tl.constexpr = CHUNK * CHUNKS
    first = part * WIDTH
    EVEN: tl.constexpr = SPLIT * WIDTH == N
    SUMS: tl.constexpr = 2 if CENTERED else 1
    slots_ptr += group * (RING * SUMS * SPLIT)
    x_row_stride *= STRIDE_UNIT
    in_slice = tl.minimum(tl.maximum(N - first, 0), WIDTH)
    counts = tl.minimum(tl.maximum(N - tl.arange(0, SPLIT) * WIDTH, 0), WIDTH).to(tl.float32)

    weight = ()
    bias = ()
    x = ()
    for k in tl.static_range(CHUNKS):
        if HAS_WEIGHT and KEEP_WEIGHT:
            weight = weight + (load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN),)
        if HAS_BIAS and KEEP_WEIGHT:
            bias = bias + (load_slice_columns(bias_ptr, first, k, N, CHUNK, EVEN),)
        x = x + (tl.zeros([CHUNK], x_ptr.dtype.element_ty),)
    row = group.to(tl.int64)

    # Step i loads row i and publishes its moments, then finishes row i - 1, which it still holds.
    steps = (M - group + groups - 1) // groups
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        in_rows = row < M
        ready_ptr = slots_ptr + ((step + RING - 1) % RING) * (SUMS * SPLIT)
        ready = peek(ready_ptr, SUMS * SPLIT)
        next_x = ()
        for k in tl.static_range(CHUNKS):
            next_x = next_x + (
                load_slice(x_ptr, row, x_row_stride, in_rows, first, k, N, CHUNK, EVEN),
            )
        mean, m2 = slice_moments(next_x, in_slice, first, N, CHUNK, CHUNKS, CENTERED)
        slot_ptr = slots_ptr + (step % RING) * (SUMS * SPLIT) + part
        publish(slot_ptr, m2, step + 1)
        if CENTERED:
            publish(slot_ptr + SPLIT, mean, step + 1)

        if step > 0:
            done = row - groups
            moments = collect(ready, ready_ptr, step, SUMS * SPLIT)
            if CENTERED:
                m2s, means = tl.split(tl.trans(tl.reshape(moments, [2, SPLIT])))
                row_mean = tl.sum(means * counts, 0) / N
                apart = means - row_mean
                row_m2 = tl.sum(m2s + counts * apart * apart, 0)
                tl.store(stats_ptr + M + done, row_mean)
            else:
                row_mean = 0.0
                row_m2 = tl.sum(moments, 0)
            rstd = tl.rsqrt(row_m2 / N + eps)
            tl.store(stats_ptr + done, rstd)
            for k in tl.static_range(CHUNKS):
                y = x[k].to(tl.float32)
                y = (y - row_mean) * rstd if CENTERED else y * rstd
                if ROUND_TO is not None:
                    y = y.to(ROUND_TO).to(tl.float32)
                if HAS_WEIGHT:
                    if KEEP_WEIGHT:
                        w_k = weight[k]
                    else:
                        w_k = load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN)
                    y = y * widen_weight(w_k, WEIGHT_OFFSET)
                if HAS_BIAS:
                    if KEEP_WEIGHT:
                        b_k = bias[k]
                    else:
                        b_k = load_slice_columns(bias_ptr, first, k, N, CHUNK, EVEN)
                    y = y + b_k.to(tl.float32)
                store_slice(y_ptr, done, y, first, k, N, CHUNK, EVEN)
        x = next_x
        row += groups
    grid_barrier(semaphore_ptr, program, P)
    leave_clean(slots_ptr, part, RING * SUMS, SPLIT)
