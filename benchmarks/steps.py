"""Models that differ in their norms alone, and a training step of each."""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastnorm
from fastnorm.autocast import AutocastOutput
from fastnorm.functional import Backend

PRECISIONS = ("bf16-mixed", "bf16-true")
MODES = ("eager", "compiled")
BASE = "torch"
BOUND = "identity"
#: The variants that fastnorm patches: what their norms give under autocast, and what runs them.
PATCHED: dict[str, tuple[AutocastOutput, Backend]] = {
    "fastnorm": ("torch", "auto"),
    "fastnorm-autocast": ("autocast", "auto"),
    "fastnorm-kernels": ("torch", "triton"),
}

# So small that a model without norms, which nothing keeps from growing, stays finite.
LEARNING_RATE = 1e-5


class Refused(RuntimeError):
    """A row whose times would not mean what they seem to."""


@dataclass(frozen=True)
class Row:
    """One comparison: everything but whose norms run.

    Args:
        model: key of `MODELS` in step_models.py.
        norm: "layer" or "rms".
        precision: "bf16-mixed" (fp32 weights, bf16 autocast) or "bf16-true" (all bf16).
        mode: "eager" or "compiled".
    """

    model: str
    norm: str
    precision: str
    mode: str

    @property
    def variants(self) -> tuple[str, ...]:
        """In the order they are timed. Compiled, fastnorm leaves norms to the compiler unless it is
        told not to; without autocast, `autocast_output` changes nothing."""
        if self.mode == "compiled":
            return (BASE, "fastnorm", "fastnorm-kernels", BOUND)
        autocast = ("fastnorm-autocast",) if self.precision == "bf16-mixed" else ()
        return (BASE, "fastnorm", *autocast, BOUND)

    def on_kernels(self, variant: str) -> bool:
        """Whether a variant's norms are to run on fastnorm's kernels, where there is a GPU."""
        return variant in PATCHED and (self.mode == "eager" or self.backend(variant) == "triton")

    def backend(self, variant: str) -> Backend:
        """What a variant asks to run its norms."""
        return PATCHED[variant][1] if variant in PATCHED else "auto"

    def __str__(self) -> str:
        return f"{self.model} {self.norm} {self.precision} {self.mode}"


@dataclass(frozen=True)
class Effort:
    """How a row is timed.

    Args:
        rounds: each times all variants, one after the other; what counts is the median over them.
        steps: of each variant in a round.
        profile: also find the norms' share of device time; of eager rows, as compiled kernels do
            other work along with norms.
        compiler: backend of `torch.compile`.
    """

    rounds: int = 7
    steps: int = 5
    profile: bool = False
    compiler: str = "inductor"


@dataclass
class Outcome:
    """What was found of one variant of a row.

    Args:
        norms: norm layers of the model, before any were removed.
        first_loss: before any step.
        last_loss: after the timed ones.
        routes: pass -> route -> calls of one step, fastnorm's counters.
        memory_bytes: peak of one step above what is allocated between steps: gradients,
            activations and temporaries. None on a CPU.
        round_ms: milliseconds of a step, round by round.
        norm_share: of a step's device time, 0 to 1; None where not asked for.
    """

    norms: int
    first_loss: float = math.nan
    last_loss: float = math.nan
    routes: dict[str, dict[str, int]] = field(default_factory=dict)
    memory_bytes: int | None = None
    round_ms: list[float] = field(default_factory=list)
    norm_share: float | None = None

    @property
    def step_ms(self) -> float:
        return statistics.median(self.round_ms)


class Training:
    """A model with its optimizer and one batch, on which it is trained again and again."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        mixed: bool,
        compiler: str | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.model = model
        self.backend = backend
        self.inputs, self.targets = batch
        self.device = self.targets.device
        self.mixed = mixed
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=fused)
        if compiler is not None:
            # A graph break, or one compilation too many for dynamo, is an error: part of the
            # model would run eagerly and be reported as compiled.
            model.compile(backend=compiler, fullgraph=True)

    def step(self) -> Tensor:
        """Forward, loss, backward, optimizer. Returns the loss without waiting for it."""
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed)
        with fastnorm.backend(self.backend), autocast:
            outputs = self.model(self.inputs)
            loss = F.cross_entropy(outputs.flatten(0, -2), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def norm_layers(model: nn.Module) -> list[str]:
    """Names of the norm layers, the only kinds that the examples have."""
    return [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]


def remove_norms(model: nn.Module) -> None:
    """Put layers that return their input in the place of norms."""
    for name in norm_layers(model):
        model.set_submodule(name, nn.Identity())


def with_norms(variant: str, model: nn.Module) -> nn.Module:
    """A copy of the model, same weights, whose norms are the variant's."""
    model = copy.deepcopy(model)
    if variant == BOUND:
        remove_norms(model)
    elif variant != BASE:
        report = fastnorm.patch(model, strict=True, autocast_output=PATCHED[variant][0])
        if len(report) != len(norm_layers(model)):
            raise Refused(f"{variant}: not every norm was patched:\n{report}")
    return model
