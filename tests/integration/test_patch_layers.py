"""Patching changes the class of a layer and nothing else; undoing gives everything back."""

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
from norm_zoo import (
    RECOGNISED,
    CohereLike,
    GemmaLike,
    LlamaLike,
    N,
    ScaleNorm,
    T5Like,
    input_for,
    randomized,
    sample,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fastnorm
from fastnorm.patching import recognition


class Block(nn.Module):
    """Norms of several kinds, one of them shared, in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.LayerNorm(N)
        self.parts = nn.ModuleDict(
            {
                "a": nn.Sequential(nn.Linear(N, N), shared, nn.Sequential(LlamaLike())),
                "b": nn.ModuleList([nn.RMSNorm(N), GemmaLike(), CohereLike()]),
            }
        )
        self.again = shared
        self.vision = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N, bias=False), T5Like())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts["a"](x)
        for layer in self.parts["b"]:
            x = x + layer(x)
        return self.vision(self.again(x))


NORMS = 7


@pytest.fixture
def block() -> nn.Module:
    return randomized(Block())


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_registered", {})


def fast(model: nn.Module) -> list[str]:
    """Names of the patched layers, by their classes' names."""
    return [name for name, m in model.named_modules() if type(m).__name__.startswith("Fast")]


def train_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_patch_keeps_all_but_the_class_and_undo_gives_it_back(block: nn.Module) -> None:
    """B105, B108, B109, B120, B132: same objects before, during and after."""
    before = {
        "parameters": [(n, id(p)) for n, p in block.named_parameters()],
        "modules": [(n, id(m)) for n, m in block.named_modules()],
        "keys": list(block.state_dict()),
        "vars": [dict(vars(m)) for m in block.modules()],
    }
    classes, shown, x = [type(m) for m in block.modules()], repr(block), sample()
    y = block(x)
    report = fastnorm.patch(block)
    assert len(report) == NORMS == len(fast(block))
    for _ in range(2):
        assert before["parameters"] == [(n, id(p)) for n, p in block.named_parameters()]
        assert before["modules"] == [(n, id(m)) for n, m in block.named_modules()]
        assert before["keys"] == list(block.state_dict())
        assert before["vars"] == [dict(vars(m)) for m in block.modules()]
        assert torch.equal(block(x), y)
        report.undo()
    assert [type(m) for m in block.modules()] == classes
    assert repr(block) == shown
    assert "forward" not in vars(block.again)


def test_report_counts_and_an_empty_one_warns(block: nn.Module) -> None:
    """B106: a patch without effect does not pass in silence."""
    report = fastnorm.patch(block)
    assert report.counts() == {
        "layer": 2,
        "rms_rounded": 1,
        "rms": 1,
        "rms_zero_centered": 1,
        "layer_cohere": 1,
        "rms_t5": 1,
    }
    first = report.patched[0]
    assert (first.name, first.class_name, first.semantics) == ("parts.a.1", "LayerNorm", "layer")
    assert (first.hidden, first.dtype) == (N, "float32")
    assert "7 patched, 0 skipped" in str(report) and "LlamaLike" in str(report)
    assert report.table().row_count == NORMS - 1
    with pytest.warns(UserWarning, match="no layer to patch"):
        assert len(fastnorm.patch(nn.Linear(3, 3))) == 0


def test_patching_one_model_leaves_every_other_alone(block: nn.Module) -> None:
    """B107, B110, B132: no class and no module of a library is assigned to."""
    names = ("LayerNorm", "RMSNorm")
    before = [(getattr(nn, n), getattr(nn, n).forward) for n in names]
    other, forward = Block(), LlamaLike.forward
    fastnorm.patch(block)
    assert fast(other) == [] and fast(Block()) == []
    assert LlamaLike.forward is forward
    assert before == [(getattr(nn, n), getattr(nn, n).forward) for n in names]
    assert type(other.again).__name__ == "LayerNorm"


def test_layer_norm_stays_centred(block: nn.Module) -> None:
    """B110: a LayerNorm never gets the RMS formula."""
    fastnorm.patch(block)
    x = sample(dtype=torch.float64)
    block.again.double()
    torch.testing.assert_close(block.again(x + 100), block.again(x))


def test_isinstance_and_name_survive(block: nn.Module) -> None:
    """B111: initialisers ask for the class or for its name."""
    fastnorm.patch(block)
    assert isinstance(block.again, nn.LayerNorm)
    assert isinstance(block.parts["b"][1], GemmaLike)
    assert type(block.again).__name__ == "FastLayerNorm"
    assert type(block.parts["b"][0]).__name__ == "FastRMSNorm"


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"exclude": "vision"}, ["vision.1", "vision.2"]),
        ({"exclude": nn.LayerNorm}, ["parts.a.1", "vision.1"]),
        ({"exclude": ["vision.[12]", LlamaLike]}, ["parts.a.2.0", "vision.1", "vision.2"]),
        ({"include": "parts.b.*"}, ["parts.a.1", "parts.a.2.0", "vision.1", "vision.2"]),
        (
            {"include": (nn.RMSNorm, "vision"), "exclude": T5Like},
            ["parts.a.1", "parts.a.2.0", "parts.b.1", "parts.b.2", "vision.2"],
        ),
        ({"filter_fn": lambda name, module: "vision" not in name}, ["vision.1", "vision.2"]),
        ({"exclude": lambda name, module: hasattr(module, "bias")}, ["parts.a.1", "vision.1"]),
    ],
)
def test_selection(block: nn.Module, arguments: dict[str, object], left: list[str]) -> None:
    """B113: what is excluded stays as it is, and the report says by what."""
    report = fastnorm.patch(block, **arguments)  # type: ignore[arg-type]
    assert [entry.name for entry in report.skipped] == left
    assert len(fast(block)) == NORMS - len(left)
    assert all(
        "exclude" in e.reason
        or "filter" in e.reason
        or "refused" in e.reason
        or "include" in e.reason
        for e in report.skipped
    )


