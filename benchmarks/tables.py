"""Markdown tables of a benchmark's CSV, as docs/performance.md shows them."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

Row = dict[str, str]
Shape = tuple[str, int, int]


def main(results: Annotated[Path, typer.Argument(help="CSV of benchmarks.run")]) -> None:
    """Print time, percent of copy bandwidth and ratios to torch and to the best peer."""
    with results.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
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


if __name__ == "__main__":
    typer.run(main)
