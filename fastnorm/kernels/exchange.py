"""How programs of one launch meet: a grid barrier, and sums exchanged between programs of a row."""

from __future__ import annotations

import triton
import triton.language as tl

#: Steps whose sums may be under way at once. A program publishes one step ahead of what it has
#: collected, and learns from a partner's sums of step i only that the partner is done with i - 2.
RING = tl.constexpr(4)


@triton.jit
def grid_barrier(semaphore_ptr, program, P):
    """Wait until all P co-resident programs have arrived. Needs a cooperative launch.

    `semaphore_ptr` [1] int32. Program 0 adds 2^31 - (P - 1) and the others 1, so the top bit flips
    as the last one arrives and the rest is zero again: the next launch may use the word as it is,
    whatever its grid.
    """
    tl.debug_barrier()
    step = tl.where(program == 0, (2147483647 - P) + 2, 1)
    before = tl.atomic_add(semaphore_ptr, step, sem="acq_rel", scope="gpu")
    while (tl.atomic_add(semaphore_ptr, 0, sem="acquire", scope="gpu") ^ before) >= 0:
        pass
    tl.debug_barrier()


@triton.jit
def publish(slot_ptr, value, tag):
    """Write an fp32 value and its tag as one 64-bit word: whoever sees the tag has the value."""
    bits = value.to(tl.int32, bitcast=True).to(tl.uint32).to(tl.int64)
    tl.atomic_xchg(slot_ptr, (tag.to(tl.int64) << 32) | bits, sem="relaxed", scope="gpu")


@triton.jit
def peek(slots_ptr, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """What partners have published so far, whether or not it is there yet.

    One element for each thread at least: were the same element held by several warps, Triton would
    take their copies for equal, which loads at different times are not.
    """
    COPIES: tl.constexpr = max(1, 32 * WARPS // COUNT)
    return tl.load(slots_ptr + tl.arange(0, COPIES * COUNT) % COUNT, volatile=True)


@triton.jit
def collect(words, slots_ptr, tag, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """Wait until all words of all copies carry the tag; their values, fp32 [COUNT]."""
    COPIES: tl.constexpr = max(1, 32 * WARPS // COUNT)
    while tl.max(((words >> 32) != tag).to(tl.int32), 0) > 0:
        words = peek(slots_ptr, COUNT, WARPS)
    values = words.to(tl.int32).to(tl.float32, bitcast=True)
    if COPIES > 1:
        # Equal by now, whichever is taken.
        values = tl.max(tl.reshape(values, [COPIES, COUNT]), 0)
    return values


@triton.jit
def leave_clean(slots_ptr, part, SLOTS: tl.constexpr, SPLIT: tl.constexpr):
    """Zero a program's own words. Only behind a barrier: everybody must have read everything."""
    for slot in tl.static_range(SLOTS):
        tl.store(slots_ptr + slot * SPLIT + part, 0)
