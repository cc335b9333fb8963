"""Access to a program's slice of a row, for kernels whose rows are shared by programs."""

from __future__ import annotations

import triton
import triton.language as tl


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
def load_slices(
    ptr,
    row,
    row_stride,
    in_rows,
    first,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """All chunks of a program's slice of one row, as a tuple."""
    chunks = ()
    for k in tl.static_range(CHUNKS):
        chunks = chunks + (load_slice(ptr, row, row_stride, in_rows, first, k, N, CHUNK, EVEN),)
    return chunks


@triton.jit
def zero_slices(dtype: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """As many chunks of zeros."""
    chunks = ()
    for _ in tl.static_range(CHUNKS):
        chunks = chunks + (tl.zeros([CHUNK], dtype),)
    return chunks
