"""The `fastnorm::` operators: opaque to everything above the dispatcher, for CUDA and CPU, with
fakes.

Their autograd formulas are in autograd.py. See: docs/math.md, "What is saved".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastnorm import reference, routing
from fastnorm.operands import Mask, backward_rows, forward_rows, hidden_size, statistics_shape
from fastnorm.semantics import SEMANTICS

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

LIBRARY = torch.library.Library("fastnorm", "DEF")
LIBRARY.define(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, "
    "str semantics, ScalarType out_dtype) -> (Tensor y, Tensor mean, Tensor rstd)"
)
LIBRARY.define(
    "norm_backward(Tensor dy, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, int normalized_ndim, str semantics, bool[3] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def _device_index(x: Tensor) -> int:
    return x.device.index if x.is_cuda else routing.INTERPRETER


def _no_kernels(x: Tensor, weight: Tensor | None, hidden: int) -> str:
    """Why no kernel can serve these tensors, whatever the plan says; "" where one may."""
    if not x.is_cuda and not (x.device.type == "cpu" and routing.device.interpreting()):
        return (
            f"input is on {x.device}; the kernels run on CUDA devices "
            "(and on a CPU in Triton's interpreter)"
        )
    if weight is not None and weight.numel() != hidden:
        return (
            f"weight of shape {list(weight.shape)}: the kernels take one value per "
            "normalised element"
        )
    return ""


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fastnorm::norm_forward` for tensors in memory.

    Args:
        x: `[..., *normalized_shape]`.
        weight, bias: `normalized_shape`, or None.
        normalized_ndim: trailing dimensions that are normalised.
        eps: added to the variance.
        semantics: a key of `SEMANTICS`.
        out_dtype: dtype of y.

    Returns:
        y like x in `out_dtype`, contiguous; mean (empty where nothing is centred) and rstd `[...,
        1, ...]`, fp32 (fp64 for fp64).
    """
    kind = SEMANTICS[semantics]
    hidden = hidden_size(x, normalized_ndim)
    if x.numel() and not _no_kernels(x, weight, hidden):
        rows = forward_rows(x, weight, bias, hidden, semantics, out_dtype)
        kernel = routing.forward_kernel(rows.problem, _device_index(x))
        if kernel is not None:
            shape = statistics_shape(x, normalized_ndim)
            y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
            rstd = torch.empty(shape, dtype=torch.float32, device=x.device)
            mean = torch.empty_like(rstd) if kind.centered else rstd.new_empty(0)
            with _on_device(x):
                kernel(
                    rows.x,
                    rows.weight,
                    rows.bias,
                    eps,
                    rows.count,
                    rows.x_row_stride,
                    y,
                    mean,
                    rstd,
                )
            routing.count("forward", kernel.plan.route)
            return y, mean, rstd
    routing.count("forward", "torch")
    y = reference.norm(x, x.shape[x.dim() - normalized_ndim :], weight, bias, eps, kind, out_dtype)
    saved_mean, rstd = reference.statistics(x, normalized_ndim, eps, kind)
    return y.contiguous(), rstd.new_empty(0) if saved_mean is None else saved_mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    normalized_ndim: int,
    semantics: str,
    output_mask: Mask,
) -> Grads:
    """`fastnorm::norm_backward` for tensors in memory; None where the mask leaves a gradient out.

    Args:
        dy: gradient of y, any strides.
        x, weight, bias, normalized_ndim, semantics: as given to the forward.
        mean, rstd: as it returned them.
        output_mask: which of dx, dweight, dbias are wanted.

    Returns:
        dx, dweight, dbias, contiguous, in the dtypes of x, weight and bias.
    """
    hidden = hidden_size(x, normalized_ndim)
    want_dx, want_dw, want_db = output_mask
    mask = (want_dx, want_dw and weight is not None, want_db and bias is not None)
    if x.numel() and not _no_kernels(x, weight, hidden):
        rows = backward_rows(dy, x, weight, bias, hidden, semantics, mask)
        kernel = routing.backward_kernel(rows.problem, _device_index(x))
        if kernel is not None:
            dx, dw, db = (
                _result_like(x, mask[0]),
                _result_like(weight, mask[1]),
                _result_like(bias, mask[2]),
            )
            with _on_device(x):
                kernel(
                    rows.dy,
                    rows.x,
                    rows.weight,
                    mean,
                    rstd,
                    rows.count,
                    rows.dy_row_stride,
                    rows.x_row_stride,
                    dx,
                    dw,
                    db,
                )
            routing.count("backward", kernel.plan.route)
            return dx, dw, db
    routing.count("backward", "torch")
    return _torch_backward(dy, x, weight, bias, mean, rstd, normalized_ndim, semantics, mask)


