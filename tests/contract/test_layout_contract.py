"""Any shape, any strides, any number of rows: sections A, L, S and E of the public reports."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import fastnorm
from tests.conftest import Route, multiprocessors
from tests.contract.norms import KINDS, close, pair, same, seeded
from tests.oracle import check
from tests.property.test_kernels import through_fastnorm
from tests.strategies import Case

FP32 = torch.float32

#: Views of 6 x 64, made from a function of sizes that returns dense values.
VIEWS = {
    "dense": lambda new: new(6, 64),
    "every other column": lambda new: new(6, 128)[..., ::2],
    "expanded rows": lambda new: new(64).expand(6, 64),
    "row slice": lambda new: new(12, 64)[::2],
    "transposed": lambda new: new(64, 6).t(),
    "column slice": lambda new: new(6, 100)[:, 20:84],
    "expanded columns": lambda new: new(6, 1).expand(6, 64),
    "expanded scalar": lambda new: new(1).expand(6, 64),
    "one element off": lambda new: new(6 * 64 + 1)[1:].view(6, 64),
}


def _grads(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_layouts_gives_the_dense_result(
    kind: str, dtype: torch.dtype, route: Route
) -> None:
    """B15 to B20, B17 among them: the layouts of x and dy change nothing."""
    ours, _ = pair(kind, 64, dtype=dtype)
    ours.to(route.device)
    views = list(VIEWS.values())
    pairs = (
        itertools.product(views, views) if route.thorough else zip(views, views[1:], strict=False)
    )
    for x_view, dy_view in pairs:
        x, dy = (
            view(partial(seeded, seed=seed, device=route.device, dtype=dtype))
            for seed, view in enumerate((x_view, dy_view))
        )
        close(_grads(ours, x, dy), _grads(ours, x.contiguous(), dy.contiguous()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_strided_weight(kind: str, route: Route) -> None:
    """B16: a weight that is a view, frozen or trained."""
    storage = seeded(128, seed=1, device=route.device)
    x = seeded(6, 64, device=route.device).requires_grad_()
    f = fastnorm.layer_norm if kind == "layer" else fastnorm.rms_norm
    strided, dense = (
        w.detach().requires_grad_() for w in (storage[::2], storage[::2].contiguous())
    )
    results = [torch.autograd.grad(f(x, (64,), w).square().sum(), [x, w]) for w in (strided, dense)]
    close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_permuted_and_flattened_input(kind: str, route: Route) -> None:
    """B18, B19, B20, B23."""
    views = [
        seeded(8, 6).t(),
        seeded(4, 6, 8).transpose(1, 2),
        seeded(4, 4, 4).permute(0, 2, 1),
        seeded(8, 4, 4)[::2],
        seeded(2, 5, 7, 4).transpose(1, 2).flatten(-2),
    ]
    for view in views:
        x = view.to(route.device)
        hidden = x.shape[-1]
        ours, torchs = pair(kind, hidden)
        dy = seeded(*x.shape, seed=1, device=route.device)
        torch.testing.assert_close(
            _grads(ours.to(route.device), x, dy),
            _grads(torchs.to(route.device), x, dy),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("shape", [(64,), (1, 64), (4, 16, 64), (2, 2, 16, 64), (2, 1, 2, 8, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_rank(kind: str, shape: tuple[int, ...], route: Route) -> None:
    """B05, B81: 1-D to 5-D input, the rows counted over all leading dimensions."""
    ours, _ = pair(kind, 64)
    ours.to(route.device)
    x, dy = (seeded(*shape, seed=s, device=route.device) for s in (0, 1))
    flat = _grads(ours, x.reshape(-1, 64), dy.reshape(-1, 64))
    shaped = _grads(ours, x, dy)
    assert shaped[0].shape == shaped[1].shape == torch.Size(shape)
    same([t.reshape(f.shape) for t, f in zip(shaped, flat, strict=True)], flat)


@pytest.mark.parametrize("shape", [(6, 9), (2, 3, 4), (1, 5), (5, 1), (1,)])
@pytest.mark.parametrize("kind", KINDS)
def test_normalized_shapes_of_several_dimensions(
    kind: str, shape: tuple[int, ...], route: Route
) -> None:
    """B08: gradients have the parameter's whole shape."""
    bias = FP32 if kind == "layer" else None
    inputs = Case((3, 2), shape, kind, FP32, FP32, bias).build(route.device)
    results = through_fastnorm(inputs)
    check(results, inputs)
    assert results[2].shape == shape


