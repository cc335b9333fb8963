"""Patched models under everything else that touches modules: copies, compilers, hooks, shards."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from block import NORMS, Block, fast
from norm_zoo import (
    RECOGNISED,
    LlamaLike,
    N,
    ScaleNorm,
    input_for,
    randomized,
    sample,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fastnorm
from fastnorm.patching import recognition


def test_copies_are_patched_and_can_be_undone(block: nn.Module) -> None:
    report = fastnorm.patch(block)
    stream = io.BytesIO()
    torch.save(block, stream)
    stream.seek(0)
    for made in (
        copy.deepcopy(block),
        pickle.loads(pickle.dumps(block)),
        torch.load(stream, weights_only=False),
    ):
        assert fast(made) == fast(block)
        assert torch.equal(made(sample()), block(sample()))
        assert made.again is made.parts["a"][1]
        assert fastnorm.unpatch(made) == NORMS
        assert len(fast(block)) == NORMS
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report
    with pytest.raises(RuntimeError, match="use fastnorm.unpatch"):
        copied.undo()


def test_pickle_opens_in_a_fresh_process(block: nn.Module, tmp_path: object) -> None:
    path = f"{tmp_path}/model.pt"
    model = nn.Sequential(nn.LayerNorm(N), nn.RMSNorm(N))
    fastnorm.patch(model)
    torch.save(model, path)
    code = (
        f"import torch; m = torch.load({path!r}, weights_only=False); "
        f"print(type(m[0]).__name__, m(torch.ones(2, {N})).shape)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[0] == f"FastLayerNorm torch.Size([2, {N}])"


def train_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_train_step_with_an_optimizer_made_before(block: nn.Module, training: bool) -> None:
    plain = copy.deepcopy(block)
    block.train(training)
    plain.train(training)
    expected = train_step(plain, sample())
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    fastnorm.patch(block)
    block(sample()).square().mean().backward()
    optimizer.step()
    for ours, theirs in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(block: nn.Module, use_reentrant: bool) -> None:
    x = sample().requires_grad_()
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    fastnorm.patch(block)
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", RECOGNISED, ids=lambda cls: cls.__name__)
def test_compiled_before_and_after_patching(cls: type[nn.Module]) -> None:
    """B106: what was compiled before is compiled anew, without graph breaks; undoing likewise."""
    torch._dynamo.reset()
    model = nn.Sequential(randomized(cls()))
    x = input_for(model[0])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = compiled(x)
    fastnorm.reset_stats()
    report = fastnorm.patch(model)
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    report.undo()
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("cls", RECOGNISED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("strict", [True, False])
def test_exported_program_needs_no_fastnorm(cls: type[nn.Module], strict: bool) -> None:
    model = nn.Sequential(randomized(cls()))
    x = input_for(model[0])
    expected = model(x)
    fastnorm.patch(model)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(program.module()(x), expected)
    assert not any("fastnorm" in str(node.target) for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_by_fx_and_jit_as_before() -> None:
    model = nn.Sequential(randomized(LlamaLike()), randomized(nn.LayerNorm(N)))
    expected = model(sample())
    fastnorm.patch(model)
    assert torch.equal(torch.fx.symbolic_trace(model)(sample()), expected)
    assert torch.equal(torch.jit.trace(model, (sample(),))(sample()), expected)


def test_wrapper_of_torch_compile_is_looked_into(block: nn.Module) -> None:
    report = fastnorm.patch(torch.compile(block, backend="eager"))
    assert len(report) == NORMS
    assert report.patched[0].name == "_orig_mod.parts.a.1"


def test_functional_call_sees_the_given_parameters() -> None:
    module = ScaleNorm()
    fastnorm.patch(module)
    tripled = torch.func.functional_call(module, {"scale": 3 * torch.ones(N)}, (sample(),))
    torch.testing.assert_close(tripled, 3 * module(sample()))


def test_forward_on_the_instance_is_respected() -> None:
    """B108: offloading hooks and other tools replace forward on the module itself."""
    module = nn.LayerNorm(N)
    module.forward = types.MethodType(lambda self, x: x, module)
    with pytest.warns(UserWarning):
        report = fastnorm.patch(module)
    assert "replaced on the instance" in report.skipped[0].reason
    assert type(module) is nn.LayerNorm


def test_forward_wrapped_after_patching_blocks_the_undo() -> None:
    """The wrapper may hold the patched forward: restoring the class would not restore the layer."""
    module = nn.LayerNorm(N)
    report = fastnorm.patch(module)
    module.forward = functools.partial(module.forward)
    for undo in (report.undo, lambda: fastnorm.unpatch(module)):
        with pytest.raises(RuntimeError, match="got a forward of its own"):
            undo()
    del module.forward
    report.undo()
    assert type(module) is nn.LayerNorm


@pytest.mark.parametrize("cls", [nn.LayerNorm, LlamaLike])
def test_hooks_of_accelerate(cls: type[nn.Module]) -> None:
    """They wrap forward on the instance, and leave the class's own there when taken off."""
    hooks = pytest.importorskip("accelerate.hooks", exc_type=ImportError)
    module = hooks.add_hook_to_module(randomized(cls(N)), hooks.ModelHook())
    expected = module(sample())
    with pytest.warns(UserWarning):
        assert "replaced on the instance" in fastnorm.patch(module).skipped[0].reason
    hooks.remove_hook_from_module(module)
    report = fastnorm.patch(module)
    assert len(report) == 1 and "forward" not in vars(module)
    hooks.add_hook_to_module(module, hooks.ModelHook())
    assert torch.equal(module(sample()), expected)
    with pytest.raises(RuntimeError, match="accelerate.hooks.remove_hook_from_module"):
        report.undo()
    hooks.remove_hook_from_module(module)
    report.undo()
    assert type(module) is cls and "forward" not in vars(module)
    assert torch.equal(module(sample()), expected)


