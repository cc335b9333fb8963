"""Where decision and compiler meet: decide, compile, accept or refuse and decide again. Caches and
counters live here."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fastnorm import device
from fastnorm.budget import resident_programs
from fastnorm.device import DeviceLimits
from fastnorm.plan import Decision, Plan, Rejection, decide
from fastnorm.problem import NormProblem

#: Spilled 32-bit words per thread that an accepted kernel may have. They cost: LayerNorm bf16 12288
#: with 8 warps and 46 spilled words takes 246 us, with none 200 us.
SPILL_TOLERANCE = 0

#: Stands for "the interpreter" where a device index is asked for.
INTERPRETER = -1


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiler's own figures for a plan: registers per thread, spilled words, shared bytes."""

    registers: int
    spills: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A decision after verification; `kernel` is launchable on the device it was made for, or None
    for torch."""

    decision: Decision
    kernel: Any = None
    figures: Compiled | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """How often each route ran since the last reset, by pass.

    Keys are "triton:<schedule>" or "torch". Where torch's autograd runs a whole norm (CPU tensors,
    transforms), the backward is counted when the forward hands it over.
    """

    forward: dict[str, int]
    backward: dict[str, int]


_counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
_verified: dict[tuple[NormProblem, int], Verified] = {}
_preferred: dict[tuple[NormProblem, int], str] = {}
_recorded: dict[NormProblem, int] | None = None
_lock = threading.Lock()


class Shortcut(Protocol):
    """What runs verified kernels past this module, once it has been told of them."""

    def forget(self) -> None: ...
    def pause(self, on: bool) -> None: ...
    def counts(self) -> list[tuple[str, str, int]]: ...
    def reset_counts(self) -> None: ...


_shortcut: Shortcut | None = None


def follow(shortcut: Shortcut | None) -> None:
    """Keep a shortcut in step: told when decisions change, asked for its counts. None: no more."""
    global _shortcut
    _shortcut = shortcut


def count(direction: str, route: str) -> None:
    """Record that a route ran."""
    _counts[direction][route] += 1


def stats() -> Stats:
    """Calls by pass and route since import or `reset_stats`."""
    total = {direction: Counter(counter) for direction, counter in _counts.items()}
    for direction, route, calls in _shortcut.counts() if _shortcut else ():
        total[direction][route] += calls
    return Stats(dict(total["forward"]), dict(total["backward"]))


def reset_stats() -> None:
    """Set all counters to zero."""
    for counter in _counts.values():
        counter.clear()
    if _shortcut:
        _shortcut.reset_counts()


def limits(index: int) -> DeviceLimits:
    """Limits of a CUDA device, or of the interpreter."""
    return device.interpreter_limits() if index == INTERPRETER else device.limits_for_device(index)


def kernel_for(problem: NormProblem, index: int, rows: int = 0) -> Any:
    """The verified `ForwardKernel` or `BackwardKernel` of a problem on a device, or None where
    torch runs it.

    Compiles at most once per problem and device; `rows` does not matter to it (see `recording`).
    """
    if (asked := _recorded) is not None:
        asked[problem] = max(rows, asked.get(problem, 0))
    found = _verified.get((problem, index))
    return (found or verified(problem, index)).kernel


@contextlib.contextmanager
def recording() -> Iterator[dict[NormProblem, int]]:
    """Problems that kernels are asked for inside a `with` block, with their most rows at once."""
    global _recorded
    previous, _recorded = _recorded, {}
    if _shortcut:
        _shortcut.pause(True)
    try:
        yield _recorded
    finally:
        _recorded = previous
        if _shortcut:
            _shortcut.pause(_recorded is not None)


def verified(problem: NormProblem, index: int) -> Verified:
    """As `kernel_for`, with the decision and the compiler's figures."""
    key = (problem, index)
    with _lock:
        if key in _verified:
            return _verified[key]
        limit = limits(index)
        if index != INTERPRETER and _capturing() and decide(problem, limit).plan is not None:
            warnings.warn(
                "fastnorm: a norm of this kind is first used while a CUDA graph is captured, "
                "where nothing can be compiled; the graph keeps torch's kernel. Run the model "
                "once before capturing it.",
                stacklevel=3,
            )
            return Verified(Decision(None, (), ("not compiled before graph capture",)))
        _verified[key] = _verify(problem, limit, index)
        return _verified[key]


