"""Tables of a CSV: ours against torch and against whoever is the fastest of the others."""

from benchmarks.tables import lines


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
