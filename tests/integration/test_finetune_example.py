"""The example patches, verifies, trains and undoes, and refuses what it cannot do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", exc_type=ImportError)
typer = pytest.importorskip("typer")
testing = pytest.importorskip("typer.testing")

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_hf.py"


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of one call of the example, in this process."""
    spec = importlib.util.spec_from_file_location("finetune_hf", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = typer.Typer()
    app.command()(module.main)
    done = testing.CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_loss_falls_and_undo_changes_nothing(family: str) -> None:
    code, shown = run("--family", family, "--steps", "12", "--device", "cpu")
    assert code == 0, shown
    assert "within rounding" in shown and "0 skipped" in shown
    before, after = map(float, shown.split("validation loss ")[1].split(" nats")[0].split(" -> "))
    unpatched = float(shown.split("after undo: ")[1].split()[0])
    assert after < before - 1
    assert unpatched == after


def test_bad_options_are_usage_errors() -> None:
    assert run("--steps", "0")[0] == 2
    assert run("--family", "gpt")[0] == 2
