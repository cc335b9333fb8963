"""Hypothesis strategies: norms described as data, and their tensors made from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor

from fastnorm.device import DeviceLimits
from fastnorm.problem import NormProblem
from fastnorm.semantics import SEMANTICS
from tests.oracle import Inputs

#: Widths that a kernel may treat differently: 1, powers of two, their neighbours, primes, 3·2^k.
WIDTHS = (1, 2, 3, 5, 7, 8, 9, 16, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 257, 384)
ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33)
HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = (
    "contiguous",
    "rows padded",
    "every other row",
    "every other column",
    "transposed",
    "one row expanded",
    "one column expanded",
    "one element off",
)
VALUES = (
    "normal",
    "large offset",
    "constant rows",
    "tiny variance",
    "zeros",
    "huge",
    "subnormal",
    "one inf",
    "one nan",
)


def values(kind: str, rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator):
    """`[rows, hidden]` of a kind of values, on the CPU.

    Huge values are a quarter of the largest whose squares fp32 still sums over the row, or of
    fp16's largest.
    """
    x = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    if kind == "large offset":
        x = x + 1000
    elif kind == "constant rows":
        x = x[:, :1].expand(rows, hidden)
    elif kind == "tiny variance":
        x = 0.01 * x + 1
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "huge":
        x = x.clamp(-3, 3) / 12
        x = x * (6.5e4 if dtype == torch.float16 else math.sqrt(3e38 / max(1, hidden)))
    elif kind == "subnormal":
        x = x * 1e-39
    elif kind in ("one inf", "one nan") and rows:
        x[rows // 2, hidden // 2] = math.inf if kind == "one inf" else math.nan
    return x.to(dtype)


def laid_out(dense: Tensor, layout: str) -> Tensor:
    """The values of `[rows, hidden]` in another layout; expanded ones repeat a row or a column."""
    rows, hidden = dense.shape
    if layout == "rows padded":
        wide = dense.new_full((rows, hidden + 3), math.nan)
        wide[:, :hidden] = dense
        return wide[:, :hidden]
    if layout == "every other row":
        wide = dense.new_full((2 * rows, hidden), math.nan)
        wide[::2] = dense
        return wide[::2]
    if layout == "every other column":
        wide = dense.new_full((rows, 2 * hidden), math.nan)
        wide[:, ::2] = dense
        return wide[:, ::2]
    if layout == "transposed":
        return dense.t().contiguous().t()
    if layout == "one row expanded" and rows:
        return dense[:1].expand(rows, hidden)
    if layout == "one column expanded":
        return dense[:, :1].expand(rows, hidden)
    if layout == "one element off":
        flat = dense.new_full((rows * hidden + 1,), math.nan)
        flat[1:] = dense.reshape(-1)
        return flat[1:].view(rows, hidden)
    return dense


@dataclass(frozen=True)
class Case:
    """A norm described as data; `build` makes its tensors.

    Args:
        lead: leading dimensions of x.
        shape: normalized_shape.
        kind: key of `SEMANTICS`.
        x_dtype, weight_dtype, bias_dtype: None where there is no such parameter.
        dy_dtype: of the gradient that comes in; None: y's.
        layouts: of x, dy and weight.
        kind_of_values: one of `VALUES`, for x.
        eps: added to the variance.
        seed: of the values.
    """

    lead: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    x_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    kind_of_values: str = "normal"
    eps: float = 1e-5
    seed: int = 0

    @property
    def output_dtype(self) -> torch.dtype:
        """dtype of y by the kind's definition (norms.md's groups)."""
        kind, weight = SEMANTICS[self.kind], self.weight_dtype
        if kind.output == "input" or weight is None:
            return self.x_dtype
        if kind.rounds_normalized == "half_weight":
            return weight if weight in HALF_AND_SINGLE[1:] else torch.float32
        return torch.promote_types(self.x_dtype, weight)

    def build(self, device: str = "cpu") -> Inputs:
        """The tensors."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, hidden = math.prod(self.lead), math.prod(self.shape)

        def rows_of(kind: str, dtype: torch.dtype, layout: str) -> Tensor:
            dense = values(kind, rows, hidden, dtype, generator).to(device)
            placed = laid_out(dense, layout).unflatten(-1, self.shape)
            return placed.unflatten(0, self.lead) if self.lead else placed[0]

        def parameter(dtype: torch.dtype | None, layout: str) -> Tensor | None:
            if dtype is None:
                return None
            dense = values("normal", 1, hidden, dtype, generator).to(device)
            return laid_out(dense, layout)[0].unflatten(0, self.shape)

        return Inputs(
            rows_of(self.kind_of_values, self.x_dtype, self.layouts[0]),
            parameter(self.weight_dtype, self.layouts[2]),
            parameter(self.bias_dtype, "contiguous"),
            rows_of("normal", self.output_dtype, self.layouts[1]),
            self.shape,
            self.eps,
            SEMANTICS[self.kind],
        )


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = tuple(SEMANTICS),
    dtypes: tuple[torch.dtype, ...] = HALF_AND_SINGLE,
    kinds_of_values: tuple[str, ...] = VALUES,
    widths: tuple[int, ...] = WIDTHS,
    rows: tuple[int, ...] = ROWS,
) -> Case:
    """Any norm of up to about 33 x 384, or 33 x 2 x 192 and the like."""
    kind = draw(st.sampled_from(kinds))
    hidden, count = draw(st.sampled_from(widths)), draw(st.sampled_from(rows))
    lead = draw(st.sampled_from([(count,), (count, 1), (2, count), (1, count, 1)]))
    if count == 1:
        lead = draw(st.sampled_from([(), lead]))
    shape = (hidden,)
    if hidden % 2 == 0:
        shape = draw(st.sampled_from([shape, (2, hidden // 2), (hidden // 2, 2)]))
    x_dtype = draw(st.sampled_from(dtypes))
    same = st.just(x_dtype)
    weight_dtype = draw(st.one_of(same, st.sampled_from(dtypes), st.none()))
    has_bias = SEMANTICS[kind].centered and kind != "layer_cohere"
    bias_dtype = draw(st.one_of(same, st.sampled_from(dtypes), st.none())) if has_bias else None
    return Case(
        lead=lead,
        shape=shape,
        kind=kind,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        kind_of_values=draw(st.sampled_from(kinds_of_values)),
        eps=draw(st.sampled_from([1e-5, 1e-6, 1e-12, 0.1])),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def devices(draw: st.DrawFn) -> DeviceLimits:
    """GPUs that may or may not exist."""
    shared = draw(st.integers(16, 512)) * 1024
    return DeviceLimits(
        name="invented",
        target=draw(st.sampled_from(["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])),
        sm_count=draw(st.integers(1, 1000)),
        registers_per_sm=draw(st.sampled_from([32768, 65536, 131072])),
        max_registers_per_thread=draw(st.sampled_from([127, 255])),
        shared_bytes_per_program=draw(st.integers(16, shared // 1024)) * 1024,
        shared_bytes_per_sm=shared,
        max_warps_per_sm=draw(st.sampled_from([16, 32, 48, 64])),
        cooperative=draw(st.booleans()),
        unsupported=draw(st.sampled_from(["", "", "", "no kernels here"])),
    )


@st.composite
def problems(draw: st.DrawFn) -> NormProblem:
    """Any problem, also ones that no kernel takes (fp64, rows wider than any GPU's memory)."""
    dtype = st.sampled_from(["bf16", "fp16", "fp32", "torch.float64"])
    kind = draw(st.sampled_from(tuple(SEMANTICS)))
    direction = draw(st.sampled_from(["forward", "backward"]))
    weight = draw(st.one_of(st.none(), dtype))
    bias = draw(st.one_of(st.none(), dtype)) if SEMANTICS[kind].centered else None
    flags = [draw(st.booleans()), draw(st.booleans()), draw(st.booleans())]
    asked = (flags[0], flags[1] and weight is not None, flags[2] and bias is not None)
    return NormProblem(
        direction,
        kind,
        draw(st.one_of(st.sampled_from(WIDTHS), st.integers(1, 40_000), st.just(2**20 + 1))),
        draw(dtype),
        draw(dtype),
        weight,
        bias,
        *(asked if direction == "backward" else (False, False, False)),
        draw(st.sampled_from([1, 2, 4, 8, 16])),
        draw(st.booleans()),
    )
