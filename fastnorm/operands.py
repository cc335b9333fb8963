"""From tensors to what kernels take: rows with one stride, and the problem that they pose."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastnorm.problem import NormProblem, stride_unit

#: Triton's names of the dtypes; what is missing here is refused by the plan under torch's name.
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Mask = tuple[bool, bool, bool]


class Rows(NamedTuple):
    """Operands as kernels want them.

    Args:
        problem: what they pose.
        x, dy: viewed as `[rows, N]` with unit column stride and the given row strides (elements);
            dy is x itself in a forward problem.
        weight, bias: `[N]` contiguous, or None.
        rows: M.
    """

    problem: NormProblem
    x: Tensor
    x_row_stride: int
    dy: Tensor
    dy_row_stride: int
    weight: Tensor | None
    bias: Tensor | None
    rows: int


def name_of(dtype: torch.dtype) -> str:
    """Triton's name of a dtype, or torch's for what kernels do not take."""
    return _NAMES.get(dtype) or str(dtype)


def hidden_size(x: Tensor, normalized_ndim: int) -> int:
    """N: elements that share one mean and variance."""
    if normalized_ndim == 1:
        return x.shape[-1]
    hidden = 1
    for size in x.shape[x.dim() - normalized_ndim :]:
        hidden *= size
    return hidden


def stats_shape(x: Tensor, normalized_ndim: int, centered: bool) -> tuple[int, ...]:
    """`[2, ...]` (rstd, mean) over the leading dimensions of x; `[1, ...]` (rstd) where not
    centred."""
    return (2 if centered else 1, *x.shape[: x.dim() - normalized_ndim])


def forward_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    semantics: str,
    out_dtype: torch.dtype,
) -> Rows:
    """Operands of a forward pass. Copies what has no single row stride."""
    rows, stride = _as_rows(x, hidden)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    problem = _problem(
        "forward",
        semantics,
        hidden,
        x.dtype,
        out_dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        (False, False, False),
        stride_unit(stride),
        aligned(rows, weight, bias),
    )
    return Rows(problem, rows, stride, rows, stride, weight, bias, x.numel() // hidden)


def backward_rows(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    semantics: str,
    mask: Mask,
) -> Rows:
    """Operands of a backward pass. Copies what has no single row stride; never writes into dy."""
    x_rows, x_stride = _as_rows(x, hidden)
    dy_rows, dy_stride = _as_rows(dy, hidden)
    weight = None if weight is None else weight.contiguous()
    problem = _problem(
        "backward",
        semantics,
        hidden,
        x.dtype,
        dy.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        mask,
        stride_unit(x_stride, dy_stride),
        aligned(x_rows, dy_rows, weight),
    )
    return Rows(problem, x_rows, x_stride, dy_rows, dy_stride, weight, bias, x.numel() // hidden)


@functools.lru_cache(maxsize=4096)
def _problem(
    direction: Literal["forward", "backward"],
    semantics: str,
    hidden: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    mask: Mask,
    unit: int,
    aligned: bool,
) -> NormProblem:
    """Made once per kind of call: finding it costs less than making it."""
    return NormProblem(
        direction,
        semantics,
        hidden,
        name_of(x_dtype),
        name_of(y_dtype),
        None if weight_dtype is None else name_of(weight_dtype),
        None if bias_dtype is None else name_of(bias_dtype),
        *mask,
        unit,
        aligned,
    )


def _as_rows(x: Tensor, hidden: int) -> tuple[Tensor, int]:
    """x itself and its row stride, or a contiguous copy where rows have no single stride."""
    if x.is_contiguous():
        return x, hidden
    stride = row_stride(x.shape, x.stride(), hidden)
    if stride is None:
        return x.contiguous(), hidden
    return x, stride


def row_stride(sizes: tuple[int, ...], strides: tuple[int, ...], hidden: int) -> int | None:
    """The one stride that takes each dense row of `hidden` elements to the next.

    None where a row is not dense or no single stride does.
    """
    dim, covered = len(sizes) - 1, 1
    while dim >= 0 and covered < hidden:
        if sizes[dim] != 1 and strides[dim] != covered:
            return None
        covered *= sizes[dim]
        dim -= 1
    stride, expected = None, 0
    for size, step in zip(sizes[dim::-1], strides[dim::-1], strict=True) if dim >= 0 else ():
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * size
    return hidden if stride is None else stride


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every pointer is a multiple of 16 bytes, which vector accesses need."""
    for t in tensors:
        if t is not None and t.data_ptr() % 16:
            return False
    return True
