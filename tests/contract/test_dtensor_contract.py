"""Sharded tensors: rows may lie on several ranks and stay there, gradients are summed."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.contract.norms import KINDS, operator, seeded

RANKS = 2


def _run(rank: int, job, folder: str, *args) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    try:
        job(init_device_mesh("cpu", (RANKS,)), *args)
    finally:
        dist.destroy_process_group()


def _gradients(kind: str, x, w, b, dy):
    """y, dx, dw, db and the collectives of both passes."""
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    leaves += [] if b is None else [b.detach().requires_grad_()]
    with CommDebugMode() as comm:
        y = operator(kind, leaves[0], leaves[1], leaves[2] if b is not None else None)
        grads = torch.autograd.grad(y, leaves, dy)
    return [y, *grads], comm.get_total_counts()


def _compare(mesh, placements: list) -> None:
    for kind in KINDS:
        x, dy = seeded(4, 6, 16), seeded(4, 6, 16, seed=1)
        w, b = seeded(16, seed=2), seeded(16, seed=3) if kind == "layer" else None
        expected, _ = _gradients(kind, x, w, b, dy)
        for placement in placements:
            shared = [distribute_tensor(t, mesh, [placement]) for t in (x, dy)]
            whole = [
                None if t is None else distribute_tensor(t, mesh, [Replicate()]) for t in (w, b)
            ]
            results, collectives = _gradients(kind, shared[0], *whole, shared[1])
            for actual, right in zip(results, expected, strict=True):
                assert isinstance(actual, DTensor)
                torch.testing.assert_close(actual.full_tensor(), right, rtol=1e-5, atol=1e-5)
            if placement.is_shard() and placement.dim < 2:
                assert collectives == 0, f"{placement}: {collectives} collectives"
                y, dx, *sums = results
                assert y.placements == dx.placements == (placement,)
                assert all(isinstance(t.placements[0], Partial) for t in sums)


def _every_placement(mesh) -> None:
    """Any row dimension stays where it is, with dw and db left to be summed; an input that is
    split along its features is gathered, since statistics are whole rows'."""
    _compare(mesh, [Replicate(), Shard(0), Shard(1), Shard(2)])


def test_sharded_norms_are_whole_norms(tmp_path: Path) -> None:
    """B100, B101."""
    mp.spawn(_run, args=(_every_placement, str(tmp_path)), nprocs=RANKS)
