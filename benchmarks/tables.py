"""Markdown tables of a benchmark's CSV, as docs/performance.md shows them."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

Row = dict[str, str]
Shape = tuple[str, int, int]


CSV_HELP = "Of benchmarks.run, or of benchmarks.end_to_end; several of the latter make one table."


def main(results: Annotated[list[Path], typer.Argument(help=CSV_HELP, exists=True)]) -> None:
    """Print time, percent of copy bandwidth and ratios to torch and to the best peer; or, of whole
    training steps, times and how much of what norms cost is won back."""
    rows: list[Row] = []
    for path in results:
        with path.open(newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    if all("recovered_pct" in row for row in rows):
        print_steps(rows)
    elif len(results) > 1:
        raise typer.BadParameter("ratios of kernels hold within one CSV, so give one of them")
    else:
        print_kernels(rows)


def print_kernels(rows: list[Row]) -> None:
    for op, title in (("bwd", "backward"), ("fwd", "forward")):
        print(f"\n| {title} | RMS us | % of copy | / torch | / best peer ", end="")
        print("| LN us | % of copy | / torch | / best peer |")
        print("|---" * 9 + "|")
        for line in lines(rows, op):
            print(line)


def lines(rows: list[Row], op: str) -> list[str]:
    """One line a shape: RMSNorm's four cells, then LayerNorm's."""
    cases: dict[tuple[str, Shape], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["op"] == op:
            shape = (row["dtype"], int(row["M"]), int(row["N"]))
            cases[row["norm"], shape][row["provider"]] = row
    shapes = sorted({shape for _, shape in cases}, key=lambda s: (s[0], s[2], -s[1]))
    return [
        f"| {dtype} {m} x {n} | "
        + " | ".join(c for norm in ("rms", "layer") for c in _cells(cases[norm, (dtype, m, n)]))
        + " |"
        for dtype, m, n in shapes
    ]


def _cells(case: dict[str, Row]) -> list[str]:
    timed = {name: float(row["us"]) for name, row in case.items() if row["correct"] == "1"}
    if "fastnorm" not in timed:
        return ["-"] * 4
    ours = timed.pop("fastnorm")
    best = min(timed, key=lambda name: timed[name])
    return [
        f"{ours:.1f}",
        f"{float(case['fastnorm']['copy_pct']):.0f}",
        f"{ours / timed['torch']:.2f}",
        f"{ours / timed[best]:.2f} ({best})",
    ]


STEP_HEADINGS = (
    *("model", "norm", "precision", "mode"),
    *("torch ms", "fastnorm", "autocast", "kernels", "no norms"),
    *("recovered %", "autocast", "kernels"),
    *("norms % of time, torch", "fastnorm", "autocast"),
    *("peak GiB, torch", "fastnorm"),
)


def print_steps(rows: list[Row]) -> None:
    print(f"\n| {' | '.join(STEP_HEADINGS)} |")
    print("|---" * len(STEP_HEADINGS) + "|")
    for line in step_lines(rows):
        print(line)


def step_lines(rows: list[Row]) -> list[str]:
    """One line a row of benchmarks.end_to_end; "autocast" stands for `autocast_output="autocast"`,
    "kernels" for `backend="triton"`."""
    cases: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        case = (row["model"], row["norm"], row["precision"], row["mode"])
        if row["variant"] in cases[case]:
            raise typer.BadParameter(f"{' '.join(case)} is there twice")
        cases[case][row["variant"]] = row
    return [f"| {' | '.join((*case, *_step_cells(cases[case])))} |" for case in cases]


def _step_cells(case: dict[str, Row]) -> list[str]:
    ours = ("fastnorm", "fastnorm-autocast", "fastnorm-kernels")
    shares = ("torch", "fastnorm", "fastnorm-autocast")

    def cell(variant: str, column: str, spec: str) -> str:
        value = case[variant][column] if variant in case else ""
        return format(float(value), spec) if value else "-"

    return [
        *(cell(v, "step_ms", ".1f") for v in ("torch", *ours, "identity")),
        *(cell(v, "recovered_pct", ".0f") for v in ours),
        *(cell(v, "norm_share_pct", ".1f") for v in shares),
        *(cell(v, "memory_gib", ".2f") for v in shares[:2]),
    ]


if __name__ == "__main__":
    typer.run(main)
