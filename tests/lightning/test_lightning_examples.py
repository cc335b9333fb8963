"""Every example runs, on one process and on two, and says what is wrong with its options."""

from __future__ import annotations

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning_models import ADVICE_IGNORED, make_trainer
from typer.testing import CliRunner

from fastnorm.lightning import FastNormCallback

pytestmark = ADVICE_IGNORED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NORMS_IN_SMALL_GPT = 9
SECONDS_AT_MOST = 150


def _run(folder: Path, script: str, *options: str) -> str:
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / script, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS_AT_MOST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that Lightning started
        output, _ = process.communicate()
        pytest.fail(f"{script} {options} took more than {SECONDS_AT_MOST} s:\n{output}")
    assert process.returncode == 0, output
    return output


def _runs(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "runs" / name / "runs.json").read_text())


def test_gpt_compares_both_norms_from_one_start(tmp_path: Path) -> None:
    text = _run(tmp_path, "train_gpt.py", "--steps", "2", "--compare", "--accelerator", "cpu")
    torch_run, fast_run = _runs(tmp_path, "train_gpt")
    assert [torch_run["name"], fast_run["name"]] == ["torch", "fastnorm"]
    assert len(fast_run["train_losses"]) == 2
    assert fast_run["train_losses"] == torch_run["train_losses"]
    assert fast_run["validation_losses"] == torch_run["validation_losses"]
    assert torch_run["calls"] == {"forward": {}, "backward": {}}
    assert sum(fast_run["calls"]["backward"].values()) == 2 * NORMS_IN_SMALL_GPT
    assert fast_run["decision"] in text.replace("\r", "")
    assert f"fastnorm: norms replaced: {NORMS_IN_SMALL_GPT} layer" in text
    assert (tmp_path / "runs" / "train_gpt" / "losses.png").stat().st_size > 10_000
    lines = (tmp_path / "runs" / "train_gpt" / "losses.csv").read_text().splitlines()
    assert lines[0] == "step,train_loss_torch,train_loss_fastnorm"
    assert len(lines) == 3


def test_gpt_profile_finds_the_norms_of_a_step(tmp_path: Path) -> None:
    options = ["--steps", "12", "--batch", "2", "--context", "8", "--profile"]
    text = _run(tmp_path, "train_gpt.py", *options, "--accelerator", "cpu")
    (run,) = _runs(tmp_path, "train_gpt")
    assert run["items_per_second"] > 0
    assert run["profile"]["aten::native_layer_norm"] > 0
    assert run["profile"]["aten::native_layer_norm_backward"] > 0
    assert "all norms" in text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_gpt_on_two_processes_replaces_every_norm(tmp_path: Path, strategy: str) -> None:
    options = ["--steps", "2", "--batch", "4", "--context", "32", "--norm", "rms"]
    two = ["--strategy", strategy, "--devices", "2", "--accelerator", "cpu"]
    text = _run(tmp_path, "train_gpt.py", *options, *two)
    (run,) = _runs(tmp_path, "train_gpt")
    assert text.count(f"fastnorm: norms replaced: {NORMS_IN_SMALL_GPT} rms") == 1
    assert sum(run["calls"]["backward"].values()) == 2 * NORMS_IN_SMALL_GPT
    assert len(run["train_losses"]) == 2


def test_vit_runs(tmp_path: Path) -> None:
    _run(tmp_path, "train_vit.py", "--steps", "2", "--compare", "--accelerator", "cpu")
    torch_run, fast_run = _runs(tmp_path, "train_vit")
    assert fast_run["train_losses"] == torch_run["train_losses"]
    assert sum(fast_run["calls"]["backward"].values()) == 2 * 9


def test_lightning_cli_runs_from_its_config_file(tmp_path: Path) -> None:
    folder = EXAMPLES / "lightning_cli"
    options = ["--config", str(folder / "config.yaml"), "--data.steps=2", "--data.batch=4"]
    two_steps = ["--trainer.accelerator=cpu", "--trainer.val_check_interval=1"]
    text = _run(tmp_path, "lightning_cli/main.py", "fit", *options, *two_steps)
    assert f"fastnorm: norms replaced: {NORMS_IN_SMALL_GPT} rms" in text
    assert "fastnorm: calls by route" in text


@pytest.fixture(scope="module")
def train_gpt() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("train_gpt")


@pytest.fixture
def gpt_app(train_gpt: ModuleType) -> typer.Typer:
    app = typer.Typer()
    app.command()(train_gpt.main)
    return app


def test_lightnings_throughput_monitor_counts_the_same_tokens(
    train_gpt: ModuleType, tmp_path: Path
) -> None:
    monitor = ThroughputMonitor(len, lambda batch: batch[:, 1:].numel(), window_size=2)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = make_trainer(FastNormCallback(), monitor, logger=logger, log_every_n_steps=1)
    module = train_gpt.GPTModule(width=16, layers=1, heads=2, context=8, steps=4)
    trainer.fit(module, train_gpt.TextData(context=8, batch=2, steps=4, validation_batches=1))
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    tokens = [float(row["train/lengths"]) for row in rows if row["train/lengths"]]
    assert tokens == [16.0, 32.0, 48.0, 64.0]
    for rate in ("items_per_sec", "flops_per_sec"):
        rates = [float(value) for row in rows if (value := row[f"train/device/{rate}"])]
        assert rates and min(rates) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--norm", "batch"], "layer"),
        (["--size", "huge"], "medium"),
        (["--steps", "0"], "--steps"),
        (["--strategy", "deepspeed"], "fsdp"),
        (["--precision", "8"], "bf16-mixed"),
        (["--strategy", "ddp", "--devices", "3"], "multiple"),
        (["--strategy", "tp", "--devices", "3"], "divides both"),
        (["--profile", "--steps", "3"], "--steps 12"),
        (["--no-such-option"], "No such option"),
        (["--accelerator", "gpu", "--devices", "999"], "GPU"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_give_a_usage_error(
    gpt_app: typer.Typer, options: list[str], message: str
) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(gpt_app, options)
    assert result.exit_code == 2
    assert "Usage:" in result.output
    assert message in result.output
