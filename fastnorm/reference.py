"""The same mathematics in differentiable PyTorch: for transforms, higher derivatives and whatever
no kernel serves.

Each kind is written as the layers it is named after write it, so its results are theirs bit for
bit.
See: docs/math.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastnorm.semantics import Semantics


def norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    semantics: Semantics,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise the trailing dimensions in differentiable PyTorch.

    Args:
        input: `[..., *normalized_shape]`, any floating dtype.
        normalized_shape: trailing dimensions that share one mean and variance.
        weight: `normalized_shape` (or, for the kinds written out here, any shape that broadcasts
            against it), or None.
        bias: `normalized_shape`, or None.
        eps: added to the variance.
        semantics: which kind of norm.
        out_dtype: dtype of the result; None: what the kind gives.

    Returns:
        `[..., *normalized_shape]`, differentiable to any order.
    """
    shape = tuple(normalized_shape)
    if semantics.name in ("layer", "rms"):
        y = _torch_norm(input, shape, weight, bias, eps, semantics)
    elif semantics.name == "layer_offset":
        shifted = None if weight is None else weight + 1
        y = _torch_norm(input, shape, shifted, bias, eps, semantics)
    elif semantics.name == "layer_fp32":
        y = _layer_fp32(input, shape, weight, bias, eps)
    elif semantics.name == "layer_cohere":
        y = _layer_cohere(input, len(shape), weight, bias, eps)
    else:
        y = _rms(input, len(shape), weight, eps, semantics)
    return y if out_dtype is None or y.dtype == out_dtype else y.to(out_dtype)


def statistics(
    x: Tensor, dims: int, eps: float, semantics: Semantics
) -> tuple[Tensor | None, Tensor]:
    """mean (None where nothing is centred) and rstd over the last `dims` dimensions, which stay
    with size 1.

    In fp32, or fp64 for fp64; differentiable to any order.
    """
    axes = tuple(range(-dims, 0))
    x = x.to(statistics_dtype(x.dtype))
    if not semantics.centered:
        return None, torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
    mean = x.mean(axes, keepdim=True)
    return mean, torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + eps)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dims: int,
    semantics: Semantics,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `norm` written out; differentiable in every argument. See: docs/math.md,
    "Backward".

    Args:
        dy: gradient of the output, `[..., *normalized_shape]`.
        x, weight, bias: as given to `norm`; the weight's shape is what it broadcasts from.
        mean, rstd: from `statistics`, `[..., 1, ...]`.
        dims: how many trailing dimensions are normalised.
        semantics: which kind of norm.
        output_mask: which of dx, dweight, dbias are wanted.

    Returns:
        dx, dweight, dbias in the dtypes of x, weight and bias; None where not wanted.
    """
    wide = statistics_dtype(x.dtype)
    axes = tuple(range(-dims, 0))
    dy_wide, x_wide = dy.to(wide), x.to(wide)
    x_hat = (x_wide if mean is None else x_wide - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        wdy = dy_wide if weight is None else dy_wide * _factor(weight, semantics, wide)
        c1 = (x_hat * wdy).mean(axes, keepdim=True)
        dx = wdy - x_hat * c1
        if mean is not None:
            dx = dx - wdy.mean(axes, keepdim=True)
        dx = (dx * rstd).to(x.dtype)
    if output_mask[1] and weight is not None:
        dweight = (dy_wide * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = dy_wide.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dweight, dbias


def _factor(weight: Tensor, semantics: Semantics, wide: torch.dtype) -> Tensor:
    """What x_hat is multiplied by."""
    if semantics.weight_offset == "fp32":
        return 1 + weight.to(wide)
    if semantics.weight_offset == "weight_dtype":
        return (1 + weight).to(wide)
    return weight.to(wide)


def _torch_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    semantics: Semantics,
) -> Tensor:
    """torch's own function, in fp32 where it refuses a mix of dtypes, and right at one feature."""
    if not semantics.centered:
        return F.rms_norm(x, shape, weight, eps)
    if all(size == 1 for size in shape):
        return _single_feature(x, weight, bias)
    dtypes = {p.dtype for p in (weight, bias) if p is not None}
    half_on_cpu = x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    if dtypes <= {x.dtype} or (half_on_cpu and dtypes == {torch.float32} and weight is not None):
        # The CPU's operator takes half input with fp32 parameters; no other mix is accepted, and
        # its backward fails on a bias without a weight.
        return F.layer_norm(x, shape, weight, bias, eps)
    return _layer_fp32(x, shape, weight, bias, eps)


def _single_feature(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """LayerNorm over one feature: x equals its mean, so y = bias and dx = dweight = 0.

    torch 2.13 on a CPU returns rounding noise times rstd here (pytorch/pytorch#188372).
    """
    # Squared, so that dx, too, is NaN where x is not finite.
    x_hat = (x - x).square()
    y = x_hat if weight is None else x_hat * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _layer_fp32(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """torch's LayerNorm on everything in fp32, cast back to the input's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), shape, w, b, eps).to(x.dtype)


def _layer_cohere(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm in fp32 throughout, as Cohere writes it out; the weight may have leading dims."""
    wide = torch.promote_types(x.dtype, torch.float32)
    axes = tuple(range(-dims, 0))
    x32 = x.to(wide)
    mean = x32.mean(axes, keepdim=True)
    variance = (x32 - mean).pow(2).mean(axes, keepdim=True)
    y = (x32 - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        y = weight.to(wide) * y
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def _rms(x: Tensor, dims: int, weight: Tensor | None, eps: float, semantics: Semantics) -> Tensor:
    """The RMS kinds of transformers: they differ in where they round and in the weight's offset."""
    wide = torch.promote_types(x.dtype, torch.float32)
    axes = tuple(range(-dims, 0))
    x32 = x.to(wide)
    x_hat = x32 * torch.rsqrt(x32.pow(2).mean(axes, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if semantics.rounds_normalized == "input":
        x_hat = x_hat.to(x.dtype)
    elif semantics.rounds_normalized == "half_weight" and weight.dtype in (
        torch.float16,
        torch.bfloat16,
    ):
        x_hat = x_hat.to(weight.dtype)
    if semantics.weight_offset == "fp32":
        weight = 1 + weight.to(wide)
    elif semantics.weight_offset == "weight_dtype":
        weight = (1 + weight).to(wide)
    y = weight * x_hat
    return y if semantics.output == "promoted" else y.to(x.dtype)


def result_dtype(x: torch.dtype, weight: torch.dtype | None, semantics: Semantics) -> torch.dtype:
    """The dtype `norm` returns without autocast. Pure; used by planning and fakes."""
    if semantics.output == "input" or weight is None:
        return x
    if semantics.rounds_normalized == "half_weight":
        half = weight in (torch.float16, torch.bfloat16)
        return (
            weight if half else torch.promote_types(torch.promote_types(x, torch.float32), weight)
        )
    return torch.promote_types(x, weight)
