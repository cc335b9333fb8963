"""No time without a right answer: every provider is held against float64 before it is timed.

The rule is the project's own: max|ours - o| <= 2 max|torch of the same dtype - o| + floor, with o
in float64 on the rounded inputs. o is made a few rows at a time, so that the largest shapes fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.provider import Outputs

OUTPUTS = {
    "fwd": ("y",),
    "bwd": ("dx", "dweight", "dbias"),
    "both": ("y", "dx", "dweight", "dbias"),
    "host": ("y", "dx", "dweight", "dbias"),
}
# Elements of x the float64 formulas work on at once: 128 MiB an intermediate.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Verdict:
    """Whether outputs passed and, where not, what is wrong with which output."""

    passed: bool
    reason: str = ""


class Gate:
    """Judges the outputs of one op on one set of inputs.

    Args:
        op: key of `OUTPUTS`.
        inputs: what the outputs were computed from.
        baseline: torch's outputs in the same dtype, which set the allowance.
        chunk_elements: elements of x in float64 at once.

    Raises:
        ValueError: torch's own outputs are not finite, so they allow anything.
    """

    def __init__(
        self, op: str, inputs: Inputs, baseline: Outputs, chunk_elements: int = CHUNK_ELEMENTS
    ):
        self.names = OUTPUTS[op]
        self.inputs = inputs
        self.rows_at_once = max(1, chunk_elements // inputs.x.shape[1])
        self.expected = {
            name: (tuple(out.shape), out.dtype) for name, out in self._present(baseline).items()
        }
        self.sums = self._column_sums() if "dweight" in self.expected else {}
        errors, scales = self._errors(self._present(baseline))
        self.allowed = {
            name: 2 * errors[name] + floor(name, inputs, scales[name]) for name in self.expected
        }
        if not all(map(math.isfinite, self.allowed.values())):
            raise ValueError(f"torch's own outputs are not finite: allowance {self.allowed}")

    def check(self, outputs: Outputs) -> Verdict:
        """Compare shapes, dtypes and every element."""
        if len(outputs) != len(self.names):
            return Verdict(False, f"{len(outputs)} outputs where {len(self.names)} were expected")
        present = self._present(outputs)
        for name, expected in self.expected.items():
            out = present.get(name)
            got = None if out is None else (tuple(out.shape), out.dtype)
            if got != expected:
                return Verdict(False, f"{name} is {got} where {expected} was expected")
        errors, _ = self._errors(present)
        for name, allowed in self.allowed.items():
            # Written so that NaN, which compares false with everything, fails.
            if not errors[name] <= allowed:
                return Verdict(False, f"{name} is off by {errors[name]:.3g}, allowed {allowed:.3g}")
        return Verdict(True)

    def _present(self, outputs: Outputs) -> dict[str, Tensor]:
        return {n: out for n, out in zip(self.names, outputs, strict=True) if out is not None}

    def _chunks(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        rows = self.inputs.x.shape[0]
        for start in range(0, rows, self.rows_at_once):
            chunk = slice(start, min(start + self.rows_at_once, rows))
            yield chunk, formulas(self.inputs, chunk)

    def _column_sums(self) -> dict[str, Tensor]:
        """dweight and dbias `[N]` in float64, over all rows."""
        totals: dict[str, Tensor] = {}
        for _, values in self._chunks():
            for name in ("dweight", "dbias"):
                part = values[name].sum(0)
                totals[name] = totals[name] + part if name in totals else part
        return totals

    def _errors(self, outputs: dict[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        """max|out - o| and max|o| of each expected output; NaN wherever `out` holds one."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.expected}
        for name in found.keys() & self.sums.keys():
            found[name].append(_compare(outputs[name], self.sums[name]))
        by_row = found.keys() - self.sums.keys()
        for rows, values in self._chunks():
            for name in by_row:
                found[name].append(_compare(outputs[name][rows], values[name]))
        worst = {name: torch.stack(pairs).amax(0).tolist() for name, pairs in found.items()}
        return {n: pair[0] for n, pair in worst.items()}, {n: pair[1] for n, pair in worst.items()}


def _compare(out: Tensor, exact: Tensor) -> Tensor:
    """(max|out - exact|, max|exact|) as one tensor on the device, read once at the end."""
    return torch.stack(((out.double() - exact).abs().amax(), exact.abs().amax()))


def floor(name: str, inputs: Inputs, scale: float) -> float:
    """What rounding alone may cost, whatever torch's error happens to be on these inputs.

    One unit in the last place of the largest element, for the output's own rounding. Column sums
    add the random walk of float32 additions over the rows.
    """
    eps = torch.finfo(inputs.x.dtype).eps
    if name in ("dweight", "dbias"):
        eps += torch.finfo(torch.float32).eps * math.sqrt(inputs.x.shape[0])
    return eps * scale


def formulas(inputs: Inputs, rows: slice) -> dict[str, Tensor]:
    """y and dx of some rows in float64, and their terms of dweight and dbias before the sum.

    See: docs/math.md for the derivation.
    """
    x, dy = inputs.x[rows].double(), inputs.dy[rows].double()
    weight = inputs.weight.double()
    centered = inputs.norm == "layer"
    if centered:
        x = x - x.mean(1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(1, keepdim=True) + inputs.eps)
    x_hat = x * rstd
    wdy = dy * weight
    dx = wdy - x_hat * (x_hat * wdy).mean(1, keepdim=True)
    if centered:
        dx = dx - wdy.mean(1, keepdim=True)
    y = x_hat * weight
    if inputs.bias is not None:
        y = y + inputs.bias.double()
    return {"y": y, "dx": dx * rstd, "dweight": dy * x_hat, "dbias": dy}


def poison_free_memory(inputs: Inputs) -> None:
    """Leave NaN in the memory the next allocations will get, so unwritten outputs show.

    The caching allocator hands freed blocks out again uncleared, torch's right answers among them;
    every byte 0xFF is NaN in bf16, fp16 and fp32. Nothing to do on a CPU, whose allocator gives
    memory back.
    """
    if inputs.x.device.type != "cuda":
        return
    torch.cuda.empty_cache()
    # y and dx get blocks of their own size. Two of 1 MiB fill a segment that blocks up to 1 MiB
    # (parameters, statistics) are cut from; up to 10 MiB (partials) are cut from larger free ones.
    sizes = [inputs.x.nbytes] * 3 + [20 << 20] * 4 + [1 << 20] * 16
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks
