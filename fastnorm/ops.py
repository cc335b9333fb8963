"""The `fastnorm::` operators: opaque to everything above the dispatcher, for CUDA and CPU, with
fakes.

Their autograd formulas are in autograd.py. See: docs/math.md, "What is saved".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastnorm import reference, routing
from fastnorm.operands import Mask, aligned, backward_rows, forward_rows, hidden_size, stats_shape
from fastnorm.semantics import SEMANTICS

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

LIBRARY = torch.library.Library("fastnorm", "DEF")
LIBRARY.define(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, "
    "str semantics, ScalarType out_dtype) -> (Tensor y, Tensor stats)"
)
LIBRARY.define(
    "norm_backward(Tensor dy, Tensor input, Tensor? weight, Tensor? bias, Tensor stats, "
    "int normalized_ndim, str semantics, bool[3] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def device_index(x: Tensor) -> int:
    return x.device.index if x.is_cuda else routing.INTERPRETER


def why_torch(x: Tensor, weight: Tensor | None, hidden: int) -> str:
    """Why no kernel can serve these tensors, whatever the plan says; "" where one may."""
    if not x.is_cuda and not (x.device.type == "cpu" and routing.device.interpreting()):
        return (
            f"input is on {x.device}; the kernels run on CUDA devices "
            "(and on a CPU in Triton's interpreter)"
        )
    return why_torch_anywhere(weight, hidden)


def why_torch_anywhere(weight: Tensor | None, hidden: int) -> str:
    """The part of `why_torch` that holds on any device."""
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
) -> tuple[Tensor, Tensor]:
    """`fastnorm::norm_forward` for tensors in memory.

    Args:
        x: `[..., *normalized_shape]`.
        weight, bias: `normalized_shape`, or None.
        normalized_ndim: trailing dimensions that are normalised.
        eps: added to the variance.
        semantics: a key of `SEMANTICS`.
        out_dtype: dtype of y.

    Returns:
        y like x in `out_dtype`, contiguous; stats `[2, ...]` over x's leading dimensions: rstd,
        mean (`[1, ...]`: rstd, where nothing is centred), fp32 (fp64 for fp64).
    """
    hidden = hidden_size(x, normalized_ndim)
    if x.numel() and not why_torch(x, weight, hidden):
        rows = forward_rows(x, weight, bias, hidden, semantics, out_dtype)
        kernel = routing.kernel_for(rows.problem, device_index(x), rows.rows)
        if kernel is not None:
            shape = stats_shape(x, normalized_ndim, SEMANTICS[semantics].centered)
            y = _unwritten(x) if out_dtype == x.dtype else _unwritten(x, out_dtype)
            stats = x.new_empty(shape, dtype=torch.float32)
            kernel(rows, eps, y, stats)
            routing.count("forward", kernel.route)
            return y, stats
    routing.count("forward", "torch")
    return torch_forward(x, weight, bias, normalized_ndim, eps, semantics, out_dtype)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    normalized_ndim: int,
    semantics: str,
    output_mask: Mask,
) -> Grads:
    """`fastnorm::norm_backward` for tensors in memory; None where the mask leaves a gradient out.

    Args:
        dy: gradient of y, any strides.
        x, weight, bias, normalized_ndim, semantics: as given to the forward.
        stats: as it returned them.
        output_mask: which of dx, dweight, dbias are wanted.

    Returns:
        dx, dweight, dbias, contiguous, in the dtypes of x, weight and bias.
    """
    hidden = hidden_size(x, normalized_ndim)
    want_dx, want_dw, want_db = output_mask
    mask = (want_dx, want_dw and weight is not None, want_db and bias is not None)
    if not (stats.is_contiguous() and aligned(stats)):
        # As some saved-tensors hook gave it back.
        stats = stats.clone(memory_format=torch.contiguous_format)
    if x.numel() and not why_torch(x, weight, hidden):
        rows = backward_rows(dy, x, weight, bias, hidden, semantics, mask)
        kernel = routing.kernel_for(rows.problem, device_index(x), rows.rows)
        if kernel is not None:
            dx = _unwritten(x) if mask[0] else None
            dw = None if weight is None or not mask[1] else _unwritten(weight)
            db = None if bias is None or not mask[2] else _unwritten(bias)
            kernel(rows, stats, dx, dw, db)
            routing.count("backward", kernel.route)
            return dx, dw, db
    routing.count("backward", "torch")
    return torch_backward(dy, x, weight, bias, stats, normalized_ndim, semantics, mask)


def _unwritten(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous result of t's shape, by the cheapest call that makes one."""
    if dtype is None and t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty(t.shape, dtype=dtype or t.dtype, device=t.device)


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
    if reason := why_torch(x, weight, hidden):
        return [reason]
    if not x.numel():
        return []
    recorded = torch.is_grad_enabled()
    with torch.no_grad():
        asked = [forward_rows(x, weight, bias, hidden, semantics, out_dtype).problem]
        mask = (x.requires_grad, _requires_grad(weight), _requires_grad(bias))
        if recorded and any(mask):
            dy = torch.empty(x.shape, dtype=out_dtype, device=x.device)
            asked.append(backward_rows(dy, x, weight, bias, hidden, semantics, mask).problem)
    reasons = []
    for problem in asked:
        decision = routing.verified(problem, device_index(x)).decision
        if decision.plan is None:
            reasons += [f"{problem.direction}: {r}" for r in decision.reasons]
            reasons += [f"{problem.direction}: {r}" for r in decision.rejections]
    return reasons


