"""`fastnorm.explain` and the command line: a decision that anybody can read, for any width."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastnorm
from fastnorm import offline
from fastnorm.__main__ import main
from fastnorm.device import known_targets
from fastnorm.semantics import SEMANTICS


@pytest.fixture
def no_compiler(monkeypatch):
    """The budget's model alone decides: these properties do not hang on the compiler."""
    monkeypatch.setattr(offline.device, "triton_missing", lambda: "switched off by the test")


@given(
    hidden=st.integers(1, 300_000),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    norm=st.sampled_from(sorted(SEMANTICS)),
    rows=st.none() | st.integers(0, 10**7),
    target=st.sampled_from(known_targets()),
)
def test_any_problem_is_explained(hidden, dtype, norm, rows, target):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline.device, "triton_missing", lambda: "switched off by the test")
        found = fastnorm.explain(hidden=hidden, dtype=dtype, norm=norm, rows=rows, target=target)
    assert [p.direction for p in found.passes] == ["forward", "backward"]
    for p in found.passes:
        assert (p.route == "torch") == bool(p.reasons) == (not p.plan)
        assert p.route in str(found)
    assert json.loads(found.to_json())["hidden"] == hidden


def test_compiled_figures_stand_beside_the_predicted_ones():
    pytest.importorskip("triton")
    backward = fastnorm.explain(hidden=768, target="sm_90", rows=4096).passes[1]
    assert backward.compiled.spills == 0
    assert 0 < backward.compiled.registers <= 255
    assert backward.predicted.registers > 0
    assert backward.bytes_moved == 3 * 4096 * 768 * 2
    assert backward.torch_bytes_moved == 5 * 4096 * 768 * 2
    assert backward.partial_bytes == backward.programs * 768 * 8


def test_what_the_compiler_refuses_is_told(monkeypatch):
    pytest.importorskip("triton")
    figures = iter([offline.Compiled(255, 7, 0)])

    def spilling_once(compiled):
        return next(figures, offline.Compiled(100, 0, 0))

    monkeypatch.setattr(offline, "offline_figures", spilling_once)
    found = fastnorm.explain(hidden=768, target="sm_90").passes[0]
    assert len(found.refused) == 1 and "spilled words 7 > 0" in found.refused[0]


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, fastnorm.LayerNorm, fastnorm.RMSNorm])
def test_a_layer_on_a_cpu_goes_to_torch_and_says_why(make):
    found = fastnorm.explain(make(16), torch.zeros(3, 16))
    assert {p.route for p in found.passes} == {"torch"}
    assert all("cpu" in p.reasons[0] for p in found.passes)
    assert found.rows == 3


def test_a_patched_layer_is_explained_as_before(no_compiler):
    layer = nn.RMSNorm(16)
    before = fastnorm.explain(layer, torch.zeros(3, 16), target="sm_90")
    fastnorm.patch(layer)
    assert fastnorm.explain(layer, torch.zeros(3, 16), target="sm_90") == before


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({}, "either a module"),
        ({"hidden": 0}, "at least 1, got 0"),
        ({"hidden": 8, "rows": -1}, "not be negative, got -1"),
        ({"hidden": 8, "dtype": "int8"}, "got 'int8'"),
        ({"hidden": 8, "norm": "batch"}, "got 'batch'"),
        ({"hidden": 8, "target": "sm_10"}, "'sm_10'"),
        ({"module": nn.LayerNorm(8)}, "input as well"),
        ({"module": nn.Linear(8, 8), "input": torch.zeros(8)}, "Linear cannot be explained"),
    ],
)
def test_bad_questions_are_answered_with_what_to_do(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        fastnorm.explain(**arguments)


def test_a_layers_own_settings_count(no_compiler):
    x = torch.zeros(2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = fastnorm.LayerNorm(64, autocast_output="autocast")
        assert layer(x).dtype is torch.bfloat16
        assert fastnorm.explain(layer, x, target="sm_90").dtypes["output"] == "bf16"
    found = fastnorm.explain(fastnorm.RMSNorm(64, backend="torch"), x, target="sm_90")
    assert {p.route for p in found.passes} == {"torch"}
    assert 'backend="torch"' in str(found)


def test_a_weight_per_head_is_torchs_on_every_target(no_compiler):
    class CohereLayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(3, 64)), 1e-5

    fastnorm.register(
        CohereLayerNorm, semantics="layer_cohere", weight="weight", eps="variance_epsilon"
    )
    found = fastnorm.explain(CohereLayerNorm(), torch.zeros(2, 3, 64), target="sm_90")
    assert {p.route for p in found.passes} == {"torch"}
    assert "one value per normalised element" in str(found)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain"],
        ["explain", "--hidden", "0"],
        ["explain", "--hidden", "many"],
        ["explain", "--hidden", "8", "--dtype", "fp8"],
        ["explain", "--hidden", "8", "--target", "sm_1"],
        ["explain", "--hidden", "8", "--wide"],
        ["conquer"],
    ],
)
def test_bad_command_lines_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_command_line_prints_data_and_text(no_compiler, capsys):
    assert main(["explain", "--hidden", "4096", "--target", "sm_90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"][1]["route"] == "triton:persistent row"
    assert main(["explain", "--hidden", "4096", "--target", "sm_90"]) == 0
    assert "backward: triton:persistent row" in capsys.readouterr().out


def test_doctor_tells_of_a_missing_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_an_empty_input_is_told_apart():
    with pytest.raises(ValueError, match="empty"):
        fastnorm.explain(nn.LayerNorm(8), torch.zeros(0, 8), target="sm_90")


def test_a_kernel_that_triton_cannot_build_gives_way_to_the_next(monkeypatch):
    pytest.importorskip("triton")
    from fastnorm.kernels import compile

    build, broken = compile.compile_plan, iter([RuntimeError("PassManager::run failed")])

    def failing_once(plan, capability):
        for error in broken:
            raise error
        return build(plan, capability)

    monkeypatch.setattr(compile, "compile_plan", failing_once)
    with pytest.warns(UserWarning, match="another is tried"):
        found = fastnorm.explain(hidden=768, target="sm_90").passes[0]
    assert "failures to compile" in found.refused[0] and found.compiled.spills == 0
