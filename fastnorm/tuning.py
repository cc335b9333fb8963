"""Measured choice, opt-in: time every candidate and torch, and keep the winner on disk.

The default plan needs none of this; tuning is for GPUs and shapes that nobody has measured.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastnorm import ops, routing
from fastnorm.operands import Rows
from fastnorm.plan import TORCH, Plan, candidates, over_budget, unsuitable
from fastnorm.problem import NormProblem

#: Where choices are kept unless told otherwise.
DEFAULT_CACHE = Path("~/.cache/fastnorm/tuned.json")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Tuned:
    """What was measured for one problem.

    Args:
        problem: one pass of one norm.
        rows: how many rows were timed.
        choice: the winner: a candidate in words, or "torch".
        microseconds: median time of each candidate and of torch.
        cached: the choice was found in the cache and nothing was timed.
    """

    problem: NormProblem
    rows: int
    choice: str
    microseconds: dict[str, float]
    cached: bool = False


def tune(
    model: nn.Module | None = None,
    *batch: Any,
    problems: dict[NormProblem, int] | None = None,
    cache: str | Path = DEFAULT_CACHE,
    again: bool = False,
) -> list[Tuned]:
    """Time candidates and torch for the norms of a model, or for given problems, and use the
    winners.

    Args:
        model: a model with fastnorm's norms (patched, or built from them), on a CUDA device.
        *batch: what the model is called with, once forward and once backward, to see which problems
            it poses (its gradients are left as they were).
        problems: instead of a model: problems and how many rows to time each with.
        cache: the JSON file that keeps winners per problem, GPU and versions.
        again: time also what the cache knows.

    Returns:
        One entry per problem that kernels may run. The choices are in force from now on in this
        process, on every GPU like the one that was timed (the model's, else the current one);
        another process takes them over by calling this with the same cache, which times nothing
        then.

    Raises:
        RuntimeError: there is no CUDA device.
        ValueError: neither or both of model and problems; or the model poses no problem.
    """
    if (model is None) == (problems is None):
        raise ValueError("give either a model and its batch, or problems=")
    if not torch.cuda.is_available():
        raise RuntimeError("tuning times kernels on a CUDA device, and there is none")
    if problems is None:
        assert model is not None
        problems = _problems_of(model, batch)
        if not problems:
            raise ValueError(
                "the model ran no norm of fastnorm's on a CUDA device; patch it and move it there"
            )
    index = _index_of(model)
    limit = routing.limits(index)
    alike = [i for i in range(torch.cuda.device_count()) if routing.limits(i) == limit]
    path = Path(cache).expanduser()
    known = _load(path)
    results = []
    for problem, rows in problems.items():
        if unsuitable(problem, limit):
            continue  # torch runs it: fp64, for one
        key = _key(problem, index)
        # Another version of fastnorm may have had other candidates.
        choices = {TORCH, *(plan.describe() for plan in candidates(problem, limit))}
        if key in known and known[key]["choice"] in choices and not again:
            result = Tuned(problem, rows, **known[key], cached=True)
        else:
            times = measure(problem, rows, index)
            result = Tuned(problem, rows, min(times, key=lambda name: times[name]), times)
            known[key] = {"choice": result.choice, "microseconds": result.microseconds}
        for i in alike:
            routing.prefer(problem, i, result.choice)
        results.append(result)
    _store(path, known)
    return results


def _index_of(model: nn.Module | None) -> int:
    """The GPU to time on: where the model's first parameter is, else the current one."""
    for p in () if model is None else model.parameters():
        if p.is_cuda:
            return p.device.index
    return torch.cuda.current_device()


def measure(problem: NormProblem, rows: int, index: int) -> dict[str, float]:
    """Median microseconds of torch and of every candidate that the compiler accepts."""
    limit = routing.limits(index)
    with torch.cuda.device(index):  # whose events are the clock
        operands, outputs = _operands(problem, rows, index)
        times = {TORCH: _time(_torch_call(problem, operands))}
        for plan in candidates(problem, limit):
            if over_budget(plan, limit) is None:
                built = routing.build(plan, limit, index)
                if isinstance(built, tuple):
                    times[plan.describe()] = _time(_kernel_call(plan, built[0], operands, outputs))
    return times


def _time(call: Callable[[], object]) -> float:
    import triton

    return 1e3 * triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")


def _operands(problem: NormProblem, rows: int, index: int) -> tuple[Rows, dict[str, Tensor]]:
    """Random operands that pose a problem, and room for its results."""
    where = torch.device("cuda", index)

    def randn(*shape: int, dtype: str) -> Tensor:
        return torch.randn(*shape, device=where).to(_DTYPES[dtype])

    n = problem.hidden
    x, dy = randn(rows, n, dtype=problem.x_dtype), randn(rows, n, dtype=problem.y_dtype)
    weight = None if problem.weight_dtype is None else randn(n, dtype=problem.weight_dtype)
    bias = None if problem.bias_dtype is None else randn(n, dtype=problem.bias_dtype)
    operands = Rows(problem, x, n, dy, n, weight, bias, rows)
    stats = torch.ones(2, rows, device=where)
    return operands, {"stats": stats, "y": dy.clone(), "dx": x.clone()}


def _torch_call(problem: NormProblem, o: Rows) -> Callable[[], object]:
    """torch's route of a problem, as the operators would take it."""
    if problem.direction == "forward":
        dtype = _DTYPES[problem.y_dtype]
        return lambda: ops.torch_forward(o.x, o.weight, o.bias, 1, 1e-5, problem.semantics, dtype)
    mask = (problem.needs_dx, problem.needs_dw, problem.needs_db)
    stats = torch.ones(2, o.rows, device=o.x.device)
    return lambda: ops.torch_backward(
        o.dy, o.x, o.weight, o.bias, stats, 1, problem.semantics, mask
    )


def _kernel_call(
    plan: Plan, kernel: Any, o: Rows, outputs: dict[str, Tensor]
) -> Callable[[], object]:
    p = plan.problem
    if p.direction == "forward":
        return lambda: kernel(o, 1e-5, outputs["y"], outputs["stats"])
    dx = outputs["dx"] if p.needs_dx else None
    dw = None if o.weight is None or not p.needs_dw else torch.empty_like(o.weight)
    db = None if o.bias is None or not p.needs_db else torch.empty_like(o.bias)
    return lambda: kernel(o, outputs["stats"], dx, dw, db)


def _problems_of(model: nn.Module, batch: tuple[Any, ...]) -> dict[NormProblem, int]:
    """Problems that one forward and backward of the model pose, with their largest row counts."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    try:
        with routing.recording() as asked:
            output = model(*batch)
            tensors = [t for t in _tensors(output) if t.requires_grad]
            if tensors:
                torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
    finally:
        for name, p in model.named_parameters():
            p.grad = grads[name]
    return asked


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _key(problem: NormProblem, index: int) -> str:
    """A problem on a GPU under these versions: what a choice holds for."""
    limit = routing.limits(index)
    gpu = [limit.name, limit.target, limit.sm_count]
    versions = [torch.__version__, routing.device.triton_version()]
    return json.dumps([*gpu, *versions, *problem])


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not the JSON that tune() writes ({error}); delete it"
        ) from None
    if not isinstance(known, dict):
        raise ValueError(f"{path} holds a {type(known).__name__}, expected an object; delete it")
    return known


def _store(path: Path, known: dict[str, Any]) -> None:
    """Replace the file in one step: another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(known, file, indent=1)
    os.replace(name, path)
