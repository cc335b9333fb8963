"""Training on two processes gives what one process gives, under every engine of torch."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.multiprocessing

NORMS = ("layer", "rms")
CASES = [(*case, "auto") for case in itertools.product(worker.ENGINES, NORMS, worker.WHEN)]
KERNEL_CASES = [(e, norm, "after", "triton") for e in ("ddp", "fsdp2") for norm in NORMS]
NORMS_IN_MODEL = 5

#: Other orders of summation alone give up to 6 roundings (measured: tensor parallelism; 3 for the
#: data parallel engines, 4 with the kernels).
RELATIVE = 20 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict[str, Any]]:
    """All cases in one pair of processes, whose start takes longer than the cases."""
    out = tmp_path_factory.mktemp("distributed") / "results.pt"
    return run_in_two_processes(out, CASES)


def run_in_two_processes(out: Path, cases: list[tuple]) -> dict[tuple, dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        worker.run_all, args=(port, str(out), cases), nprocs=worker.PROCESSES
    )
    return torch.load(out, weights_only=False)


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
    results: dict, engine: str, norm: str, when: str
) -> None:
    assert_as_one_process(results[engine, norm, when, "auto"], norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("engine", worker.ENGINES)
def test_patched_before_or_after_wrapping_nothing_differs_from_torch_norms(
    results: dict, engine: str, norm: str
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


def test_the_sequence_is_split_between_the_norms_of_tensor_parallelism(results: dict) -> None:
    for norm in NORMS:
        result = results["tp", norm, "after", "auto"]
        assert result["output_layouts"] == ["(Shard(dim=1),)"]
        assert result["gradient_layouts"]["norm.weight"] == "(Partial(sum),)"


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict[str, Any]]:
    """The kernels themselves, in Triton's interpreter, below each engine."""
    out = tmp_path_factory.mktemp("distributed_kernels") / "results.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return run_in_two_processes(out, KERNEL_CASES)


@pytest.mark.parametrize("case", KERNEL_CASES, ids="-".join)
def test_kernels_below_an_engine_give_what_one_process_gives(
    kernel_results: dict, case: tuple
) -> None:
    result = kernel_results[case]
    assert_as_one_process(result, case[1])
    for calls in result["calls"].values():
        assert {route.partition(":")[0] for route in calls} == {"triton"}
        assert sum(calls.values()) == NORMS_IN_MODEL
