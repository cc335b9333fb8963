"""The end-to-end benchmark's command line: what it measures, writes, prints and refuses."""

import csv
import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import fastnorm
from benchmarks import end_to_end
from benchmarks.results import CsvWriter
from benchmarks.step_models import MODELS, Workload, workload
from benchmarks.step_results import COLUMNS, measurements, recovered, step_table
from benchmarks.steps import Effort, Outcome, Row
from fastnorm.native import shortcut

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS = 9  # of both tiny models: two in each of four blocks, and the last one
MIXED = Row("tiny", "layer", "bf16-mixed", "eager")
LIGHT = ("--batch", "1", "--rounds", "3", "--steps", "1")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(end_to_end.app, arguments)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_are_the_published_ones():
    assert ",".join(COLUMNS) == (
        "gpu,torch,triton,model,norm,precision,mode,variant,"
        "step_ms,tokens_per_s,memory_gib,norm_share_pct,recovered_pct"
    )


def test_every_variant_of_every_row_is_timed_and_reported(no_gpu, tmp_path):
    out = tmp_path / "deep" / "steps.csv"
    arguments = ("--models", "tiny,vit-tiny", "--modes", "eager", "--out", str(out))
    result = invoke(*arguments, *LIGHT)
    assert result.exit_code == 0, result.output
    lines = read(out)
    ours = {"bf16-mixed": ["fastnorm", "fastnorm-autocast"], "bf16-true": ["fastnorm"]}
    cases = itertools.product(("tiny", "vit-tiny"), ours, ("layer", "rms"))
    assert [(r["model"], r["precision"], r["norm"], r["variant"]) for r in lines] == [
        (*case, variant) for case in cases for variant in ("torch", *ours[case[1]], "identity")
    ]
    about = json.loads(out.with_suffix(".json").read_text())
    assert about["left_at_time_limit"] == 0 and about["not_timed"] == {}
    assert about["native_library"] == (shortcut.norm is not None)
    for line in lines:
        name = " ".join(line[key] for key in ("model", "norm", "precision", "mode"))
        variants = about["rows"][name]["variants"]
        check_line(line, variants[line["variant"]], about["tokens_of_a_step"][line["model"]])
        if line["variant"] == "fastnorm":  # on a CPU it runs torch's operators
            for loss in ("first_loss", "last_loss"):
                assert variants["fastnorm"][loss] == variants["torch"][loss]


def check_line(line, detail, tokens):
    """One line of the CSV against what the JSON says of the same variant."""
    assert len(detail["step_ms_by_round"]) == 3
    milliseconds = float(line["step_ms"])
    assert milliseconds == statistics.median(detail["step_ms_by_round"]) > 0
    assert float(line["tokens_per_s"]) == pytest.approx(1e3 * tokens / milliseconds, rel=1e-2)
    assert (line["gpu"], line["memory_gib"], line["norm_share_pct"]) == ("cpu", "", "")
    assert math.isfinite(detail["last_loss"])
    calls = {"torch": NORMS} if line["variant"].startswith("fastnorm") else {}
    assert detail["calls_of_a_step"] == {"forward": calls, "backward": calls}


def test_recovered_is_the_part_of_what_there_is_to_win():
    assert recovered(78.0, 78.0, 71.0) == 0
    assert recovered(78.0, 71.0, 71.0) == 100
    assert recovered(80.0, 75.0, 70.0) == 50
    assert recovered(80.0, 82.0, 70.0) == -20
    assert recovered(70.0, 69.0, 70.0) is None


def test_a_line_has_the_median_and_the_peak():
    outcomes = {
        "torch": Outcome(9, memory_bytes=3 * 2**30, round_ms=[10.0, 90.0, 8.0], norm_share=0.25),
        "fastnorm": Outcome(9, memory_bytes=2**30, round_ms=[7.0]),
        "identity": Outcome(9, round_ms=[6.0]),
    }
    versions = ("NVIDIA H200", "2.11.0", "3.6.0")
    base, ours, bound = measurements(versions, MIXED, 1000, outcomes)
    assert (base.step_ms, base.tokens_per_s, base.memory_gib) == (10.0, 100_000.0, 3.0)
    assert (base.norm_share_pct, base.recovered_pct) == (25.0, 0.0)
    assert (ours.recovered_pct, bound.recovered_pct, ours.norm_share_pct) == (75.0, 100.0, None)
    assert ours.cells()["step_ms"] == "7.000" and ours.cells()["norm_share_pct"] == ""
    console = Console(width=160, record=True)
    console.print(step_table([base, ours, bound, base, ours], "run"))
    text = console.export_text()
    cells = [cell.strip() for cell in text.splitlines()[5].split("│")[1:-1]]
    assert cells == [*4 * [""], "fastnorm", "7.00", "0.700", "142,857", "1.00", "-", "75"]
    assert text.count("bf16-mixed") == 2


