"""The shortcut past Python gives what Python gives, and leaves to it what is not an everyday call.

All other properties of kernels are asserted with the shortcut in place by `--native`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastnorm
from fastnorm import routing
from fastnorm.kernels import launch
from fastnorm.native import library, shortcut
from fastnorm.problem import NormProblem
from tests.conftest import Route
from tests.contract.norms import KINDS, close, formula, pair, same, seeded


@pytest.fixture
def native(route: Route, request: pytest.FixtureRequest) -> Iterator[Route]:
    """A route to kernels through the shortcut."""
    if not request.config.getoption("--native"):
        pytest.skip("needs --native")
    if not route.kernels:
        pytest.skip("needs a route to kernels")
    assert shortcut.norm is not None
    yield route


def everything(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """y and all gradients."""
    x = x.detach().requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y, [x, *module.parameters()], dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shortcut_gives_what_python_gives(
    kind: str, dtype: torch.dtype, native: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair(kind, 48)
    ours.to(native.device, dtype)
    x, dy = (seeded(2, 7, 48, seed=s, device=native.device, dtype=dtype) for s in (0, 1))
    with native.counted():
        short = everything(ours, x, dy)
    assert "NormBackward" in short[0].grad_fn.name()
    assert short[0].grad_fn.name() != "NormBackward"  # which is Python's
    monkeypatch.setattr(shortcut, "norm", None)
    with native.counted():
        long = everything(ours, x, dy)
    assert long[0].grad_fn.name() == "NormBackward"
    same(short, long)


def test_every_set_of_gradients(native: Route) -> None:
    """Edges exist for given tensors only: the mask must not slip by one."""
    shapes = ((5, 24), (24,), (24,))
    x, w, b = (seeded(*s, seed=i, device=native.device) for i, s in enumerate(shapes))
    for weight in (None, w):
        for bias in (None, b):
            for wanted in range(1, 8):
                given = [x, weight, bias]
                leaves = [
                    t.detach().clone().requires_grad_(bool(wanted >> i & 1)) if t is not None else t
                    for i, t in enumerate(given)
                ]
                asked = [t for t in leaves if t is not None and t.requires_grad]
                if not asked:
                    continue
                y = fastnorm.layer_norm(leaves[0], (24,), *leaves[1:])
                expected = formula("layer", *leaves)
                close(
                    torch.autograd.grad(y.square().sum(), asked),
                    torch.autograd.grad(expected.square().sum(), asked),
                )


class Subclass(torch.Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def call(x: Tensor, shape: object = (24,), weight: object = None, eps: object = 1e-5) -> object:
    return shortcut.norm(x, shape, weight, None, eps, "rms", "torch")


#: Calls that are Python's to serve, or to refuse with its words.
LEFT_TO_PYTHON: dict[str, Callable[[Tensor], object]] = {
    "a subclass": lambda x: call(x.as_subclass(Subclass)),
    "a subclassed weight": lambda x: call(x, weight=x[0].as_subclass(Subclass)),
    "strided rows": lambda x: call(torch.cat((x, x), 1)[:, :24]),
    "a strided weight": lambda x: call(x, weight=torch.cat((x[0], x[0]))[::2]),
    "a lazy negation": lambda x: call(torch._neg_view(x)),
    "no rows": lambda x: call(x[:0]),
    "another shape": lambda x: call(x, (23,)),
    "too many dimensions": lambda x: call(x, (1, 5, 24)),
    "no dimensions": lambda x: call(x, ()),
    "a list": lambda x: call(x, [24]),
    "a shape of floats": lambda x: call(x, (24.0,)),
    "a huge size": lambda x: call(x, (2**70,)),
    "a weight of another shape": lambda x: call(x, weight=x),
    "a weight on another device": lambda x: call(x, weight=torch.empty(24, device="meta")),
    "no tensor": lambda x: call(x.tolist()),
    "an integer eps": lambda x: call(x, eps=1),
    "a semantics that is no string": lambda x: shortcut.norm(
        x, (24,), None, None, 1e-5, None, "torch"
    ),
    "an autocast_output that is no string": lambda x: shortcut.norm(
        x, (24,), None, None, 1e-5, "rms", 7
    ),
    "a semantics made at run time": lambda x: shortcut.norm(
        x, (24,), None, None, 1e-5, "".join(["r", "ms"]), "torch"
    ),
    "fp64": lambda x: call(x.double()),
    "a dispatch mode": lambda x: _within(Watching(), x),
    "forward-mode AD": lambda x: _within(torch.autograd.forward_ad.dual_level(), x),
    "vmap": lambda x: _seen_in(torch.vmap, x),
    "functional grad": lambda x: _seen_in(
        lambda f: torch.func.grad(lambda x: (f(x), x.sum())[1]), x
    ),
}


def _within(context: object, x: Tensor) -> object:
    with context:
        return call(x)


def _seen_in(transform: Callable[..., Callable[[Tensor], object]], x: Tensor) -> object:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(call(x))
        return x * 1

    transform(function)(x)
    return seen[0]


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_what_is_left_to_python(name: str, native: Route) -> None:
    x = seeded(5, 24, device=native.device)
    assert call(x) is not None
    assert LEFT_TO_PYTHON[name](x) is None


def test_tracing_is_left_to_python(native: Route) -> None:
    answers = []

    def traced(x: Tensor) -> Tensor:
        answers.append(call(x))
        return x + 1

    x = seeded(5, 24, device=native.device)
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.trace(traced, x)
    assert answers[0] is None


def test_autocast_is_part_of_the_kind(native: Route) -> None:
    """Python's answer without autocast must not serve a call under it, nor the other way round."""
    module = fastnorm.LayerNorm(24, device=native.device, autocast_output="autocast")
    x = seeded(5, 24, device=native.device)
    for dtype in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast(native.device, dtype or torch.bfloat16, enabled=dtype is not None):
            assert module(x).dtype == (dtype or torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of its own bookkeeping
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_autograd_over_the_shortcut(kind: str, native: Route) -> None:
    ours, torchs = pair(kind, 24)
    ours.to(native.device), torchs.to(native.device)
    gradients = []
    for module in (ours, torchs):
        x = seeded(4, 24, device=native.device).requires_grad_()
        y = module(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    close(*gradients)


def test_an_error_of_pythons_in_backward_reaches_the_caller(
    native: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's thread hands it over: the same class and words."""

    def broken(*_args: object) -> None:
        raise KeyError("broken on purpose")

    monkeypatch.setattr(fastnorm.autograd, "differentiable_backward", broken)
    shortcut.connect()
    try:
        x = seeded(4, 24, device=native.device).requires_grad_()
        y = fastnorm.layer_norm(x, (24,))
        with pytest.raises(KeyError, match="broken on purpose"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    finally:
        monkeypatch.undo()
        shortcut.connect()


def test_a_saved_tensor_that_was_written_to_is_torchs_error(native: Route) -> None:
    x = seeded(4, 24, device=native.device).requires_grad_()
    held = x * 1
    y = fastnorm.layer_norm(held, (24,))
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_decisions_are_followed(native: Route) -> None:
    """Recording sees every call, and a choice made later is in force at once."""
    x = seeded(5, 24, device=native.device)
    fastnorm.layer_norm(x, (24,))
    with routing.recording() as asked:
        for rows in (2, 5):
            fastnorm.layer_norm(x[:rows], (24,))
    (problem,) = asked
    assert asked[problem] == 5
    index = x.device.index if x.is_cuda else routing.INTERPRETER
    try:
        routing.prefer(problem, index, "torch")
        with fastnorm.backend("auto"):
            assert call(x) is not None  # rms: another problem
            assert shortcut.norm(x, (24,), None, None, 1e-5, "layer", "torch") is None
    finally:
        routing._preferred.pop((problem, index))
        routing._forget(problem, index)
    with native.counted(1, 0):
        fastnorm.layer_norm(x, (24,))


def test_counts_outlive_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shortcut counted before it had to forget."""

    class Shortcut:
        known = [("forward", "triton:looped", 3)]

        def counts(self) -> list[tuple[str, str, int]]:
            return self.known

        def forget(self) -> None:
            self.known = []

    routing.reset_stats()
    monkeypatch.setattr(routing, "_shortcut", Shortcut())
    for _ in range(2):
        routing._forget(NormProblem("forward", "layer", 24, "fp32", "fp32", None), 0)
        assert routing.stats().forward == {"triton:looped": 3}


def test_threads(native: Route) -> None:
    """Many threads meet kinds of call for the first time together."""
    if native.name == "interpreter":
        pytest.skip("the interpreter itself keeps one grid position for all threads")
    routing.reset_stats()
    results: list[bool] = []

    def work(seed: int) -> None:
        for hidden in (17, 32, 65):
            x = seeded(64, hidden, seed=seed, device=native.device).requires_grad_()
            y = fastnorm.layer_norm(x, (hidden,))
            (dx,) = torch.autograd.grad(y.square().sum(), x)
            (expected,) = torch.autograd.grad(formula("layer", x, None).square().sum(), x)
            results.append(torch.allclose(dx, expected, atol=1e-4))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 24


def test_a_function_mode_sees_what_it_saw(native: Route) -> None:
    """Torch function modes never saw fastnorm's functions; they must not change results."""

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = seeded(5, 24, device=native.device)
    with Counting():
        inside = fastnorm.rms_norm(x, (24,))
    same(inside, fastnorm.rms_norm(x, (24,)))


def test_numbers_that_stand_in_both_languages() -> None:
    text = library.SOURCE.read_text(encoding="utf-8")
    slots = re.search(r"SLOTS_PER_PROGRAM = (\d+);", text)
    largest = re.search(r"LARGEST_KEPT = int64_t\{(\d+)\} << (\d+);", text)
    assert slots and int(slots[1]) == launch.SLOTS_PER_PROGRAM
    assert largest and int(largest[1]) << int(largest[2]) == launch.Workspace.LARGEST_KEPT
    assert f"PYBIND11_MODULE({library._NAME}, m)" in text
