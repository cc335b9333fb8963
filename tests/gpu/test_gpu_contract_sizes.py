"""Many rows, many elements, little memory: sections A and S of the public reports on a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fastnorm
from tests.contract.norms import KINDS, pair, same, seeded
from tests.oracle import Inputs, check, run

pytestmark = pytest.mark.gpu

HALF, FP32 = torch.float16, torch.float32


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)


def ours(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Through the public functions, on kernels: anything else raises."""
    if inputs.kind.centered:
        return run(
            inputs,
            lambda x, w, b: fastnorm.layer_norm(
                x, inputs.shape, w, b, inputs.eps, backend="triton"
            ),
        )
    return run(
        inputs, lambda x, w, b: fastnorm.rms_norm(x, inputs.shape, w, inputs.eps, backend="triton")
    )


def drawn(
    lead: tuple[int, ...],
    shape: tuple[int, ...],
    kind: str,
    weight: bool = True,
    bias: bool = True,
    dtype: torch.dtype = FP32,
) -> Inputs:
    x, dy = (normal(*lead, *shape, dtype=dtype, seed=s) for s in (0, 1))
    w = normal(*shape, dtype=dtype, seed=2) if weight else None
    b = normal(*shape, dtype=dtype, seed=3) if bias and kind == "layer" else None
    return Inputs(x, w, b, dy, shape, 1e-5, fastnorm.semantics.SEMANTICS[kind])


@pytest.mark.parametrize("rows", [65535, 65536, 65537, 200_000])
@pytest.mark.parametrize("kind", KINDS)
def test_row_counts_around_grid_limits(rows: int, kind: str, poisoned: None) -> None:
    """B11."""
    inputs = drawn((rows,), (64,), kind)
    check(ours(inputs), inputs)


@pytest.mark.parametrize("lead", [(1, 65536, 1), (65536, 2)])
def test_middle_dimensions_around_grid_limits(lead: tuple[int, ...], poisoned: None) -> None:
    """B12."""
    inputs = drawn(lead, (64,), "layer")
    check(ours(inputs), inputs)


@pytest.mark.parametrize("rows", [65536, 65537, 70_000])
@pytest.mark.parametrize("kind", KINDS)
def test_normalized_shapes_of_two_dimensions(rows: int, kind: str, poisoned: None) -> None:
    """B08: gradients keep the parameter's whole shape above 65,536 rows, where torch's do not;
    it is asked about the same rows with one dimension each."""
    inputs = drawn((rows,), (6, 129), kind)
    results = ours(inputs)
    assert results[2].shape == (6, 129)
    flat = replace(
        inputs,
        x=inputs.x.flatten(-2),
        dy=inputs.dy.flatten(-2),
        weight=inputs.weight.flatten(),
        bias=None if inputs.bias is None else inputs.bias.flatten(),
        shape=(6 * 129,),
    )
    sizes = [t if t is None else t.shape for t in (flat.x, flat.x, flat.weight, flat.bias)]
    pairs = zip(results, sizes, strict=True)
    check(tuple(None if r is None else r.reshape(size) for r, size in pairs), flat)