def prefer(problem: NormProblem, index: int, choice: str) -> None:
    """Let a measured choice go first: a candidate as `Plan.describe` words it, or "torch"."""
    with _lock:
        _preferred[problem, index] = choice
        _forget(problem, index)


def _forget(problem: NormProblem, index: int) -> None:
    """Let the next call of a kind be decided anew."""
    _verified.pop((problem, index), None)
    if _shortcut:
        for direction, route, calls in _shortcut.counts():  # which it forgets, too
            _counts[direction][route] += calls
        _shortcut.forget()


def _capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def _verify(problem: NormProblem, limit: DeviceLimits, index: int) -> Verified:
    """Decide, compile, read the compiler's figures; on a refusal decide again without that
    candidate."""
    refused: list[Rejection] = []
    preferred = _preferred.get((problem, index), "")
    while True:
        decision = decide(problem, limit, tuple(refused), preferred)
        plan = decision.plan
        if plan is None:
            return Verified(decision)
        if index == INTERPRETER:
            return Verified(decision, _interpreted(plan, limit))
        try:
            outcome = build(plan, limit, index)
        except (FileNotFoundError, subprocess.CalledProcessError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "C compiler" not in str(error):
                raise
            reason = f"kernels cannot be built here: {error}"
            warnings.warn(f"fastnorm: {reason}; torch's kernels are used", stacklevel=4)
            return Verified(Decision(None, decision.rejections, (reason,)))
        if isinstance(outcome, Rejection):
            refused.append(outcome)
            continue
        return Verified(decision, *outcome)


def build(plan: Plan, limit: DeviceLimits, index: int) -> tuple[Any, Compiled] | Rejection:
    """Compile a plan and load it on a device; the kernel and its figures, or what refuses it."""
    import torch
    from triton.runtime.errors import OutOfResources

    compiled = compiled_or_refused(plan, limit)
    if isinstance(compiled, Rejection):
        return compiled
    with torch.cuda.device(index):
        try:
            compiled._init_handles()
        except OutOfResources as error:
            return Rejection(plan.describe(), f"{error.name} needed", error.required, error.limit)
        figures = Compiled(compiled.n_regs, compiled.n_spills, compiled.metadata.shared)
        refusal = check(plan, limit, figures)
        return refusal or (_launchable(plan, limit, index, compiled), figures)


def compiled_or_refused(plan: Plan, limit: DeviceLimits) -> Any | Rejection:
    """A plan compiled for a target, or refused, with a warning, because Triton fails on it."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    from fastnorm.kernels.compile import compile_plan

    try:
        return compile_plan(plan, limit.capability)
    except (CompilationError, PTXASError, RuntimeError) as error:
        if "C compiler" in str(error):
            raise
        warnings.warn(
            f"fastnorm: Triton failed on a kernel, another is tried ({plan.describe()}): {error}",
            stacklevel=5,
        )
        return Rejection(plan.describe(), "failures to compile", 1, 0)


def check(plan: Plan, limit: DeviceLimits, figures: Compiled) -> Rejection | None:
    """Hold the compiler's figures against the budget; what they break, or None."""
    name = plan.describe()
    if figures.spills > SPILL_TOLERANCE:
        return Rejection(name, "compiled spilled words", figures.spills, SPILL_TOLERANCE)
    if figures.shared_bytes > limit.shared_bytes_per_program:
        allowed = limit.shared_bytes_per_program
        return Rejection(name, "compiled shared bytes", figures.shared_bytes, allowed)
    fit = resident_programs(limit, plan.tiling.warps, figures.registers, figures.shared_bytes)
    needed = max(1, plan.programs_per_sm)
    if fit < needed:
        return Rejection(name, "compiled programs per SM", needed, fit)
    return None


def _launchable(plan: Plan, limit: DeviceLimits, index: int, compiled: Any) -> Any:
    from fastnorm.kernels import compile, launch

    if plan.problem.direction == "forward":
        return launch.forward_kernel(plan, limit.sm_count, index, compiled)
    finalize = None
    if not plan.cooperative and plan.problem.accumulators:
        finalize = compile.compile_finalize(plan, limit.capability)
        finalize._init_handles()
    return launch.backward_kernel(plan, limit.sm_count, index, compiled, finalize)


def _interpreted(plan: Plan, limit: DeviceLimits) -> Any:
    from fastnorm.kernels.interpret import InterpretedBackward, InterpretedForward

    forward = plan.problem.direction == "forward"
    return (InterpretedForward if forward else InterpretedBackward)(plan, limit.sm_count)
