"""Train a GPT on text that ships with Python, with fastnorm's norms or side by side with torch's.

    python examples/train_gpt.py --compare
    python examples/train_gpt.py --compare --corpus stdlib --norm rms --profile
    python examples/train_gpt.py --strategy fsdp --devices 2

On a CPU the default is a small model for about a minute. On a GPU it is one of GPT-2's size, 124M
parameters, in bf16 mixed precision, and its norms go to the Triton kernels; where its memory is not
there, `--batch` makes it less. `--size d768` and `--size d1024` are the models of
docs/performance.md.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, get_args

import lightning.pytorch as pl
import torch
import typer
from corpus import CORPORA, TextData
from gpt import NORMS
from gpt_module import GPTModule
from harness import AUTOCAST_HELP, PROFILE_HELP, check_profile, choice, compare, prepare, train
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from summary import Run, print_runs, save_runs
from typer import Option

from fastnorm.autocast import AutocastOutput
from fastnorm.lightning import FastNormCallback


@dataclass(frozen=True)
class Size:
    """A model and the batch it is trained with, all devices together."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    learning_rate: float


# GPT-2's table has 50,257 rows, padded to a multiple of 128. The text is bytes, so most rows stay
# unused, but the embedding and the last layer cost what they cost in GPT-2.
GPT2_VOCABULARY = 50304
SIZES = {
    "small": Size(128, 4, 4, context=64, batch=16, vocabulary=256, learning_rate=2e-3),
    "medium": Size(768, 12, 12, 1024, batch=16, vocabulary=GPT2_VOCABULARY, learning_rate=6e-4),
    "d768": Size(768, 12, 12, 1024, batch=32, vocabulary=GPT2_VOCABULARY, learning_rate=6e-4),
    "d1024": Size(1024, 24, 16, 1024, batch=16, vocabulary=GPT2_VOCABULARY, learning_rate=3e-4),
}


NormName = choice("NormName", *NORMS)
SizeName = choice("SizeName", "auto", *SIZES)
CorpusName = choice("CorpusName", *CORPORA)
StrategyName = choice("StrategyName", "auto", "ddp", "fsdp", "tp")
OutputName = choice("OutputName", *get_args(AutocastOutput))
AcceleratorName = choice("AcceleratorName", "auto", "cpu", "gpu")
PrecisionName = choice("PrecisionName", "auto", "32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class Plan:
    """A training that can be run more than once, each time from the same start."""

    size: Size
    norm: str
    corpus: str
    steps: int
    seed: int
    compile: bool
    profile: bool
    strategy: str
    devices: int
    accelerator: str
    precision: str

    @property
    def replicas(self) -> int:
        """Devices that see different data: tensor parallel ones share theirs."""
        return 1 if self.strategy == "tp" else self.devices

    def lightning_strategy(self) -> str | Strategy:
        """fsdp is FSDP2, tp is tensor with sequence parallelism: meshes of one engine."""
        if self.strategy == "fsdp":
            return ModelParallelStrategy(self.devices, tensor_parallel_size=1)
        if self.strategy == "tp":
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=self.devices)
        return self.strategy

    def train_once(self, name: str, patch: FastNormCallback | None) -> Run:
        """Builds the model from the seed and trains it; `compare` in harness.py calls this."""
        pl.seed_everything(self.seed, verbose=False)
        size = self.size
        module = GPTModule(
            width=size.width,
            layers=size.layers,
            heads=size.heads,
            context=size.context,
            vocabulary=size.vocabulary,
            norm=self.norm,
            learning_rate=size.learning_rate,
            steps=self.steps,
            compile=self.compile,
        )
        batch = size.batch // self.replicas
        data = TextData(
            self.corpus, size.context, batch, self.steps, replicas=self.replicas, seed=self.seed
        )
        return train(
            name,
            module,
            data,
            items_per_batch=size.batch * size.context,
            steps=self.steps,
            patch=patch,
            profile=self.profile,
            strategy=self.lightning_strategy(),
            devices=self.devices,
            accelerator=self.accelerator,
            precision=self.precision,
        )


