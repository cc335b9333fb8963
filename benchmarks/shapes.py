"""What is measured: cases, the published grid, and the bytes a case cannot avoid moving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NORMS = ("layer", "rms")
OPS = ("fwd", "bwd", "both", "host")

# Passes over an [M, N] tensor: forward reads x and writes y; backward reads x, dy and writes dx.
PASSES = {"fwd": 2, "bwd": 3, "both": 5}

HOST_SHAPE = (64, 256)

HALF_GRID = (
    (1048576, 128),
    (32768, 256),
    (131072, 768),
    (2048, 1024),
    (32768, 1024),
    (16384, 4096),
    (8192, 5120),
    (16384, 8192),
    (8192, 12288),
    (8192, 16384),
    (4096, 32768),
    (2048, 65536),
)
FP32_GRID = (
    (2048, 1024),
    (8192, 4096),
    (2048, 10240),
    (2048, 14336),
    (2048, 16384),
    (2048, 32768),
)
QUICK_GRID = ((32768, 1024), (16384, 4096), (8192, 12288))
GRIDS = ("default", "quick")


@dataclass(frozen=True, order=True)
class Case:
    """One thing to measure, whoever computes it.

    Args:
        op: "fwd", "bwd", or eager autograd forward and backward: "both" in device time, "host" in
            host time.
        norm: "layer" (weight and bias) or "rms" (weight).
        dtype: key of `DTYPES`; x, dy and the parameters all have it.
        rows: M.
        hidden: N.
    """

    op: str
    norm: str
    dtype: str
    rows: int
    hidden: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def floor_bytes(self) -> int | None:
        """Fewest bytes the op moves; None for host time, which moving bytes does not bound."""
        if self.op == "host":
            return None
        return PASSES[self.op] * self.rows * self.hidden * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.norm} {self.op} {self.dtype} {self.rows} x {self.hidden}"


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Read "16384x4096,8192x5120" as ((16384, 4096), (8192, 5120)).

    Raises:
        ValueError: an entry is not ROWSxHIDDEN with two positive integers.
    """
    return tuple(_parse_shape(entry.strip()) for entry in text.split(","))


def _parse_shape(entry: str) -> tuple[int, int]:
    parts = entry.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"shape {entry!r} is not ROWSxHIDDEN with two positive integers; "
            "write for example 16384x4096,8192x5120"
        )
    rows, hidden = (int(part) for part in parts)
    return rows, hidden


def parse_names(text: str, allowed: Sequence[str], what: str) -> tuple[str, ...]:
    """Read a comma-separated choice among `allowed`, in the order written, once each.

    Raises:
        ValueError: a name is not in `allowed`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown {what} {', '.join(map(repr, unknown))}; choose among {', '.join(allowed)}"
        )
    return names


def grid_shapes(grid: str, dtype: str) -> tuple[tuple[int, int], ...]:
    """The (rows, hidden) pairs of a named grid for one dtype."""
    if grid == "quick":
        return QUICK_GRID
    return FP32_GRID if dtype == "fp32" else HALF_GRID


def build_cases(
    ops: Iterable[str],
    norms: Iterable[str],
    dtypes: Sequence[str],
    grid: str = "default",
    shapes: Sequence[tuple[int, int]] | None = None,
) -> list[Case]:
    """List the cases in the order they are measured: host, then shape by shape to reuse tensors.

    Args:
        ops: among `OPS`; host time is taken at `HOST_SHAPE` in the first dtype only.
        norms: among `NORMS`.
        dtypes: keys of `DTYPES`.
        grid: among `GRIDS`; ignored where `shapes` is given.
        shapes: (rows, hidden) pairs that replace the grid for every dtype.
    """
    ops, norms = tuple(ops), tuple(norms)
    on_host = [Case("host", norm, dtypes[0], *HOST_SHAPE) for norm in norms if "host" in ops]
    return on_host + [
        Case(op, norm, dtype, rows, hidden)
        for dtype in dtypes
        for rows, hidden in (shapes or grid_shapes(grid, dtype))
        for norm in norms
        for op in ops
        if op != "host"
    ]
