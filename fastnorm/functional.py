"""The functions people call: validate, describe, route."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fastnorm import ops, reference, routing
from fastnorm.autograd import apply
from fastnorm.semantics import SEMANTICS, Semantics

Backend = Literal["auto", "triton", "torch"]


class _Context(threading.local):
    """The backend chosen in this thread. Dynamo reads and guards it; a ContextVar breaks graphs."""

    def __init__(self) -> None:
        self.backend: Backend = "auto"


_context = _Context()


class KernelUnavailable(RuntimeError):
    """`backend="triton"` was asked for and no kernel can run; the message lists every reason."""


@contextlib.contextmanager
def backend(choice: Backend) -> Iterator[None]:
    """Choose what runs norms inside a `with` block (this thread only).

    Args:
        choice: "auto" (kernels where they pass the budget), "triton" (raise where they do not) or
            "torch".

    Raises:
        ValueError: any other choice.
    """
    before, _context.backend = _context.backend, checked_backend(choice)
    try:
        yield
    finally:
        _context.backend = before


def checked_backend(choice: Backend) -> Backend:
    if choice not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {choice!r}")
    return choice


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """`y = (x - mean)·rstd·weight + bias` over the trailing dimensions, as
    `torch.nn.functional.layer_norm`.

    Args:
        input: `[..., *normalized_shape]`, floating.
        normalized_shape: trailing dimensions that share a mean and a variance.
        weight, bias: `normalized_shape`, any floating dtype, or None.
        eps: added to the variance.
        backend: overrides the context's choice, see `fastnorm.backend`.

    Returns:
        `[..., *normalized_shape]` in input's dtype (under autocast: as torch's own function).

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes are not floating.
        KernelUnavailable: `backend="triton"` and no kernel can run.
    """
    return norm(input, normalized_shape, weight, bias, eps, semantics="layer", backend=backend)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """`y = x·rstd·weight` with `rstd = (mean(x²) + eps)^-1/2`, as `torch.nn.functional.rms_norm`.

    Args:
        input: `[..., *normalized_shape]`, floating.
        normalized_shape: trailing dimensions that share a root mean square.
        weight: `normalized_shape`, any floating dtype, or None.
        eps: added to the mean square; None: the machine epsilon of fp32 (of fp64 for fp64).
        backend: overrides the context's choice, see `fastnorm.backend`.

    Returns:
        `[..., *normalized_shape]` in input's dtype (under autocast: as torch's own function).

    Raises:
        ValueError, TypeError, KernelUnavailable: as `layer_norm`.
    """
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    return norm(input, normalized_shape, weight, None, eps, semantics="rms", backend=backend)


def norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    semantics: str = "layer",
    backend: Backend | None = None,
) -> Tensor:
    """Any kind of norm (see `fastnorm.semantics`); `layer_norm` and `rms_norm` are two of them.

    Args:
        input, normalized_shape, weight, bias, eps, backend: as `layer_norm`.
        semantics: a key of `fastnorm.semantics.SEMANTICS`.

    Raises:
        ValueError, TypeError, KernelUnavailable: as `layer_norm`.
    """
    shape = (
        normalized_shape
        if type(normalized_shape) is tuple
        else (normalized_shape,)
        if isinstance(normalized_shape, int)
        else tuple(normalized_shape)
    )
    kind = _validate(input, shape, weight, bias, semantics)
    choice = _context.backend if backend is None else checked_backend(backend)
    if choice == "torch" or not (input.is_cuda or choice == "triton"):
        return _torch(input, shape, weight, bias, eps, kind)
    if reason := _needs_reference(input):
        if choice == "triton":
            raise KernelUnavailable(f'backend="triton" cannot run: {reason}')
        return _torch(input, shape, weight, bias, eps, kind)
    out_dtype = result_dtype(input, weight, kind)
    if choice == "triton":
        _require_kernels(input, weight, bias, len(shape), kind, out_dtype)
    return apply(input, weight, bias, len(shape), float(eps), semantics, out_dtype)


def _validate(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    semantics: str,
) -> Semantics:
    """Raise for what no route may compute; torch's own errors where they are clear."""
    kind = SEMANTICS.get(semantics)
    if kind is None:
        raise ValueError(f"unknown semantics {semantics!r}; known: {', '.join(SEMANTICS)}")
    if not shape:
        raise ValueError("normalized_shape is empty; give at least one trailing dimension")
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


def _needs_reference(input: Tensor) -> str:
    """Why this call must be differentiable PyTorch all through, or ""."""
    if torch.compiler.is_exporting():
        return (
            "torch.export records torch's own operators, so that the program runs without fastnorm"
        )
    if torch.compiler.is_compiling():
        return ""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    if torch.jit.is_tracing():
        return "torch.jit.trace records torch's own operators"
    if input.is_nested:
        return "nested tensors run on torch's operators"
    return ""


def result_dtype(input: Tensor, weight: Tensor | None, kind: Semantics) -> torch.dtype:
    """The dtype torch's own function, or the layer the kind is named after, would return here."""
    if kind.name in AUTOCAST_TO_FP32 and torch.is_autocast_enabled(input.device.type):
        if input.device.type == "cuda" and input.dtype != torch.float64:
            return torch.float32
    return reference.result_dtype(input.dtype, None if weight is None else weight.dtype, kind)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


#: Kinds whose torch function CUDA autocast runs in fp32: layer_norm always, rms_norm from torch
#: 2.12 on.
AUTOCAST_TO_FP32 = frozenset(
    {"layer", "layer_offset"} | ({"rms"} if _torch_version() >= (2, 12) else set())
)


def _torch(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: Semantics,
) -> Tensor:
    """torch's operators, forward and backward; nothing of ours is between them and autograd."""
    if not torch.compiler.is_compiling():
        routing.count("forward", "torch")
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (input, weight, bias)
        ):
            routing.count("backward", "torch")
    return reference.norm(input, shape, weight, bias, eps, kind)


def _require_kernels(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    kind: Semantics,
    out_dtype: torch.dtype,
) -> None:
    """Raise with every reason unless kernels serve this call, forward and (where gradients are
    wanted) backward."""
    reasons = ops.why_no_kernel(input, weight, bias, normalized_ndim, kind.name, out_dtype)
    if reasons:
        raise KernelUnavailable('backend="triton" cannot run: ' + "; ".join(reasons))
