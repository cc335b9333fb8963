"""Checkpoints do not know about fastnorm: written with or without it, read with or without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_models import ADVICE_IGNORED, Staged, batches, make_trainer, staged

from fastnorm.lightning import FastNormCallback

pytestmark = ADVICE_IGNORED


def _write(path: Path, patched: bool) -> dict:
    trainer = make_trainer(*([FastNormCallback()] if patched else []))
    trainer.fit(staged(), batches())
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_a_checkpoint_is_the_same_with_and_without(tmp_path: Path) -> None:
    plain = _write(tmp_path / "plain.ckpt", patched=False)
    patched = _write(tmp_path / "patched.ckpt", patched=True)
    assert list(patched) == list(plain)
    for key in ("hyper_parameters", "callbacks", "hparams_name", "global_step"):
        assert patched[key] == plain[key]
    assert list(patched["state_dict"]) == list(plain["state_dict"])
    for name, value in plain["state_dict"].items():
        assert torch.equal(patched["state_dict"][name], value)


@pytest.mark.parametrize("read_patched", [False, True])
@pytest.mark.parametrize("written_patched", [False, True])
def test_training_resumes_from_either_kind(
    tmp_path: Path, written_patched: bool, read_patched: bool
) -> None:
    path = tmp_path / "model.ckpt"
    written = _write(path, written_patched)
    model = staged(seed=1)
    callbacks = [FastNormCallback()] if read_patched else []
    make_trainer(*callbacks, max_epochs=2).fit(model, batches(), ckpt_path=path)
    assert len(model.losses) == 3  # the second epoch alone
    resumed = make_trainer(max_epochs=2)
    other = staged(seed=2)
    resumed.fit(other, batches(), ckpt_path=path)
    assert model.losses == other.losses
    assert written["hyper_parameters"] == dict(model.hparams)


def test_a_checkpoint_of_a_patched_run_builds_a_plain_module(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    _write(path, patched=True)

    class Built(Staged):
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__(rate)
            Staged.setup(self, "fit")
            Staged.configure_model(self)

    model = Built.load_from_checkpoint(path, weights_only=True)
    assert {type(module).__name__ for module in model.modules()} == {
        "Built",
        "LayerNorm",
        "Linear",
        "RMSNorm",
        "Sequential",
    }
