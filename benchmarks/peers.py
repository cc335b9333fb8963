"""Other people's norms as providers, each through the lowest entry point its package offers.

Where a package has options, the one that computes what torch computes is taken, and its fastest.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.provider import (
    Call,
    Outputs,
    Provider,
    backward_of,
    forward_of,
    package_version,
)


def _triton_errors() -> tuple[type[Exception], ...]:
    # Compilation failures and OutOfResources (too wide a row) derive from Exception alone.
    return (importlib.import_module("triton.errors").TritonError,)


def load_liger() -> Provider:
    """liger-kernel's Triton kernels."""
    layer = importlib.import_module("liger_kernel.ops.layer_norm")
    rms = importlib.import_module("liger_kernel.ops.rms_norm")
    # "gemma" with offset 0 rounds once, at the end, as torch does; "llama" rounds x_hat too.
    offset, casting = 0.0, "gemma"
    # Liger's default writes dx over dy, its fastest way: dy is then a copy of ours.
    in_place, row_mode = True, None

    def layer_forward(i: Inputs) -> Call:
        return lambda: layer.layer_norm_forward(i.x, i.weight, i.bias, i.eps)[:1]

    def layer_backward(i: Inputs) -> Call:
        _, x, mean, rstd, _, _ = layer.layer_norm_forward(i.x, i.weight, i.bias, i.eps)
        return lambda: layer.layer_norm_backward(i.dy, x, i.weight, i.bias, mean, rstd)

    def rms_forward(i: Inputs) -> Call:
        return lambda: rms.rms_norm_forward(i.x, i.weight, i.eps, offset, casting, row_mode)[:1]

    def rms_backward(i: Inputs) -> Call:
        _, x, rstd, block, warps, mode = rms.rms_norm_forward(
            i.x, i.weight, i.eps, offset, casting, row_mode
        )
        dy = i.dy.clone()
        return lambda: (
            *rms.rms_norm_backward(
                dy, x, i.weight, rstd, offset, mode, block, warps, in_place, row_mode
            ),
            None,
        )

    def layer_function(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return layer.LigerLayerNormFunction.apply(x, weight, bias, eps)

    def rms_function(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms.LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place, row_mode)

    return Provider(
        name="liger",
        version=package_version("liger-kernel"),
        passes={
            ("fwd", "layer"): layer_forward,
            ("bwd", "layer"): layer_backward,
            ("fwd", "rms"): rms_forward,
            ("bwd", "rms"): rms_backward,
        },
        functions={"layer": layer_function, "rms": rms_function},
        errors=_triton_errors(),
    )


def load_quack() -> Provider:
    """quack-kernels, CuTe DSL. It has no autograd entry point for LayerNorm."""
    # Not `from quack import rmsnorm`: the package exports a function of the module's name.
    quack = importlib.import_module("quack.rmsnorm")
    dsl = importlib.import_module("cutlass.base_dsl.common")

    def layer_statistics(i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        # Its LayerNorm forward takes fp32 parameters only; its backward takes any.
        bias = None if i.bias is None else i.bias.float()
        return quack.layernorm_fwd(
            i.x, i.weight.float(), bias, i.eps, return_rstd=True, return_mean=True
        )

    def layer_forward(i: Inputs) -> Call:
        weight, bias = i.weight.float(), None if i.bias is None else i.bias.float()
        return lambda: quack.layernorm_fwd(
            i.x, weight, bias, i.eps, return_rstd=True, return_mean=True
        )[:1]

    def layer_backward(i: Inputs) -> Call:
        _, rstd, mean = layer_statistics(i)
        return lambda: quack.layernorm_bwd(i.x, i.weight, i.dy, rstd, mean, True)

    def rms_forward(i: Inputs) -> Call:
        return lambda: quack.rmsnorm_fwd(i.x, i.weight, eps=i.eps, store_rstd=True)[:1]

    def rms_backward(i: Inputs) -> Call:
        rstd = quack.rmsnorm_fwd(i.x, i.weight, eps=i.eps, store_rstd=True)[2]
        return lambda: quack.rmsnorm_bwd(i.x, i.weight, i.dy, rstd)[:3]

    def rms_function(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return quack.rmsnorm(x, weight, eps=eps)

    return Provider(
        name="quack",
        version=package_version("quack-kernels"),
        passes={
            ("fwd", "layer"): layer_forward,
            ("bwd", "layer"): layer_backward,
            ("fwd", "rms"): rms_forward,
            ("bwd", "rms"): rms_backward,
        },
        functions={"rms": rms_function},
        errors=(dsl.DSLBaseError,),
    )


def load_flash_attn(file: Path | None = None) -> Provider:
    """flash-attention's Triton layer norm, installed or from a source tree."""
    if file is not None:
        _open_source_tree(file)
    module = importlib.import_module("flash_attn.ops.triton.layer_norm")

    def forward(i: Inputs) -> Call:
        rms = i.norm == "rms"
        return lambda: module._layer_norm_fwd(i.x, i.weight, i.bias, i.eps, is_rms_norm=rms)[:1]

    def backward(i: Inputs) -> Call:
        rms = i.norm == "rms"
        saved = module._layer_norm_fwd(i.x, i.weight, i.bias, i.eps, is_rms_norm=rms)
        mean, rstd = saved[2], saved[3]

        def call() -> Outputs:
            return module._layer_norm_bwd(
                i.dy, i.x, i.weight, i.bias, i.eps, mean, rstd, is_rms_norm=rms
            )[:3]

        return call

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return module.layer_norm_fn(x, weight, bias, eps=eps)

    def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return module.rms_norm_fn(x, weight, bias, eps=eps)

    return Provider(
        name="flash-attn",
        version=package_version("flash-attn"),
        passes={
            (op, norm): builder
            for norm in ("layer", "rms")
            for op, builder in (("fwd", forward), ("bwd", backward))
        },
        functions={"layer": layer, "rms": rms},
        errors=_triton_errors(),
    )


def _open_source_tree(file: Path) -> None:
    """Make `flash_attn` importable from sources whose CUDA extension was never built.

    The package's own `__init__` imports that extension; an empty package over the same directory
    takes its place, and the few modules the layer norm needs are found below it.

    Raises:
        ImportError: the file is not where flash-attention keeps it.
    """
    tail = ("flash_attn", "ops", "triton", "layer_norm.py")
    if file.parts[-4:] != tail or not file.is_file():
        raise ImportError(
            f"{file} is not an existing {'/'.join(tail)}; give the file inside its source tree, "
            "whose flash_attn/utils it imports"
        )
    package = ModuleType("flash_attn")
    package.__path__ = [str(file.resolve().parents[2])]
    sys.modules["flash_attn"] = package


def load_apex() -> Provider:
    """apex's FusedLayerNorm and FusedRMSNorm, through autograd."""
    module = importlib.import_module("apex.normalization.fused_layer_norm")
    importlib.import_module("fused_layer_norm_cuda")

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return module.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)

    def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return module.fused_rms_norm_affine(x, weight, weight.shape, eps)

    return Provider(
        name="apex",
        version=package_version("apex"),
        passes={
            ("fwd", "layer"): forward_of(layer),
            ("bwd", "layer"): backward_of(layer),
            ("fwd", "rms"): forward_of(rms),
            ("bwd", "rms"): backward_of(rms),
        },
        functions={"layer": layer, "rms": rms},
    )


def load_apex_fast() -> Provider:
    """apex contrib's FastLayerNorm, which serves a list of hidden sizes and raises elsewhere."""
    module = importlib.import_module("apex.contrib.layer_norm.layer_norm")

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return module.FastLayerNormFN.apply(x, weight, bias, eps)

    return Provider(
        name="apex-fast",
        version=package_version("apex"),
        passes={("fwd", "layer"): forward_of(layer), ("bwd", "layer"): backward_of(layer)},
        functions={"layer": layer},
    )
