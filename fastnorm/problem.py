"""What is asked of a norm kernel, as frozen data: enough to plan and compile, nothing that changes
from batch to batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fastnorm.semantics import SEMANTICS, Semantics

#: Bytes per element of the dtypes that kernels take, by Triton's names.
ITEM_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


class NormProblem(NamedTuple):
    """One pass of one norm over rows of one width. A tuple, since one is made and hashed per call.

    Args:
        direction: "forward" or "backward".
        semantics: a key of `fastnorm.semantics.SEMANTICS`.
        hidden: N, elements per row.
        x_dtype, weight_dtype, bias_dtype: Triton dtype names ("bf16", "fp16", "fp32"); None where
            absent.
        y_dtype: dtype of the output (forward) or of dy (backward).
        needs_dx, needs_dw, needs_db: which gradients backward computes; ignored forward.
        stride_unit: a power of two up to 16 that divides the row strides, in elements.
        aligned: every pointer is a multiple of 16 bytes.
    """

    direction: Literal["forward", "backward"]
    semantics: str
    hidden: int
    x_dtype: str
    y_dtype: str
    weight_dtype: str | None
    bias_dtype: str | None = None
    needs_dx: bool = True
    needs_dw: bool = True
    needs_db: bool = True
    stride_unit: int = 16
    aligned: bool = True

    @property
    def kind(self) -> Semantics:
        """The semantics as data."""
        return SEMANTICS[self.semantics]

    @property
    def accumulators(self) -> int:
        """fp32 values that backward accumulates per column: dweight, dbias."""
        return int(self.needs_dw) + int(self.needs_db)

    def bytes_per_row(self) -> int:
        """Fewest bytes a row moves through device memory: inputs read once, outputs written
        once."""
        x, y = ITEM_SIZE[self.x_dtype], ITEM_SIZE[self.y_dtype]
        if self.direction == "forward":
            return (x + y) * self.hidden
        return (x + y + (x if self.needs_dx else 0)) * self.hidden


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides every stride (elements)."""
    unit = 16
    for stride in strides:
        # stride & -stride is the largest power of two that divides it.
        unit = min(unit, stride & -stride or 16)
    return unit
