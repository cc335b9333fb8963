"""A training run as numbers, and what is shown and written of one run or of two side by side."""

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from fastnorm.lightning import FastNormCallback

matplotlib.use("Agg")

# Processes that Lightning starts for the other devices stay silent.
console = Console(quiet=rank_zero_only.rank != 0)


@dataclass
class Run:
    """One training run, as numbers.

    Attributes:
        name: "torch" or "fastnorm", whose norms ran.
        train_losses: one for each step, averaged over devices.
        validation_losses: (step, loss) pairs, the first before training.
        items_per_second: tokens or images of all devices, without validation and the first steps.
        peak_memory_bytes: largest allocation on this process' GPU; 0 on a CPU.
        calls: pass -> route -> number of calls, fastnorm's counters over this run.
        metrics: what the last validation logged, by name.
        profile: milliseconds of a step by kernel (on a CPU: by operator), if it was asked for.
        decision: why the first replaced norm ran as it did, for its real input.
    """

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    items_per_second: float = 0.0
    peak_memory_bytes: int = 0
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)
    decision: str = ""


def print_runs(runs: list[Run], patch: FastNormCallback, unit: str) -> None:
    """Prints what was patched, why the first norm runs as it does, and what came of each run."""
    for report in patch.reports:
        console.print(report.table())
    if runs[-1].decision:
        console.print(runs[-1].decision, markup=False, highlight=False, soft_wrap=True)
    _print_losses(runs)
    speed = Table(title="Speed and routes")
    for heading in ("norms", f"{unit}/s", "peak memory", "norm calls by route"):
        speed.add_column(heading, justify="left" if heading.startswith("norm") else "right")
    for run in runs:
        memory = f"{run.peak_memory_bytes / 2**30:.2f} GiB" if run.peak_memory_bytes else "-"
        speed.add_row(run.name, f"{run.items_per_second:,.0f}", memory, _routes(run))
    console.print(speed)
    for run in runs:
        if run.profile:
            _print_profile(run)
    if len(runs) == 2 and runs[0].items_per_second:
        _print_comparison(*runs)


def _print_losses(runs: list[Run]) -> None:
    """The loss curves side by side, one row for each validation."""
    curves = Table(title="Loss (train: mean over the steps since the line before)")
    curves.add_column("step", justify="right")
    for run in runs:
        curves.add_column(f"{run.name} train", justify="right")
        curves.add_column("validation", justify="right")
    previous = 0
    for row, (step, _) in enumerate(runs[0].validation_losses):
        cells = [str(step)]
        for run in runs:
            since = run.train_losses[previous:step]
            cells.append(f"{sum(since) / len(since):.4f}" if since else "")
            cells.append(f"{run.validation_losses[row][1]:.4f}")
        curves.add_row(*cells)
        previous = step
    console.print(curves)


#: What torch's and fastnorm's norm kernels and operators are called. A kernel into which
#: torch.compile fused a norm counts whole: its other work cannot be told apart.
NORM_NAMES = ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "gammabeta") + (
    "norm_forward",
    "norm_backward",
    "norm_finalize",
)


def _print_profile(run: Run, rows: int = 12) -> None:
    """Where the time of a step goes: the longest kernels, all norms, everything."""
    total = sum(run.profile.values())
    norms = {name: ms for name, ms in run.profile.items() if is_norm(name)}
    table = Table(title=f"Time of a step, {run.name}")
    table.add_column("kernel or operator", max_width=56, no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True, min_width=9)
    table.add_column("share", justify="right", no_wrap=True)
    shown = {**dict(list(run.profile.items())[:rows]), **norms}
    for name, ms in shown.items():
        style = "green" if name in norms else None
        table.add_row(name, f"{ms:.3f}", f"{ms / total:.1%}", style=style)
    table.add_section()
    table.add_row("all norms", f"{sum(norms.values()):.3f}", f"{sum(norms.values()) / total:.1%}")
    table.add_row("everything", f"{total:.3f}", "")
    console.print(table)


def is_norm(name: str) -> bool:
    """Whether a kernel or operator is a norm's."""
    return any(part in name.lower() for part in NORM_NAMES)


def _print_comparison(before: Run, after: Run) -> None:
    """Prints how far the two loss curves lie apart and the ratio of the speeds."""
    pairs = zip(before.train_losses, after.train_losses, strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    console.print(f"Largest difference between the training losses: {apart:.2e}.")
    if any(route.startswith("triton") for calls in after.calls.values() for route in calls):
        ratio = after.items_per_second / before.items_per_second
        console.print(f"Speed of {after.name} over {before.name}: {ratio:.3f}.")
    else:
        console.print("Both ran torch's kernels: any difference in speed is noise.")


def _routes(run: Run) -> str:
    lines = [
        f"{direction} {route}: {count:,}"
        for direction, routes in run.calls.items()
        for route, count in sorted(routes.items())
    ]
    return "\n".join(lines) or "none counted: torch's own modules"


@rank_zero_only
def save_runs(runs: list[Run], out: Path, title: str) -> None:
    """Writes runs.json, losses.csv and losses.png into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "runs.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    with open(out / "losses.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"train_loss_{run.name}" for run in runs)])
        for step, losses in enumerate(zip(*(run.train_losses for run in runs), strict=True)):
            writer.writerow([step + 1, *losses])
    _plot(runs, out / "losses.png", title)
    console.print(f"Written: {out}/runs.json, losses.csv, losses.png")


def _plot(runs: list[Run], path: Path, title: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=False):
        steps = range(1, len(run.train_losses) + 1)
        (line,) = axes.plot(steps, run.train_losses, style, label=f"train, {run.name}", alpha=0.7)
        axes.plot(
            *zip(*run.validation_losses, strict=True),
            style,
            marker="o",
            color=line.get_color(),
            label=f"validation, {run.name}",
        )
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
