"""How norms meet autograd: an autograd.Function in eager mode, registered formulas in compiled
graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastnorm import ops, reference, sharding
from fastnorm.operands import Mask
from fastnorm.ops import LIBRARY, Grads
from fastnorm.semantics import SEMANTICS


def apply(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """A norm through the operators, recorded by autograd. Arguments as `ops.forward`; returns y."""
    if torch.compiler.is_compiling():
        return torch.ops.fastnorm.norm_forward(
            x, weight, bias, normalized_ndim, eps, semantics, out_dtype
        )[0]
    if torch.is_grad_enabled():
        return _apply_norm(x, weight, bias, (normalized_ndim, eps, semantics, out_dtype))
    return _call_forward(x, weight, bias, normalized_ndim, eps, semantics, out_dtype)[0]


#: What a call fixes beside its tensors: normalized_ndim, eps, semantics, out_dtype.
Settings = tuple[int, float, str, torch.dtype]


class Norm(torch.autograd.Function):
    """A norm in eager mode. The settings are one argument: each costs host time of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
    ) -> Tensor:
        """y, with what backward needs saved."""
        y, stats = _call_forward(x, weight, bias, *settings)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Gradients by the kernel, or differentiable ones where autograd records."""
        x, weight, bias, stats = ctx.saved_tensors
        normalized_ndim, eps, semantics, _ = ctx.settings
        mask = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            grads = differentiable_backward(
                dy, x, weight, bias, normalized_ndim, eps, semantics, mask
            )
        else:
            grads = call_backward(dy, x, weight, bias, stats, normalized_ndim, semantics, mask)
        return *grads, None


# `Function.apply` without its functorch prologue (12 us with it, 9 without, on one CPU): callers
# have ruled transforms out.
_apply_norm = super(torch.autograd.Function, Norm).apply


def differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    semantics: str,
    mask: Mask,
) -> Grads:
    """First-order gradients that can be differentiated again: the saved statistics are functions of
    x."""
    kind = SEMANTICS[semantics]
    mean, rstd = reference.statistics(x, normalized_ndim, eps, kind)
    return reference.norm_backward(dy, x, weight, bias, mean, rstd, normalized_ndim, kind, mask)


#: Types whose memory is at `data_ptr()`: nothing that wraps other tensors.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def _below_dispatcher(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the operators' dispatch adds nothing: plain tensors and no mode that wants to see
    calls."""
    plain = type(x) is Tensor and type(weight) in _PLAIN and type(bias) in _PLAIN
    if not plain or torch._C._len_torch_dispatch_stack():
        return False
    # A lazy negation is written nowhere.
    return not (x.is_neg() or _negated(weight) or _negated(bias))


def _negated(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.is_neg()


def _call_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    if _below_dispatcher(x, weight, bias):
        return ops.forward(x, weight, bias, *settings)
    sharding.ensure_registered(x)
    return torch.ops.fastnorm.norm_forward.default(x, weight, bias, *settings)


def call_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> Grads:
    # What autograd hands over may be written nowhere: a lazy negation, a lazy zero, a batch of
    # `is_grads_batched`. The dispatcher writes it out.
    written = type(dy) is Tensor and not (
        dy.is_neg() or dy._is_zerotensor() or not torch._C._has_storage(dy)
    )
    if written and _below_dispatcher(x, weight, bias):
        return ops.backward(dy, x, weight, bias, *rest)
    grads = torch.ops.fastnorm.norm_backward.default(dy, x, weight, bias, *rest)
    return _only_wanted(grads, rest[-1])


def _only_wanted(grads: tuple[Tensor, Tensor, Tensor], mask: Any) -> Grads:
    """Drop the empty tensors that stand for gradients nobody asked for."""
    (dx, dw, db), (want_dx, want_dw, want_db) = grads, mask
    return dx if want_dx else None, dw if want_dw else None, db if want_db else None


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, normalized_ndim, eps, semantics, _ = inputs
    _, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(x, weight, bias, stats)
    ctx.static = (normalized_ndim, eps, semantics)


def _compiled_backward(ctx: Any, dy: Tensor | None, _dstats: Any) -> Any:
    nothing = (None,) * 7
    if dy is None:
        return nothing
    x, weight, bias, stats = ctx.saved_tensors
    normalized_ndim, eps, semantics = ctx.static
    mask = list(ctx.needs_input_grad[:3])
    grads = torch.ops.fastnorm.norm_backward.default(
        dy, x, weight, bias, stats, normalized_ndim, semantics, mask
    )
    return *_only_wanted(grads, mask), *nothing[3:]


torch.library.register_autograd(
    "fastnorm::norm_forward", _compiled_backward, setup_context=_setup_context, lib=LIBRARY
)


def _no_second_order(ctx: Any, *_grads: Any) -> Any:
    raise NotImplementedError(
        "fastnorm::norm_backward was called as an operator and is not differentiable: its saved "
        "statistics are constants to it. Call fastnorm.layer_norm or fastnorm.rms_norm in eager "
        "mode for higher derivatives."
    )


torch.library.register_autograd("fastnorm::norm_backward", _no_second_order, lib=LIBRARY)