def test_a_bias_without_a_weight_over_many_rows(poisoned: None) -> None:
    """B09."""
    inputs = drawn((100_000,), (16,), "layer", weight=False)
    check(ours(inputs), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameters_over_many_rows(kind: str, poisoned: None) -> None:
    """B65."""
    inputs = drawn((100_000,), (8,), kind, weight=False, bias=False)
    check(ours(inputs), inputs)


def test_rms_norm_per_head(poisoned: None) -> None:
    """B10: query and key norms have many rows of few elements."""
    inputs = drawn((2, 4096, 16), (128,), "rms", dtype=torch.bfloat16)
    check(ours(inputs), inputs)


def test_transposed_and_flattened_heads() -> None:
    """B23: rows of 1,200 elements, in memory that no vector access may assume to be aligned."""
    q = normal(2, 25, 257, 48, dtype=torch.bfloat16).transpose(1, 2).flatten(-2)
    inputs = Inputs(
        q,
        normal(1200, dtype=torch.bfloat16, seed=1),
        None,
        normal(2, 257, 1200, dtype=torch.bfloat16, seed=2),
        (1200,),
        1e-5,
        fastnorm.semantics.RMS,
    )
    check(ours(inputs), inputs)
    odd = normal(2 * 257 * 1200 + 1, dtype=torch.bfloat16)[1:].view(2, 257, 1200)
    shifted = dataclasses.replace(inputs, x=odd)
    check(ours(shifted), shifted)


@pytest.mark.parametrize(
    ("rows", "hidden"), [(2**20 + 8, 4096), (2**23 + 5, 267)], ids=["past 2^32", "past 2^31, odd"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_of_very_many_elements(kind: str, rows: int, hidden: int) -> None:
    """B26, B27: row offsets need 64 bits; the last rows have the bits that they have alone."""
    needed = 5 * 2 * rows * hidden
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GB of free memory")
    module = pair(kind, hidden)[0].to("cuda", HALF)
    x, dy = normal(rows, hidden, dtype=HALF), normal(rows, hidden, dtype=HALF, seed=1)
    tails = []
    with fastnorm.backend("triton"):
        for part in (slice(None), slice(-8, None)):
            leaf = x[part].detach().requires_grad_()
            y = module(leaf)
            (dx,) = torch.autograd.grad(y, leaf, dy[part])
            tails.append([y[-8:].detach().clone(), dx[-8:].clone()])
            del y, dx
    same(*tails)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_cost_no_memory(kind: str) -> None:
    """B61: no gradient, no partial buffer: backward allocates dx and nothing of its size beside."""
    module = pair(kind, 4096)[0].cuda().requires_grad_(False)
    x, dy = normal(1024, 4096).requires_grad_(), normal(1024, 4096, seed=1)
    for attempt in range(2):  # the first one compiles
        x.grad = None
        with fastnorm.backend("triton"):
            y = module(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        spent = torch.cuda.max_memory_allocated() - before
        if attempt:
            assert spent <= x.numel() * 4 + 64 * 1024
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
def test_a_hundred_runs_have_the_same_bits(dtype: torch.dtype) -> None:
    """B13, B14: no update is lost, no order changes."""
    inputs = drawn((8192,), (2048,), "layer", dtype=dtype)
    first = ours(inputs)
    check(first, inputs)
    for _ in range(100):
        same(ours(inputs), first)


def test_neighbouring_widths_have_no_cliff() -> None:
    """B32: backward GB/s of neighbours differ by less than 2."""
    from triton.testing import do_bench

    speeds = []
    for hidden in (4096, 5120, 6144, 8192, 8193):
        module = pair("layer", hidden)[0].to("cuda", torch.bfloat16)
        x = normal(4096, hidden, dtype=torch.bfloat16).requires_grad_()
        with fastnorm.backend("triton"):
            y = module(x)
        dy = torch.ones_like(y)
        leaves = [x, *module.parameters()]
        time = do_bench(
            lambda y=y, leaves=leaves, dy=dy: torch.autograd.grad(y, leaves, dy, retain_graph=True),
            warmup=10,
            rep=40,
        )
        speeds.append(3 * 2 * x.numel() / time)
    for slower, faster in zip(speeds, speeds[1:], strict=False):
        assert 0.5 < slower / faster < 2, speeds


def test_mixed_dtypes_under_autocast_stay_on_kernels() -> None:
    """B73: bf16 activations and fp32 weights, without a warning, in torch's dtype."""
    ours_module, torchs = pair("rms", 256)
    ours_module.cuda(), torchs.cuda()
    linear = torch.nn.Linear(256, 256, device="cuda")
    x = seeded(32, 256, device="cuda")
    fastnorm.reset_stats()
    with torch.autocast("cuda", torch.bfloat16):
        y = ours_module(linear(x))
        expected = torchs(linear(x))
    y.float().sum().backward()
    assert y.dtype == expected.dtype
    stats = fastnorm.stats()
    assert "torch" not in stats.forward and "torch" not in stats.backward, stats
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_many_steps_of_mixed_precision_follow_torchs() -> None:
    """fp16 autocast with GradScaler: the same losses over 30 steps, within their noise."""
    losses = []
    for index in (0, 1):
        torch.manual_seed(0)
        norms = [pair(kind, 128)[index] for kind in KINDS]
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), norms[0], torch.nn.GELU(), norms[1], torch.nn.Linear(128, 1)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda")
        curve = []
        for seed in range(30):
            x = seeded(256, 64, seed=seed, device="cuda")
            with torch.autocast("cuda", HALF):
                loss = (model(x).squeeze(-1) - x[:, 0]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-2, atol=2e-2)
