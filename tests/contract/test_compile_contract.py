"""torch.compile, torch.export and tracing keep working, and the operators are what they say."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export

import fastnorm
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route
from tests.contract.norms import KINDS, close, pair, same, seeded

OPERATORS = torch.ops.fastnorm


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def _model(kind: str, width: int = 24) -> nn.Module:
    ours, _ = pair(kind, width)
    return nn.Sequential(nn.Linear(width, width), ours, nn.GELU(), nn.Linear(width, 5))


def _step(model, forward, x) -> list[torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    forward(leaf).square().sum().backward()
    return [leaf.grad, *(p.grad.clone() for p in model.parameters())]


def _through_operators(kind: str, x, weight, bias):
    """What a compiled norm calls on a GPU, reached on a CPU."""
    return OPERATORS.norm_forward(x, weight, bias, 1, 1e-5, kind, x.dtype)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_training_steps_equal_eager_ones(kind: str) -> None:
    """B95: one graph, the same numbers."""
    model, x = _model(kind), seeded(6, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(_step(model, compiled, x), _step(model, model, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("patched", [False, True])
def test_compiled_graphs_are_torchs(kind: str, autocast: bool, patched: bool) -> None:
    """What Inductor gets to fuse: operator by operator what it gets with torch's module."""
    ours, torchs = pair(kind, 24)
    if patched:
        ours = nn.Sequential(copy.deepcopy(torchs))
        fastnorm.patch(ours)
        torchs = nn.Sequential(torchs)
    graphs = []
    for module in (ours, torchs):
        torch._dynamo.reset()
        seen: list[str] = []

        def look(graph: torch.fx.GraphModule, _inputs: object, seen: list[str] = seen):
            calls = (node for node in graph.graph.nodes if node.op == "call_function")
            seen += [f"{node.target} {node.meta.get('val')}" for node in calls]
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=look, bw_compiler=look)
        x = seeded(4, 24).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = torch.compile(module, backend=backend, fullgraph=True)(x)
        y.float().square().sum().backward()
        graphs.append(seen)
    assert len(graphs[0]) > 5
    assert graphs[0] == graphs[1]


def test_inductor_compiles_a_training_step() -> None:
    model, x = nn.Sequential(_model("layer"), fastnorm.RMSNorm(5)), seeded(6, 24)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(
        _step(model, compiled, x), _step(model, model, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", SEMANTICS)
def test_operators_stay_opaque_in_compiled_graphs(kind: str, route: Route) -> None:
    """One forward and one backward operator; in the interpreter and on GPUs they launch kernels."""
    has_bias = SEMANTICS[kind].centered and kind != "layer_cohere"
    leaves = [seeded(4, 33, device=route.device), seeded(33, seed=1, device=route.device)]
    leaves += [seeded(33, seed=2, device=route.device)] if has_bias else []

    def run(f):
        own = [t.clone().requires_grad_() for t in leaves]
        y = f(kind, own[0], own[1], own[2] if has_bias else None)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), own)]

    compiled = torch.compile(_through_operators, fullgraph=True, backend="aot_eager")
    with route.counted():
        actual = run(compiled)
    same(actual, run(_through_operators))


