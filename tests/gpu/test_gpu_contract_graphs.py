"""CUDA graphs, compiled graphs, threads and other devices: section V of the public reports."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import fastnorm
from tests.contract.norms import KINDS, close, pair, same, seeded
from tests.oracle import Inputs, check, run

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def launches() -> int:
    """Kernel launches since the last reset; none of torch's may be among them."""
    stats = fastnorm.stats()
    assert "torch" not in stats.forward and "torch" not in stats.backward, stats
    return sum(stats.forward.values()) + sum(stats.backward.values())


def module_and_data(kind: str, hidden: int, rows: int = 512) -> tuple[nn.Module, Tensor, Tensor]:
    ours, _ = pair(kind, hidden)
    ours.to("cuda", BF16)
    x, dy = (seeded(rows, hidden, seed=s, device="cuda", dtype=BF16) for s in (0, 1))
    return ours, x.requires_grad_(), dy


def step(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """One pass each way; y and all gradients, where autograd put them. No node of the graph
    outlives the step, since torch warns when the next one runs it on another stream."""
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def forget_gradients(module: nn.Module, x: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    x.grad = None


def warm_up(module: nn.Module, x: Tensor, dy: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(module, x, dy)
            forget_gradients(module, x)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("hidden", [768, 4096, 20480])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay_with_new_data(kind: str, hidden: int) -> None:
    """B94: captured after warm-up; replays have the bits of eager calls."""
    module, x, dy = module_and_data(kind, hidden)
    warm_up(module, x, dy)
    fastnorm.reset_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(module, x, dy)
    assert launches() == 2
    for seed in range(2, 5):
        x.data.copy_(seeded(*x.shape, seed=seed))
        dy.copy_(seeded(*x.shape, seed=seed + 10))
        graph.replay()
        replayed = [t.clone() for t in captured]
        other, leaf = type(module)(hidden).to("cuda", BF16), x.detach().clone().requires_grad_()
        other.load_state_dict(module.state_dict())
        same(replayed, step(other, leaf, dy))


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_that_comes_first_keeps_torchs_kernels(kind: str) -> None:
    """B94: nothing can be compiled there; it says so, and is right; later calls use kernels."""
    hidden = 1992 if kind == "layer" else 1976
    module, x, dy = module_and_data(kind, hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="first used while a CUDA graph is captured"):
        with torch.cuda.graph(graph):
            captured = step(module, x, dy)
    graph.replay()
    from_graph = [t.clone() for t in captured]
    forget_gradients(module, x)
    fastnorm.reset_stats()
    eager = step(module, x, dy)
    assert launches() == 2
    torch.testing.assert_close(from_graph, eager, rtol=2e-2, atol=2e-1)


# make_graphed_callables keeps the graphs of its warm-up and of its capture, and so parameters'
# AccumulateGrad nodes made on its own stream; torch says so once per process.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_graphed_callables() -> None:
    module, x, dy = module_and_data("layer", 1024)
    expected = [t.clone() for t in step(module, x, dy)]
    forget_gradients(module, x)
    graphed = torch.cuda.make_graphed_callables(module, (x.detach().clone().requires_grad_(),))
    forget_gradients(module, x)
    same(step(graphed, x, dy), expected)


# Inductor's advice on the linear layer, and its empty graph that keeps a memory pool alive: it
# catches that graph's warning itself, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_uses_the_kernels(mode: str) -> None:
    """B95: one graph, kernels inside it, eager's numbers, with and without CUDA graphs."""
    torch._dynamo.reset()
    (layer, _), (rms, _) = pair("layer", 512), pair("rms", 512)
    layer.backend = rms.backend = "triton"
    model = nn.Sequential(layer, nn.Linear(512, 512), rms).cuda()
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    for seed in range(4):
        x = seeded(64, 512, seed=seed, device="cuda").requires_grad_()
        fastnorm.reset_stats()
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        y.square().sum().backward()
        if seed == 0 or mode == "default":
            assert launches() >= 4
        actual = [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        forget_gradients(model, x)
        y = model(x)
        y.square().sum().backward()
        expected = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
        forget_gradients(model, x)


def test_compiled_norms_are_left_to_the_compiler_unless_kernels_are_asked_for() -> None:
    """Inductor fuses them with their neighbours: faster than kernels it cannot look into."""
    seen: dict[str, set[str]] = {}
    for choice in ("auto", "triton"):
        torch._dynamo.reset()
        graph: set[str] = seen.setdefault(choice, set())

        def look(module: torch.fx.GraphModule, _inputs: object, graph: set[str] = graph):
            graph |= {str(node.target) for node in module.graph.nodes}
            return module.forward

        module = fastnorm.LayerNorm(64, device="cuda", backend=choice)
        x = seeded(4, 64, device="cuda")
        close = torch.testing.assert_close
        close(torch.compile(module, backend=look, fullgraph=True)(x), module(x))
    assert not any("fastnorm" in target for target in seen["auto"])
    assert any("fastnorm.norm_forward" in target for target in seen["triton"])


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_compiled_batches_vary_without_recompiling(choice: str) -> None:
    """B96: the plan and the graph are the same for every batch size."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = pair("layer", 256)[0].cuda()
    module.backend = choice
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=counter)
    for batch in (3, 5, 9, 17, 2):
        x = seeded(batch, 7, 256, device="cuda").requires_grad_()
        compiled(x).sum().backward()
        assert x.grad.isfinite().all()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_higher_derivatives_run_on_torchs_path(kind: str) -> None:
    """B66 to B70 where kernels are the rule."""
    ours, torchs = pair(kind, 16)
    ours.cuda(), torchs.cuda()
    x = seeded(4, 16, device="cuda")

    def everything(module):
        def loss(t: Tensor) -> Tensor:
            return module(t).square().sum()

        func = torch.func
        return [
            func.grad(loss)(x),
            func.vmap(func.grad(loss))(x),
            func.jvp(module, (x,), (x.cos(),))[1],
            func.hessian(loss)(x),
        ]

    close(everything(ours), everything(torchs))
    grads = []
    for module in (ours, torchs):
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        grads.append(torch.autograd.grad(g.square().sum(), [leaf, module.weight]))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_eight_threads_meet_new_widths_at_once() -> None:
    """B91: compilation, launch and workspace from any thread, each on its own stream."""
    start = threading.Barrier(8)
    widths = [1301 + 2 * (i // 2) for i in range(8)]

    def work(index: int) -> None:
        hidden = widths[index]
        x, dy = (seeded(64, hidden, seed=10 * index + s, device="cuda") for s in (0, 1))
        w, b = (seeded(hidden, seed=10 * index + s, device="cuda") for s in (2, 3))
        inputs = Inputs(x, w, b, dy, (hidden,), 1e-5, fastnorm.semantics.LAYER)
        start.wait(timeout=60)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                results = run(
                    inputs,
                    lambda x, w, b: fastnorm.layer_norm(x, (hidden,), w, b, backend="triton"),
                )
            torch.cuda.current_stream().synchronize()
        check(results, inputs)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_cpu_modules_work_beside_a_gpu_and_misplaced_input_raises() -> None:
    """B92."""
    ours, torchs = pair("layer", 24)
    same(ours(seeded(3, 24)), torchs(seeded(3, 24)))
    with pytest.raises(RuntimeError, match="input on cpu and weight on cuda"):
        ours.cuda()(seeded(3, 24))


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_not_current(kind: str) -> None:
    """B86, B87, B89: nothing is allocated on the current device, and the results are right."""
    ours, _ = pair(kind, 1024)
    x, dy = (seeded(64, 1024, seed=s) for s in (0, 1))
    results = []
    for place in ("cuda:0", "cuda:1"):
        module = type(ours)(1024).to(place)
        module.load_state_dict(ours.state_dict())
        leaf = x.to(place).requires_grad_()
        with torch.cuda.device(0):
            torch.cuda.reset_peak_memory_stats(0)
            before = torch.cuda.memory_allocated(0)
            fastnorm.reset_stats()
            results.append([t.cpu() for t in step(module, leaf, dy.to(place))])
            assert launches() == 2
            assert torch.cuda.current_device() == 0
            if place == "cuda:1":
                assert torch.cuda.max_memory_allocated(0) == before
    close(*results)


@needs_two
def test_models_spread_over_gpus() -> None:
    """B90, B91: one layer on each GPU, and DataParallel's replicas."""
    (first, _), (second, _) = pair("rms", 256), pair("layer", 256)
    x = seeded(8, 256)
    expected = second(first(x))
    first.to("cuda:0"), second.to("cuda:1")
    close(second(first(x.to("cuda:0")).to("cuda:1")).cpu(), expected)
    replicas = nn.DataParallel(second.to("cuda:0"))
    close(replicas(x.to("cuda:0")), second(x.to("cuda:0")))
