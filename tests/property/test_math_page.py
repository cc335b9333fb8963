"""docs/math.md: what the code points to is there, and what it proves holds."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import fastnorm
from fastnorm.semantics import SEMANTICS
from tests.conftest import Route

PACKAGE = Path(fastnorm.__file__).parent
ROOT = PACKAGE.parent
if not (ROOT / "docs").is_dir():
    pytest.skip("documents come with a checkout only", allow_module_level=True)


def pointers() -> list[tuple[str, str, str]]:
    """(file, page, section) of every docs/page.md, "Section" in the package; "" for a whole
    page."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = re.sub(r"\s+(#:?\s+)?", " ", path.read_text(encoding="utf-8"))
        for page, section in re.findall(r'(docs/\w+\.md)(?:, "([^"]+)")?', text):
            found.append((path.relative_to(PACKAGE).as_posix(), page, section))
    return found


@pytest.mark.parametrize("file, page, section", pointers())
def test_what_the_code_points_to_is_there(file: str, page: str, section: str) -> None:
    if page == "docs/performance.md" and not (ROOT / page).exists():
        pytest.skip("written from a benchmark's results, which are not there yet")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings
    assert not section or section in headings


def test_pointers_are_found() -> None:
    assert ("kernels/split_backward.py", "docs/math.md", "Split rows") in pointers()
    assert ("kernels/finalize.py", "docs/math.md", "Partials") in pointers()  # over two lines


def test_every_kind_is_on_the_page_with_its_output() -> None:
    page = (ROOT / "docs/math.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (x|promoted)\b[^|]*\|$", page, re.MULTILINE)
    assert dict(rows) == {
        name: "x" if kind.output == "input" else "promoted" for name, kind in SEMANTICS.items()
    }


Position = tuple[int, int]  # (step, words collected in it)


def lets_a_sum_be_overwritten(ring: int, programs: int, steps: int) -> bool:
    """Whether some interleaving of a split row's programs overwrites a sum that is still awaited.

    In step i a program publishes its sum i to slot i mod ring, then reads the partners' sums
    i - 1 one by one, and all of them again when one was not there yet.
    """
    start: tuple[Position, ...] = ((-1, programs),) * programs
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        moves = []
        for me, (step, words) in enumerate(state):
            if words == programs:
                if step < steps:
                    moves.append((me, (step + 1, programs if step < 0 else 0)))
                continue
            published = state[words][0]
            in_slot = published - (published - (step - 1)) % ring
            if in_slot > step - 1:
                return True
            moves.append((me, (step, words + 1 if in_slot == step - 1 else 0)))
        progress = [(me, to) for me, to in moves if to != state[me]]
        assert progress or all(at == (steps, programs) for at in state), f"all wait in {state}"
        for me, to in progress:
            after = (*state[:me], to, *state[me + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return False


@pytest.mark.parametrize("programs", [2, 3])
def test_the_ring_is_as_small_as_is_safe(programs: int) -> None:
    pytest.importorskip("triton")
    from fastnorm.kernels.exchange import RING

    steps = 3 * RING.value
    assert not lets_a_sum_be_overwritten(RING.value, programs, steps)
    assert lets_a_sum_be_overwritten(RING.value - 1, programs, steps)


@given(
    programs=st.integers(1, 4096),
    place=st.integers(0, 4095),
    flipped=st.booleans(),
    launches=st.integers(1, 3),
)
def test_the_barrier_opens_with_the_last_arrival(
    programs: int, place: int, flipped: bool, launches: int
) -> None:
    """The word as `grid_barrier` adds to it, program 0 arriving at any place among the others."""
    word = flipped << 31
    for _ in range(launches):
        before = word
        for arrival in range(programs):
            assert (word ^ before) >> 31 == 0, "open before all have arrived"
            first = arrival == place % programs
            word = (word + (2**31 - (programs - 1) if first else 1)) % 2**32
        assert (word ^ before) >> 31 == 1
        assert word % 2**31 == 0


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_feature_is_its_own_mean(
    shape: tuple[int, ...], dtype: torch.dtype, route: Route
) -> None:
    """B49: y = bias and no gradient reaches x or the weight, however large x is."""
    x = torch.linspace(-1e6, 1e6, 64, device=route.device).to(dtype).view(64, *shape)
    weight, bias = (torch.full(shape, v, device=route.device, dtype=dtype) for v in (2.7, 3.1))
    for t in (x, weight, bias):
        t.requires_grad_()
    y = fastnorm.layer_norm(x, shape, weight, bias)
    assert torch.equal(y, bias.expand_as(y))
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), torch.full_like(y, 0.5))
    assert not dx.any() and not dw.any()
    assert torch.equal(db, torch.full_like(db, 32.0))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("first", [1, 12, 140, 300])
def test_rows_have_the_same_bits_in_any_chunk_of_the_batch(
    kind: str, first: int, route: Route
) -> None:
    """B14: dw and db of the chunks add up to the whole's within rounding only."""
    draw = torch.Generator().manual_seed(first)
    x, dy = torch.randn(2, 301, 100, generator=draw).to(route.device)
    parameters = torch.randn(2, 100, generator=draw).to(route.device)

    def results(rows: slice) -> list[torch.Tensor]:
        given = [
            t.clone().requires_grad_() for t in (x[rows], *parameters[: 1 + (kind == "layer")])
        ]
        with route.counted():
            y = fastnorm.functional.norm(given[0], (100,), *given[1:], semantics=kind)
            return [y.detach(), *torch.autograd.grad(y, given, dy[rows])]

    whole, chunks = results(slice(None)), [results(slice(first)), results(slice(first, None))]
    for name, all_rows, *parts in zip(("y", "dx", "dw", "db"), whole, *chunks, strict=False):
        if name in ("y", "dx"):
            assert torch.equal(all_rows, torch.cat(parts)), name
        else:
            torch.testing.assert_close(sum(parts), all_rows, rtol=1e-5, atol=1e-4)