def test_a_bias_without_a_weight(route: Route) -> None:
    """B09."""
    inputs = Case((50,), (16,), "layer", FP32, None, FP32).build(route.device)
    check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 132, 1000])
def test_more_or_fewer_rows_than_programs(kind: str, count: int, route: Route) -> None:
    """B01, B02, B07: unwritten partials are NaN here, so an idle program shows."""
    bias = FP32 if kind == "layer" else None
    with multiprocessors(count):
        for rows in (1, 2, 3, 7, 17):
            inputs = Case((rows,), (12,), kind, FP32, FP32, bias).build(route.device)
            check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_one_zero_vector(kind: str, route: Route) -> None:
    """B01: a 1-D input of zeros has a weight gradient of exactly zero, every time."""
    module, _ = pair(kind, 4)
    module.to(route.device)
    for _ in range(10):
        module.zero_grad()
        y = module(torch.zeros(4, device=route.device))
        (-y.sum()).backward()
        assert y.shape == (4,)
        same(module.weight.grad, torch.zeros(4, device=route.device))


@pytest.mark.parametrize("hidden", [8, 16, 24])
def test_rows_that_share_a_tile_do_not_mix(hidden: int, route: Route) -> None:
    """B03, B06: dy of one row moves dx of no other."""
    ours, _ = pair("layer", hidden)
    ours.to(route.device)
    x, dy = (seeded(100, hidden, seed=s, device=route.device) for s in (0, 1))
    before = _grads(ours, x, dy)[1]
    dy[37] += 1
    after = _grads(ours, x, dy)[1]
    others = torch.arange(100, device=route.device) != 37
    same(after[others], before[others])
    assert not torch.equal(after[37], before[37])


@pytest.mark.parametrize("kind", KINDS)
def test_every_small_width(kind: str, route: Route) -> None:
    """B24, B30: no width is special."""
    bias = FP32 if kind == "layer" else None
    for hidden in (*range(1, 70, 1 if route.thorough else 6), 100, 255, 256, 257):
        inputs = Case((3,), (hidden,), kind, FP32, FP32, bias, seed=hidden).build(route.device)
        check(through_fastnorm(inputs), inputs)


