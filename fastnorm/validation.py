"""What no route may compute: bad input gets its error here, before anything is planned."""

from __future__ import annotations

import torch
from torch import Tensor

from fastnorm.semantics import SEMANTICS, Semantics


def validate(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    semantics: str,
) -> Semantics:
    """Raise for what no route may compute, saying what came and what was expected.

    Args:
        input, weight, bias: as given to `fastnorm.functional.norm`.
        shape: the normalised shape.
        semantics: a key of `SEMANTICS`.

    Returns:
        The semantics as data.

    Raises:
        ValueError: unknown semantics, or an empty shape.
        RuntimeError: shapes, dtypes or devices do not fit (torch raises RuntimeError, too).
    """
    kind = SEMANTICS.get(semantics)
    if kind is None:
        raise ValueError(f"unknown semantics {semantics!r}; known: {', '.join(SEMANTICS)}")
    if not shape:
        raise ValueError("normalized_shape is empty; give at least one trailing dimension")
    if input.is_nested and input.layout is torch.strided:
        # It has no shape to look at; the operators of torch that run it check it.
        return kind
    if input.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"normalized_shape={list(shape)} expects input with shape "
            f"[*, {', '.join(map(str, shape))}], but got input of size {list(input.shape)}"
        )
    if input.dtype not in _FLOATING:
        raise RuntimeError(
            f"expected a floating input of 16, 32 or 64 bits, got {input.dtype}; convert it first"
        )
    if weight is not None:
        if weight.shape != shape and not _per_head(weight, input, shape, kind):
            raise _shape_error("weight", weight, shape)
        _validate_parameter("weight", weight, input)
    if bias is not None:
        if bias.shape != shape:
            raise _shape_error("bias", bias, shape)
        _validate_parameter("bias", bias, input)
    return kind


_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _validate_parameter(name: str, parameter: Tensor, input: Tensor) -> None:
    if parameter.device != input.device:
        raise RuntimeError(
            f"expected all tensors on one device, got input on {input.device} and {name} on "
            f"{parameter.device}; move one of them"
        )
    if parameter.dtype not in _FLOATING:
        raise RuntimeError(f"expected a floating {name}, got {parameter.dtype}; convert it first")


def _shape_error(name: str, parameter: Tensor, shape: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"expected {name} of shape {list(shape)} (the normalized_shape), "
        f"got {list(parameter.shape)}"
    )


def _per_head(weight: Tensor, input: Tensor, shape: tuple[int, ...], kind: Semantics) -> bool:
    """Cohere's weights: leading dimensions of the weight match input's, (heads, head_dim)."""
    return (
        kind.name == "layer_cohere"
        and len(shape) < weight.dim() <= input.dim()
        and weight.shape == input.shape[-weight.dim() :]
    )
