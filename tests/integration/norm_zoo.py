"""Norm layers as people write them: one per kind under other names, look-alikes, doubtful ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 48


def _x_hat(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class LlamaLike(nn.Module):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = _x_hat(hidden_states.float(), self.variance_epsilon)
        return self.weight * y.to(hidden_states.dtype)


class ScaleNorm(LlamaLike):
    """torchtune's names, fp32 weight."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.eps) * self.scale.float()).type_as(x)


class GammaNorm(ScaleNorm):
    """A third pair of names."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.gamma = nn.Parameter(torch.ones(size))
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.epsilon) * self.gamma.float()).type_as(x)


class OwnNamesNorm(ScaleNorm):
    """Names that nobody else uses: found by behaviour."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.g = nn.Parameter(torch.ones(size))
        self.tiny = eps
        self.momentum = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.tiny) * self.g.float()).type_as(x)


class GemmaLike(nn.Module):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.eps) * (1.0 + self.weight.float())).type_as(x)


class GemmaRoundedNorm(GemmaLike):
    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.eps) * (1.0 + self.weight).float()).type_as(x)


class T5Like(LlamaLike):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        y = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            y = y.to(self.weight.dtype)
        return self.weight * y


class WeightlessNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _x_hat(x.float(), self.eps).type_as(x)


class CohereLike(nn.Module):
    def __init__(self, size: int | tuple[int, int] = N, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        x = (x - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class Fp32LayerNorm(nn.LayerNorm):
    def __init__(self, size: int = N, eps: float = 1e-5) -> None:
        super().__init__(size, eps=eps)

    def forward(self, input: Tensor) -> Tensor:
        w, b = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, w, b, self.eps).to(input.dtype)


class CastBackLayerNorm(nn.LayerNorm):
    """Differs from torch's under autocast only."""

    def __init__(self, size: int = N, eps: float = 1e-5) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class OffsetLayerNorm(nn.LayerNorm):
    def __init__(self, size: int = N, eps: float = 1e-5) -> None:
        super().__init__(size, eps=eps)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class ChannelsFirstNorm(nn.LayerNorm):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FixedSizeNorm(nn.Module):
    """No parameter tells the size, an attribute does."""

    def __init__(self, size: int = N, eps: float = 1e-5) -> None:
        super().__init__()
        self.size = size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), eps=self.eps)


class FixedEpsNorm(nn.Module):
    def __init__(self, size: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), 1e-6) * self.weight.float()).type_as(x)


class SmallFixedEpsNorm(FixedEpsNorm):
    """Only rows as small as 1e-6 tell this eps from another."""

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), 1e-12) * self.weight.float()).type_as(x)


class BufferNorm(nn.Module):
    """A frozen norm: the weight is a buffer, and another buffer does nothing."""

    def __init__(self, size: int = N) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size))
        self.register_buffer("unused", torch.ones(size), persistent=False)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (_x_hat(x.float(), self.eps) * self.weight.float()).type_as(x)


RECOGNISED: dict[type[nn.Module], str] = {
    LlamaLike: "rms_rounded",
    ScaleNorm: "rms_fp32",
    GammaNorm: "rms_fp32",
    OwnNamesNorm: "rms_fp32",
    GemmaLike: "rms_zero_centered",
    GemmaRoundedNorm: "rms_zero_centered_rounded",
    T5Like: "rms_t5",
    WeightlessNorm: "rms_fp32",
    CohereLike: "layer_cohere",
    Fp32LayerNorm: "layer_fp32",
    CastBackLayerNorm: "layer",
    OffsetLayerNorm: "layer_offset",
    ChannelsFirstNorm: "layer",
    FixedSizeNorm: "layer",
    FixedEpsNorm: "rms_fp32",
    SmallFixedEpsNorm: "rms_fp32",
    BufferNorm: "rms_fp32",
}
"""Class and the kind it is."""


class _Refused(nn.Module):
    """A Llama norm with one thing changed."""

    def __init__(self, size: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6
        self.calls = 0

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * _x_hat(x.float(), self.eps).to(x.dtype)


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
        return self.weight * _x_hat(x, self.eps)


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
        return self.weight * _x_hat(x.float(), min(self.eps, 1e-3)).to(x.dtype)


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


def randomized(module: nn.Module, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """The module with every parameter and buffer drawn anew: norm weights are never ones here."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module if dtype is None else module.to(dtype)


def sample(
    seed: int = 1, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 5, N)
) -> Tensor:
    """Input with an offset, so that centred and uncentred kinds differ."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2 + 0.5).to(dtype)


def input_for(module: nn.Module, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input in the layout that the layer takes."""
    x = sample(seed, dtype)
    return x.movedim(-1, 1)[..., None] if isinstance(module, ChannelsFirstNorm) else x


Factory = Callable[[], nn.Module]
