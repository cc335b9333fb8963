"""Where tests run, and how many examples they draw. See: CONTRIBUTING.md, "Tests".

`pytest` runs everything that needs neither a GPU nor the interpreter. `pytest --route interpreter`
and `pytest --route cuda` run the tests that go through the `route` fixture once more, on kernels in
Triton's interpreter and on a GPU; with `--native` calls take the compiled shortcut on their way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

ROUTES = ("torch", "interpreter", "cuda")
#: Examples per property: CI's, and enough for 10,000 over all properties (see `--examples`).
EXAMPLES = {"ci": 12, "large": 600}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastnorm")
    group.addoption("--route", choices=ROUTES, default="torch", help="what runs the norms")
    group.addoption(
        "--examples",
        default="ci",
        metavar="{ci,large,N}",
        help="per property; give --hypothesis-seed with all but ci",
    )
    group.addoption(
        "--native", action="store_true", help="build the library of fastnorm.native, and use it"
    )
    group.addoption(
        "--full", action="store_true", help="the whole grid where CI runs a part, e.g. of budgets"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: runs only where kernels do, see --route")
    # torch says so once per process where F.rms_norm gets two dtypes; here it is the peer.
    config.addinivalue_line("filterwarnings", "ignore:Mismatch dtype between input and weight")
    # Poisoned buffers come with torch's deterministic mode, which warns of matmul on a GPU.
    config.addinivalue_line("filterwarnings", "ignore:.*[Dd]eterministic:UserWarning")
    # torch's own forward-mode decompositions and tracer.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")
    if config.getoption("--route") == "interpreter":
        # Triton reads the variable when it decorates a kernel, once for the process.
        if "triton" in sys.modules:
            raise pytest.UsageError("triton is imported already: the interpreter comes too late")
        os.environ["TRITON_INTERPRET"] = "1"
        # numpy warns of inf - inf and overflow, which kernels on a GPU do in silence.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
        _correct_the_interpreter()
    _choose_shortcut(config.getoption("--native"))
    if importlib.util.find_spec("hypothesis"):
        _load_profile(config.getoption("--examples"))


def _choose_shortcut(wanted: bool) -> None:
    """Whether calls take the shortcut is the command's to say, not what somebody built earlier."""
    from fastnorm.native import library, shortcut

    if wanted:
        try:
            library.build()
        except library.BuildError as error:
            raise pytest.UsageError(f"--native: {error}") from error
        assert shortcut.connect()
    else:
        shortcut.disconnect()


def _correct_the_interpreter() -> None:
    """Round fp32 to bf16 to the nearest and pass integers in the 64 bits that kernels ask for, as
    compiled code does; Triton 3.9's interpreter truncates, and passes 32 bits."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.uint16)
            return TensorHandle(rounded.numpy(), dst_type.scalar)
        return cast(self, src, dst_type)

    InterpreterBuilder.cast_impl = rounding_cast
    convert = interpreter._implicit_cvt

    def wide_integers(arg):
        if type(arg) is int:
            return tl.tensor(TensorHandle(np.array([arg], dtype=np.int64), tl.int64), tl.int64)
        return convert(arg)

    interpreter._implicit_cvt = wide_integers


def _load_profile(name: str) -> None:
    from hypothesis import HealthCheck, settings

    if name not in EXAMPLES and not (name.isdecimal() and int(name)):
        raise pytest.UsageError(f"--examples: {', '.join(EXAMPLES)} or a number, got {name!r}")
    settings.register_profile(
        name,
        max_examples=EXAMPLES.get(name) or int(name),
        derandomize=name == "ci",
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    route = config.getoption("--route")
    gpu = torch.cuda.is_available()
    kept, dropped = [], []
    for item in items:
        routed = "route" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if route == "torch":
            wanted = item.get_closest_marker("kernels") is None
        else:
            wanted = routed or (route == "cuda" and item.get_closest_marker("gpu") is not None)
        (kept if wanted else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@dataclass(frozen=True)
class Route:
    """What runs norms in a test.

    Args:
        name: one of `ROUTES`.
        thorough: everything is to be tried; else, in the interpreter, a part that takes seconds.
    """

    name: str
    thorough: bool

    @property
    def device(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def kernels(self) -> bool:
        """Whether norms are meant to run on kernels."""
        return self.name != "torch"

    @contextlib.contextmanager
    def counted(self, forward: int = 1, backward: int = 1) -> Iterator[None]:
        """Assert how many kernel launches of each pass the block makes, and that nothing else
        ran."""
        import fastnorm

        fastnorm.reset_stats()
        yield
        stats = fastnorm.stats()
        for counts, expected in ((stats.forward, forward), (stats.backward, backward)):
            ours = sum(n for key, n in counts.items() if key.startswith("triton:") == self.kernels)
            assert ours == expected == sum(counts.values()), stats


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` and its like return with NaN, so that unwritten outputs show."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def route(request: pytest.FixtureRequest, poisoned: None) -> Iterator[Route]:
    """The route of this session; in the interpreter every norm must run on kernels."""
    import torch

    import fastnorm

    name = request.config.getoption("--route")
    chosen = Route(name, name != "interpreter" or request.config.getoption("--full"))
    if chosen.name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with fastnorm.backend("triton" if chosen.name == "interpreter" else "auto"):
        yield chosen


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Let plans for the interpreter believe in so many multiprocessors; a GPU keeps its own."""
    from fastnorm import device

    found = device.interpreter_limits
    device.interpreter_limits = lambda: replace(found(), sm_count=count)
    forget_interpreted()
    try:
        yield
    finally:
        device.interpreter_limits = found
        forget_interpreted()


def forget_interpreted() -> None:
    """Drop the plans that the interpreter has used so far."""
    from fastnorm import routing

    for problem, index in list(routing._verified):
        if index == routing.INTERPRETER:
            routing._forget(problem, index)
