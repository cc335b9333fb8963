"""Clocks: device time with a cold L2, copy bandwidth, and host time of an eager training step."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

# Bytes of each buffer of the bandwidth copy: far beyond any L2, 1 ms a copy on an H200.
COPY_BYTES = 2 << 30


def device_time(call: Callable[[], object], milliseconds: int) -> float:
    """Median device time of a call in microseconds, L2 flushed before each.

    Args:
        call: enqueues the work on the current stream.
        milliseconds: how long to repeat it, flushes included.
    """
    from triton.testing import do_bench

    return 1e3 * do_bench(call, warmup=25, rep=milliseconds, return_mode="median")


def flush_time(milliseconds: int = 20) -> float:
    """Device time in microseconds of the flush that `device_time` puts before each call: what the
    host has to enqueue the call in. A host that is slower is timed in place of the device."""
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    return device_time(lambda: driver.active.clear_cache(cache), milliseconds)


def enqueue_time(
    call: Callable[[], object],
    calls: int = 20,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> float:
    """Host time in microseconds to enqueue a call, the device not waited for.

    Args:
        call: enqueues the work on the current stream.
        calls: how many in a row; few, so that the device's queue does not fill up.
        synchronize: waits for the device, before and after.
    """
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return 1e6 * elapsed / calls


def copy_bandwidth(milliseconds: int = 300) -> float:
    """Bytes a second, read plus written, of a large device-to-device copy: the practical roof."""
    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    microseconds = device_time(lambda: target.copy_(source), milliseconds)
    return 2 * size / (microseconds * 1e-6)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside a `with` block, where it would be part of some times only."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def host_time(
    call: Callable[[], object],
    iterations: int = 1000,
    repeats: int = 7,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> float:
    """Host time of a call in microseconds: median over repeats of a mean over iterations.

    The device is waited for once, after the last iteration, so what is measured is how fast the
    host can enqueue: meaningful where the device needs less than the host.

    Args:
        call: one iteration.
        iterations: calls between two readings of the clock.
        repeats: readings.
        synchronize: waits for the device.
    """
    for _ in range(max(10, iterations // 10)):
        call()
    synchronize()
    means = []
    with without_collection():
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(iterations):
                call()
            synchronize()
            means.append((time.perf_counter() - start) / iterations)
    return 1e6 * statistics.median(means)
