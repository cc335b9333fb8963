"""Gate, then time: one measurement, the loop over all of them, and compilation ahead of both."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
from benchmarks.timing import device_time, enqueue_time, host_time

# What a provider may raise at a shape it does not serve; its own types are in `Provider.errors`.
SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError)
# Nothing of these is compiled at run time.
PRECOMPILED = ("torch", "apex", "apex-fast")
# Seconds without any compilation ending after which a process must have died or hung.
PATIENCE = 180.0


@dataclass(frozen=True)
class Outcome:
    """What came of one provider at one case; `us` is None unless `correct` is "1", and
    `enqueue_us`, the host's part, unless `us` is a device's time."""

    case: Case
    provider: str
    us: float | None
    correct: str
    reason: str = ""
    enqueue_us: float | None = None


def pairs(cases: Sequence[Case], providers: Sequence[Provider]) -> list[tuple[Case, Provider]]:
    """What there is to measure: every case with every provider that has its op and norm."""
    return [(case, p) for case in cases for p in providers if p.offers(case)]


def measure_all(
    cases: Sequence[Case],
    providers: Sequence[Provider],
    clock: Callable[[Case, Call], float],
    device: str = "cuda",
    deadline: float = float("inf"),
    given_up: Collection[tuple[Case, str]] = (),
) -> Iterator[Outcome]:
    """Measure case by case, all providers of a case one after the other on the same tensors.

    Args:
        cases: as `build_cases` orders them, so that ops of one shape share its tensors.
        providers: in the order they are timed.
        clock: times a call, in microseconds.
        device: where the tensors are.
        deadline: `time.monotonic()` after which nothing more is started.
        given_up: (case, provider name) pairs whose compilation did not end in time; compiling them
            here would hold up all the rest.
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
                if (case, provider.name) in given_up:
                    yield Outcome(
                        case, provider.name, None, "error:TimeoutError", "still compiling"
                    )
                else:
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
        us = clock(case, call)
        on_device = inputs.x.is_cuda and case.op != "host"
        enqueue_us = enqueue_time(call) if on_device else None
        return Outcome(case, provider.name, us, "1", enqueue_us=enqueue_us)
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


def to_compile(cases: Sequence[Case], providers: Sequence[Provider]) -> list[tuple[Case, str]]:
    """The pairs worth compiling ahead, provider by provider: whoever is slow delays itself."""
    names = [p for p in providers if p.name not in PRECOMPILED]
    device_cases = [case for case in cases if case.op != "host"]
    return [(case, p.name) for p in names for case in device_cases if p.offers(case)]


def precompile(
    tasks: Sequence[tuple[Case, str]],
    flash_attn_file: Path | None,
    jobs: int,
    deadline: float = float("inf"),
) -> Iterator[tuple[Case, str]]:
    """Fill the compilers' caches on disk from several processes, so the run itself only loads.

    What fails here fails again, and is recorded, when it is measured.

    Args:
        tasks: from `to_compile`.
        flash_attn_file: as `load` takes it.
        jobs: processes.
        deadline: `time.monotonic()` at which the rest is given up and its processes ended; so it
            is where nothing ends for `PATIENCE` seconds.

    Yields:
        Each task that has ended, in the order they end.
    """
    with get_context("spawn").Pool(jobs) as pool:
        ended = pool.imap_unordered(_run_once, [(*task, flash_attn_file) for task in tasks])
        for _ in tasks:
            try:
                yield ended.next(min(PATIENCE, max(0.0, deadline - time.monotonic())))
            except multiprocessing.TimeoutError:
                return


@cache
def _provider(name: str, flash_attn_file: Path | None) -> Provider | None:
    loaded = load([name], flash_attn_file).providers
    return loaded[0] if loaded else None


def _run_once(task: tuple[Case, str, Path | None]) -> tuple[Case, str]:
    case, name, flash_attn_file = task
    provider = _provider(name, flash_attn_file)
    if provider is not None:
        try:
            torch.cuda.empty_cache()
            provider.build(case, make_inputs(case, "cuda"))()
            torch.cuda.synchronize()
        except raised_by(provider):
            pass
    return case, name
