"""A routing decision as data and as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fastnorm.routing import Compiled


@dataclass(frozen=True)
class Alternative:
    """A candidate that comes after the plan.

    Args:
        schedule: of the candidate.
        candidate: in words.
        refusal: the condition that refuses it, with the numbers; "" where it fits as well.
    """

    schedule: str
    candidate: str
    refusal: str


@dataclass(frozen=True)
class Pass:
    """What runs one direction.

    Args:
        direction: "forward" or "backward".
        route: "triton:<schedule>" or "torch".
        plan: the accepted plan in words, or "".
        programs: launched for the rows that were asked about; 0 where unknown or torch's.
        predicted: registers per thread and shared bytes per program by the budget's model.
        compiled: the compiler's figures, or None where nothing was compiled.
        bytes_moved: least traffic of these rows through device memory; 0 where unknown.
        partial_bytes: fp32 partials of dweight and dbias that the launch writes.
        reasons: why torch runs it.
        torch_bytes_moved: what torch's own kernels move for the same: they read x and dy once more
            for dweight and dbias.
        refused: candidates that came first, each with the condition that refused it.
        alternatives: candidates that come after the plan, in the order of their turn.
    """

    direction: str
    route: str
    plan: str
    programs: int
    predicted: Compiled | None
    compiled: Compiled | None
    bytes_moved: int
    torch_bytes_moved: int
    partial_bytes: int
    reasons: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """A decision for one norm: `str()` for people, `to_dict()` and `to_json()` for programs."""

    semantics: str
    hidden: int
    rows: int | None
    dtypes: dict[str, str | None]
    device: str
    passes: tuple[Pass, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        dtypes = ", ".join(f"{name} {dtype}" for name, dtype in self.dtypes.items() if dtype)
        rows = "" if self.rows is None else f"{self.rows} rows of "
        lines = [f"{self.semantics} norm, {rows}{self.hidden} ({dtypes}) on {self.device}"]
        for p in self.passes:
            lines += _describe(p)
        if any(p.route.startswith("triton:") for p in self.passes):
            lines.append(
                "under torch.compile: torch's operators, for Inductor to fuse; "
                'backend="triton" puts these kernels into the graph'
            )
        return "\n".join(lines)


def _describe(p: Pass) -> list[str]:
    lines = [f"{p.direction}: {p.route}"]
    lines += [f"    because {reason}" for reason in p.reasons]
    if p.plan:
        lines.append(f"    {p.plan}")
    for name, figures in (("predicted", p.predicted), ("compiled", p.compiled)):
        if figures is not None:
            lines.append(
                f"    {name}: {figures.registers} registers, {figures.spills} words spilled, "
                f"{figures.shared_bytes} bytes of shared memory"
            )
    if p.programs:
        lines.append(
            f"    {p.programs} programs; {p.bytes_moved:,} bytes moved "
            f"(torch: {p.torch_bytes_moved:,}), {p.partial_bytes:,} bytes of partials"
        )
    lines += [f"    refused: {refusal}" for refusal in p.refused]
    shown = {p.route.removeprefix("triton:")}
    for a in p.alternatives:
        if a.refusal:
            lines.append(f"    refused: {a.refusal}")
        elif a.schedule not in shown:
            shown.add(a.schedule)
            lines.append(f"    fits as well, later in turn: {a.candidate}")
    if p.alternatives:
        lines.append(f"    {len(p.alternatives)} candidates follow in all, and torch after them")
    return lines
