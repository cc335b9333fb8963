"""Verification for GPUs that are not here: compile for a named target and read the binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fastnorm import device
from fastnorm.device import DeviceLimits
from fastnorm.plan import Decision, Rejection, decide
from fastnorm.problem import NormProblem
from fastnorm.routing import Compiled, check, compiled_or_refused


def verify_offline(problem: NormProblem, limits: DeviceLimits) -> tuple[Decision, Compiled | None]:
    """Decide and verify against the compiler for a GPU that need not be here.

    Without Triton (or in its interpreter) nothing is compiled, and the model alone decides.
    """
    can_compile = not device.triton_missing() and not device.interpreting()
    refused: list[Rejection] = []
    while True:
        decision = decide(problem, limits, tuple(refused))
        if decision.plan is None or not can_compile:
            return decision, None
        compiled = compiled_or_refused(decision.plan, limits)
        if isinstance(compiled, Rejection):
            refused.append(compiled)
            continue
        figures = offline_figures(compiled)
        refusal = check(decision.plan, limits, figures)
        if refusal is None:
            return decision, figures
        refused.append(refusal)


def offline_figures(compiled: Any) -> Compiled:
    """Registers, spilled words and shared bytes read off a cubin, without loading it.

    Args:
        compiled: what `kernels.compile.compile_plan` returns.

    Raises:
        RuntimeError: Triton's `cuobjdump` prints no resource usage.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", str(binary)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    if found is None:
        raise RuntimeError(f"{tool} printed no resource usage: {printed!r}")
    registers, stack, local = (int(n) for n in found.groups())
    return Compiled(registers, (stack + local) // 4, compiled.metadata.shared)
