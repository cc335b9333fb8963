"""Training steps that are compared: alike but for their norms, taken in turn, and checked."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fastnorm
from benchmarks import measure_steps
from benchmarks.measure_steps import check_finite, check_losses, check_routes, measure_row
from benchmarks.step_models import example, workload
from benchmarks.steps import Effort, Outcome, Refused, Row, Training, with_norms

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS = 9  # of both tiny models: two in each of four blocks, and the last one
MIXED = Row("tiny", "layer", "bf16-mixed", "eager")


def test_the_share_of_norms_is_nothing_without_them():
    outcomes = measure_row(MIXED, workload("tiny", 1), "cpu", Effort(1, 1, profile=True))
    assert 0 < outcomes["torch"].norm_share < 0.5
    assert 0 < outcomes["fastnorm"].norm_share < 0.5
    assert outcomes["identity"].norm_share == 0


def test_tokens_are_those_of_the_examples():
    tokens = {"d768": 32 * 1024, "d1024": 16 * 1024, "vit-base": 128 * 14**2}
    assert {name: workload(name).tokens for name in tokens} == tokens
    assert workload("d768", 2).tokens == 2 * 1024
    assert example("train_gpt").SIZES["d768"].layers == 12
    assert example("train_gpt").SIZES["d1024"].layers == 24


@pytest.mark.parametrize("model", ["tiny", "vit-tiny"])
def test_variants_share_the_weights_and_nothing_else(model):
    start = workload(model, 1).build("layer")
    for variant in MIXED.variants:
        copied = with_norms(variant, start)
        state = copied.state_dict()
        kept = {n: t for n, t in start.state_dict().items() if variant != "identity" or n in state}
        assert state.keys() == kept.keys()
        assert all(torch.equal(state[n], t) and state[n] is not t for n, t in kept.items())
        storages = {p.data_ptr() for p in start.parameters()}
        assert not storages & {p.data_ptr() for p in copied.parameters()}
        norms = [m for m in copied.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
        assert len(norms) == (0 if variant == "identity" else NORMS)
        patched = [m for m in norms if type(m) is not nn.LayerNorm]
        assert len(patched) == (NORMS if variant.startswith("fastnorm") else 0)
    if model == "tiny":
        assert copied.head.weight is copied.token_embedding.weight


def test_a_step_trains():
    batch = workload("tiny", 2).batch()
    training = Training(workload("tiny", 2).build("rms"), batch, mixed=True)
    losses = [training.step() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert all(p.grad is None for p in training.model.parameters())


def test_rounds_go_through_the_variants_in_turn():
    order = []

    class Recorded:
        device = torch.device("cpu")

        def __init__(self, name):
            self.name = name

        def step(self):
            order.append(self.name)
            return torch.tensor(float(len(order)))

    outcomes = {"torch": Outcome(0), "identity": Outcome(0)}
    trainings = {name: Recorded(name) for name in outcomes}
    losses = measure_steps.time_rounds(trainings, outcomes, Effort(rounds=3, steps=2))
    assert order == 3 * (2 * ["torch"] + 2 * ["identity"])
    assert (losses["torch"], losses["identity"]) == (10, 12)
    assert [len(outcome.round_ms) for outcome in outcomes.values()] == [3, 3]


@torch._dynamo.config.patch(recompile_limit=4)
def test_each_variant_is_compiled_once_and_rows_add_up_to_no_limit_of_dynamos():
    for precision in ("bf16-mixed", "bf16-true"):
        row = Row("tiny", "rms", precision, "compiled")
        counter = CompileCounter()
        outcomes = measure_row(row, workload("tiny", 1), "cpu", Effort(2, 2, True, counter))
        assert counter.frame_count == len(row.variants)
        assert outcomes["fastnorm"].first_loss == outcomes["torch"].first_loss
        assert outcomes["identity"].first_loss != outcomes["torch"].first_loss
        assert outcomes["torch"].norm_share is None


def test_a_norm_that_stays_unpatched_is_refused(monkeypatch):
    true_patch = fastnorm.patch
    fewer = lambda model, **options: true_patch(model, exclude="blocks.0.*", **options)  # noqa: E731
    monkeypatch.setattr(fastnorm, "patch", fewer)
    with pytest.raises(Refused, match="not every norm was patched"):
        with_norms("fastnorm", workload("tiny", 1).build("layer"))


@pytest.mark.parametrize("loss", [5.4, math.nan, math.inf])
def test_a_patched_model_starts_from_torchs_loss(loss):
    outcomes = {"torch": Outcome(9, first_loss=5.70), "fastnorm": Outcome(9, first_loss=5.71)}
    check_losses(outcomes)
    outcomes["fastnorm-autocast"] = Outcome(9, first_loss=loss)
    with pytest.raises(Refused, match="fastnorm-autocast: "):
        check_losses(outcomes)


def test_a_loss_that_does_not_stay_finite_is_refused():
    check_finite({"identity": Outcome(9, last_loss=5.7)})
    with pytest.raises(Refused, match="identity: last_loss is nan"):
        check_finite({"identity": Outcome(9, last_loss=math.nan)})


def test_on_a_gpu_every_norm_must_have_run_on_a_kernel():
    good = {"triton:persistent_tile": 9}
    check_routes("fastnorm", Outcome(9, routes={"forward": good, "backward": good}))
    for calls in ({}, {"torch": 9}, {"triton:persistent_tile": 8}, {**good, "torch": 1}):
        outcome = Outcome(9, routes={"forward": good, "backward": calls})
        with pytest.raises(Refused, match="backward of 9 norms"):
            check_routes("fastnorm", outcome)


def test_rows_without_autocast_have_no_variant_that_needs_it():
    assert "fastnorm-autocast" in MIXED.variants
    assert "fastnorm-autocast" not in Row("tiny", "rms", "bf16-true", "eager").variants


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_on_a_gpu_kernels_run_and_memory_is_read(norm, mode):
    row = Row("tiny", norm, "bf16-mixed", mode)
    outcomes = measure_row(row, workload("tiny"), "cuda", Effort(rounds=2, steps=2, profile=True))
    for variant, outcome in outcomes.items():
        assert min(outcome.round_ms) > 0 and outcome.memory_bytes > 0
        if mode == "eager":
            assert (outcome.norm_share > 0) == (variant != "identity")
    for calls in outcomes["fastnorm"].routes.values():
        assert sum(calls.values()) == NORMS and "torch" not in calls
