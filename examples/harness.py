"""What the training examples share: their options, and one run with its measurements."""

import gc
import time
import warnings
from collections.abc import Callable
from enum import Enum

import lightning.pytorch as pl
import torch
import typer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from step_profile import FEWEST_STEPS, StepProfile
from summary import Run
from torch import nn
from torch.utils.hooks import RemovableHandle

import fastnorm
from fastnorm.lightning import FastNormCallback


def prepare(small: bool) -> None:
    """Sets up torch and Lightning for a training script.

    Args:
        small: the operators are so small that a second thread gains little, and waits long for
            its turn where cores are shared: the default GPT, both runs, took 58 s with one thread
            and 256 s with two on a busy two-core machine.
    """
    quiet_lightning()
    torch.set_float32_matmul_precision("high")
    if small:
        torch.set_num_threads(1)


def quiet_lightning() -> None:
    """Silences two warnings that the reader of an example's output could do nothing about."""
    # Batches are cut from memory: worker processes would only add start-up time.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own use of torch's pytree.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


AUTOCAST_HELP = "What norms give under autocast: torch's dtype, the input's or autocast's."
PROFILE_HELP = "Show where the time of a step goes, and the norms' share."


def check_profile(profile: bool, steps: int) -> None:
    """Raises a usage error for a run too short to be profiled beside being timed."""
    if profile and steps < FEWEST_STEPS:
        raise typer.BadParameter(f"--profile needs --steps {FEWEST_STEPS} or more, got {steps}")


def choice(name: str, *values: str) -> type[Enum]:
    """A set of option values that Typer checks and lists in its help."""
    return Enum(name, {value: value for value in values}, type=str)


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
            x = inputs[0]
            # Of a DTensor (tensor parallelism), what the kernels of this device get to see.
            local = x.to_local() if hasattr(x, "to_local") else x
            self.run.decision = str(fastnorm.explain(norm, local))


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
    profile: bool = False,
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
        profile: also find out where the time of a step goes.
        trainer_options: for `lightning.pytorch.Trainer`.
    """
    gc.collect()  # a run before this one may have left a model on the GPU, in a cycle of references
    run = Run(name)
    warmup_steps = min(10, steps // 4)
    callbacks = [Recorder(run, items_per_batch, warmup_steps)]
    if patch is not None:
        callbacks += [patch, Decision(run)]
    if profile:
        callbacks.append(StepProfile(run, warmup_steps))
    fastnorm.reset_stats()
    trainer = pl.Trainer(
        max_epochs=1,
        val_check_interval=max(1, steps // 10),
        num_sanity_val_steps=-1,  # the whole validation set: the loss at step 0
        log_every_n_steps=max(1, min(10, steps)),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        # The bar reads the loss, which waits for the GPU: not at each step.
        callbacks=[RichProgressBar(refresh_rate=10), *callbacks],
        **trainer_options,
    )
    trainer.fit(module, data)
    stats = fastnorm.stats()
    run.calls = {"forward": dict(stats.forward), "backward": dict(stats.backward)}
    return run


def compare(
    train_once: Callable[[str, FastNormCallback | None], Run],
    patch: FastNormCallback,
    with_torch: bool,
) -> list[Run]:
    """Runs a training with fastnorm's norms, and with torch's before that if asked.

    Args:
        train_once: builds a model from the seed and trains it; gets the run's name and callback.
        patch: replaces the norms; it has the reports afterwards.
        with_torch: also run with torch's norms.
    """
    runs = [train_once("torch", None)] if with_torch else []
    return [*runs, train_once("fastnorm", patch)]