def _fused_by_torch(x: Tensor, semantics: str, *others: Tensor | None) -> bool:
    """Whether torch's fused CUDA operators take these tensors: its own two kinds, one dtype."""
    same = all(t is None or t.dtype == x.dtype for t in others)
    return x.is_cuda and same and semantics in ("layer", "rms") and x.numel() > 0


def torch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """torch's fused forward where it takes these dtypes, else the reference."""
    kind = SEMANTICS[semantics]
    shape = x.shape[x.dim() - normalized_ndim :]
    saved = stats_shape(x, normalized_ndim, kind.centered)
    if out_dtype == x.dtype and _fused_by_torch(x, semantics, weight, bias):
        if kind.centered:
            y, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
            return y, torch.stack((rstd, mean)).view(saved)
        y, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        return y, rstd.view(saved)
    y = reference.norm(x, shape, weight, bias, eps, kind, out_dtype)
    stats = [t for t in reference.statistics(x, normalized_ndim, eps, kind) if t is not None]
    return y.contiguous(), torch.stack(stats[::-1]).view(saved)


def torch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    normalized_ndim: int,
    semantics: str,
    mask: Mask,
) -> Grads:
    """torch's fused backward where it takes these dtypes, else the formula written out."""
    kind = SEMANTICS[semantics]
    saved = (*x.shape[: x.dim() - normalized_ndim], *([1] * normalized_ndim))
    rstd = stats[0].view(saved)
    mean = stats[1].view(saved) if kind.centered else None
    if _fused_by_torch(x, semantics, dy, weight, bias):
        hidden = hidden_size(x, normalized_ndim)
        dx, dw, db = _fused_backward(dy, x, weight, bias, mean, rstd, hidden, mask)
        return (
            None if dx is None else dx.view(x.shape),
            None if dw is None or weight is None else dw.view(weight.shape),
            None if db is None or bias is None else db.view(bias.shape),
        )
    return reference.norm_backward(dy, x, weight, bias, mean, rstd, normalized_ndim, kind, mask)


def _fused_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    hidden: int,
    mask: Mask,
) -> Grads:
    """torch's fused CUDA backward, on rows: above 65,536 of them it returns dweight of the wrong
    shape for several normalised dimensions (pytorch/pytorch#192016)."""
    rows = x.numel() // hidden
    dy, x = dy.reshape(rows, hidden), x.reshape(rows, hidden)
    weight_row = None if weight is None else weight.reshape(hidden)
    if mean is None:
        dx, dw = torch.ops.aten._fused_rms_norm_backward(
            dy, x, (hidden,), rstd.reshape(rows, 1), weight_row, mask[:2]
        )
        db = None
    else:
        bias_row = None if bias is None else bias.reshape(hidden)
        stats = mean.reshape(rows, 1), rstd.reshape(rows, 1)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy, x, (hidden,), *stats, weight_row, bias_row, mask
        )
    return dx, dw, db


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
) -> tuple[Tensor, Tensor]:
    shape = stats_shape(input, normalized_ndim, SEMANTICS[semantics].centered)
    stats = input.new_empty(shape, dtype=reference.statistics_dtype(input.dtype))
    return input.new_empty(input.shape, dtype=out_dtype), stats


@torch.library.register_fake("fastnorm::norm_backward", lib=LIBRARY)
def _backward_fake(
    dy: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    normalized_ndim: int,
    semantics: str,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    def like(t: Tensor | None, wanted: bool) -> Tensor:
        return input.new_empty(0) if t is None or not wanted else t.new_empty(t.shape)

    want_dx, want_dw, want_db = output_mask
    return like(input, want_dx), like(weight, want_dw), like(bias, want_db)
