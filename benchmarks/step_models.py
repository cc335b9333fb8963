"""The models of examples/, each with random data of its own kind, for timing whole steps."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Args:
        build: norm ("layer" or "rms") -> the model, fp32, on torch's default device.
        batch: () -> inputs and int64 targets, on torch's default device. The targets have the
            shape of the model's output without its last dimension.
        tokens: of one batch.
    """

    build: Callable[[str], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    tokens: int


def example(name: str) -> ModuleType:
    """Import a script of examples/. They import each other by bare names, as no package does.

    Raises:
        ModuleNotFoundError: what the examples need is not installed.
    """
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def gpt(size_name: str, batch_size: int | None) -> Workload:
    """examples/train_gpt.py's model: random tokens, and random tokens to come next."""
    scripts = example("gpt"), example("train_gpt")
    size = resized(scripts[1].SIZES[size_name], batch_size)

    def build(norm: str) -> nn.Module:
        config = scripts[0].GPTConfig(
            size.width, size.layers, size.heads, size.context, size.vocabulary, norm=norm
        )
        return scripts[0].GPT(config)

    def batch() -> tuple[Tensor, Tensor]:
        shape = (size.batch, size.context)
        return torch.randint(size.vocabulary, shape), torch.randint(size.vocabulary, shape)

    return Workload(build, batch, tokens=size.batch * size.context)


def vit(size_name: str, batch_size: int | None) -> Workload:
    """examples/train_vit.py's model: random images, one channel, and random classes."""
    script = example("train_vit")
    size = resized(script.SIZES[size_name], batch_size)

    def batch() -> tuple[Tensor, Tensor]:
        images = torch.randn(size.batch, 1, size.pixels, size.pixels)
        return images, torch.randint(script.CLASSES, (size.batch,))

    patches = (size.pixels // size.patch) ** 2
    return Workload(lambda norm: script.ViT(size, norm), batch, tokens=size.batch * patches)


def resized(size: Any, batch_size: int | None) -> Any:
    return size if batch_size is None else replace(size, batch=batch_size)


#: Name here -> maker, and the size's name in the example.
MODELS: dict[str, tuple[Callable[[str, int | None], Workload], str]] = {
    "d768": (gpt, "d768"),
    "d1024": (gpt, "d1024"),
    "vit-base": (vit, "base"),
    "tiny": (gpt, "small"),
    "vit-tiny": (vit, "small"),
}
#: What a CPU can do in seconds.
TINY = ("tiny", "vit-tiny")


def workload(model: str, batch_size: int | None = None) -> Workload:
    """Look up a model of `MODELS`; `batch_size` replaces the example's."""
    make, size_name = MODELS[model]
    return make(size_name, batch_size)
