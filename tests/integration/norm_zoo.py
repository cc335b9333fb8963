"""Norm layers as people write them: every kind at least once, under various names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 48


def x_hat(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class LlamaLike(nn.Module):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = x_hat(hidden_states.float(), self.variance_epsilon)
        return self.weight * y.to(hidden_states.dtype)


class ScaleNorm(LlamaLike):
    """torchtune's names, fp32 weight."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.eps) * self.scale.float()).type_as(x)


class GammaNorm(ScaleNorm):
    """A third pair of names."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.gamma = nn.Parameter(torch.ones(size))
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.epsilon) * self.gamma.float()).type_as(x)


class OwnNamesNorm(ScaleNorm):
    """Names that nobody else uses: found by behaviour."""

    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.g = nn.Parameter(torch.ones(size))
        self.tiny = eps
        self.momentum = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.tiny) * self.g.float()).type_as(x)


class GemmaLike(nn.Module):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.eps) * (1.0 + self.weight.float())).type_as(x)


class GemmaRoundedNorm(GemmaLike):
    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.eps) * (1.0 + self.weight).float()).type_as(x)


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
        return x_hat(x.float(), self.eps).type_as(x)


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


class AutocastingLayerNorm(nn.LayerNorm):
    """Half precision throughout under autocast, as no kind here: its own forward runs there."""

    def __init__(self, size: int = N, eps: float = 1e-5) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        arguments = (x, self.weight + 1.0, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            arguments = tuple(t.to(dtype) for t in arguments)
        x, weight, bias = arguments
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


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
        return (x_hat(x.float(), 1e-6) * self.weight.float()).type_as(x)


class SmallFixedEpsNorm(FixedEpsNorm):
    """Only rows as small as 1e-6 tell this eps from another."""

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), 1e-12) * self.weight.float()).type_as(x)


class BufferNorm(nn.Module):
    """A frozen norm: the weight is a buffer, and another buffer does nothing."""

    def __init__(self, size: int = N) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size))
        self.register_buffer("unused", torch.ones(size), persistent=False)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x_hat(x.float(), self.eps) * self.weight.float()).type_as(x)


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
    AutocastingLayerNorm: "layer_offset",
    ChannelsFirstNorm: "layer",
    FixedSizeNorm: "layer",
    FixedEpsNorm: "rms_fp32",
    SmallFixedEpsNorm: "rms_fp32",
    BufferNorm: "rms_fp32",
}
"""Class and the kind it is."""


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
