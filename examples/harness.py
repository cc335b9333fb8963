"""What the training examples share: one run, its measurements, the tables and the plot."""

import csv
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lightning.pytorch as pl
import matplotlib
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import nn

import fastnorm
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
    """

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    items_per_second: float = 0.0
    peak_memory_bytes: int = 0
    calls: dict[str, dict[str, int]] = field(default_factory=dict)


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
        loss = float(trainer.callback_metrics["val_loss"])
        self.run.validation_losses.append((trainer.global_step, loss))

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
        callbacks=[RichProgressBar(), recorder, *([patch] if patch else [])],
        **trainer_options,
    )
    trainer.fit(module, data)
    stats = fastnorm.stats()
    run.calls = {"forward": dict(stats.forward), "backward": dict(stats.backward)}
    return run


def print_decision(module: nn.Module) -> None:
    """Prints why the first norm of `module` runs as it does."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            console.print(f"\n[bold]How {name} runs[/bold]")
            text = str(fastnorm.explain(layer))
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            return


def print_runs(runs: list[Run], unit: str) -> None:
    """Prints the loss curves side by side, then speed, memory and counters of each run."""
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

    speed = Table(title="Speed and routes")
    for heading in ("norms", f"{unit}/s", "peak memory", "norm calls by route"):
        speed.add_column(heading, justify="left" if heading.startswith("norm") else "right")
    for run in runs:
        memory = f"{run.peak_memory_bytes / 2**30:.2f} GiB" if run.peak_memory_bytes else "-"
        speed.add_row(run.name, f"{run.items_per_second:,.0f}", memory, _routes(run))
    console.print(speed)
    if len(runs) == 2 and runs[0].items_per_second:
        print_comparison(*runs)


def print_comparison(before: Run, after: Run) -> None:
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
    train_one: Callable[[str, FastNormCallback | None], tuple[Run, nn.Module]], with_torch: bool
) -> tuple[list[Run], nn.Module, FastNormCallback]:
    """Runs the training with fastnorm's norms, and with torch's before that if asked.

    Args:
        train_one: builds a model from the seed and trains it; gets the run's name and callback.
        with_torch: also run with torch's norms.

    Returns:
        The runs, the model with fastnorm's norms, and its callback with the patch report.
    """
    runs = []
    if with_torch:
        runs.append(train_one("torch", None)[0])
    patch = FastNormCallback()
    run, module = train_one("fastnorm", patch)
    return [*runs, run], module, patch