@pytest.mark.parametrize("kind", KINDS)
def test_new_batch_sizes_compile_no_more_often_than_torchs(kind: str) -> None:
    """B96, B97: batch and sequence length vary, forward and backward: two graphs at most."""
    compilations = []
    for module in pair(kind, 24):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, dynamic=True, backend=counter)
        for batch, length in ((3, 7), (5, 7), (9, 4), (17, 30), (2, 3)):
            x = seeded(batch, length, 24).requires_grad_()
            compiled(x).square().sum().backward()
            assert x.grad.isfinite().all()
        compilations.append(counter.frame_count)
    ours, torchs = compilations
    assert ours <= torchs <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_operators_take_symbolic_sizes(kind: str, route: Route) -> None:
    """B96 for the operators themselves: their fakes keep sizes symbolic."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_through_operators, dynamic=True, backend=counter, fullgraph=True)
    w = seeded(24, seed=1, device=route.device).requires_grad_()
    for batch in (3, 5, 9, 17, 2):
        x = seeded(batch, 4, 24, device=route.device).requires_grad_()
        y = compiled(kind, x, w, None)
        same(y, _through_operators(kind, x, w, None))
        y.sum().backward()
        assert x.grad.shape == x.shape
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_autograd(kind: str) -> None:
    model, x = _model(kind), seeded(6, 24)
    expected = _step(model, model, x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = _step(model, torch.compile(model, backend="aot_eager"), x)
    close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_differentiating_a_compiled_backward_again_raises(kind: str, route: Route) -> None:
    """A second derivative through the operators would take the statistics for constants."""
    x = seeded(4, 24, device=route.device).requires_grad_()
    w = seeded(24, seed=1, device=route.device).requires_grad_()
    y = _through_operators(kind, x, w, None)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="in eager mode for higher derivatives"):
        g.square().sum().backward()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_export_holds_torchs_operators_and_a_free_batch(kind: str, strict: bool) -> None:
    """B98, B99: the program runs where fastnorm is not installed, for any batch."""
    ours, torchs = pair(kind, 24)
    program = export(
        ours, (seeded(4, 24),), dynamic_shapes=({0: Dim("batch", min=2)},), strict=strict
    )
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert targets and not any("fastnorm" in t for t in targets)
    for batch in (2, 7):
        x = seeded(batch, 24, seed=batch)
        same(program.module()(x), torchs(x))


def test_aot_inductor_packages_run(tmp_path) -> None:
    (n1, t1), (n2, t2) = pair("layer", 24), pair("rms", 24)
    program = export(nn.Sequential(n1, n2).eval(), (seeded(4, 24),))
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 warns of its own pytrees
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "norm.pt2")
    )
    x = seeded(4, 24, seed=5)
    close(torch._inductor.aoti_load_package(path)(x), t2(t1(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_traces_compute_the_norm(kind: str) -> None:
    """B98: no constant in place of the norm; saved and loaded."""
    ours, torchs = pair(kind, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ours, seeded(4, 24))
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
    x = seeded(9, 24, seed=5)
    same(loaded(x), torchs(x))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch of itself
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_programs_compute_the_norm(kind: str) -> None:
    """B98, B99."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    ours, torchs = pair(kind, 24)
    batch = {0: Dim("batch", min=2)}
    program = torch.onnx.export(ours.eval(), (seeded(4, 24),), dynamic_shapes=(batch,), dynamo=True)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for rows in (2, 7):
        x = seeded(rows, 24, seed=rows)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        close(torch.from_numpy(y), torchs(x).detach())


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_patching_before_and_after_compile(kind: str, compile_first: bool) -> None:
    _, torchs = pair(kind, 24)
    model, x = nn.Sequential(nn.Linear(24, 24), torchs), seeded(6, 24)
    expected = _step(model, model, x)
    if compile_first:
        compiled = torch.compile(model, backend="aot_eager")
        same(_step(model, compiled, x), expected)
        assert len(fastnorm.patch(model)) == 1
    else:
        assert len(fastnorm.patch(model)) == 1
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same(_step(model, compiled, x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_transforms(kind: str) -> None:
    ours, torchs = pair(kind, 6)
    x = seeded(3, 6)

    def per_sample(module):
        return torch.func.vmap(torch.func.grad(lambda t: module(t).square().sum()))

    compiled = torch.compile(per_sample(ours), backend="aot_eager", fullgraph=True)
    close(compiled(x), per_sample(torchs)(x))


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize("parameters", ["all", "none"])
def test_opcheck_of_the_forward_operator(kind: str, parameters: str, route: Route) -> None:
    """Schema, fake tensors, autograd registration, AOT dispatch with static and dynamic shapes."""
    x = seeded(3, 2, 24, device=route.device).requires_grad_()
    w = seeded(24, seed=1, device=route.device).requires_grad_() if parameters == "all" else None
    has_bias = w is not None and SEMANTICS[kind].centered and kind != "layer_cohere"
    b = seeded(24, seed=2, device=route.device).requires_grad_() if has_bias else None
    torch.library.opcheck(OPERATORS.norm_forward.default, (x, w, b, 1, 1e-5, kind, x.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [[True] * 3, [True, False, False], [False, True, True]], ids=str)
def test_opcheck_of_the_backward_operator(kind: str, mask: list[bool], route: Route) -> None:
    x, dy = (seeded(3, 2, 24, seed=s, device=route.device) for s in (0, 3))
    w, b = seeded(24, seed=1, device=route.device), None
    if kind == "layer":
        b = seeded(24, seed=2, device=route.device)
    stats = OPERATORS.norm_forward(x, w, b, 1, 1e-5, kind, x.dtype)[1]
    mask = [mask[0], mask[1], mask[2] and b is not None]
    torch.library.opcheck(OPERATORS.norm_backward.default, (dy, x, w, b, stats, 1, kind, mask))


@pytest.mark.parametrize("kind", SEMANTICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 24), (24,), (3, 2, 24)], ids=str)
def test_fakes_agree_with_the_operators(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Shapes, dtypes and strides, also for empty and 1-D input and expanded dy."""
    x, w = seeded(*shape, dtype=dtype), seeded(24, dtype=torch.float32)
    out = torch.promote_types(dtype, torch.float32)

    def both(x, w, dy):
        y, stats = OPERATORS.norm_forward(x, w, None, 1, 1e-5, kind, out)
        grads = OPERATORS.norm_backward(dy, x, w, None, stats, 1, kind, [True, True, False])
        return [y, stats, *grads]

    dy = torch.ones((), dtype=out).expand(shape)
    real = both(x, w, dy)
    with FakeTensorMode() as mode:
        fake = both(*(mode.from_tensor(t) for t in (x, w, dy)))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_asking_for_kernels_does_not_break_the_graph(route: Route) -> None:
    """Whether they can run is found out by running."""
    if route.name == "torch":
        pytest.skip("kernels run in the interpreter or on a GPU")
    module = fastnorm.LayerNorm(64, backend="triton", device=route.device)
    x = torch.randn(8, 64, device=route.device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
