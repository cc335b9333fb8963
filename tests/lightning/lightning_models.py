"""LightningModules with norms made at every moment at which Lightning lets a model be built."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastnorm.patching.swap import is_patched

ADVICE_IGNORED = [
    # Hints for the owner of a real training: workers, missing loaders, short epochs.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning's own use of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
"""What Lightning warns about in any run as small as these."""

WIDTH = 8


class Staged(pl.LightningModule):
    """One norm from `__init__`, one from `setup`, one from `configure_model`.

    Args:
        rate: learning rate; there to be a hyper-parameter of the checkpoint.
    """

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.second: nn.Module | None = None
        self.third: nn.Module | None = None
        self.patched_while_running: dict[str, list[str]] = {}
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        if self.second is None:
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))

    def configure_model(self) -> None:
        if self.third is None:
            self.third = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] -> [batch, 1]."""
        return self.third(self.second(self.first(x)))

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        self.patched_while_running[stage] = patched_names(self)
        return self(batch[0]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        loss = self._loss(batch, "fit")
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "validate")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"])


ALL_NORMS = ["first.1", "second.1", "third.0"]


def patched_names(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if is_patched(child)]


def batches(count: int = 3) -> DataLoader:
    rows = torch.randn(4 * count, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=4)


def make_trainer(*callbacks: pl.Callback, **options: object) -> pl.Trainer:
    """A quiet CPU Trainer of one epoch."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def staged(seed: int = 0) -> Staged:
    """A Staged model whose weights depend on the seed alone, those made by Lightning included."""
    torch.manual_seed(seed)
    return Staged()
