"""Time whole training steps with different norms: python -m benchmarks.end_to_end --help."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress, TaskID
from torch._dynamo.exc import TorchDynamoException

from benchmarks.cli import console, default_out, device_name, fail, progress_bar, write_about
from benchmarks.measure_steps import measure_row
from benchmarks.provider import package_version
from benchmarks.results import CsvWriter
from benchmarks.shapes import NORMS, parse_names
from benchmarks.step_models import MODELS, TINY, Workload, workload
from benchmarks.step_results import COLUMNS, StepMeasurement, measurements, step_table
from benchmarks.steps import MODES, PRECISIONS, Effort, Outcome, Refused, Row
from fastnorm.native import shortcut

app = typer.Typer(add_completion=False)

MODELS_HELP = f"Among {', '.join(MODELS)}; the last two are for trying things out, also on a CPU."
LIMIT_HELP = "Seconds after which no further row is started."
# What of a row that cannot be measured leaves the others measurable.
ROW_ERRORS = (Refused, torch.OutOfMemoryError, TorchDynamoException)

PROFILE_HELP = "Also the norms' share of device time, in eager mode."


@dataclass(frozen=True)
class Plan:
    """What a run measures, all options read and checked."""

    rows: list[Row]
    workloads: dict[str, Workload]
    device: str
    effort: Effort
    seconds: float


@app.command()
def main(
    models: Annotated[str, typer.Option(help=MODELS_HELP)] = "d768,d1024,vit-base",
    norms: Annotated[str, typer.Option(help=f"Among {', '.join(NORMS)}.")] = "layer,rms",
    precisions: Annotated[
        str, typer.Option(help="bf16-mixed: fp32 weights, bf16 autocast; bf16-true: all bf16.")
    ] = ",".join(PRECISIONS),
    modes: Annotated[
        str, typer.Option(help="Eager rows come first: compiling takes longer than timing.")
    ] = ",".join(MODES),
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences or images of a step, for less memory.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Median over so many.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Of each variant in a round.")] = 5,
    profile: Annotated[bool, typer.Option("--profile", help=PROFILE_HELP)] = False,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "inductor",
    out: Annotated[
        Path | None,
        typer.Option(help="CSV. Default: benchmarks/results/end-to-end-GPU-DATE.csv."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the CSV.")] = False,
    time_limit: Annotated[float | None, typer.Option(min=1, help=LIMIT_HELP)] = None,
) -> None:
    """Time training steps of one model with torch's norms, fastnorm's, and none: the bound."""
    started = time.monotonic()
    try:
        names = parse_names(models, tuple(MODELS), "model")
        device = _device(names)
        rows = build_rows(
            names,
            parse_names(norms, NORMS, "norm"),
            parse_names(precisions, PRECISIONS, "precision"),
            parse_names(modes, MODES, "mode"),
        )
        _check_compiler(compiler)
        plan = Plan(
            rows=rows,
            workloads={name: workload(name, batch) for name in names},
            device=device,
            effort=Effort(rounds, steps, profile, compiler),
            seconds=time_limit or float("inf"),
        )
        writer = CsvWriter(out or default_out("end-to-end-"), overwrite, COLUMNS)
    except ModuleNotFoundError as error:
        fail(f'{error}; the models are those of examples/: pip install -e ".[bench,examples]"')
    except (ValueError, RuntimeError, FileExistsError) as error:
        fail(str(error))
    sys.exit(run(plan, writer, started))


def build_rows(
    models: tuple[str, ...],
    norms: tuple[str, ...],
    precisions: tuple[str, ...],
    modes: tuple[str, ...],
) -> list[Row]:
    """All combinations, eager before compiled: a time limit should cost the expensive ones."""
    in_order = [mode for mode in MODES if mode in modes]
    combinations = product(in_order, models, precisions, norms)
    return [Row(model, norm, precision, mode) for mode, model, precision, norm in combinations]


def _device(models: tuple[str, ...]) -> str:
    if torch.cuda.is_available():
        return "cuda"
    large = [name for name in models if name not in TINY]
    if large:
        raise RuntimeError(
            f"torch {torch.__version__} sees no CUDA device, and {', '.join(large)} would take a "
            f"CPU hours; run where torch.cuda.is_available(), or --models {','.join(TINY)}"
        )
    return "cpu"


def _check_compiler(name: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise ValueError(f"unknown compiler {name!r}; choose among {', '.join(known)}")


@dataclass
class Results:
    """What a run has produced so far."""

    lines: list[StepMeasurement] = field(default_factory=list)
    details: dict[str, dict[str, object]] = field(default_factory=dict)
    not_timed: dict[str, str] = field(default_factory=dict)
    left: int = 0


def run(plan: Plan, writer: CsvWriter, started: float) -> int:
    """Measure row by row, keeping each as it comes; 1 if a row could not be measured, else 0."""
    results = Results(left=len(plan.rows))
    with progress_bar() as progress, writer:
        task = progress.add_task("", total=len(plan.rows))
        for row in plan.rows:
            if time.monotonic() > started + plan.seconds:
                break
            _measure(plan, row, writer, results, progress, task)
            results.left -= 1
            progress.advance(task)
            # What a killed run has on disk is what it has measured.
            write_about(writer.path, _about(plan, results))
    title = f"{device_name()}, torch {torch.__version__}"
    console.print(step_table(results.lines, title))
    if results.left:
        console.print(f"time limit reached: {results.left} rows were not measured")
    console.print(f"{len(results.lines)} lines in {writer.path}")
    return 1 if results.not_timed else 0


def _measure(
    plan: Plan, row: Row, writer: CsvWriter, results: Results, progress: Progress, task: TaskID
) -> None:
    started = time.monotonic()
    load = plan.workloads[row.model]
    try:
        outcomes = measure_row(
            row,
            load,
            plan.device,
            plan.effort,
            on_progress=lambda what: progress.update(task, description=what),
        )
    except ROW_ERRORS as error:
        results.not_timed[str(row)] = " ".join(str(error).split())[:500]
        console.print(f"{row}: {results.not_timed[str(row)]}", style="yellow", markup=False)
    else:
        versions = (device_name(), torch.__version__, package_version("triton"))
        lines = measurements(versions, row, load.tokens, outcomes)
        for line in lines:
            writer.write(line)
        results.lines += lines
        results.details[str(row)] = _detail(outcomes, time.monotonic() - started)
    # The next row finds the device as this one did.
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def _detail(outcomes: Mapping[str, Outcome], seconds: float) -> dict[str, object]:
    """What the columns have no room for."""
    variants = {
        variant: {
            "first_loss": outcome.first_loss,
            "last_loss": outcome.last_loss,
            "calls_of_a_step": outcome.routes,
            "step_ms_by_round": [round(ms, 3) for ms in outcome.round_ms],
        }
        for variant, outcome in outcomes.items()
    }
    norms = next(iter(outcomes.values())).norms
    return {"norms": norms, "seconds": round(seconds, 1), "variants": variants}


def _about(plan: Plan, results: Results) -> dict[str, object]:
    """How it was measured, and what the CSV's columns have no room for."""
    return {
        "rounds": plan.effort.rounds,
        "steps_in_a_round": plan.effort.steps,
        "compiler": plan.effort.compiler,
        "native_library": shortcut.norm is not None,
        "tokens_of_a_step": {name: load.tokens for name, load in plan.workloads.items()},
        "rows": results.details,
        "not_timed": results.not_timed,
        "left_at_time_limit": results.left,
    }


if __name__ == "__main__":
    app()
