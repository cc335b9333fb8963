"""Every norm class of the installed transformers: taken if its kind is known, and only then.

The groups in norm_classes.json were made by reading the classes, not by fastnorm; each class is
then judged here by its own results. The printed table is the one in docs/patching.md.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fastnorm

transformers = pytest.importorskip("transformers", exc_type=ImportError)
rich_table = pytest.importorskip("rich.table")
rich_console = pytest.importorskip("rich.console")

pytestmark = pytest.mark.filterwarnings("ignore")

N = 48
CATALOGUE = json.loads((Path(__file__).parent / "norm_classes.json").read_text())
KNOWN = ("R1", "R2", "R2o", "R3", "R4", "R5", "L1", "L1c", "L2", "L3", "L4")
LOOK_ALIKES = ("RX", "LX")
KINDS = {
    "R1": {"rms_rounded"},
    "R2": {"rms_fp32"},
    "R2o": {"rms_fp32"},
    "R3": {"rms_zero_centered", "rms_zero_centered_rounded"},
    "R4": {"rms_t5"},
    "R5": {"rms_fp32"},
    "L1": {"layer"},
    "L1c": {"layer"},
    "L2": {"layer_fp32"},
    "L3": {"layer_cohere"},
    "L4": {"layer_offset"},
}
NOT_OF_ITS_GROUP = {
    # Divides by sqrt where F.layer_norm multiplies by rsqrt: other bits, so it is refused.
    "VitDetLayerNorm",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CANNOT_CONSTRUCT = (
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
SIZES = {
    "hidden_size": N,
    "d_model": N,
    "head_dim": N,
    "dim": N,
    "eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
}


@dataclass
class Outcome:
    """What became of one class."""

    name: str
    group: str
    kind: str | None = None
    reason: str = ""
    wrong: str = ""
    pairs: int = 0


def construct(cls: type[nn.Module]) -> nn.Module:
    """An instance with N features, by the names of the constructor's parameters."""
    arguments: dict[str, object] = {}
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name == "config":
            arguments["config"] = SimpleNamespace(**SIZES)
        elif parameter.name == "group_size":
            # Statistics per group: what tells Qwen4Exp's class from Gemma's.
            arguments["group_size"] = N // 4
        elif cls.__name__ == "ChameleonLayerNorm":
            arguments["hidden_size"] = (4, N)
        elif parameter.name in SIZES and parameter.default is None:
            arguments[parameter.name] = SIZES[parameter.name]
        elif required:
            arguments[parameter.name] = 4 if "head" in parameter.name else N
    return cls(**arguments) if arguments else cls(*_sizes_for(cls))


def _sizes_for(cls: type[nn.Module]) -> tuple[int, ...]:
    parameters = inspect.signature(cls.__init__).parameters.values()
    return (N,) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else ()


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 2)


def inputs(module: nn.Module) -> torch.Tensor | None:
    """An fp32 input in the first layout that the class itself takes."""
    generator = torch.Generator().manual_seed(11)
    for shape in ((3, 5, N), (3, N, 4, 5), (3, N, 5), (3, 5, 4, N)):
        x = torch.randn(shape, generator=generator) * 3 + 1
        try:
            if module(x.clone()).shape == x.shape:
                return x
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue
    return None


