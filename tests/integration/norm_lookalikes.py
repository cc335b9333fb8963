"""Layers that look like a norm of a known kind and are not, and doubtful ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from norm_zoo import N, x_hat
from torch import Tensor, nn


class _Refused(nn.Module):
    """A Llama norm with one thing changed."""

    def __init__(self, size: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6
        self.calls = 0

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * x_hat(x.float(), self.eps).to(x.dtype)


class EpsOutsideRootNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return self.weight * y.to(x.dtype)


class UnbiasedNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)
        return self.weight * (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype)


class HalfStatisticsNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x_hat(x, self.eps)


class DividingNorm(_Refused):
    """One rounding apart from Llama's: x / sqrt instead of x * rsqrt."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() / root).to(x.dtype)


class ClampedNorm(_Refused):
    """Equal to Llama's unless a value is large."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.where(x.isfinite(), x.clamp(-5000, 5000), x))


class CappedEpsNorm(_Refused):
    """Equal to Llama's for its eps, not for every other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x_hat(x.float(), min(self.eps, 1e-3)).to(x.dtype)


class NanGuardedNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).nan_to_num()


class LayoutNorm(_Refused):
    """Equal to Llama's for contiguous input; timm has a LayerNorm2d of the sort."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return self.norm(x)
        root = torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() / root).to(x.dtype)


class NoisyNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + 1e-3 * torch.randn_like(x)


class DropoutNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(x), 0.1, self.training)


class ModeNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (1.0 if self.training else 1.125)


class CountingNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


class FirstCallNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls or x.shape[0]
        return self.norm(x)


class ClassStateNorm(_Refused):
    total = 0

    def forward(self, x: Tensor) -> Tensor:
        ClassStateNorm.total += 1
        return self.norm(x)


class RunningNorm(_Refused):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(N))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().float().flatten(0, -2).mean(0).nan_to_num()
        return self.norm(x)


class GatedNorm(_Refused):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.norm(x if gate is None else x * F.silu(gate))


class KeywordNorm(_Refused):
    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return self.norm(x)


class PairNorm(_Refused):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x


class BatchNormLike(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y - y.mean(0, keepdim=True)


class InPlaceNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x.mul_(0)
        return y


class BranchingNorm(_Refused):
    """Data-dependent: the branch is not taken by any ordinary input."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool((x == 123.5).all()) else self.norm(x)


class DetachedNorm(_Refused):
    """Right values, other gradients: the statistics are constants."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.detach().float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class InferenceNorm(_Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (1.0 if torch.is_grad_enabled() else 1.125)


class OverloadedCallNorm(_Refused):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class TensorAttributeNorm(_Refused):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(N)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.shift


class RegistryNorm(_Refused):
    seen: list[type] = []

    def __init_subclass__(cls) -> None:
        RegistryNorm.seen.append(cls)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class MixedDtypeNorm(_Refused):
    """Equal to torch's LayerNorm except for bf16 input with an fp32 weight (ESMFold's)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) if x.dtype == torch.bfloat16 else self.weight
        return F.layer_norm(x, (N,), weight, None, self.eps)


class TwoWeightsNorm(_Refused):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.second


class PerHeadRmsNorm(_Refused):
    """Right, but no kernel takes a weight row per head for this kind."""

    def __init__(self) -> None:
        super().__init__((4, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


REFUSED: dict[type[nn.Module], str] = {
    EpsOutsideRootNorm: "no kind of norm known here",
    UnbiasedNorm: "no kind of norm known here",
    HalfStatisticsNorm: "equal for plain float32, not for all input",
    DividingNorm: "no kind of norm known here; nearest: rms",
    ClampedNorm: "no kind of norm known here",
    CappedEpsNorm: "no kind of norm known here",
    NanGuardedNorm: "no kind of norm known here",
    LayoutNorm: "equal for plain float32, not for all input",
    NoisyNorm: "different results for the same input",
    DropoutNorm: "different results for the same input",
    ModeNorm: "otherwise in train than in eval mode",
    CountingNorm: "changes its own state",
    FirstCallNorm: "changes its own state",
    ClassStateNorm: "changes its own state",
    RunningNorm: "changes its own state",
    GatedNorm: "takes further inputs: gate",
    KeywordNorm: "takes further inputs: kwargs",
    PairNorm: "returned a tuple",
    BatchNormLike: "no kind of norm known here",
    InPlaceNorm: "writes into its input",
    BranchingNorm: "decides by the values of its input",
    DetachedNorm: "not its gradients",
    InferenceNorm: "otherwise without gradients",
    OverloadedCallNorm: "overrides __call__",
    TensorAttributeNorm: "attribute shift is a Tensor",
    RegistryNorm: "__init_subclass__",
    MixedDtypeNorm: "nearest: layer",
    TwoWeightsNorm: "no kind of norm known here",
    PerHeadRmsNorm: "weight row per head",
}
"""Class and a part of the reason."""