def test_forward_of_another_tool_in_torch_s_class_is_not_taken_for_torch_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias)

    monkeypatch.setattr(nn.LayerNorm, "forward", doubled)
    monkeypatch.setattr(recognition, "_fingerprints", {})
    with pytest.warns(UserWarning):
        report = fastnorm.patch(nn.LayerNorm(N))
    assert "no kind of norm known here" in report.skipped[0].reason


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_parametrization_before_is_refused_and_after_works() -> None:
    before = randomized(nn.LayerNorm(N))
    parametrize.register_parametrization(before, "weight", Doubled())
    with pytest.warns(UserWarning):
        report = fastnorm.patch(before)
    assert "parametrizations" in report.skipped[0].reason

    after, plain = (randomized(nn.LayerNorm(N)) for _ in range(2))
    report = fastnorm.patch(after)
    for module in (after, plain):
        parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.equal(after(sample()), plain(sample()))
    for undo in (report.undo, lambda: fastnorm.unpatch(after)):
        with pytest.raises(RuntimeError, match="after it was patched"):
            undo()
    parametrize.remove_parametrizations(after, "weight")
    report.undo()
    assert type(after) is nn.LayerNorm


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("patch_first", [True, False])
def test_sharded_model_computes_what_the_plain_one_does(one_rank: None, patch_first: bool) -> None:
    """B82: parameters keep one dtype, so fully_shard takes a patched bf16 model; or before it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = randomized(Block()).bfloat16()
    plain = copy.deepcopy(model)
    x = sample(dtype=torch.bfloat16)
    if patch_first:
        fastnorm.patch(model)
    fully_shard(model, mesh=mesh)
    if not patch_first:
        assert len(fastnorm.patch(model)) == NORMS
    y = model(x)
    assert torch.equal(y, plain(x))
    y.sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0.05, atol=0.1)