def test_norms_that_compute_something_else_are_not_timed(no_gpu, monkeypatch, tmp_path):
    true_patch = fastnorm.patch

    def wrong(model, **options):
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.weight, 3.0)
        return true_patch(model, **options)

    monkeypatch.setattr(fastnorm, "patch", wrong)
    out = tmp_path / "steps.csv"
    only = ("--models", "tiny", "--modes", "eager", "--precisions", "bf16-true", "--out", str(out))
    result = invoke(*only, *LIGHT)
    assert result.exit_code == 1
    assert {line["norm"] for line in read(out)} == {"rms"}
    reasons = json.loads(out.with_suffix(".json").read_text())["not_timed"]
    assert "where torch's norms give" in reasons["tiny layer bf16-true eager"]


def test_eager_rows_come_before_compiled_ones():
    rows = end_to_end.build_rows(("d768", "tiny"), ("rms",), ("bf16-true",), ("compiled", "eager"))
    assert [(row.mode, row.model) for row in rows] == [
        ("eager", "d768"),
        ("eager", "tiny"),
        ("compiled", "d768"),
        ("compiled", "tiny"),
    ]


def test_the_time_limit_ends_the_run_after_the_row_it_falls_in(monkeypatch, tmp_path):
    clock = [0.0]

    def measured(row, *arguments, **options):
        clock[0] += 60.0
        return {variant: Outcome(9, round_ms=[1.0]) for variant in row.variants}

    monkeypatch.setattr(end_to_end, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(end_to_end, "measure_row", measured)
    rows = end_to_end.build_rows(("tiny",), ("layer", "rms"), ("bf16-true",), ("eager", "compiled"))
    plan = end_to_end.Plan(rows, {"tiny": workload("tiny", 1)}, "cpu", Effort(), seconds=100.0)
    path = tmp_path / "steps.csv"
    end_to_end.run(plan, CsvWriter(path, columns=COLUMNS), started=0.0)
    assert [line["norm"] for line in read(path)] == 3 * ["layer"] + 3 * ["rms"]
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["left_at_time_limit"] == 2 and len(about["rows"]) == 2


class Interrupted(nn.Module):
    """Part of it dynamo cannot compile."""

    def __init__(self, norm):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.norm(x)
        torch._dynamo.graph_break()
        return self.head(x)


def test_a_model_that_is_not_compiled_whole_is_no_compiled_row(tmp_path):
    load = Workload(Interrupted, lambda: (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)), 2)
    rows = end_to_end.build_rows(("tiny",), ("layer",), ("bf16-true",), ("eager", "compiled"))
    plan = end_to_end.Plan(rows, {"tiny": load}, "cpu", Effort(1, 1, False, "eager"), math.inf)
    path = tmp_path / "steps.csv"
    assert end_to_end.run(plan, CsvWriter(path, columns=COLUMNS), started=0.0) == 1
    assert [line["mode"] for line in read(path)] == 3 * ["eager"]
    (reason,) = json.loads(path.with_suffix(".json").read_text())["not_timed"].items()
    assert reason[0] == "tiny layer bf16-true compiled" and "graph_break" in reason[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt5"], f"choose among {', '.join(MODELS)}"),
        (["--models", "tiny", "--norms", "batch"], "unknown norm 'batch'"),
        (["--models", "tiny", "--precisions", "fp8"], "choose among bf16-mixed, bf16-true"),
        (["--models", "tiny", "--modes", "fast"], "choose among eager, compiled"),
        (["--models", "tiny", "--compiler", "gcc"], "unknown compiler 'gcc'"),
        (["--models", "tiny", "--rounds", "0"], "--rounds"),
        (["--models", "tiny", "--out", __file__], "--overwrite"),
        (["--models", "tiny,d768"], "sees no CUDA device, and d768 would"),
    ],
)
def test_options_that_do_not_fit_are_refused(no_gpu, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_package_that_the_models_need_is_named(no_gpu, monkeypatch):
    def missing(*arguments):
        raise ModuleNotFoundError("No module named 'sklearn'")

    monkeypatch.setattr(end_to_end, "workload", missing)
    result = invoke("--models", "vit-tiny")
    assert result.exit_code == 2
    assert "sklearn" in result.stderr and ".[bench,examples]" in result.stderr
