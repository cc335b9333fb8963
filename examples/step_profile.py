"""Where the time of a training step goes."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from summary import Run
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3
FEWEST_STEPS = 4 * STEPS
"""Of a run that is profiled: the first quarter is warm-up, whose last steps are looked at."""


class StepProfile(Callback):
    """Profiles the last `STEPS` warm-up steps, which are left out of the timing.

    Args:
        run: its `profile` is set to milliseconds of a step by kernel (on a CPU: by operator).
        warmup_steps: of the run, at least `STEPS`.
    """

    def __init__(self, run: Run, warmup_steps: int) -> None:
        self.run = run
        self.first = warmup_steps - STEPS
        self._profiler: profile | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == self.first:
            gpu = pl_module.device.type == "cuda"
            activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
            self._profiler = profile(activities=[activity])
            self._profiler.start()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if batch_idx == self.first + STEPS - 1:
            gpu = pl_module.device.type == "cuda"
            if gpu:
                torch.cuda.synchronize()
            self._profiler.stop()
            self.run.profile = milliseconds(self._profiler, gpu)


def milliseconds(profiler: profile, gpu: bool) -> dict[str, float]:
    """Milliseconds of a step by name, longest first; the profiler saw `STEPS` steps."""
    times = {}
    for event in profiler.key_averages():
        # Annotations span kernels: the optimizer's step would count twice.
        if gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.key] = event.self_device_time_total / 1000 / STEPS
        elif not gpu:
            times[event.key] = event.self_cpu_time_total / 1000 / STEPS
    return dict(sorted(times.items(), key=lambda item: -item[1]))
