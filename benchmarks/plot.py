"""Plots from a CSV of benchmarks.run, as PNG and SVG: python -m benchmarks.plot results.csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")

import typer  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.results import BASE, OURS, Comparison, compare, read_csv  # noqa: E402

app = typer.Typer(add_completion=False)

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by their markers.
STYLES = {
    OURS: ("#D55E00", "o"),
    BASE: ("#000000", "s"),
    "liger": ("#0072B2", "^"),
    "quack": ("#009E73", "v"),
    "flash-attn": ("#CC79A7", "D"),
    "apex": ("#56B4E9", "P"),
    "apex-fast": ("#E69F00", "X"),
    "compile": ("#999999", "*"),
}
TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
NORM_TITLES = {"layer": "LayerNorm", "rms": "RMSNorm"}

# (comparison, provider) -> what is plotted, None where it was not measured.
Value = Callable[[Comparison, str], float | None]


def copy_pct(comparison: Comparison, provider: str) -> float | None:
    """Percent of copy bandwidth."""
    return comparison.copy_pct.get(provider)


def time_ratio(comparison: Comparison, provider: str) -> float | None:
    """Time over torch's time; torch itself is the line at 1."""
    if provider not in comparison.times or BASE not in comparison.times:
        return None
    return comparison.times[provider] / comparison.times[BASE]


@app.command()
def main(
    csv: Annotated[Path, typer.Argument(help="Written by python -m benchmarks.run.", exists=True)],
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path("docs/img"),
) -> None:
    """Draw percent of copy bandwidth and time ratio to torch by hidden size, op by op."""
    measurements = read_csv(csv)
    if not measurements:
        raise typer.BadParameter(f"{csv} has no measurements")
    where = f"{measurements[0].gpu}, torch {measurements[0].torch}"
    comparisons = compare(measurements)
    for op, title in TITLES.items():
        for dtype in dict.fromkeys(c.case.dtype for c in comparisons):
            chosen = largest_per_hidden([c for c in comparisons if _is(c, op, dtype)])
            if chosen:
                _draw_both(chosen, f"{title}, {dtype} ({where})", out, f"{op}_{dtype}")


def _is(comparison: Comparison, op: str, dtype: str) -> bool:
    return comparison.case.op == op and comparison.case.dtype == dtype


def largest_per_hidden(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """One case for each norm and hidden size, that of most rows, by hidden size.

    Small cases of the same hidden size measure launches, not bandwidth; they stay in the table.
    """
    best: dict[tuple[str, int], Comparison] = {}
    for c in comparisons:
        key = (c.case.norm, c.case.hidden)
        if key not in best or c.case.rows > best[key].case.rows:
            best[key] = c
    return sorted(best.values(), key=lambda c: c.case.hidden)


def _draw_both(comparisons: Sequence[Comparison], title: str, out: Path, stem: str) -> None:
    figure = draw(comparisons, copy_pct, f"Share of copy bandwidth: {title}", "% of copy bandwidth")
    for axes in figure.axes:
        axes.set_ylim(0, 105)
    save(figure, out, f"copy_pct_{stem}")
    figure = draw(comparisons, time_ratio, f"Time relative to torch: {title}", "time / torch")
    for axes in figure.axes:
        # A peer several times slower than torch must not press the others together.
        axes.set_ylim(0, min(2.0, 1.05 * axes.get_ylim()[1]))
    save(figure, out, f"time_ratio_{stem}")


def draw(comparisons: Sequence[Comparison], value: Value, title: str, label: str) -> Figure:
    """One panel a norm, one line a provider, hidden size along a logarithmic axis."""
    norms = [n for n in NORM_TITLES if any(c.case.norm == n for c in comparisons)]
    figure, panels = plt.subplots(
        1, len(norms), figsize=(5.2 * len(norms), 4), sharey=True, squeeze=False
    )
    for axes, norm in zip(panels[0], norms, strict=True):
        _draw_norm(axes, [c for c in comparisons if c.case.norm == norm], value)
        axes.set_title(NORM_TITLES[norm])
    panels[0][0].set_ylabel(label)
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure


def _draw_norm(axes: Axes, comparisons: Sequence[Comparison], value: Value) -> None:
    for provider, (color, marker) in STYLES.items():
        points = [(c.case.hidden, value(c, provider)) for c in comparisons]
        measured = [(hidden, v) for hidden, v in points if v is not None]
        if measured:
            axes.plot(
                *zip(*measured, strict=True),
                color=color,
                marker=marker,
                markersize=5,
                linewidth=2.2 if provider == OURS else 1.1,
                zorder=3 if provider == OURS else 2,
                label=provider,
            )
    hidden = sorted({c.case.hidden for c in comparisons})
    axes.set_xscale("log", base=2)
    axes.set_xticks(hidden, [str(h) for h in hidden], rotation=60, fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel("hidden size")
    axes.grid(alpha=0.3)


def save(figure: Figure, out: Path, stem: str) -> None:
    """Write PNG and SVG; the same CSV gives the same SVG, byte for byte."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{stem}.png", dpi=160, bbox_inches="tight")
    with plt.rc_context({"svg.hashsalt": stem}):
        figure.savefig(out / f"{stem}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    app()