def test_mistaken_selectors_are_reported(block: nn.Module) -> None:
    with pytest.warns(UserWarning, match="no module's name fits 'visoin'"):
        fastnorm.patch(block, exclude="visoin")
    with pytest.raises(TypeError, match="exclude takes name patterns.*got 3"):
        fastnorm.patch(Block(), exclude=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module; got str"):
        fastnorm.patch("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [1e-12, 1e-1])
def test_eps_is_kept_and_followed(eps: float) -> None:
    """B117: for torch's own two; test_fingerprint.py has the others."""
    for cls in (nn.LayerNorm, nn.RMSNorm):
        module = randomized(cls(N, eps=eps))
        original, x = copy.deepcopy(module), 1e-2 * sample()
        fastnorm.patch(module)
        assert torch.equal(module(x), original(x))
        module.eps = original.eps = 0.3
        assert torch.equal(module(x), original(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(N, elementwise_affine=False),
        nn.RMSNorm(N, elementwise_affine=False),
        nn.LayerNorm(N, bias=False),
        nn.LayerNorm((5, N)),
        nn.RMSNorm((5, N), eps=1e-3),
    ],
    ids=str,
)
def test_parameters_that_do_not_exist_are_not_made(module: nn.Module) -> None:
    """B118, B119, B120: no weight, no bias, several dimensions; strict loading both ways."""
    randomized(module)
    original, x = copy.deepcopy(module), sample()
    fastnorm.patch(module)
    assert torch.equal(module(x), original(x))
    assert module.state_dict().keys() == original.state_dict().keys()
    module.load_state_dict(original.state_dict(), strict=True)
    original.load_state_dict(module.state_dict(), strict=True)


def test_weight_is_applied_once() -> None:
    """B122: twice the weight is twice the output."""
    module = nn.RMSNorm(N)
    fastnorm.patch(module)
    once = module(sample())
    with torch.no_grad():
        module.weight.fill_(2.0)
    assert torch.equal(module(sample()), 2 * once)


def test_shared_layer_stays_shared(block: nn.Module) -> None:
    """B123: one module in two places is one entry and one object."""
    report = fastnorm.patch(block)
    assert block.again is block.parts["a"][1]
    assert [e.name for e in report.patched if e.name in ("again", "parts.a.1")] == ["parts.a.1"]


def test_parameter_attributes_stay() -> None:
    """B125: distributed optimizers keep marks on the Parameter object."""
    module = nn.LayerNorm(N)
    module.weight.sequence_parallel = True
    module.weight.requires_grad_(False)
    fastnorm.patch(module)
    assert module.weight.sequence_parallel is True
    assert not module.weight.requires_grad


def test_meta_model_is_patched_then_made_and_reset() -> None:
    """B129: ones for LayerNorm, zeros where the class starts from zeros."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(N), GemmaLike(), nn.RMSNorm(N))
    assert len(fastnorm.patch(model)) == 3
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    assert torch.equal(model[0].weight, torch.ones(N)) and not model[0].bias.any()
    assert not model[1].weight.any()
    assert model(sample()).isfinite().all()


@pytest.mark.parametrize("cls", [nn.LayerNorm, LlamaLike])
def test_weight_that_exists_only_within_the_call(cls: type[nn.Module]) -> None:
    """B130, B131: ZeRO-3 gathers in a pre-hook and releases in a hook; each fires once."""
    module, full, fired = randomized(cls(N)), torch.randn(N), []
    plain = copy.deepcopy(module)
    plain.weight.data = full

    def gather(layer: nn.Module, args: object) -> None:
        fired.append("gather")
        layer.weight.data = full

    def release(layer: nn.Module, args: object, output: object) -> None:
        fired.append("release")
        layer.weight.data = torch.empty(0)

    module.weight.data = torch.empty(0)
    module.weight.ds_shape = torch.Size([N])
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    assert fastnorm.patch(module).patched[0].hidden == N
    y = module(sample())
    assert fired == ["gather", "release"]
    assert torch.equal(y, plain(sample()))
    assert module.weight.numel() == 0


def test_hooks_of_every_sort_fire_as_before(block: nn.Module) -> None:
    """B131: forward, backward and state_dict hooks belong to the module, which stays."""
    fired: list[str] = []
    layer = block.again
    layer.register_forward_hook(lambda *_: fired.append("forward"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: fired.append("state_dict"))
    with fastnorm.patch(block):
        block(sample().requires_grad_()).sum().backward()
        block.state_dict()
    assert fired == ["forward", "forward", "backward", "backward", "state_dict", "state_dict"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norm_kept_in_fp32_in_a_bf16_model_behaves_as_before() -> None:
    """B72, B76, B77, B82: dtypes of results and parameters are the class's."""
    for cls in (LlamaLike, T5Like, nn.RMSNorm):
        norm = randomized(cls(N)).float()
        model = nn.Sequential(norm, nn.Linear(N, N, dtype=torch.bfloat16))
        plain, x = copy.deepcopy(model), sample(dtype=torch.bfloat16)
        fastnorm.patch(model)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
        assert model[0](x).dtype == plain[0](x).dtype
        assert torch.equal(model[0](x), plain[0](x))
        if plain[0](x).dtype == torch.float32:
            with pytest.raises(RuntimeError):
                plain(x)
            with pytest.raises(RuntimeError):
                model(x)


def test_offset_weight_rounds_where_gemma_rounds() -> None:
    """B78, B80: 1 + 15.8125 in fp32; and zeros are the neutral weight."""
    module = GemmaLike().bfloat16()
    x = sample(dtype=torch.bfloat16)
    fastnorm.patch(module)
    assert module(x).any(), "a lost offset would give zeros"
    nn.init.constant_(module.weight, 15.8125)
    original = GemmaLike().bfloat16()
    original.load_state_dict(module.state_dict())
    assert torch.equal(module(x), original(x))


@pytest.mark.parametrize("cls", RECOGNISED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_under_cpu_autocast_is_the_class_s(cls: type[nn.Module], dtype: torch.dtype) -> None:
    """B74: fp32 parameters, as mixed precision has them."""
    module = randomized(cls())
    original, x = copy.deepcopy(module), input_for(module, dtype=dtype)
    fastnorm.patch(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = module(x), original(x)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 2), (2, 1, 3, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm, LlamaLike, GemmaLike, CohereLike])
def test_input_of_any_number_of_dimensions(cls: type[nn.Module], leading: tuple[int, ...]) -> None:
    """B81: one vector, no row at all, five dimensions; bf16 weight."""
    module = randomized(cls(N), dtype=torch.bfloat16)
    original, x = copy.deepcopy(module), sample(dtype=torch.bfloat16, shape=(*leading, N))
    fastnorm.patch(module)
    assert torch.equal(module(x), original(x))


def test_patching_twice_is_patching_once(block: nn.Module) -> None:
    fastnorm.patch(block)
    classes = [type(m) for m in block.modules()]
    again = fastnorm.patch(block)
    assert len(again) == 0 and {e.reason for e in again.skipped} == {"already patched"}
    assert [type(m) for m in block.modules()] == classes
    again.undo()
    assert len(fast(block)) == NORMS, "a report undoes its own call only"
    assert fastnorm.unpatch(block) == NORMS and fastnorm.unpatch(block) == 0


def test_fastnorm_s_own_layers_are_left_as_they_are() -> None:
    model = nn.Sequential(fastnorm.LayerNorm(N), nn.LayerNorm(N))
    report = fastnorm.patch(model)
    assert len(report) == 1
    assert report.skipped[0].reason == "already fastnorm"


def test_two_reports_undo_in_any_order(block: nn.Module) -> None:
    vision = fastnorm.patch(block, include="vision")
    rest = fastnorm.patch(block)
    vision.undo()
    assert len(fast(block)) == NORMS - 2 == len(rest)
    with rest:
        pass
    assert fast(block) == []


def test_block_is_undone_on_an_exception(block: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError), fastnorm.patch(block):
        1 / 0  # noqa: B018
    assert fast(block) == []


def test_model_that_is_a_norm_itself() -> None:
    module = nn.LayerNorm(N)
    with fastnorm.patch(module) as report:
        assert report.patched[0].name == "" and "(root)" in str(report)
        assert type(module).__name__ == "FastLayerNorm"
    assert type(module) is nn.LayerNorm


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


def test_keyword_argument_keeps_its_name() -> None:
    module = LlamaLike()
    fastnorm.patch(module)
    module(hidden_states=sample())
    with pytest.raises(TypeError):
        module(input=sample())


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


def test_import_patches_nothing() -> None:
    """B132: only a call of patch changes a class, and only of the layers it is given."""
    code = (
        "from torch import nn; f = nn.LayerNorm.forward, nn.RMSNorm.forward; import fastnorm; "
        "assert f == (nn.LayerNorm.forward, nn.RMSNorm.forward); "
        "assert type(nn.LayerNorm(3)) is nn.LayerNorm"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
