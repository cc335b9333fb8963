"""What the training examples share: one run, its measurements, the tables and the plot."""

import csv
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import lightning.pytorch as pl
import matplotlib
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.hooks import RemovableHandle

import fastnorm
from fastnorm.lightning import FastNormCallback

matplotlib.use("Agg")

# Processes that Lightning starts for the other devices stay silent.
console = Console(quiet=rank_zero_only.rank != 0)


def quiet_lightning() -> None:
    """Silences two warnings that the reader of an example's output could do nothing about."""
    # Batches are cut from memory: worker processes would only add start-up time.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own use of torch's pytree.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


def choice(name: str, *values: str) -> type[Enum]:
    """A set of option values that Typer checks and lists in its help."""
    return Enum(name, {value: value for value in values}, type=str)


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
        decision: why the first replaced norm ran as it did, for its real input.
    """

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    items_per_second: float = 0.0
    peak_memory_bytes: int = 0
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    decision: str = ""


class Recorder(Callback):
    """Fills a Run. Waits for the GPU at the ends of a timed stretch only, never at each step.

    Args:
        run: is filled.
        items_per_batch: tokens or images in one step of all devices.
        warmup_steps: left out of the timing: compilation, allocation, kernel choice.
    """

    def __init__(self, run: Run, items_per_batch: int, warmup_steps: int) -> None:
        self.run = run
        self.items_per_batch = items_per_batch
        self.warmup_steps = warmup_steps
        self._losses: list[torch.Tensor] = []
        self._seconds = 0.0
        self._timed_steps = 0
        self._started: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._started is None and len(self._losses) >= self.warmup_steps:
            _synchronize(pl_module)
            self._started = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._losses.append(outputs["loss"].detach())
        self._timed_steps += self._started is not None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.run.validation_losses.append((trainer.global_step, self.run.metrics["val_loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)
        losses = trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean")
        self.run.train_losses = losses.float().tolist()
        if self._timed_steps:
            self.run.items_per_second = self.items_per_batch * self._timed_steps / self._seconds
        if pl_module.device.type == "cuda":
            self.run.peak_memory_bytes = torch.cuda.max_memory_allocated()

    def _pause(self, pl_module: pl.LightningModule) -> None:
        if self._started is not None:
            _synchronize(pl_module)
            self._seconds += time.perf_counter() - self._started
            self._started = None


class Decision(Callback):
    """Asks fastnorm why the first norm runs as it does, for the input of the first step.

    Args:
        run: its `decision` is set.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._hook: RemovableHandle | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        norms = (m for m in pl_module.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm))
        self._hook = next(norms).register_forward_pre_hook(self._ask)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook.remove()

    def _ask(self, norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        # A compiled model must not be interrupted for this; its norm goes unexplained.
        if not self.run.decision and not torch.compiler.is_compiling():
            self.run.decision = str(fastnorm.explain(norm, inputs[0]))


def _synchronize(pl_module: pl.LightningModule) -> None:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize()


def train(
    name: str,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    items_per_batch: int,
    steps: int,
    patch: FastNormCallback | None,
    **trainer_options,
) -> Run:
    """Trains `module` for one epoch of `steps` steps, validating ten times.

    Args:
        name: of the run.
        module: is trained in place; its norms are replaced if `patch` is given.
        data: one epoch has `steps` batches.
        items_per_batch: tokens or images in one step of all devices.
        steps: optimizer steps.
        patch: the callback that replaces the norms, or None for torch's own.
        trainer_options: for `lightning.pytorch.Trainer`.
    """
    run = Run(name)
    recorder = Recorder(run, items_per_batch, warmup_steps=min(10, steps // 4))
    fastnorm.reset_stats()
    trainer = pl.Trainer(
        max_epochs=1,
        val_check_interval=max(1, steps // 10),
        num_sanity_val_steps=-1,  # the whole validation set: the loss at step 0
        log_every_n_steps=max(1, min(10, steps)),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[RichProgressBar(), recorder, *([patch, Decision(run)] if patch else [])],
        **trainer_options,
    )
    trainer.fit(module, data)
    stats = fastnorm.stats()
    run.calls = {"forward": dict(stats.forward), "backward": dict(stats.backward)}
    return run


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


def _print_comparison(before: Run, after: Run) -> None:
    """Prints how far the two loss curves lie apart and the ratio of the speeds."""
    pairs = zip(before.train_losses, after.train_losses, strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    ratio = after.items_per_second / before.items_per_second
    console.print(
        f"Largest difference between the training losses: {apart:.2e}. "
        f"Speed {after.name} / {before.name}: {ratio:.3f}.",
        soft_wrap=True,
    )
    if not any(route.startswith("triton") for calls in after.calls.values() for route in calls):
        console.print("No Triton route ran, so both runs used torch's kernels: only noise differs.")


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


def compare(
    train_once: Callable[[str, FastNormCallback | None], Run], with_torch: bool
) -> tuple[list[Run], FastNormCallback]:
    """Runs a training with fastnorm's norms, and with torch's before that if asked.

    Args:
        train_once: builds a model from the seed and trains it; gets the run's name and callback.
        with_torch: also run with torch's norms.

    Returns:
        The runs, and the callback with the patch report.
    """
    patch = FastNormCallback()
    runs = [train_once("torch", None)] if with_torch else []
    return [*runs, train_once("fastnorm", patch)], patch
