"""Measured choices: the fastest goes first, is kept on disk, and nothing is timed twice."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

import fastnorm
from fastnorm import routing, tuning
from fastnorm.__main__ import main
from fastnorm.device import limits_for_target
from fastnorm.plan import TORCH, candidates, decide
from fastnorm.problem import NormProblem

H100 = limits_for_target("sm_90")
PROBLEM = NormProblem("backward", "layer", 4096, "bf16", "bf16", "bf16", "bf16")


@pytest.fixture
def a_gpu(monkeypatch):
    """A GPU that is not there: every candidate is timed by a clock of the test's own."""
    timed = []
    plans = [plan.describe() for plan in candidates(PROBLEM, H100)]
    clock = {TORCH: 9.0} | {name: 5.0 for name in plans}

    def measure(problem, rows, index):
        timed.append((problem, rows))
        return dict(clock)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(routing, "limits", lambda index: H100)
    monkeypatch.setattr(routing, "_preferred", {})
    monkeypatch.setattr(routing, "_verified", {})
    monkeypatch.setattr(tuning, "measure", measure)
    return clock, plans, timed


def test_the_fastest_candidate_is_kept_and_timed_once(a_gpu, tmp_path):
    clock, plans, timed = a_gpu
    clock[plans[3]] = 1.0
    cache = tmp_path / "deep" / "tuned.json"
    (first,) = fastnorm.tune(problems={PROBLEM: 512}, cache=cache)
    assert first.choice == plans[3] and not first.cached
    assert first.microseconds[TORCH] == 9.0
    (second,) = fastnorm.tune(problems={PROBLEM: 512}, cache=cache)
    assert second.cached and second.choice == plans[3]
    assert second.microseconds == first.microseconds
    assert timed == [(PROBLEM, 512)]
    clock[plans[2]] = 0.5
    (third,) = fastnorm.tune(problems={PROBLEM: 512}, cache=cache, again=True)
    assert third.choice == plans[2]
    assert routing._preferred == {(PROBLEM, 0): plans[2]}


def test_a_preferred_candidate_is_decided_on_first(a_gpu):
    _, plans, _ = a_gpu
    assert decide(PROBLEM, H100).plan.describe() == plans[0]
    assert decide(PROBLEM, H100, (), plans[3]).plan.describe() == plans[3]
    assert decide(PROBLEM, H100, (), "one that is no more").plan.describe() == plans[0]


def test_torch_is_taken_where_it_is_the_fastest(a_gpu, tmp_path):
    clock, _, _ = a_gpu
    clock[TORCH] = 0.1
    (tuned,) = fastnorm.tune(problems={PROBLEM: 8}, cache=tmp_path / "t.json")
    assert tuned.choice == TORCH
    decision = decide(PROBLEM, H100, (), TORCH)
    assert decision.plan is None and "measured" in decision.reasons[0]


def test_choices_hold_for_their_gpu_only(a_gpu, tmp_path, monkeypatch):
    _, _, timed = a_gpu
    cache = tmp_path / "t.json"
    fastnorm.tune(problems={PROBLEM: 8}, cache=cache)
    monkeypatch.setattr(routing, "limits", lambda index: limits_for_target("sm_100"))
    fastnorm.tune(problems={PROBLEM: 8}, cache=cache)
    assert len(timed) == 2 and len(json.loads(cache.read_text())) == 2


def test_choices_are_in_force_on_every_gpu_of_the_kind(a_gpu, tmp_path, monkeypatch):
    """A model need not be on the current GPU, nor on one."""
    _, plans, _ = a_gpu
    kinds = [H100, limits_for_target("sm_100"), H100]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(routing, "limits", kinds.__getitem__)
    fastnorm.tune(problems={PROBLEM: 8}, cache=tmp_path / "t.json")
    assert routing._preferred == {(PROBLEM, 0): plans[0], (PROBLEM, 2): plans[0]}


def test_a_cached_choice_that_is_no_candidate_any_more_is_timed_again(a_gpu, tmp_path):
    clock, plans, timed = a_gpu
    cache = tmp_path / "t.json"
    clock["of an older version"] = 1.0
    fastnorm.tune(problems={PROBLEM: 8}, cache=cache)
    assert "of an older version" in cache.read_text()
    del clock["of an older version"]
    (tuned,) = fastnorm.tune(problems={PROBLEM: 8}, cache=cache)
    assert tuned.choice == plans[0] and not tuned.cached and len(timed) == 2


def test_what_only_torch_runs_is_not_timed(a_gpu, tmp_path):
    _, _, timed = a_gpu
    fp64 = PROBLEM._replace(x_dtype="torch.float64", y_dtype="torch.float64")
    wide = PROBLEM._replace(hidden=2**18)
    tuned = fastnorm.tune(problems={fp64: 8, wide: 8, PROBLEM: 8}, cache=tmp_path / "t.json")
    assert [t.problem for t in tuned] == [PROBLEM] and timed == [(PROBLEM, 8)]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_cache_is_named(a_gpu, tmp_path, content):
    cache = tmp_path / "t.json"
    cache.write_text(content)
    with pytest.raises(ValueError, match=r"t\.json.*delete it"):
        fastnorm.tune(problems={PROBLEM: 8}, cache=cache)


def test_bad_calls_say_what_to_give():
    with pytest.raises(ValueError, match="either a model"):
        fastnorm.tune()
    with pytest.raises(ValueError, match="either a model"):
        fastnorm.tune(torch.nn.Identity(), problems={PROBLEM: 1})


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA device"):
        fastnorm.tune(problems={PROBLEM: 1})


def test_a_models_problems_are_recorded_with_their_rows_and_no_gradient_stays(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), fastnorm.LayerNorm(16))
    kept = torch.ones(16)
    model[1].weight.grad = kept

    def as_on_a_gpu(*args, **kwargs):
        y = torch.nn.functional.layer_norm(*args[:5])
        routing.kernel_for(PROBLEM, routing.INTERPRETER, y.numel() // 16)
        return y

    monkeypatch.setattr(
        routing, "_verified", {(PROBLEM, -1): routing.Verified(decide(PROBLEM, H100))}
    )
    monkeypatch.setattr("fastnorm.modules.norm", as_on_a_gpu)
    assert tuning._problems_of(model, (torch.randn(5, 8),)) == {PROBLEM: 5}
    assert model[1].weight.grad is kept and model[0].weight.grad is None


def test_a_model_that_fails_keeps_its_gradients():
    model = torch.nn.Linear(8, 16)
    kept = model.weight.grad = torch.ones(16, 8)
    with pytest.raises(RuntimeError):
        tuning._problems_of(model, (torch.randn(5, 9),))
    assert model.weight.grad is kept


def test_triton_need_not_be_installed_as_triton(a_gpu, tmp_path, monkeypatch):
    """PyTorch's nightly builds bring it as pytorch-triton."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(tuning, "version", version, raising=False)
    (tuned,) = fastnorm.tune(problems={PROBLEM: 8}, cache=tmp_path / "t.json")
    assert not tuned.cached
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 1