def check(plan: Plan) -> None:
    """Raises a usage error for options that do not go together."""
    size = plan.size
    if plan.accelerator == "gpu" and not torch.cuda.is_available():
        raise typer.BadParameter("--accelerator gpu: torch finds no GPU here; leave it out")
    if plan.accelerator == "gpu" and plan.devices > torch.cuda.device_count():
        raise typer.BadParameter(
            f"--devices {plan.devices}: there are {torch.cuda.device_count()} GPUs here"
        )
    if size.batch % plan.replicas:
        raise typer.BadParameter(
            f"--batch {size.batch} is for all {plan.replicas} devices: a multiple of that, please"
        )
    if plan.strategy == "tp" and (size.context % plan.devices or size.heads % plan.devices):
        raise typer.BadParameter(
            f"--strategy tp splits {size.heads} heads and --context {size.context} over --devices "
            f"{plan.devices}: choose a number of devices that divides both"
        )


def main(
    norm: Annotated[NormName, Option(help="LayerNorm or RMSNorm.")] = "layer",
    size: Annotated[SizeName, Option(help="auto: medium on a GPU, small on a CPU.")] = "auto",
    corpus: Annotated[CorpusName, Option(help="Python's help topics, or its library.")] = "topics",
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 200,
    batch: Annotated[int | None, Option(min=1, help="Windows in a step, all devices.")] = None,
    context: Annotated[int | None, Option(min=8, help="Bytes in a window.")] = None,
    compare_norms: Annotated[bool, Option("--compare", help="Also with torch's norms.")] = False,
    profile: Annotated[bool, Option("--profile", help=PROFILE_HELP)] = False,
    compile_model: Annotated[bool, Option("--compile", help="Use torch.compile.")] = False,
    precision: Annotated[
        PrecisionName, Option(help="auto: bf16-mixed on a GPU, 32-true on a CPU.")
    ] = "auto",
    accelerator: Annotated[AcceleratorName, Option(help="auto: a GPU if there is one.")] = "auto",
    devices: Annotated[int, Option(min=1, help="GPUs, or processes on a CPU.")] = 1,
    strategy: Annotated[
        StrategyName, Option(help="fsdp is FSDP2; tp is tensor with sequence parallelism.")
    ] = "auto",
    autocast_output: Annotated[OutputName, Option(help=AUTOCAST_HELP)] = "torch",
    seed: Annotated[int, Option(min=0, help="Draws the weights and the windows.")] = 0,
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("runs/train_gpt"),
) -> None:
    """Train a GPT on text that ships with Python, with fastnorm's norms."""
    where = accelerator.value
    if where == "auto":
        where = "gpu" if torch.cuda.is_available() else "cpu"
    if precision.value == "auto":
        precision = PrecisionName("bf16-mixed" if where == "gpu" else "32-true")
    size_name = size.value
    if size_name == "auto":
        size_name = "medium" if where == "gpu" else "small"
    chosen = SIZES[size_name]
    plan = Plan(
        size=replace(chosen, batch=batch or chosen.batch, context=context or chosen.context),
        norm=norm.value,
        corpus=corpus.value,
        steps=steps,
        seed=seed,
        compile=compile_model,
        profile=profile,
        strategy=strategy.value,
        devices=devices,
        accelerator=where,
        precision=precision.value,
    )
    check(plan)
    check_profile(profile, steps)
    prepare(small=where == "cpu" and size_name == "small")
    patch = FastNormCallback(autocast_output=autocast_output.value)
    runs = compare(plan.train_once, patch, with_torch=compare_norms)
    print_runs(runs, patch, "tokens")
    save_runs(runs, out, f"GPT {size_name}, {norm.value} norm, {where}, {plan.precision}")


if __name__ == "__main__":
    typer.run(main)
