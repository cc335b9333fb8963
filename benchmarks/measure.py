"""Gate, then time: one measurement, the loop over all of them, and compilation ahead of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.gate import Gate, poison_free_memory
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.provider import Call, Provider
from benchmarks.providers import load, load_torch
from benchmarks.shapes import Case
from benchmarks.timing import device_time, host_time

# What a provider may raise at a shape it does not serve; its own types are in `Provider.errors`.
SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError)
# Nothing of these is compiled at run time.
PRECOMPILED = ("torch", "apex", "apex-fast")


@dataclass(frozen=True)
class Outcome:
    """What came of one provider at one case; `us` is None unless `correct` is "1"."""

    case: Case
    provider: str
    us: float | None
    correct: str
    reason: str = ""


def pairs(cases: Sequence[Case], providers: Sequence[Provider]) -> list[tuple[Case, Provider]]:
    """What there is to measure: every case with every provider that has its op and norm."""
    return [(case, p) for case in cases for p in providers if p.offers(case)]


def measure_all(
    cases: Sequence[Case],
    providers: Sequence[Provider],
    clock: Callable[[Case, Call], float],
    device: str = "cuda",
    deadline: float = float("inf"),
) -> Iterator[Outcome]:
    """Measure case by case, all providers of a case one after the other on the same tensors.

    Args:
        cases: as `build_cases` orders them, so that ops of one shape share its tensors.
        providers: in the order they are timed.
        clock: times a call, in microseconds.
        device: where the tensors are.
        deadline: `time.monotonic()` after which nothing more is started.
    """
    native = load_torch()
    for _, group in groupby(cases, key=lambda c: (c.norm, c.dtype, c.rows, c.hidden)):
        inputs = None
        for case in group:
            if time.monotonic() > deadline:
                return
            inputs = inputs or make_inputs(case, device)
            gate = Gate(case.op, inputs, native.build(case, inputs)())
            for _, provider in pairs([case], providers):
                if time.monotonic() > deadline:
                    return
                yield measure(case, provider, inputs, gate, clock)


def measure(
    case: Case,
    provider: Provider,
    inputs: Inputs,
    gate: Gate,
    clock: Callable[[Case, Call], float],
) -> Outcome:
    """Check one provider's outputs and, where they pass, time it."""
    try:
        call = provider.build(case, inputs)
        poison_free_memory(inputs)
        # The first call: some providers overwrite their copy of dy in every later one.
        verdict = gate.check(call())
        if not verdict.passed:
            return Outcome(case, provider.name, None, "0", verdict.reason)
        return Outcome(case, provider.name, clock(case, call), "1")
    except raised_by(provider) as error:
        outcome = Outcome(case, provider.name, None, f"error:{type(error).__name__}", _brief(error))
    if inputs.x.is_cuda:
        # Raises again if the error has broken the CUDA context: no later time could be trusted.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return outcome


def raised_by(provider: Provider) -> tuple[type[Exception], ...]:
    """The exceptions of a provider that make a line of the CSV; any other ends the run."""
    return (*SHAPE_ERRORS, *provider.errors)


def gpu_clock(milliseconds: int) -> Callable[[Case, Call], float]:
    """Host time for "host", device time with a cold L2 for every other op."""

    def clock(case: Case, call: Call) -> float:
        return host_time(call) if case.op == "host" else device_time(call, milliseconds)

    return clock


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def precompile(
    cases: Sequence[Case],
    names: Sequence[str],
    flash_attn_file: Path | None,
    jobs: int,
) -> Iterator[str]:
    """Fill the compilers' caches on disk from several processes, so the run itself only loads.

    What fails here fails again, and is recorded, when it is measured.

    Yields:
        A line for each (case, provider) done, or one that says why the rest was left.
    """
    tasks = [
        (case, name)
        for case in cases
        for name in names
        if case.op != "host" and name not in PRECOMPILED
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(_run_once, case, name, flash_attn_file): f"{name} {case}"
            for case, name in tasks
        }
        for future in as_completed(futures):
            if isinstance(future.exception(), BrokenProcessPool):
                yield "a compiling process died; what is left compiles as it is measured"
                return
            yield futures[future]


@cache
def _provider(name: str, flash_attn_file: Path | None) -> Provider | None:
    loaded = load([name], flash_attn_file).providers
    return loaded[0] if loaded else None


def _run_once(case: Case, name: str, flash_attn_file: Path | None) -> None:
    provider = _provider(name, flash_attn_file)
    if provider is None or not provider.offers(case):
        return
    try:
        torch.cuda.empty_cache()
        provider.build(case, make_inputs(case, "cuda"))()
        torch.cuda.synchronize()
    except raised_by(provider):
        return
