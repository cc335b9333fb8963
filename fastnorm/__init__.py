"""LayerNorm and RMSNorm for any PyTorch model, unchanged in meaning and faster. See: README.md."""

from fastnorm.explainer import explain
from fastnorm.explanation import Explanation
from fastnorm.functional import KernelUnavailable, backend, layer_norm, rms_norm
from fastnorm.modules import LayerNorm, RMSNorm
from fastnorm.patching import Report, patch, register, unpatch, verify
from fastnorm.routing import Stats, reset_stats, stats
from fastnorm.tuning import Tuned, tune

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "KernelUnavailable",
    "LayerNorm",
    "RMSNorm",
    "Report",
    "Stats",
    "Tuned",
    "backend",
    "explain",
    "layer_norm",
    "patch",
    "register",
    "reset_stats",
    "rms_norm",
    "stats",
    "tune",
    "unpatch",
    "verify",
]
