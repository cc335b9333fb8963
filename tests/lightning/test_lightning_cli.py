"""The callback from a command line, in both packages that Lightning is published as."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import {package} as pl
from {package}.cli import LightningCLI

class Model(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.RMSNorm(width))
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()
    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8), batch_size=4)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    LightningCLI(Model, save_config_callback=None)
"""
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.fast_dev_run=true",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def _run(tmp_path: Path, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(package=package))
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_is_added_on_the_command_line(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    done = _run(
        tmp_path,
        package,
        "fit",
        *QUIET,
        "--trainer.callbacks+=fastnorm.lightning.FastNormCallback",
        "--trainer.callbacks.exclude=[net.2]",
        "--trainer.callbacks.strict=true",
    )
    assert done.returncode == 0, done.stderr
    assert "norms replaced: 1 layer; left: 1 (excluded by 'net.2')" in done.stdout + done.stderr


def test_a_mistyped_option_gives_a_usage_error(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        "lightning.pytorch",
        "fit",
        *QUIET,
        "--trainer.callbacks+=fastnorm.lightning.FastNormCallback",
        "--trainer.callbacks.strict=perhaps",
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "perhaps" in done.stderr
