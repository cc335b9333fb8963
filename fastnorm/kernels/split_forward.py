"""Forward for rows too wide for one program: SPLIT programs share a row and exchange its moments.

As split_backward.py. See: docs/math.md, "Split rows".
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastnorm.kernels.common import reciprocal_root, widen_weight
from fastnorm.kernels.exchange import RING, collect, grid_barrier, leave_clean, peek, publish
from fastnorm.kernels.slices import load_slice_columns, load_slices, store_slice, zero_slices


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
    WARPS: tl.constexpr,
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
    for k in tl.static_range(CHUNKS):
        if HAS_WEIGHT and KEEP_WEIGHT:
            weight = weight + (load_slice_columns(weight_ptr, first, k, N, CHUNK, EVEN),)
        if HAS_BIAS and KEEP_WEIGHT:
            bias = bias + (load_slice_columns(bias_ptr, first, k, N, CHUNK, EVEN),)
    x = zero_slices(x_ptr.dtype.element_ty, CHUNK, CHUNKS)
    row = group.to(tl.int64)

    # Step i loads row i and publishes its moments, then finishes row i - 1, which it still holds.
    steps = (M - group + groups - 1) // groups
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        in_rows = row < M
        ready_ptr = slots_ptr + ((step + RING - 1) % RING) * (SUMS * SPLIT)
        ready = peek(ready_ptr, SUMS * SPLIT, WARPS)
        next_x = load_slices(x_ptr, row, x_row_stride, in_rows, first, N, CHUNK, CHUNKS, EVEN)
        mean, m2 = slice_moments(next_x, in_slice, first, N, CHUNK, CHUNKS, CENTERED)
        slot_ptr = slots_ptr + (step % RING) * (SUMS * SPLIT) + part
        publish(slot_ptr, m2, step + 1)
        if CENTERED:
            publish(slot_ptr + SPLIT, mean, step + 1)

        if step > 0:
            done = row - groups
            moments = collect(ready, ready_ptr, step, SUMS * SPLIT, WARPS)
            if CENTERED:
                m2s, means = tl.split(tl.trans(tl.reshape(moments, [2, SPLIT])))
                row_mean = tl.sum(means * counts, 0) / N
                apart = means - row_mean
                row_m2 = tl.sum(m2s + counts * apart * apart, 0)
                tl.store(stats_ptr + M + done, row_mean)
            else:
                row_mean = 0.0
                row_m2 = tl.sum(moments, 0)
            rstd = reciprocal_root(row_m2 / N + eps)
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
