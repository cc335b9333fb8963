"""Patching a model changes the classes of its norms and nothing else; undoing gives all back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from block import NORMS, Block, fast
from norm_zoo import (
    GemmaLike,
    LlamaLike,
    N,
    T5Like,
    sample,
)
from torch import nn

import fastnorm


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


def test_shared_layer_stays_shared(block: nn.Module) -> None:
    """B123: one module in two places is one entry and one object."""
    report = fastnorm.patch(block)
    assert block.again is block.parts["a"][1]
    assert [e.name for e in report.patched if e.name in ("again", "parts.a.1")] == ["parts.a.1"]


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


def test_import_patches_nothing() -> None:
    """B132: only a call of patch changes a class, and only of the layers it is given."""
    code = (
        "from torch import nn; f = nn.LayerNorm.forward, nn.RMSNorm.forward; import fastnorm; "
        "assert f == (nn.LayerNorm.forward, nn.RMSNorm.forward); "
        "assert type(nn.LayerNorm(3)) is nn.LayerNorm"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
