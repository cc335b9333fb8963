"""Answering what runs a norm and why: for a layer and an input, or for a described problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fastnorm import device, operands, ops, reference, routing
from fastnorm.autocast import result_dtype
from fastnorm.device import DeviceLimits, limits_for_target
from fastnorm.explanation import Alternative, Explanation, Pass
from fastnorm.modules import LayerNorm, RMSNorm
from fastnorm.offline import verify_offline
from fastnorm.patching.recipe import Recipe, Refusal
from fastnorm.patching.recognition import exact_recipe, recognise
from fastnorm.patching.swap import FastNormMixin
from fastnorm.plan import Plan, candidates, over_budget
from fastnorm.problem import ITEM_SIZE, NormProblem, stride_unit
from fastnorm.routing import Compiled
from fastnorm.semantics import SEMANTICS, Semantics


def explain(
    module: nn.Module | None = None,
    input: Tensor | None = None,
    *,
    hidden: int | None = None,
    dtype: str | torch.dtype = "bf16",
    norm: Literal["layer", "rms"] | str = "layer",
    rows: int | None = None,
    target: str | None = None,
    weight_dtype: str | torch.dtype | None = None,
) -> Explanation:
    """Say what runs a norm and why, for a layer and an input or for a described problem.

    Args:
        module: a norm layer (`fastnorm.LayerNorm`, `RMSNorm`, a patched layer or torch's own).
        input: what it is called with, `[..., N]`; only its shape, strides, dtype and device count.
        hidden: N, where no module is given.
        dtype: of the input: "bf16", "fp16", "fp32" or torch's.
        norm: "layer", "rms" or another key of `fastnorm.semantics.SEMANTICS`.
        rows: how many rows, for the size of the launch; optional.
        target: "sm_90" and the like: plan for that GPU, compile for it, no GPU needed. Default: the
            input's device, or the current GPU, or sm_90.
        weight_dtype: of weight and bias; default: the input's.

    Returns:
        The decision for forward and backward, with predicted and compiled figures.

    Raises:
        ValueError: neither or both of module and hidden, or a value that is not known.
    """
    if (module is None) == (hidden is None):
        raise ValueError("give either a module with an input, or hidden=")
    if module is not None:
        if input is None:
            raise ValueError("give the module's input as well: explain(module, input)")
        return _explain_call(module, input, target)
    assert hidden is not None
    if hidden < 1:
        raise ValueError(f"hidden must be at least 1, got {hidden}")
    if rows is not None and rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    if norm not in SEMANTICS:
        raise ValueError(f"norm must be one of {', '.join(SEMANTICS)}, got {norm!r}")
    x = _dtype_name(dtype)
    weight = x if weight_dtype is None else _dtype_name(weight_dtype)
    y = _name_of_result(x, weight, SEMANTICS[norm])
    bias = weight if norm == "layer" else None
    unit = stride_unit(hidden)
    forward = NormProblem("forward", norm, hidden, x, y, weight, bias, False, False, False, unit)
    backward = NormProblem(
        "backward", norm, hidden, x, y, weight, bias, True, True, bias is not None, unit
    )
    return _explain_problems(forward, backward, rows, *_place(target, None))


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _dtype_name(dtype: str | torch.dtype) -> str:
    if isinstance(dtype, torch.dtype):
        return operands.name_of(dtype)
    if dtype not in ITEM_SIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_SIZE)}, got {dtype!r}")
    return dtype


def _name_of_result(x: str, weight: str, kind: Semantics) -> str:
    if x not in _DTYPES or weight not in _DTYPES:
        return x
    return operands.name_of(reference.result_dtype(_DTYPES[x], _DTYPES[weight], kind))


def _place(target: str | None, index: int | None) -> tuple[DeviceLimits, int | None]:
    """Limits to plan with, and the device to load on (None: only compile)."""
    if target is not None:
        return limits_for_target(target), None
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    if index is not None:
        return device.limits_for_device(index), index
    return limits_for_target("sm_90"), None


def _explain_call(module: nn.Module, input: Tensor, target: str | None) -> Explanation:
    """The decision for a layer as it would be called."""
    recipe = _recipe(module)
    asked: list[Any] = []

    def norm(x: Tensor, *rest: Any) -> Tensor:
        asked[:] = (x, *rest)
        return x

    recipe.run(module, input.detach(), norm)
    x, shape, weight, bias, _ = asked
    kind = SEMANTICS[recipe.kind(input)]
    backend, autocast_output = None, recipe.autocast_output
    if isinstance(module, (LayerNorm, RMSNorm)):
        backend, autocast_output = module.backend, module.autocast_output
    y_dtype = result_dtype(x, weight, kind, autocast_output)
    hidden = operands.hidden_size(x, len(shape))
    with torch.no_grad():
        forward = operands.forward_rows(x, weight, bias, hidden, kind.name, y_dtype).problem
        mask = (True, weight is not None, bias is not None)
        dy = torch.empty(x.shape, dtype=y_dtype, device=x.device)
        backward = operands.backward_rows(dy, x, weight, bias, hidden, kind.name, mask).problem
    if not x.numel():
        raise ValueError(f"the input is empty, of size {list(input.shape)}: no kernel runs on it")
    rows = x.numel() // hidden
    if target is None:
        reason = ops.why_torch(x, weight, hidden)
    else:
        reason = ops.why_torch_anywhere(weight, hidden)
    if backend == "torch":
        reason = 'the layer has backend="torch"'
    if reason:
        return _torch_only(forward, backward, rows, target or str(x.device), reason)
    if target is None and not x.is_cuda:
        interpreter = device.interpreter_limits(), routing.INTERPRETER
        return _explain_problems(forward, backward, rows, *interpreter)
    return _explain_problems(forward, backward, rows, *_place(target, x.device.index))


def _recipe(module: nn.Module) -> Recipe:
    """What a layer computes and from which of its attributes; patching need not have happened."""
    if isinstance(module, FastNormMixin):
        return module._fastnorm_recipe
    if isinstance(module, (LayerNorm, RMSNorm)):
        torch_class = nn.LayerNorm if isinstance(module, LayerNorm) else nn.RMSNorm
        return cast(Recipe, exact_recipe(torch_class))
    recipe = recognise(module)
    if isinstance(recipe, Recipe):
        return recipe
    why = recipe.reason if isinstance(recipe, Refusal) else "it is not a norm layer"
    raise ValueError(
        f"{type(module).__name__} cannot be explained: {why}. "
        "fastnorm.register(cls, semantics=...) teaches fastnorm a class"
    )


def _torch_only(
    forward: NormProblem, backward: NormProblem, rows: int, place: str, reason: str
) -> Explanation:
    passes = tuple(
        Pass(p.direction, "torch", "", 0, None, None, 0, _torch_bytes(p, rows), 0, (reason,))
        for p in (forward, backward)
    )
    return Explanation(forward.semantics, forward.hidden, rows, _dtypes_of(forward), place, passes)


def _dtypes_of(p: NormProblem) -> dict[str, str | None]:
    return {"input": p.x_dtype, "output": p.y_dtype, "weight": p.weight_dtype, "bias": p.bias_dtype}


def _explain_problems(
    forward: NormProblem,
    backward: NormProblem,
    rows: int | None,
    limits: DeviceLimits,
    index: int | None,
) -> Explanation:
    passes = tuple(_explain_pass(p, rows, limits, index) for p in (forward, backward))
    place = f"{limits.name} ({limits.target})"
    return Explanation(forward.semantics, forward.hidden, rows, _dtypes_of(forward), place, passes)


def _explain_pass(
    problem: NormProblem, rows: int | None, limits: DeviceLimits, index: int | None
) -> Pass:
    if index is not None:
        found = routing.verified(problem, index)
        decision, figures = found.decision, found.figures
    else:
        decision, figures = verify_offline(problem, limits)
    plan = decision.plan
    programs = plan.grid(rows, limits.sm_count) if plan is not None and rows else 0
    partials = 0
    if plan is not None and problem.direction == "backward":
        partials = 4 * problem.accumulators * problem.hidden * plan.partial_rows(programs)
    return Pass(
        problem.direction,
        "torch" if plan is None else plan.route,
        "" if plan is None else plan.describe(),
        programs,
        None if plan is None else _predicted(plan),
        figures,
        0 if plan is None else (rows or 0) * problem.bytes_per_row(),
        _torch_bytes(problem, rows or 0),
        partials,
        decision.reasons,
        tuple(str(r) for r in decision.rejections),
        () if plan is None else tuple(_alternatives(plan, limits)),
    )


def _torch_bytes(problem: NormProblem, rows: int) -> int:
    """Bytes that torch's kernels move: dweight and dbias read x and dy a second time."""
    if problem.x_dtype not in ITEM_SIZE or problem.y_dtype not in ITEM_SIZE:
        return 0
    again = problem.direction == "backward" and problem.needs_dx and problem.accumulators > 0
    inputs = ITEM_SIZE[problem.x_dtype] + ITEM_SIZE[problem.y_dtype]
    return rows * (problem.bytes_per_row() + (inputs * problem.hidden if again else 0))


def _alternatives(chosen: Plan, limits: DeviceLimits) -> Iterator[Alternative]:
    """The candidates after the chosen one."""
    later = False
    for plan in candidates(chosen.problem, limits):
        if later:
            refusal = over_budget(plan, limits)
            yield Alternative(plan.schedule, plan.describe(), str(refusal) if refusal else "")
        later = later or plan == chosen


def _predicted(plan: Plan) -> Compiled:
    use = plan.footprint
    return Compiled(use.registers, 0, use.shared_bytes)