def judge(name: str, group: str, cls: type[nn.Module]) -> Outcome | None:
    """Patch an instance and compare it with an unpatched copy; None: it cannot be constructed."""
    try:
        module = construct(cls)
    except CANNOT_CONSTRUCT:
        return None
    randomize(module)
    outcome = Outcome(name, group)
    original = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fastnorm.patch(module)
    if not report.patched or report.patched[0].name != "":
        outcome.reason = next((s.reason for s in report.skipped if s.name == ""), "not a norm")
        return outcome
    outcome.kind = report.patched[0].semantics
    x = inputs(original)
    assert x is not None, name
    for x_dtype in DTYPES:
        for w_dtype in DTYPES:
            ours, theirs = (copy.deepcopy(m).to(w_dtype) for m in (module, original))
            try:
                expected = theirs(x.to(x_dtype))
            except RuntimeError:
                continue
            outcome.pairs += 1
            actual = ours(x.to(x_dtype))
            if actual.dtype != expected.dtype or not torch.equal(actual, expected):
                outcome.wrong += f"{x_dtype} with {w_dtype}; "
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    judged = []
    for group, names in CATALOGUE["groups"].items():
        for name in names:
            path, class_name = name.split(":")
            try:
                module = importlib.import_module(f"transformers.models.{path}")
            except ModuleNotFoundError:
                continue
            cls = getattr(module, class_name, None)
            is_layer = isinstance(cls, type) and issubclass(cls, nn.Module)
            outcome = judge(class_name, group, cls) if is_layer else None
            if outcome is not None:
                judged.append(outcome)
    return judged


def of(outcomes: list[Outcome], groups: tuple[str, ...]) -> list[Outcome]:
    return [o for o in outcomes if o.group in groups]


def test_table(outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    table = rich_table.Table(title=f"norm classes of transformers {transformers.__version__}")
    for heading in ("group", "tried", "patched", "bit-equal", "refused", "kinds"):
        table.add_column(heading, justify="left" if heading in ("group", "kinds") else "right")
    for group in CATALOGUE["groups"]:
        members = of(outcomes, (group,))
        patched = [o for o in members if o.kind]
        kinds = ", ".join(sorted({o.kind for o in patched if o.kind}))
        exact = sum(not o.wrong for o in patched)
        counts = (len(members), len(patched), exact, len(members) - len(patched))
        table.add_row(group, *map(str, counts), kinds)
    with capsys.disabled():
        print()
        rich_console.Console(width=100).print(table)
    if transformers.__version__ == CATALOGUE["transformers"]:
        assert len(of(outcomes, KNOWN)) == 236, "every class of a known group can be constructed"


def test_every_class_of_a_known_kind_is_patched(outcomes: list[Outcome]) -> None:
    missed = [(o.name, o.reason) for o in of(outcomes, KNOWN) if o.kind is None]
    assert {name for name, _ in missed} <= NOT_OF_ITS_GROUP, missed
    wrong_kind = [o for o in of(outcomes, KNOWN) if o.kind and o.kind not in KINDS[o.group]]
    assert not wrong_kind


def test_patched_classes_give_their_own_bits(outcomes: list[Outcome]) -> None:
    """B51, B54, B72, B79: in every pair of dtypes that the class itself takes."""
    assert [(o.name, o.wrong) for o in outcomes if o.wrong] == []
    assert all(o.pairs >= 3 for o in outcomes if o.kind)


def test_no_look_alike_is_patched(outcomes: list[Outcome]) -> None:
    """B128: the eleven and eleven that compute something else, whatever they are called."""
    assert [(o.name, o.kind) for o in of(outcomes, LOOK_ALIKES) if o.kind] == []
    assert len(of(outcomes, LOOK_ALIKES)) >= 20
    assert all(o.reason for o in of(outcomes, LOOK_ALIKES))


def test_gated_norms_are_refused_with_the_reason(outcomes: list[Outcome]) -> None:
    gated = of(outcomes, ("RG",))
    assert len(gated) == 15
    assert Counter(o.reason for o in gated) == {"its forward takes further inputs: gate": 15}


def test_composites_and_other_layers_are_not_patched_themselves(outcomes: list[Outcome]) -> None:
    assert [(o.name, o.kind) for o in of(outcomes, ("AD", "NA")) if o.kind] == []


def test_group_size_decides_qwen4_exp() -> None:
    """One class, two functions: recognised by configuration, not by class."""
    module = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    plain, grouped = (module.Qwen4ExpTextRMSNorm(N, group_size=g) for g in (None, N // 4))
    assert fastnorm.patch(plain).counts() == {"rms_zero_centered": 1}
    assert len(fastnorm.patch(grouped)) == 0
