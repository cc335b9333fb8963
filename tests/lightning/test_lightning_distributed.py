"""Training on two processes gives what one process gives, under every engine of torch."""

from __future__ import annotations

import socket
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.multiprocessing

NORMS = tuple(worker.NORMS)
NORMS_IN_MODEL = 5

#: Other orders of summation alone give up to 6 roundings (measured: tensor parallelism; 3 for the
#: data parallel engines, 4 with the kernels).
RELATIVE = 20 * torch.finfo(torch.float32).eps

Results = dict[tuple[str, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All results of one pair of processes, whose start takes the longest."""
    out = tmp_path_factory.mktemp("distributed") / "results.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        torch.multiprocessing.spawn(worker.run_all, (port, str(out)), nprocs=worker.PROCESSES)
    return torch.load(out, weights_only=False)


@pytest.fixture
def results(everything: dict[str, Any]) -> Results:
    return everything["models"]


@pytest.fixture
def placement_results(everything: dict[str, Any]) -> Results:
    return everything["norms"]


def one_process(norm: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch on one device, with torch's own norms."""
    gpt = worker.build(norm)
    loss = worker.loss_of(gpt, worker.tokens())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in gpt.named_parameters()}


def assert_as_one_process(result: dict[str, Any], norm: str) -> None:
    loss, gradients = one_process(norm)
    torch.testing.assert_close(result["loss"], loss, rtol=RELATIVE, atol=0)
    assert set(result["gradients"]) == set(gradients)
    for name, expected in gradients.items():
        apart = (result["gradients"][name] - expected).abs().max()
        assert apart <= RELATIVE * expected.abs().max(), f"{name}: {apart}"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("engine", [e for e in worker.ENGINES if e != "fsdp2_bf16"])
@pytest.mark.parametrize("when", worker.WHEN)
def test_loss_and_gradients_are_those_of_one_process(
    results: Results, engine: str, norm: str, when: str
) -> None:
    assert_as_one_process(results[engine, norm, when, "auto"], norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("engine", worker.ENGINES)
def test_patched_before_or_after_wrapping_nothing_differs_from_torch_norms(
    results: Results, engine: str, norm: str
) -> None:
    plain = results[engine, norm, "never", "auto"]
    for when in ("before", "after"):
        patched = results[engine, norm, when, "auto"]
        assert torch.equal(patched["loss"], plain["loss"])
        for name, expected in plain["gradients"].items():
            assert torch.equal(patched["gradients"][name], expected), name
        for what in ("output_layouts", "gradient_layouts", "state_keys"):
            assert patched[what] == plain[what]
        for calls in patched["calls"].values():
            assert sum(calls.values()) == NORMS_IN_MODEL


def test_the_sequence_is_split_between_the_norms_of_tensor_parallelism(results: Results) -> None:
    for norm in NORMS:
        result = results["tp", norm, "after", "auto"]
        assert result["output_layouts"] == ["(Shard(dim=1),)"]
        assert result["gradient_layouts"]["norm.weight"] == "(Partial(sum),)"


@pytest.mark.parametrize("case", worker.KERNEL_CASES, ids="-".join)
def test_kernels_below_an_engine_give_what_one_process_gives(results: Results, case: tuple) -> None:
    engine, norm, when, _ = case
    result = results[case]
    assert_as_one_process(result, norm)
    eager = results[engine.removesuffix("_compiled"), norm, when, "auto"]
    for what in ("output_layouts", "gradient_layouts"):
        assert result[what] == eager[what]
    for calls in result["calls"].values():
        assert {route.partition(":")[0] for route in calls} == {"triton"}
        assert sum(calls.values()) == NORMS_IN_MODEL


@pytest.mark.parametrize("case", worker.PLACEMENT_CASES, ids="-".join)
def test_a_norm_of_a_dtensor_is_laid_out_as_torchs(
    placement_results: Results, case: tuple[str, str, str]
) -> None:
    norm, placement, backend = case
    ours = placement_results[case]["fastnorm"]
    route = "torch" if backend == "auto" else "triton"
    assert {key.partition(":")[0] for key in ours["calls"]} == {route}
    plain = (
        placement_results[case].get("torch")
        or placement_results["layer", placement, "auto"]["torch"]
    )
    for name, layout in ours["layouts"].items():
        assert layout == plain["layouts"][name]
    layer, x, dy = worker.norm_and_input(norm)
    y = layer(x.requires_grad_())
    y.backward(dy)
    expected = {"y": y, "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    for name, value in ours["values"].items():
        apart = (value - expected[name]).abs().max()
        assert apart <= RELATIVE * expected[name].abs().max(), f"{name}: {apart}"


@pytest.mark.parametrize("written_patched", [False, True])
def test_sharded_checkpoints_are_read_with_and_without_the_patch(
    everything: dict[str, Any], written_patched: bool
) -> None:
    assert everything["checkpoints"][written_patched]
