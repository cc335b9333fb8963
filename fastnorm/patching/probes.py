"""What the fingerprint shows to a layer, and the conditions under which it does."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": FLOAT}
"""Named at every construction: the caller's default device and dtype may be others."""

_KINDS = 7
DTYPE_PAIRS = (
    (FLOAT, FLOAT),
    (BFLOAT, BFLOAT),
    (BFLOAT, FLOAT),
    (FLOAT, BFLOAT),
    (HALF, HALF),
    (HALF, FLOAT),
)
"""(input, parameters). The mixed pairs tell Llama's kind from torch's and find hidden casts."""

PROBE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a forward may raise about an input that does not suit it."""

_FP32_UNDER_AUTOCAST = {F.layer_norm, torch.layer_norm, torch.native_layer_norm}
if torch.__version__ >= "2.12":
    _FP32_UNDER_AUTOCAST |= {F.rms_norm, torch.rms_norm}


def probe_input(
    leading: int, trailing: tuple[int, ...], eps: float, generator: torch.Generator
) -> Tensor:
    """Rows of very different kinds in one fp32 tensor.

    Rows cycle through: ordinary with an offset, as small as the root of eps (so that eps
    matters), large, zero, constant, huge, and one with an infinity. A layer that mixes rows gives
    itself away as well.

    Args:
        leading: number of dimensions before the normalised ones, at least 1.
        trailing: the normalised dimensions, and the heads before them if the weight has any.
        eps: the eps that should matter.
        generator: source of the numbers.

    Returns:
        `[..., *trailing]`; no leading dimension equals the last one, so a layer that normalises
        another dimension finds the wrong size there.
    """
    features = math.prod(trailing)
    rows = max(_KINDS, math.ceil(512 / features))
    sizes = [rows + (rows == trailing[-1])] + [3 if trailing[-1] == 2 else 2] * (leading - 1)
    x = torch.randn(math.prod(sizes), features, generator=generator, **ON_CPU)
    x[0::_KINDS] = x[0::_KINDS] * 2 + 0.5
    x[1::_KINDS] *= max(eps, 1e-12) ** 0.5
    x[2::_KINDS] *= 200
    x[3::_KINDS] = 0
    x[4::_KINDS] = 1.7
    x[5::_KINDS] *= 1e4
    x[6::_KINDS, 0] = math.inf
    return x.reshape(*sizes, *trailing)


@contextmanager
def quiet() -> Iterator[torch.Generator]:
    """Run probes without leaving a trace or being seen.

    Random state, grad mode and autocast are as before afterwards; the caller's dispatch modes
    (fake tensors, counters) see nothing; a compiled forward runs as written.
    """
    with (
        _disable_current_modes(),
        _compiled_as_written(),
        _one_thread(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        _cuda_autocast_flag(False),
    ):
        warnings.simplefilter("ignore")
        yield torch.Generator(device="cpu").manual_seed(0)


def _compiled_as_written() -> AbstractContextManager[object]:
    """Forwards under torch.compile run eagerly. Where none can be, Dynamo is not loaded for it."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Probes are a few kilobytes: waking threads takes 5 times longer than the work (measured)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _cuda_autocast_flag(enabled: bool) -> Iterator[None]:
    """What `torch.is_autocast_enabled()` answers; torch.autocast("cuda") needs a GPU to set it."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


_TO_PYTHON = {
    Tensor.__bool__,
    Tensor.__contains__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.allclose,
    Tensor.equal,
    Tensor.is_nonzero,
    Tensor.item,
    Tensor.numpy,
    Tensor.tolist,
    torch.allclose,
    torch.equal,
    torch.is_nonzero,
}


class AsCudaAutocast(TorchFunctionMode):
    """What CUDA autocast does to norms, on CPU tensors: torch's own two compute in fp32.

    CPU autocast lists neither, so a CPU cannot show what a layer will do on a GPU otherwise.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A layer may switch off either its device's autocast, here the CPU's, or CUDA's.
        active = torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("cuda")
        if func in _FP32_UNDER_AUTOCAST and active:
            args = tuple(_to_fp32(arg) for arg in args)
            kwargs = {name: _to_fp32(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def _to_fp32(arg: Any) -> Any:
    return arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


@contextmanager
def as_cuda_autocast() -> Iterator[None]:
    """bf16 autocast as a layer on a GPU would see it, for layers that ask and those that do not."""
    with _cuda_autocast_flag(True), torch.autocast("cpu", dtype=BFLOAT), AsCudaAutocast():
        yield


class ReadsValues(TorchFunctionMode):
    """Notices when a tensor's value reaches Python: control flow that depends on the data.

    A dispatch mode would see the same in one operator, but its first use loads Dynamo: 1 to 2 s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen |= func in _TO_PYTHON
        return func(*args, **(kwargs or {}))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and values, NaN where the other has NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