@pytest.mark.parametrize("hidden", [65536, 65537, 102400, 131072, 2**20 + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_widest_rows_run_somewhere(kind: str, hidden: int) -> None:
    """B29: on kernels or on torch, never an exception."""
    bias = FP32 if kind == "layer" else None
    inputs = Case((3,), (hidden,), kind, FP32, FP32, bias).build()
    check(through_fastnorm(inputs), inputs)


def test_offsets_beyond_two_to_the_31(route: Route) -> None:
    """B25, B26: rows 2^30 elements apart, in memory of which nearly nothing is ever touched."""
    if route.name == "cuda":
        pytest.skip("tests/gpu does it with rows that exist")
    torch.use_deterministic_algorithms(False)  # poison would touch all 4 GB
    storage = torch.empty(2**31 + 64, dtype=torch.half)
    torch.use_deterministic_algorithms(True, warn_only=True)
    inputs = Case((3,), (16,), "layer", torch.half, torch.half, torch.half).build()
    far = storage.as_strided((3, 16), (2**30, 1)).copy_(inputs.x)
    same(through_fastnorm(dataclasses.replace(inputs, x=far)), through_fastnorm(inputs))


@pytest.mark.parametrize("shape", [(3, 0, 24), (0, 24), (0, 2, 24), (4, 0, 24)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str, shape: tuple[int, ...], route: Route) -> None:
    """B83, B84, B85: empty y and dx, zero (not absent) parameter gradients, then other work."""
    ours, _ = pair(kind, 24)
    ours.to(route.device)
    x = torch.zeros(shape, device=route.device, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == torch.Size(shape)
    for parameter in ours.parameters():
        same(parameter.grad, torch.zeros_like(parameter))
    with torch.autocast(route.device, torch.bfloat16), torch.no_grad():
        assert ours.eval()(x).shape == torch.Size(shape)
    assert float((torch.ones(3, device=route.device) + 1).sum()) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_zero_sized_normalized_shapes_are_torchs(kind: str, route: Route) -> None:
    """B83 for (0,): whatever torch makes of no features at all."""
    ours, torchs = {
        "layer": (fastnorm.layer_norm, nn.functional.layer_norm),
        "rms": (fastnorm.rms_norm, nn.functional.rms_norm),
    }[kind]
    x = torch.zeros(3, 0, device=route.device)
    same(ours(x, (0,)), torchs(x, (0,)))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_formats_of_the_output_are_torchs(kind: str, route: Route) -> None:
    """channels_last and permuted input: the strides that torch's module returns on this device."""
    if route.name == "interpreter":
        pytest.skip("kernels answer for torch's CUDA operators, not for those of the CPU")
    images = seeded(2, 3, 4, 5, device=route.device).to(memory_format=torch.channels_last)
    permuted = seeded(3, 2, 4, 5, device=route.device).permute(1, 0, 2, 3)
    for shape, x in itertools.product(((4, 5), 5), (images, permuted)):
        ours, torchs = (module.to(route.device) for module in pair(kind, shape))
        assert ours(x).stride() == torchs(x).stride()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_take_torchs_path(layout: torch.layout) -> None:
    parts = [seeded(2, 8), seeded(5, 8, seed=1)]
    ours, torchs = pair("layer", 8)
    warnings.simplefilter("ignore", UserWarning)  # torch calls strided nesting a prototype
    nested = torch.nested.nested_tensor(parts, layout=layout)
    for actual, expected in zip(ours(nested).unbind(), torchs(nested).unbind(), strict=True):
        same(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_misfits_raise_before_anything_runs(kind: str, route: Route) -> None:
    """B102, B127: never a number read out of bounds, never row 0 of a stacked weight."""
    f = fastnorm.layer_norm if kind == "layer" else fastnorm.rms_norm
    x = seeded(3, 32, device=route.device)
    for weight in (seeded(64), seeded(2, 32), seeded(1), seeded(32, 1)):
        with pytest.raises(RuntimeError, match="expected weight of shape"):
            f(x, (32,), weight.to(route.device))
    with pytest.raises(RuntimeError, match=r"expects input with shape \[\*, 64\]"):
        f(x, (64,), seeded(64, device=route.device))
    with pytest.raises(RuntimeError, match="expects input with shape"):
        f(x, (3, 3, 32))
    with pytest.raises(ValueError, match="normalized_shape is empty"):
        f(x, ())


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_may_come_back_with_other_strides(kind: str, route: Route) -> None:
    """A hook has to keep values, not where they lie (torch's own backward misreads them)."""

    def spread(t: torch.Tensor) -> torch.Tensor:
        room = torch.empty(*t.shape, 2, dtype=t.dtype, device=t.device)
        return room[..., 1].copy_(t)

    ours, _ = pair(kind, 33)
    ours.to(route.device)
    x = seeded(6, 33, device=route.device).requires_grad_()
    inputs = [x, *ours.parameters()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, spread):
        y = ours(x)
    actual = torch.autograd.grad(y.square().sum(), inputs)
    close(actual, torch.autograd.grad(ours(x).square().sum(), inputs))
