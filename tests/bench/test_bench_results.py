"""CSV, comparison, plots and the command line, from invented measurements."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import cli, measure, plot, run
from benchmarks.inputs import make_inputs
from benchmarks.results import COLUMNS, CsvWriter, Measurement, compare, read_csv, summary_table
from benchmarks.timing import enqueue_time, host_time

GPU = ("NVIDIA H200", "2.11.0", "3.6.0")


def _line(provider, us, pct=50.0, correct="1", op="bwd", norm="rms", rows=16384, hidden=4096):
    return Measurement(*GPU, op, norm, "bf16", rows, hidden, provider, us, pct, correct)


LINES = [
    _line("torch", 227.0, 41.5),
    _line("liger", 228.0, 41.3),
    _line("fastnorm", 106.0, 88.9),
    _line("flash-attn", None, None, "error:OutOfResources"),
    _line("quack", None, None, "0"),
    _line("torch", 92.0, None, op="host", rows=64, hidden=256),
]


def _written(path, lines=LINES):
    with CsvWriter(path) as writer:
        for line in lines:
            writer.write(line)
    return path


def test_columns_are_the_published_ones():
    assert ",".join(COLUMNS) == "gpu,torch,triton,op,norm,dtype,M,N,provider,us,copy_pct,correct"


def test_measurements_survive_the_csv(tmp_path):
    assert read_csv(_written(tmp_path / "deep" / "run.csv")) == LINES


def test_lines_are_on_disk_before_the_run_ends(tmp_path):
    path = tmp_path / "run.csv"
    with CsvWriter(path) as writer:
        writer.write(LINES[0])
        assert read_csv(path) == LINES[:1]


def test_a_csv_is_replaced_only_where_asked(tmp_path):
    path = _written(tmp_path / "run.csv")
    with pytest.raises(FileExistsError, match="--overwrite"):
        CsvWriter(path)
    with CsvWriter(path, overwrite=True):
        pass
    assert read_csv(path) == []


def test_foreign_columns_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has columns"):
        read_csv(path)


def test_ratios_are_to_torch_and_to_the_best_timed_peer():
    backward, host = compare(LINES)
    assert backward.best_peer == "torch"
    assert backward.ratio("torch") == pytest.approx(106 / 227)
    assert backward.ratio("quack") is None
    assert host.ratio("torch") is None


def test_summary_shows_what_was_timed_and_a_dash_for_the_rest():
    console = Console(width=160, record=True)
    console.print(summary_table(compare(LINES), "run"))
    text = console.export_text()
    assert "rms bwd bf16 16384 x 4096" in text and "0.467" in text and "89" in text
    assert " - " in text


def test_plots_are_written_for_each_op_and_repeat_byte_for_byte(tmp_path):
    lines = [
        _line(provider, us, pct, norm=norm, rows=rows, hidden=hidden)
        for norm in ("layer", "rms")
        for rows, hidden in ((16384, 4096), (2048, 1024), (32768, 1024))
        for provider, us, pct in (("torch", 200.0, 40.0), ("fastnorm", 100.0, 80.0))
    ]
    csv = _written(tmp_path / "run.csv", lines)
    for folder in ("one", "two"):
        result = CliRunner().invoke(plot.app, [str(csv), "--out", str(tmp_path / folder)])
        assert result.exit_code == 0, result.output
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    stems = ("copy_pct_bwd_bf16", "time_ratio_bwd_bf16")
    assert names == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_plots_take_the_most_rows_of_a_hidden_size():
    lines = [_line("torch", 1.0, rows=r, hidden=1024) for r in (2048, 32768, 4096)]
    assert [c.case.rows for c in plot.largest_per_hidden(compare(lines))] == [32768]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "12"], "ROWSxHIDDEN"),
        (["--providers", "torch,nobody"], "unknown provider 'nobody'"),
        (["--ops", "sideways"], "choose among fwd, bwd, both, host"),
        (["--grid", "huge"], "choose among default, quick"),
        ([], "sees no CUDA device"),
    ],
)
def test_command_line_says_what_is_wrong_and_fails(arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(run.app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture
def an_h200(monkeypatch):
    """What a run asks of the GPU, answered without one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(run, "flush_time", lambda: 70.0)


def test_a_run_writes_csv_and_versions_and_prints_the_comparison(an_h200, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "gpu_clock", lambda milliseconds: lambda case, call: 0.5)
    monkeypatch.setattr(measure, "make_inputs", lambda case, device: make_inputs(case, "cpu"))
    csv = tmp_path / "run.csv"
    arguments = ["--providers", "torch", "--norms", "layer", "--dtypes", "fp32", "--jobs", "0"]
    result = CliRunner().invoke(run.app, [*arguments, "--shapes", "100x1000", "--out", str(csv)])
    assert result.exit_code == 0, result.output
    host, forward, backward = read_csv(csv)
    # 2 x 100 x 1000 x 4 bytes at 4 TB/s take 0.2 us; backward moves half as much again.
    assert (forward.op, forward.copy_pct, backward.copy_pct) == ("fwd", 40.0, 60.0)
    assert (host.op, host.M, host.N, host.copy_pct, host.correct) == ("host", 64, 256, None, "1")
    about = json.loads(csv.with_suffix(".json").read_text())
    assert about["copy_bandwidth_gb_per_s"] == 4000.0 and "torch" in about["providers"]
    assert "layer bwd fp32 100 x 1000" in result.output


def test_times_that_hold_the_host_are_named(an_h200, monkeypatch, tmp_path):
    """A call that takes the host longer to enqueue than the flush before it takes the device."""

    def measured(cases, *_args, **_kwargs):
        for case, us in zip(cases, (None, 69.0, 71.0), strict=True):
            yield measure.Outcome(case, "torch", 5.0, "1", enqueue_us=us)

    monkeypatch.setattr(measure, "measure_all", measured)
    csv = tmp_path / "run.csv"
    arguments = ["--providers", "torch", "--norms", "layer", "--dtypes", "fp32", "--jobs", "0"]
    result = CliRunner().invoke(run.app, [*arguments, "--shapes", "100x1000", "--out", str(csv)])
    assert result.exit_code == 0, result.output
    assert "1 device times hold the host" in " ".join(result.output.split())
    (named,) = json.loads(csv.with_suffix(".json").read_text())["host_bound"]
    assert named == "torch, layer bwd fp32 100 x 1000: enqueued in 71 us"


def test_enqueue_time_waits_for_nothing_in_between():
    events = []
    us = enqueue_time(
        lambda: events.append("call"), calls=3, synchronize=lambda: events.append("wait")
    )
    assert events == ["wait", "call", "call", "call", "wait"]
    assert 0 < us < 1000


def test_default_file_is_named_by_gpu_and_date(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert cli.default_out().name.startswith("a100-sxm4-80gb-20")
    assert cli.default_out("end-to-end-").name.startswith("end-to-end-a100-sxm4-80gb-20")


def test_host_time_is_the_mean_of_many_calls_and_waits_once_a_repeat():
    calls, waits = [], []
    us = host_time(
        lambda: calls.append(1), iterations=50, repeats=3, synchronize=lambda: waits.append(1)
    )
    assert len(calls) == 10 + 3 * 50
    assert len(waits) == 1 + 3
    assert 0 < us < 1000
