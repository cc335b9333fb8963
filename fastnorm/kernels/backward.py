"""Backward of LayerNorm and RMSNorm in one pass over x and dy: a fixed grid of programs, each
walking many rows."""

from __future__ import annotations

import triton
import triton.language as tl

from fastnorm.kernels.common import load_columns, load_rows, store_rows, widen_weight
from fastnorm.kernels.exchange import grid_barrier
from fastnorm.kernels.finalize import sum_columns


@triton.jit
def norm_backward(
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
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP_ROW: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    FINAL_ROWS: tl.constexpr,
    FINAL_COLUMNS: tl.constexpr,
):
    """dx = (wdy - x_hat·c1 - c2)·rstd row by row; dw, db as fp32 partials [P, N], summed at the
    end.

    Row strides come in units of STRIDE_UNIT elements, so that the compiler knows their alignment.
    See: docs/math.md, "Backward".
    """
    program = tl.program_id(0)
    P = tl.num_programs(0)
    dy_row_stride *= STRIDE_UNIT
    x_row_stride *= STRIDE_UNIT

    weight = ()
    dw = ()
    db = ()
    for k in tl.static_range(CHUNKS):
        if HAS_WEIGHT and KEEP_WEIGHT and NEEDS_DX:
            weight = weight + (load_columns(weight_ptr, k, N, CHUNK, ""),)
        if NEEDS_DW:
            dw = dw + (tl.zeros([BLOCK_M, CHUNK], tl.float32),)
        if NEEDS_DB:
            db = db + (tl.zeros([BLOCK_M, CHUNK], tl.float32),)

    for block in tl.range(program, tl.cdiv(M, BLOCK_M), P, num_stages=STAGES):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows = rows < M
        x = ()
        dy = ()
        if KEEP_ROW or not NEEDS_DX:
            for k in tl.static_range(CHUNKS):
                x = x + (load_rows(x_ptr, rows, in_rows, x_row_stride, k, N, CHUNK),)
                dy = dy + (load_rows(dy_ptr, rows, in_rows, dy_row_stride, k, N, CHUNK),)
        rstd = tl.load(stats_ptr + rows, mask=in_rows, other=0.0)[:, None]
        if CENTERED:
            mean = tl.load(stats_ptr + M + rows, mask=in_rows, other=0.0)[:, None]

        if NEEDS_DX:
            sum_x_hat_wdy = tl.zeros([BLOCK_M, CHUNK], tl.float32)
            sum_wdy = tl.zeros([BLOCK_M, CHUNK], tl.float32)
            for k in tl.static_range(CHUNKS):
                if KEEP_ROW:
                    x_k, dy_k = x[k].to(tl.float32), dy[k].to(tl.float32)
                else:
                    x_k = load_rows(x_ptr, rows, in_rows, x_row_stride, k, N, CHUNK).to(tl.float32)
                    dy_k = load_rows(dy_ptr, rows, in_rows, dy_row_stride, k, N, CHUNK).to(
                        tl.float32
                    )
                if HAS_WEIGHT:
                    w_k = weight[k] if KEEP_WEIGHT else load_columns(weight_ptr, k, N, CHUNK, "")
                    dy_k = dy_k * widen_weight(w_k, WEIGHT_OFFSET)
                if CENTERED:
                    x_k = x_k - mean
                    sum_wdy += dy_k
                sum_x_hat_wdy += x_k * dy_k
            # rstd is factored out of the sum: c1 = mean(x_hat·wdy) = mean((x - mean)·wdy)·rstd.
            c1 = (tl.sum(sum_x_hat_wdy, 1) * (1.0 / N))[:, None] * rstd
            if CENTERED:
                c2 = (tl.sum(sum_wdy, 1) * (1.0 / N))[:, None]

        for k in tl.static_range(CHUNKS):
            if KEEP_ROW or not NEEDS_DX:
                x_k, dy_k = x[k].to(tl.float32), dy[k].to(tl.float32)
            else:
                x_k = load_rows(x_ptr, rows, in_rows, x_row_stride, k, N, CHUNK).to(tl.float32)
                dy_k = load_rows(dy_ptr, rows, in_rows, dy_row_stride, k, N, CHUNK).to(tl.float32)
            x_hat = (x_k - mean) * rstd if CENTERED else x_k * rstd
            if NEEDS_DX:
                wdy = dy_k
                if HAS_WEIGHT:
                    w_k = weight[k] if KEEP_WEIGHT else load_columns(weight_ptr, k, N, CHUNK, "")
                    wdy = dy_k * widen_weight(w_k, WEIGHT_OFFSET)
                dx = wdy - x_hat * c1
                if CENTERED:
                    dx = dx - c2
                store_rows(dx_ptr, rows, in_rows, dx * rstd, k, N, CHUNK)
            if NEEDS_DW:
                dw = dw[:k] + (dw[k] + dy_k * x_hat,) + dw[k + 1 :]
            if NEEDS_DB:
                db = db[:k] + (db[k] + dy_k,) + db[k + 1 :]

    for k in tl.static_range(CHUNKS):
        columns = k * CHUNK + tl.arange(0, CHUNK)
        partial = program.to(tl.int64) * N + columns
        if NEEDS_DW:
            tl.store(dw_partial_ptr + partial, tl.sum(dw[k], 0), mask=columns < N)
        if NEEDS_DB:
            tl.store(db_partial_ptr + partial, tl.sum(db[k], 0), mask=columns < N)

    if ONE_LAUNCH:
        grid_barrier(semaphore_ptr, program, P)
        for first in range(program * FINAL_COLUMNS, N, P * FINAL_COLUMNS):
            if NEEDS_DW:
                sum_columns(dw_partial_ptr, dw_ptr, P, N, first, FINAL_ROWS, FINAL_COLUMNS)
            if NEEDS_DB:
                sum_columns(db_partial_ptr, db_ptr, P, N, first, FINAL_ROWS, FINAL_COLUMNS)
