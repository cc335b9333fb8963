"""Drop-in modules: torch's own classes with another forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastnorm import sharding
from fastnorm.autocast import AutocastOutput, checked_autocast_output
from fastnorm.functional import Backend, checked_backend, norm, rms_norm


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on fastnorm's kernels; same constructor, parameters, state_dict and
    repr.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as `torch.nn.LayerNorm`.
        backend: "auto", "triton" or "torch"; None: the context's (`fastnorm.backend`).
        autocast_output: "torch", "input" or "autocast", see `fastnorm.layer_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend | None = None,
        autocast_output: AutocastOutput = "torch",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.backend = None if backend is None else checked_backend(backend)
        self.autocast_output = checked_autocast_output(autocast_output)
        sharding.register_if_loaded()

    def forward(self, input: Tensor) -> Tensor:
        """`[..., *normalized_shape]` -> the same shape. See: `fastnorm.layer_norm`."""
        return norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            backend=self.backend,
            autocast_output=self.autocast_output,
        )


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on fastnorm's kernels; same constructor, parameters, state_dict and repr.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as `torch.nn.RMSNorm`.
        backend: "auto", "triton" or "torch"; None: the context's (`fastnorm.backend`).
        autocast_output: "torch", "input" or "autocast", see `fastnorm.layer_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend | None = None,
        autocast_output: AutocastOutput = "torch",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.backend = None if backend is None else checked_backend(backend)
        self.autocast_output = checked_autocast_output(autocast_output)
        sharding.register_if_loaded()

    def forward(self, input: Tensor) -> Tensor:
        """`[..., *normalized_shape]` -> the same shape. See: `fastnorm.rms_norm`."""
        return rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.eps,
            backend=self.backend,
            autocast_output=self.autocast_output,
        )
