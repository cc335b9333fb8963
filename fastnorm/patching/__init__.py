"""Patching existing models: recognise what each norm computes, swap its class, undo exactly."""

from fastnorm.patching.patcher import patch, unpatch
from fastnorm.patching.recognition import register
from fastnorm.patching.report import Patched, Report, Skipped

__all__ = ["Patched", "Report", "Skipped", "patch", "register", "unpatch"]
