"""Small jit functions that several kernels call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen_weight(weight, OFFSET: tl.constexpr):
    """The factor that a weight stands for, in fp32. See: docs/math.md, "Kinds"."""
    if OFFSET == "weight_dtype":
        weight = (weight.to(tl.float32) + 1.0).to(weight.dtype)
    weight = weight.to(tl.float32)
    if OFFSET == "fp32":
        weight = weight + 1.0
    return weight


@triton.jit
def load_rows(
    ptr, rows, in_rows, row_stride, k: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr
):
    """Columns [k·CHUNK, (k+1)·CHUNK) of some rows, [BLOCK_M, CHUNK]; zero beyond M and N."""
    columns = k * CHUNK + tl.arange(0, CHUNK)
    address = ptr + rows[:, None] * row_stride + columns[None, :]
    if (k + 1) * CHUNK > N:
        return tl.load(address, mask=in_rows[:, None] & (columns < N)[None, :], other=0.0)
    return tl.load(address, mask=in_rows[:, None], other=0.0)


@triton.jit
def store_rows(ptr, rows, in_rows, value, k: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr):
    """Write such a chunk to a contiguous [M, N] result, rounded to its dtype."""
    columns = k * CHUNK + tl.arange(0, CHUNK)
    address = ptr + rows[:, None] * N + columns[None, :]
    value = value.to(ptr.dtype.element_ty)
    if (k + 1) * CHUNK > N:
        tl.store(address, value, mask=in_rows[:, None] & (columns < N)[None, :])
    else:
        tl.store(address, value, mask=in_rows[:, None])


@triton.jit
def load_columns(
    ptr, k: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, EVICTION: tl.constexpr
):
    """Chunk k of a weight or bias, [1, CHUNK], in its own dtype; zero beyond N."""
    columns = k * CHUNK + tl.arange(0, CHUNK)
    if (k + 1) * CHUNK > N:
        in_row = columns < N
        return tl.load(ptr + columns, mask=in_row, other=0.0, eviction_policy=EVICTION)[None, :]
    return tl.load(ptr + columns, eviction_policy=EVICTION)[None, :]


@triton.jit
def reciprocal_root(v):
    """v^-1/2, of subnormal v, too, which `tl.rsqrt` takes for zero: scaled by a power of two and
    back, exactly."""
    tiny = v < 7.9e-31
    scaled = tl.where(tiny, v * 1152921504606846976.0, v)  # 2^60
    return tl.rsqrt(scaled) * tl.where(tiny, 1073741824.0, 1.0)  # 2^30
