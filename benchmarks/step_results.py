"""Times of training steps as lines of CSV, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from rich.table import Table

from benchmarks.results import rounded
from benchmarks.steps import BASE, BOUND, Outcome, Row


@dataclass(frozen=True)
class StepMeasurement:
    """One line of the CSV; field names are its columns.

    Args:
        variant: whose norms; see `Row.variants`.
        step_ms: milliseconds of a training step, median over rounds.
        memory_gib: see `Outcome.memory_bytes`; None on a CPU.
        norm_share_pct: of device time; None where not asked for.
        recovered_pct: see `recovered`.
    """

    gpu: str
    torch: str
    triton: str
    model: str
    norm: str
    precision: str
    mode: str
    variant: str
    step_ms: float
    tokens_per_s: float
    memory_gib: float | None
    norm_share_pct: float | None
    recovered_pct: float | None

    def cells(self) -> dict[str, object]:
        """Column -> what the CSV says."""
        specs = {"step_ms": ".3f", "tokens_per_s": ".0f", "memory_gib": ".3f"}
        specs |= {"norm_share_pct": ".2f", "recovered_pct": ".1f"}
        values = asdict(self)
        return {**values, **{name: rounded(values[name], spec) for name, spec in specs.items()}}


COLUMNS = tuple(field.name for field in fields(StepMeasurement))


def recovered(torch_ms: float, variant_ms: float, bound_ms: float) -> float | None:
    """Percent of what there is to win: 0 for torch's norms, 100 for no norms at all.

    None where the model without norms is not the faster one, so that there is nothing to win.
    """
    if bound_ms >= torch_ms:
        return None
    return 100 * (torch_ms - variant_ms) / (torch_ms - bound_ms)


def measurements(
    versions: tuple[str, str, str], row: Row, tokens: int, outcomes: Mapping[str, Outcome]
) -> list[StepMeasurement]:
    """The lines of a row.

    Args:
        versions: GPU, torch, Triton.
        row: what was measured.
        tokens: of one batch.
        outcomes: by variant, torch's and the one without norms among them.
    """
    base, bound = outcomes[BASE].step_ms, outcomes[BOUND].step_ms
    return [
        StepMeasurement(
            *versions,
            row.model,
            row.norm,
            row.precision,
            row.mode,
            variant,
            outcome.step_ms,
            1e3 * tokens / outcome.step_ms,
            None if outcome.memory_bytes is None else outcome.memory_bytes / 2**30,
            None if outcome.norm_share is None else 100 * outcome.norm_share,
            recovered(base, outcome.step_ms, bound),
        )
        for variant, outcome in outcomes.items()
    ]


def step_table(lines: Sequence[StepMeasurement], title: str) -> Table:
    """Variant by variant, a section for each row."""
    table = Table(title=title)
    for column in ("model", "norm", "precision", "mode", "variant"):
        table.add_column(column, no_wrap=True)
    headers = ("ms a step", "/ torch", "tokens/s", "peak GiB", "norms %", "recovered %")
    for column in headers:
        table.add_column(column, justify="right", no_wrap=True)
    base = 1.0
    for line in lines:
        if line.variant == BASE:
            base = line.step_ms
            table.add_section()
        names = (line.model, line.norm, line.precision, line.mode)
        table.add_row(
            *(names if line.variant == BASE else [""] * len(names)),
            line.variant,
            f"{line.step_ms:.2f}",
            f"{line.step_ms / base:.3f}",
            f"{line.tokens_per_s:,.0f}",
            rounded(line.memory_gib, ".2f") or "-",
            rounded(line.norm_share_pct, ".1f") or "-",
            rounded(line.recovered_pct, ".0f") or "-",
        )
    return table
