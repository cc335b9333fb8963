"""Tables of a CSV: ours against torch and against whoever is the fastest of the others."""

import csv

import pytest
import typer

from benchmarks.tables import lines, main, step_lines


def row(provider: str, us: str, correct: str = "1") -> dict[str, str]:
    base = {"op": "bwd", "norm": "rms", "dtype": "bf16", "M": "8", "N": "4", "copy_pct": "50.4"}
    return {**base, "provider": provider, "us": us, "correct": correct}


def test_cells_are_ratios_of_one_run():
    rows = [row("torch", "20"), row("fastnorm", "10"), row("quack", "12.5"), row("liger", "40")]
    (line,) = lines(rows, "bwd")
    assert line == "| bf16 8 x 4 | 10.0 | 50 | 0.50 | 0.80 (quack) | - | - | - | - |"
    assert lines(rows, "fwd") == []


def test_what_failed_its_gate_is_nobodys_peer():
    rows = [row("torch", "20"), row("fastnorm", "10"), row("quack", "1", correct="0")]
    assert "0.50 (torch)" in lines(rows, "bwd")[0]


def step(variant: str, ms: str, pct: str, memory: str = "", share: str = "") -> dict[str, str]:
    case = {"model": "d768", "norm": "rms", "precision": "bf16-mixed", "mode": "eager"}
    found = {"step_ms": ms, "recovered_pct": pct, "memory_gib": memory, "norm_share_pct": share}
    return {**case, "variant": variant, **found}


def test_a_row_of_training_steps_is_one_line():
    rows = [step("torch", "78.24", "0.0", "30.126", "9.2"), step("fastnorm", "74.6", "50.4", "30")]
    (line,) = step_lines([*rows, step("identity", "71", "100")])
    names = "| d768 | rms | bf16-mixed | eager "
    assert (
        line == f"{names}| 78.2 | 74.6 | - | - | 71.0 | 50 | - | - | 9.2 | - | - | 30.13 | 30.00 |"
    )
    with pytest.raises(typer.BadParameter, match="twice"):
        step_lines(2 * rows)


def test_the_columns_tell_which_table_it_is(tmp_path, capsys):
    for name, rows in (("steps", [step("torch", "2", "0")]), ("kernels", [row("torch", "20")])):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    main([tmp_path / "steps"])
    heading, rule, line = capsys.readouterr().out.strip().splitlines()
    assert heading.count("|") == rule.count("|") == line.count("|")
    main([tmp_path / "kernels"])
    assert "| backward |" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="one of them"):
        main([tmp_path / "steps", tmp_path / "kernels"])
