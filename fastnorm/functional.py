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
from fastnorm.autocast import AutocastOutput, result_dtype
from fastnorm.autograd import apply
from fastnorm.native import shortcut
from fastnorm.semantics import Semantics
from fastnorm.validation import validate

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

    Activation checkpointing recomputes on a GPU in a thread of autograd's, which does not see the
    choice. Repeat it there, `checkpoint(..., context_fn=lambda: (nullcontext(),
    fastnorm.backend(choice)))`, or give the layers their `backend=`.

    Args:
        choice: "auto" (kernels where they pass the budget; under torch.compile torch's operators,
            for Inductor to fuse), "triton" (raise where they do not; not checked while
            torch.compile traces) or "torch".

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
    autocast_output: AutocastOutput = "torch",
) -> Tensor:
    """`y = (x - mean)·rstd·weight + bias` over the trailing dimensions, as
    `torch.nn.functional.layer_norm`.

    Args:
        input: `[..., *normalized_shape]`, floating.
        normalized_shape: trailing dimensions that share a mean and a variance.
        weight, bias: `normalized_shape`, any floating dtype, or None.
        eps: added to the variance.
        backend: overrides the context's choice, see `fastnorm.backend`.
        autocast_output: the result's dtype under autocast: "torch" (as torch's own function),
            "input" (input's), or "autocast" (autocast's, which the next linear layer casts to
            anyway: the same numbers there, and no fp32 copy written, read and kept).

    Returns:
        `[..., *normalized_shape]` in input's dtype, but for `autocast_output` under autocast.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes are not floating.
        KernelUnavailable: `backend="triton"` and no kernel can run.
    """
    return norm(
        input,
        normalized_shape,
        weight,
        bias,
        eps,
        backend=backend,
        autocast_output=autocast_output,
    )


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: Backend | None = None,
    autocast_output: AutocastOutput = "torch",
) -> Tensor:
    """`y = x·rstd·weight` with `rstd = (mean(x²) + eps)^-1/2`, as `torch.nn.functional.rms_norm`.

    Args:
        input: `[..., *normalized_shape]`, floating.
        normalized_shape: trailing dimensions that share a root mean square.
        weight: `normalized_shape`, any floating dtype, or None.
        eps: added to the mean square; None: the machine epsilon of fp32 (of fp64 for fp64).
        backend: overrides the context's choice, see `fastnorm.backend`.
        autocast_output: the result's dtype under autocast: "torch" (as torch's own function),
            "input" (input's), or "autocast" (autocast's, which the next linear layer casts to
            anyway: the same numbers there, and no fp32 copy written, read and kept).

    Returns:
        `[..., *normalized_shape]` in input's dtype, but for `autocast_output` under autocast.

    Raises:
        ValueError, TypeError, KernelUnavailable: as `layer_norm`.
    """
    if eps is None:
        eps = default_eps(input)
    return norm(
        input,
        normalized_shape,
        weight,
        None,
        eps,
        semantics="rms",
        backend=backend,
        autocast_output=autocast_output,
    )


def default_eps(input: Tensor) -> float:
    """The machine epsilon of the dtype that an RMSNorm's statistics have, as torch takes it."""
    # As constants: Dynamo compiles once more for floats that it finds in a module or table.
    return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23


def norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    semantics: str = "layer",
    backend: Backend | None = None,
    autocast_output: AutocastOutput = "torch",
) -> Tensor:
    """Any kind of norm (see `fastnorm.semantics`); `layer_norm` and `rms_norm` are two of them.

    Args:
        input, normalized_shape, weight, bias, eps, backend, autocast_output: as `layer_norm`.
        semantics: a key of `fastnorm.semantics.SEMANTICS`.

    Raises:
        ValueError, TypeError, KernelUnavailable: as `layer_norm`.
    """
    shape: tuple[int, ...]
    if isinstance(normalized_shape, tuple):
        shape = normalized_shape
    elif isinstance(normalized_shape, int):
        shape = (normalized_shape,)
    else:
        shape = tuple(normalized_shape)
    choice = _context.backend if backend is None else checked_backend(backend)
    compiling = torch.compiler.is_compiling()
    short = None if compiling else shortcut.norm
    if short is not None and choice == "auto" and input.is_cuda:
        y = short(input, shape, weight, bias, eps, semantics, autocast_output)
        if y is not None:
            return y
    kind = validate(input, shape, weight, bias, semantics)
    out_dtype = result_dtype(input, weight, kind, autocast_output)
    # Inductor fuses torch's operators with their neighbours, which opaque kernels keep it from: a
    # compiled GPT of 124M parameters takes 72.5 ms a step so, with our kernels 75.6 ms.
    ours = choice == "triton" or (choice == "auto" and input.is_cuda and not compiling)
    if not ours:
        return _torch(input, shape, weight, bias, eps, kind, out_dtype)
    if reason := _needs_reference(input):
        if choice == "triton":
            raise KernelUnavailable(f'backend="triton" cannot run: {reason}')
        return _torch(input, shape, weight, bias, eps, kind, out_dtype)
    if choice == "triton" and not compiling:
        # Plans are made outside compiled graphs, where Dynamo cannot look.
        _require_kernels(input, weight, bias, len(shape), kind, out_dtype)
        if short is not None:
            y = short(input, shape, weight, bias, eps, semantics, autocast_output)
            if y is not None:
                return y
    y = apply(input, weight, bias, len(shape), float(eps), semantics, out_dtype)
    if semantics == "rms" and input.dim() in (4, 5) and not input.is_contiguous():
        # torch leaves its fused RMSNorm for channels_last input, and so keeps its strides.
        y = y.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))
    return y


def _needs_reference(input: Tensor) -> str:
    """Why this call must be differentiable PyTorch all through, or ""."""
    # Not torch.compiler.is_exporting(): the Dynamo of torch 2.11 takes that for True, always.
    if torch.compiler._is_exporting_flag:
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


def _torch(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: Semantics,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch's operators, forward and backward; nothing of ours is between them and autograd."""
    if not torch.compiler.is_compiling():
        routing.count("forward", "torch")
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (input, weight, bias)
        ):
            routing.count("backward", "torch")
    return reference.norm(input, shape, weight, bias, eps, kind, out_dtype)


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
