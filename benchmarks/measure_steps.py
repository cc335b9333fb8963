"""A row of the end-to-end benchmark: train the variants in turn, check them, time and inspect."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fastnorm
from benchmarks.step_models import Workload, example
from benchmarks.steps import (
    BASE,
    PATCHED,
    Effort,
    Outcome,
    Refused,
    Row,
    Training,
    norm_layers,
    with_norms,
)
from benchmarks.timing import without_collection

# Compilation, allocation and the choice of kernels happen in the first; the clock settles.
WARM_UP_STEPS = 3
# Relative. The loss of an all-bf16 model is a bf16 number: its neighbours are 2^-8 to 2^-7 away.
LOSS_TOLERANCE = 2**-7


def measure_row(
    row: Row,
    workload: Workload,
    device: str,
    effort: Effort,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Outcome]:
    """Train all variants of a row from the same weights on the same data, and time their steps.

    Args:
        row: what is measured.
        workload: row.model's.
        device: "cuda" or "cpu".
        effort: how long.
        on_progress: told what comes next.

    Returns:
        An outcome for each of `row.variants`.

    Raises:
        Refused: the losses of patched and unpatched model differ, a loss is not finite, or on a
            GPU a norm of a patched model did not run on a kernel of fastnorm's.
    """
    # Earlier rows' compiled code counts towards dynamo's limit for each function.
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = workload.build(row.norm), workload.batch()
    mixed = row.precision == "bf16-mixed"
    if not mixed:
        model = model.bfloat16()
        batch = tuple(t.bfloat16() if t.is_floating_point() else t for t in batch)
    compiler = effort.compiler if row.mode == "compiled" else None
    outcomes = {variant: Outcome(len(norm_layers(model))) for variant in row.variants}
    trainings = {
        v: Training(with_norms(v, model), batch, mixed, compiler, row.backend(v)) for v in outcomes
    }
    del model
    for variant, training in trainings.items():
        on_progress(f"{row}: warm-up {variant}")
        outcomes[variant].first_loss = training.step().item()
    check_losses(outcomes)
    for variant, training in trainings.items():
        for _ in range(WARM_UP_STEPS - 1):
            training.step()
        inspect(training, outcomes[variant])
        if row.on_kernels(variant) and device == "cuda":
            check_routes(variant, outcomes[variant])
    on_progress(f"{row}: timing")
    losses = time_rounds(trainings, outcomes, effort)
    for variant, training in trainings.items():
        outcomes[variant].last_loss = losses[variant].item()
        if effort.profile and row.mode == "eager":
            outcomes[variant].norm_share = norm_share(training)
    check_finite(outcomes)
    return outcomes


def check_losses(outcomes: Mapping[str, Outcome]) -> None:
    """Raise unless every patched model starts from torch's loss."""
    check_finite(outcomes, "first_loss")
    base = outcomes[BASE].first_loss
    for variant in PATCHED:
        if variant in outcomes:
            loss = outcomes[variant].first_loss
            if abs(loss - base) > LOSS_TOLERANCE * abs(base):
                raise Refused(
                    f"{variant}: loss {loss:.6f} where torch's norms give {base:.6f}, from the "
                    f"same weights and data; at most {LOSS_TOLERANCE:.2%} apart was expected"
                )


def check_finite(outcomes: Mapping[str, Outcome], which: str = "last_loss") -> None:
    for variant, outcome in outcomes.items():
        if not math.isfinite(getattr(outcome, which)):
            raise Refused(f"{variant}: {which} is {getattr(outcome, which)}, not finite")


def check_routes(variant: str, outcome: Outcome) -> None:
    """Raise unless each norm of a step ran on a kernel, forward and backward."""
    for direction, calls in outcome.routes.items():
        ours = sum(n for route, n in calls.items() if route.startswith("triton:"))
        if ours != sum(calls.values()) or ours < outcome.norms:
            raise Refused(
                f"{variant}: {direction} of {outcome.norms} norms took the routes {calls}, "
                "expected Triton kernels only; python -m fastnorm explain says why not"
            )


def inspect(training: Training, outcome: Outcome) -> None:
    """Fill in the memory and the routes of one step."""
    fastnorm.reset_stats()
    if training.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training.step()
        outcome.memory_bytes = torch.cuda.max_memory_allocated() - before
    else:
        training.step()
    stats = fastnorm.stats()
    outcome.routes = {"forward": stats.forward, "backward": stats.backward}


def time_rounds(
    trainings: Mapping[str, Training], outcomes: Mapping[str, Outcome], effort: Effort
) -> dict[str, Tensor]:
    """Time the variants in turn, so that a drifting clock hits all alike.

    Within a round nothing waits for the device: a variant's first kernels are enqueued while the
    last ones of the variant before it run, so no time holds a start from an idle device.

    Returns:
        The last loss of each.
    """
    losses: dict[str, Tensor] = {}
    cuda = next(iter(trainings.values())).device.type == "cuda"
    gc.collect()
    with without_collection():
        for _ in range(effort.rounds):
            marks = [_mark(cuda)]
            for variant, training in trainings.items():
                for _ in range(effort.steps):
                    losses[variant] = training.step()
                marks.append(_mark(cuda))
            if cuda:
                torch.cuda.synchronize()
            for outcome, (start, end) in zip(outcomes.values(), pairwise(marks), strict=True):
                outcome.round_ms.append(_milliseconds(start, end) / effort.steps)
    return losses


def _mark(cuda: bool) -> torch.cuda.Event | float:
    """A point in time: of the current stream, or of the host."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float):
        return 1e3 * (end - start)
    return start.elapsed_time(end)


def norm_share(training: Training) -> float:
    """The norms' share of the device time of a step, by the names of kernels or operators."""
    step_profile, summary = example("step_profile"), example("summary")
    cuda = training.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(step_profile.STEPS):
            training.step()
        if cuda:
            torch.cuda.synchronize()
    times = step_profile.milliseconds(profiler, cuda)
    return sum(ms for name, ms in times.items() if summary.is_norm(name)) / sum(times.values())
