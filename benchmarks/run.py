"""Benchmark norms side by side: python -m benchmarks.run --help."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from benchmarks import measure
from benchmarks.cli import console, default_out, fail, progress_bar, write_about
from benchmarks.provider import Provider, package_version
from benchmarks.providers import DEFAULT_PROVIDERS, LOADERS, load
from benchmarks.results import OURS, CsvWriter, Measurement, compare, summary_table
from benchmarks.shapes import (
    DTYPES,
    GRIDS,
    NORMS,
    OPS,
    Case,
    build_cases,
    parse_names,
    parse_shapes,
)
from benchmarks.timing import copy_bandwidth, flush_time

app = typer.Typer(add_completion=False)

QUICK_PROVIDERS = ("torch", OURS)
QUICK_SECONDS = 50.0
QUICK_MILLISECONDS = 25

PROVIDERS_HELP = "Default: all that import but compile, which takes seconds a shape."
DTYPES_HELP = "Default: bf16 and fp32; bf16 with --quick."
QUICK_HELP = "A few shapes, torch and fastnorm, within a minute."
FLASH_ATTN_HELP = "flash_attn/ops/triton/layer_norm.py of a source tree, where not installed."


@dataclass(frozen=True)
class Plan:
    """What a run measures, all options read and checked."""

    cases: list[Case]
    names: tuple[str, ...]
    named_by_user: bool
    milliseconds: int
    seconds: float
    jobs: int
    flash_attn_file: Path | None


@app.command()
def main(
    providers: Annotated[
        str | None, typer.Option(help=f"Among {', '.join(LOADERS)}. {PROVIDERS_HELP}")
    ] = None,
    ops: Annotated[str, typer.Option(help=f"Among {', '.join(OPS)}.")] = "fwd,bwd,host",
    norms: Annotated[str, typer.Option(help=f"Among {', '.join(NORMS)}.")] = "layer,rms",
    dtypes: Annotated[
        str | None, typer.Option(help=f"Among {', '.join(DTYPES)}. {DTYPES_HELP}")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Instead of a grid, for example 16384x4096,8192x5120.")
    ] = None,
    grid: Annotated[str | None, typer.Option(help=f"Among {', '.join(GRIDS)}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    out: Annotated[
        Path | None, typer.Option(help="CSV. Default: benchmarks/results/GPU-DATE.csv.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the CSV.")] = False,
    rep: Annotated[int, typer.Option(min=1, help="Milliseconds each call is repeated.")] = 100,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which nothing more is started.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile ahead; 0: none.")
    ] = None,
    flash_attn_file: Annotated[Path | None, typer.Option(help=FLASH_ATTN_HELP)] = None,
) -> None:
    """Check every provider against float64, time it, and compare it with torch and a copy."""
    started = time.monotonic()
    try:
        plan = Plan(
            cases=_cases(ops, norms, dtypes, grid, shapes, quick),
            names=_names(providers, quick),
            named_by_user=providers is not None,
            milliseconds=min(rep, QUICK_MILLISECONDS) if quick else rep,
            seconds=time_limit or (QUICK_SECONDS if quick else float("inf")),
            jobs=_jobs(jobs, quick),
            flash_attn_file=flash_attn_file,
        )
        _require_gpu()
        writer = CsvWriter(out or default_out(), overwrite)
    except (ValueError, RuntimeError, FileExistsError) as error:
        fail(str(error))
    run(plan, writer, started)


def _cases(
    ops: str, norms: str, dtypes: str | None, grid: str | None, shapes: str | None, quick: bool
) -> list[Case]:
    return build_cases(
        parse_names(ops, OPS, "op"),
        parse_names(norms, NORMS, "norm"),
        parse_names(dtypes or ("bf16" if quick else "bf16,fp32"), tuple(DTYPES), "dtype"),
        parse_names(grid or ("quick" if quick else "default"), GRIDS, "grid")[0],
        parse_shapes(shapes) if shapes else None,
    )


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} sees no CUDA device, and these benchmarks time GPU "
            "kernels; run them where torch.cuda.is_available()"
        )


def _names(text: str | None, quick: bool) -> tuple[str, ...]:
    if text is not None:
        return parse_names(text, tuple(LOADERS), "provider")
    return QUICK_PROVIDERS if quick else DEFAULT_PROVIDERS


def _jobs(jobs: int | None, quick: bool) -> int:
    if jobs is not None:
        return jobs
    # Starting processes costs more than the few kernels of a quick run take to compile.
    return 0 if quick else min(8, (os.cpu_count() or 1) // 2)


def run(plan: Plan, writer: CsvWriter, started: float) -> None:
    """Load, compile, measure, write and summarise."""
    loaded = load(plan.names, plan.flash_attn_file)
    for name, reason in loaded.missing.items():
        if plan.named_by_user:
            fail(f"provider {name} does not load: {reason}")
        console.print(f"without {name}: {reason}", style="dim", markup=False)
    with progress_bar() as progress:
        given_up = _precompile(plan, loaded.providers, started, progress)
        bandwidth, flush_us = copy_bandwidth(), flush_time()
        console.print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s (bytes read + written)")
        with writer:
            outcomes = measure.measure_all(
                plan.cases,
                loaded.providers,
                measure.gpu_clock(plan.milliseconds),
                deadline=started + plan.seconds,
                given_up=given_up,
            )
            total = len(measure.pairs(plan.cases, loaded.providers))
            results = _record(outcomes, total, bandwidth, flush_us, writer, progress)
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    console.print(summary_table(compare(results.measurements), title))
    if results.host_bound:
        console.print(
            f"{len(results.host_bound)} device times hold the host, which needs longer than the "
            f"{flush_us:.0f} us of the flush to enqueue the call; the JSON names them"
        )
    if results.left:
        console.print(f"time limit reached: {results.left} measurements were not made")
    write_about(writer.path, _about(bandwidth, loaded.providers, plan, results))
    console.print(f"{len(results.measurements)} lines in {writer.path}")


def _precompile(
    plan: Plan, providers: Sequence[Provider], started: float, progress: Progress
) -> set[tuple[Case, str]]:
    """Compile ahead, in at most half the time there is; return what did not end."""
    if not plan.jobs:
        return set()
    tasks = measure.to_compile(plan.cases, providers)
    left = set(tasks)
    task = progress.add_task("compile", total=len(tasks))
    deadline = started + plan.seconds / 2
    for case, name in measure.precompile(tasks, plan.flash_attn_file, plan.jobs, deadline):
        left.discard((case, name))
        progress.update(task, advance=1, description=f"compile {name} {case}")
    return left


@dataclass
class Results:
    """What a run has produced so far."""

    measurements: list[Measurement]
    reasons: list[str]
    host_bound: list[str]
    left: int


def _record(
    outcomes: Iterable[measure.Outcome],
    total: int,
    bandwidth: float,
    flush_us: float,
    writer: CsvWriter,
    progress: Progress,
) -> Results:
    results = Results([], [], [], total)
    task = progress.add_task("measure", total=total)
    versions = (torch.cuda.get_device_name(), torch.__version__, package_version("triton"))
    for o in outcomes:
        c = o.case
        pct = None
        if o.us is not None and c.floor_bytes is not None:
            pct = 100 * c.floor_bytes / bandwidth / (o.us * 1e-6)
        measurement = Measurement(
            *versions, c.op, c.norm, c.dtype, c.rows, c.hidden, o.provider, o.us, pct, o.correct
        )
        writer.write(measurement)
        results.measurements.append(measurement)
        results.left -= 1
        if o.correct != "1":
            results.reasons.append(f"{o.provider}, {c}: {o.correct}: {o.reason}")
            console.print(results.reasons[-1], style="yellow", markup=False)
        if o.enqueue_us is not None and o.enqueue_us > flush_us:
            results.host_bound.append(f"{o.provider}, {c}: enqueued in {o.enqueue_us:.0f} us")
        progress.update(task, advance=1, description=f"{o.provider} {c}")
    return results


def _about(
    bandwidth: float, providers: Sequence[Provider], plan: Plan, results: Results
) -> dict[str, object]:
    """What the CSV's columns have no room for."""
    return {
        "copy_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "milliseconds_per_measurement": plan.milliseconds,
        "providers": {p.name: p.version for p in providers},
        "not_timed": results.reasons,
        "host_bound": results.host_bound,
        "left_at_time_limit": results.left,
    }


if __name__ == "__main__":
    app()
