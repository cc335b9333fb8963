"""The budget proof: what decision and verification accept compiles with no spills and fits, for
GPUs that are not here."""

from __future__ import annotations

import pytest

from fastnorm.device import limits_for_target
from fastnorm.offline import verify_offline
from fastnorm.problem import NormProblem, stride_unit

pytest.importorskip("triton")

POWERS = [2**k for k in range(15)]
HIDDEN = sorted(
    {
        *POWERS,
        *(n - 1 for n in POWERS[1:]),
        *(n + 1 for n in POWERS[:-1]),
        *(768, 1536, 2560, 3072, 5120, 6144, 10240, 12288, 14336),
    }
)
GRID = [
    (direction, norm, dtype, hidden, target)
    for target in ("sm_80", "sm_90", "sm_100")
    for direction in ("backward", "forward")
    for dtype in ("bf16", "fp16", "fp32")
    for norm in ("layer", "rms")
    for hidden in HIDDEN
]
#: Where registers or shared memory are scarcest.
TIGHT = [
    ("backward", norm, dtype, hidden, target)
    for hidden, dtype in ((4096, "bf16"), (12288, "bf16"), (16384, "bf16"), (14336, "fp32"))
    for norm in ("layer", "rms")
    for target in ("sm_80", "sm_90", "sm_100")
]
#: 29 is coprime to the grid's dimensions, so the part visits every value of each of them.
PART = sorted({*GRID[::29], *TIGHT}, key=GRID.index)
#: Candidates that the compiler may refuse before one passes: the model must not be far off.
MOST_REFUSALS = 4


def problem_of(direction: str, norm: str, dtype: str, hidden: int) -> NormProblem:
    """All parameters, all gradients, contiguous rows."""
    bias = dtype if norm == "layer" else None
    asked = direction == "backward"
    unit = stride_unit(hidden)
    return NormProblem(
        direction, norm, hidden, dtype, dtype, dtype, bias, asked, asked, asked and bool(bias), unit
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = GRID if metafunc.config.getoption("--full") else PART
    metafunc.parametrize("cell", cells, ids=["-".join(map(str, c)) for c in cells])


def test_accepted_plans_compile_without_spills_and_fit(
    cell: tuple[str, str, str, int, str],
) -> None:
    *described, target = cell
    limits = limits_for_target(target)
    decision, found = verify_offline(problem_of(*described), limits)
    refused = [r for r in decision.rejections if r.condition.startswith("compiled")]
    assert decision.plan is not None and found is not None, (decision.reasons, refused)
    assert found.spills == 0
    assert found.registers <= decision.plan.max_registers
    assert found.shared_bytes <= limits.shared_bytes_per_program
    assert len(refused) <= MOST_REFUSALS, refused
