"""Patching existing models: recognise what each norm computes, swap its class, undo exactly."""

from fastnorm.patching.patcher import patch, unpatch
from fastnorm.patching.recognition import register
from fastnorm.patching.report import Patched, Report, Skipped
from fastnorm.patching.verification import Difference, Verification, verify

__all__ = [
    "Difference",
    "Patched",
    "Report",
    "Skipped",
    "Verification",
    "patch",
    "register",
    "unpatch",
    "verify",
]
