"""What the hardware and the installed Triton can do. The only probe; lazy, cached per device."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits that a plan must respect.

    Args:
        name: shown to people.
        target: "sm_90" and the like.
        sm_count: multiprocessors.
        registers_per_sm: 32-bit registers.
        max_registers_per_thread: what the instruction set can address.
        shared_bytes_per_program: largest dynamic shared memory of one program, bytes.
        shared_bytes_per_sm: shared memory of one multiprocessor, bytes.
        max_warps_per_sm: resident warps.
        cooperative: cooperative launches (grid barriers) work.
        unsupported: why no kernel can run here, or "".
    """

    name: str
    target: str
    sm_count: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    shared_bytes_per_program: int = 232_448
    shared_bytes_per_sm: int = 233_472
    max_warps_per_sm: int = 64
    cooperative: bool = True
    unsupported: str = ""

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        return int(self.target.removeprefix("sm_"))


#: Published limits per compute capability (CUDA C++ Programming Guide, "Compute Capabilities"),
#: with the largest part's multiprocessor count: name, SMs, shared bytes per program and per SM,
#: warps per SM.
_TARGETS = {
    "sm_80": ("A100", 108, 166_912, 167_936, 64),
    "sm_86": ("RTX A6000", 84, 101_376, 102_400, 48),
    "sm_89": ("L40S", 142, 101_376, 102_400, 48),
    "sm_90": ("H100/H200", 132, 232_448, 233_472, 64),
    "sm_100": ("B200", 148, 232_448, 233_472, 64),
    "sm_103": ("B300", 148, 232_448, 233_472, 64),
    "sm_120": ("RTX PRO 6000", 188, 101_376, 102_400, 48),
}


def known_targets() -> tuple[str, ...]:
    """Targets that `limits_for_target` knows."""
    return tuple(_TARGETS)


def limits_for_target(target: str) -> DeviceLimits:
    """Limits of a named compute capability, with no GPU present.

    Raises:
        ValueError: the target is not known.
    """
    if target not in _TARGETS:
        raise ValueError(f"unknown target {target!r}; known targets: {', '.join(_TARGETS)}")
    name, sms, program, sm, warps = _TARGETS[target]
    return DeviceLimits(
        name=name,
        target=target,
        sm_count=sms,
        shared_bytes_per_program=program,
        shared_bytes_per_sm=sm,
        max_warps_per_sm=warps,
    )


def triton_missing() -> str:
    """Why Triton cannot be used at all, or ""."""
    try:
        found = importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: somebody switched it off
        found = False
    return "" if found else "Triton is not installed"


def triton_version() -> str:
    """Triton's own word for its version: its package has other names, pytorch-triton for one."""
    import triton

    return str(triton.__version__)


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 before
    Triton's import)."""
    if triton_missing():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def interpreter_limits() -> DeviceLimits:
    """What plans for the interpreter assume: an sm_90 of few multiprocessors, no grid barrier.

    Programs run one after another there, so a barrier would wait for ever.
    """
    return replace(
        limits_for_target("sm_90"), name="Triton interpreter", sm_count=4, cooperative=False
    )


@functools.cache
def limits_for_device(index: int) -> DeviceLimits:
    """Probe one CUDA device (once).

    Args:
        index: CUDA device index.
    """
    import torch

    p = torch.cuda.get_device_properties(index)
    limits = DeviceLimits(
        name=p.name,
        target=f"sm_{p.major}{p.minor}",
        sm_count=p.multi_processor_count,
        registers_per_sm=getattr(p, "regs_per_multiprocessor", 65536),
        shared_bytes_per_program=getattr(p, "shared_memory_per_block_optin", 49_152),
        shared_bytes_per_sm=getattr(p, "shared_memory_per_multiprocessor", 65_536),
        max_warps_per_sm=p.max_threads_per_multi_processor // 32,
    )
    return replace(limits, unsupported=_unsupported(p.major, p.minor))


def _unsupported(major: int, minor: int) -> str:
    import torch

    if torch.version.hip is not None:
        return "ROCm: the kernels have been proven on CUDA only"
    if missing := triton_missing():
        return missing
    if (major, minor) < (8, 0):
        return f"compute capability {major}.{minor} is below 8.0, which the kernels need"
    return ""