def _result_like(t: Tensor | None, wanted: bool) -> Tensor | None:
    """An unwritten contiguous result of t's shape and dtype."""
    if t is None or not wanted:
        return None
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _requires_grad(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def why_no_kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    semantics: str,
    out_dtype: torch.dtype,
) -> list[str]:
    """Every reason for which kernels do not serve a call (forward, and backward where gradients are
    wanted)."""
    hidden = hidden_size(x, normalized_ndim)
    if reason := _no_kernels(x, weight, hidden):
        return [reason]
    if not x.numel():
        return []
    with torch.no_grad():
        asked = [forward_rows(x, weight, bias, hidden, semantics, out_dtype).problem]
        mask = (x.requires_grad, _requires_grad(weight), _requires_grad(bias))
        if any(mask):
            dy = torch.empty(x.shape, dtype=out_dtype, device=x.device)
            asked.append(backward_rows(dy, x, weight, bias, hidden, semantics, mask).problem)
    reasons = []
    for problem in asked:
        decision = routing.verified(problem, _device_index(x)).decision
        if decision.plan is None:
            reasons += [f"{problem.direction}: {r}" for r in decision.reasons]
            reasons += [f"{problem.direction}: {r}" for r in decision.rejections]
    return reasons


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    normalized_ndim: int,
    semantics: str,
    mask: Mask,
) -> Grads:
    """torch's fused backward where it takes these dtypes, else the formula written out."""
    one_dtype = all(t is None or t.dtype == x.dtype for t in (dy, weight, bias))
    shape = x.shape[x.dim() - normalized_ndim :]
    if x.is_cuda and one_dtype and semantics == "layer" and x.numel():
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, shape, mean, rstd, weight, bias, mask
        )
    if x.is_cuda and one_dtype and semantics == "rms" and x.numel():
        dx, dw = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, mask[:2])
        return dx, dw, None
    kind = SEMANTICS[semantics]
    saved_mean = mean if kind.centered else None
    return reference.norm_backward(
        dy, x, weight, bias, saved_mean, rstd, normalized_ndim, kind, mask
    )


class _on_device:  # noqa: N801 - reads as a statement
    """Make a tensor's device current for a launch, at no cost where it already is."""

    __slots__ = ("_index", "_previous")

    def __init__(self, x: Tensor) -> None:
        self._index = x.device.index if x.is_cuda else None

    def __enter__(self) -> None:
        if self._index is not None:
            self._previous = torch.cuda._exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        if self._index is not None:
            torch.cuda._maybe_exchange_device(self._previous)


def _backward_operator(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator returns tensors only: empty ones stand for gradients that nobody wants."""
    dx, dw, db = backward(*args)
    nothing = args[1].new_empty(0)
    return (
        nothing if dx is None else dx,
        nothing.clone() if dw is None else dw,
        nothing.clone() if db is None else db,
    )


for _key in ("CUDA", "CPU"):
    LIBRARY.impl("norm_forward", forward, _key)
    LIBRARY.impl("norm_backward", _backward_operator, _key)


@torch.library.register_fake("fastnorm::norm_forward", lib=LIBRARY)
def _forward_fake(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = statistics_shape(input, normalized_ndim)
    rstd = input.new_empty(shape, dtype=reference.statistics_dtype(input.dtype))
    mean = torch.empty_like(rstd) if SEMANTICS[semantics].centered else rstd.new_empty(0)
    return input.new_empty(input.shape, dtype=out_dtype), mean, rstd


@torch.library.register_fake("fastnorm::norm_backward", lib=LIBRARY)
def _backward_fake(
    dy: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    normalized_ndim: int,
    semantics: str,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    def like(t: Tensor | None, wanted: bool) -> Tensor:
        return input.new_empty(0) if t is None or not wanted else t.new_empty(t.shape)

    want_dx, want_dw, want_db = output_mask
    return like(input, want_dx), like(weight, want_dw), like(bias, want_db)
