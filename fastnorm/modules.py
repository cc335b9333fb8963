"""Drop-in modules: torch's own classes with another forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastnorm.functional import AutocastOutput, Backend, checked_backend, layer_norm, rms_norm


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
        *args: Any,
        backend: Backend | None = None,
        autocast_output: AutocastOutput = "torch",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.backend = None if backend is None else checked_backend(backend)
        self.autocast_output = autocast_output

    def forward(self, input: Tensor) -> Tensor:
        """`[..., *normalized_shape]` -> the same shape. See: `fastnorm.layer_norm`."""
        return layer_norm(
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
        *args: Any,
        backend: Backend | None = None,
        autocast_output: AutocastOutput = "torch",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.backend = None if backend is None else checked_backend(backend)
        self.autocast_output = autocast_output

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
