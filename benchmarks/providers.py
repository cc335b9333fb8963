"""Which providers there are and how each is loaded; torch, torch.compile and fastnorm themselves.

A provider exists where its package imports. Peers' code is in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import Inputs
from benchmarks.provider import Call, Outputs, Provider, package_version

aten = torch.ops.aten

# What an import can raise where a package is there but not usable (no GPU, other CUDA, old torch).
LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Loaded:
    """The providers of a run, in order, and why the others are not in it."""

    providers: tuple[Provider, ...]
    missing: dict[str, str]


def load(names: Sequence[str], flash_attn_file: Path | None = None) -> Loaded:
    """Import what the named providers need.

    Args:
        names: keys of `LOADERS`.
        flash_attn_file: flash_attn/ops/triton/layer_norm.py of a source tree, where the package is
            not installed; None: the installed package.
    """
    providers, missing = [], {}
    for name in names:
        try:
            if name == "flash-attn":
                providers.append(peers.load_flash_attn(flash_attn_file))
            else:
                providers.append(LOADERS[name]())
        except LOAD_ERRORS as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return Loaded(tuple(providers), missing)


def load_torch() -> Provider:
    """torch's own operators: what every other provider is compared with."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    return Provider(
        name="torch",
        version=torch.__version__,
        passes={
            ("fwd", "layer"): _torch_layer_forward,
            ("bwd", "layer"): _torch_layer_backward,
            ("fwd", "rms"): _torch_rms_forward,
            ("bwd", "rms"): _torch_rms_backward,
        },
        functions={"layer": layer, "rms": rms},
    )


def _torch_layer_forward(i: Inputs) -> Call:
    return lambda: aten.native_layer_norm(i.x, i.shape, i.weight, i.bias, i.eps)[:1]


def _torch_layer_backward(i: Inputs) -> Call:
    _, mean, rstd = aten.native_layer_norm(i.x, i.shape, i.weight, i.bias, i.eps)
    mask = [True, True, True]
    return lambda: aten.native_layer_norm_backward(
        i.dy, i.x, i.shape, mean, rstd, i.weight, i.bias, mask
    )


def _torch_rms_forward(i: Inputs) -> Call:
    return lambda: aten._fused_rms_norm(i.x, i.shape, i.weight, i.eps)[:1]


def _torch_rms_backward(i: Inputs) -> Call:
    rstd = aten._fused_rms_norm(i.x, i.shape, i.weight, i.eps)[1]
    mask = [True, True]
    return lambda: (
        *aten._fused_rms_norm_backward(i.dy, i.x, i.shape, rstd, i.weight, mask),
        None,
    )


def load_fastnorm() -> Provider:
    """fastnorm as eager mode calls it on plain tensors; its public functions for autograd."""
    fastnorm = import_module("fastnorm")
    ops = import_module("fastnorm.ops")

    def forward(i: Inputs) -> Call:
        return lambda: ops.forward(i.x, i.weight, i.bias, 1, i.eps, i.norm, i.x.dtype)[:1]

    def backward(i: Inputs) -> Call:
        _, stats = ops.forward(i.x, i.weight, i.bias, 1, i.eps, i.norm, i.x.dtype)
        mask = (True, True, i.bias is not None)
        return lambda: ops.backward(i.dy, i.x, i.weight, i.bias, stats, 1, i.norm, mask)

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return fastnorm.layer_norm(x, weight.shape, weight, bias, eps)

    def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return fastnorm.rms_norm(x, weight.shape, weight, eps)

    return Provider(
        name="fastnorm",
        version=package_version("fastnorm-torch"),
        passes={
            (op, norm): builder
            for norm in ("layer", "rms")
            for op, builder in (("fwd", forward), ("bwd", backward))
        },
        functions={"layer": layer, "rms": rms},
    )


def load_compile() -> Provider:
    """torch.compile of the formulas of forward and backward, and of torch's functions."""
    native = load_torch().functions
    return Provider(
        name="compile",
        version=torch.__version__,
        passes={
            (op, norm): builder
            for norm in ("layer", "rms")
            for op, builder in (("fwd", _compiled_forward), ("bwd", _compiled_backward))
        },
        functions={norm: torch.compile(f, dynamic=False) for norm, f in native.items()},
    )


def _compiled_forward(i: Inputs) -> Call:
    compiled = _compile(forward_formula)
    return lambda: compiled(i.x, i.weight, i.bias, i.eps, i.norm == "layer")[:1]


def _compiled_backward(i: Inputs) -> Call:
    _, mean, rstd = forward_formula(i.x, i.weight, i.bias, i.eps, i.norm == "layer")
    compiled = _compile(backward_formula)
    return lambda: compiled(i.dy, i.x, i.weight, i.bias, mean, rstd)


def _compile(formula: Callable[..., Outputs]) -> Callable[..., Outputs]:
    # One static graph per case: without the reset torch turns to dynamic shapes at the second
    # shape and to eager at its recompilation limit, and neither is what is to be measured.
    torch.compiler.reset()
    options: dict[str, str | int | bool | Callable[..., object]] = {}
    if hasattr(inductor_config.triton, "mix_order_reduction"):
        # Fuses the row reduction with the column reduction: the fastest Inductor has for backward.
        options["triton.mix_order_reduction"] = True
    return torch.compile(formula, dynamic=False, options=options)


def forward_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> Outputs:
    """Forward in fp32. Returns y `[M, N]`, mean `[M, 1]` (None for rms) and rstd `[M, 1]`."""
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True) if centered else None
    shifted = x32 if mean is None else x32 - mean
    rstd = torch.rsqrt(shifted.square().mean(-1, keepdim=True) + eps)
    y = shifted * rstd * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype), mean, rstd


def backward_formula(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> Outputs:
    """Backward in fp32. Returns dx `[M, N]`, dweight `[N]` and dbias `[N]` (None for rms)."""
    dy32, x32 = dy.float(), x.float()
    x_hat = (x32 if mean is None else x32 - mean) * rstd
    wdy = dy32 * weight.float()
    dx = wdy - x_hat * (x_hat * wdy).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - wdy.mean(-1, keepdim=True)
    dx = (dx * rstd).to(x.dtype)
    dweight = (dy32 * x_hat).sum(0).to(weight.dtype)
    return dx, dweight, None if bias is None else dy32.sum(0).to(bias.dtype)


LOADERS: dict[str, Callable[[], Provider]] = {
    "torch": load_torch,
    "fastnorm": load_fastnorm,
    "liger": peers.load_liger,
    "quack": peers.load_quack,
    "flash-attn": peers.load_flash_attn,
    "apex": peers.load_apex,
    "apex-fast": peers.load_apex_fast,
    "compile": load_compile,
}
# torch.compile takes seconds a shape, so it runs only where it is asked for by name.
DEFAULT_PROVIDERS = tuple(name for name in LOADERS if name != "compile")
