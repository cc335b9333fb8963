"""Train a small vision transformer on scikit-learn's handwritten digits, which need no download.

    python examples/train_vit.py --compare
    python examples/train_vit.py --compare --size base

`--size base` is ViT-B/16 on the same digits enlarged to 224 x 224: useful on a GPU, for the time
of a step rather than for the accuracy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import lightning.pytorch as pl
import torch
import typer
from gpt import NORMS, Block, GPTConfig, init_weights
from harness import AUTOCAST_HELP, PROFILE_HELP, check_profile, choice, compare, prepare, train
from sklearn.datasets import load_digits
from summary import Run, console, print_runs, save_runs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from typer import Option

from fastnorm.autocast import AutocastOutput
from fastnorm.lightning import FastNormCallback


@dataclass(frozen=True)
class Size:
    """A vision transformer and its batch."""

    pixels: int
    patch: int
    width: int
    layers: int
    heads: int
    batch: int
    learning_rate: float


SIZES = {
    "small": Size(8, 2, width=64, layers=4, heads=4, batch=64, learning_rate=2e-3),
    "base": Size(224, 16, width=768, layers=12, heads=12, batch=128, learning_rate=5e-4),
}
CLASSES = 10

NormName = choice("NormName", *NORMS)
SizeName = choice("SizeName", *SIZES)
OutputName = choice("OutputName", *get_args(AutocastOutput))
AcceleratorName = choice("AcceleratorName", "auto", "cpu", "gpu")


class ViT(nn.Module):
    """Patches in, class logits out; the mean over the patches is what is classified."""

    def __init__(self, size: Size, norm: str) -> None:
        super().__init__()
        tokens = (size.pixels // size.patch) ** 2
        config = GPTConfig(
            size.width, size.layers, size.heads, context=tokens, norm=norm, causal=False
        )
        self.patches = nn.Conv2d(1, size.width, size.patch, stride=size.patch)
        self.positions = nn.Parameter(torch.empty(tokens, size.width).normal_(std=0.02))
        self.blocks = nn.ModuleList(Block(config) for _ in range(size.layers))
        self.norm = NORMS[norm](size.width)
        self.head = nn.Linear(size.width, CLASSES)
        init_weights(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, pixels, pixels] -> [batch, CLASSES]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Digits(pl.LightningDataModule):
    """1,797 handwritten digits, 8 x 8 pixels; the last fifth is for validation.

    Args:
        size: gives the pixels to enlarge to, and the batch.
        steps: batches of one epoch, drawn with replacement.
        seed: draws the batches.
    """

    def __init__(self, size: Size, steps: int, seed: int) -> None:
        super().__init__()
        self.size = size
        self.steps = steps
        self.seed = seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16 - 0.5
        images = F.interpolate(images, size=(self.size.pixels,) * 2)
        labels = torch.from_numpy(digits.target)
        split = len(labels) * 4 // 5
        self.train = TensorDataset(images[:split], labels[:split])
        self.validation = TensorDataset(images[split:], labels[split:])

    def train_dataloader(self) -> DataLoader:
        sampler = RandomSampler(
            self.train,
            replacement=True,
            num_samples=self.steps * self.size.batch,
            generator=torch.Generator().manual_seed(self.seed),
        )
        return DataLoader(self.train, batch_size=self.size.batch, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.size.batch)


class ViTModule(pl.LightningModule):
    """Classification with one learning rate cycle over `steps`."""

    def __init__(self, size: Size, norm: str, steps: int, compile: bool) -> None:
        super().__init__()
        self.size = size
        self.steps = steps
        self.vit = ViT(size, norm)
        if compile:
            self.vit.compile()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.vit(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self.vit(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        rate = self.size.learning_rate
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=rate, weight_decay=0.05, fused=self.device.type == "cuda"
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=self.steps, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(
    norm: Annotated[NormName, Option(help="LayerNorm or RMSNorm.")] = "layer",
    size: Annotated[SizeName, Option(help="The model, its images and batch.")] = "small",
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 300,
    compare_norms: Annotated[bool, Option("--compare", help="Also with torch's norms.")] = False,
    profile: Annotated[bool, Option("--profile", help=PROFILE_HELP)] = False,
    compile_model: Annotated[bool, Option("--compile", help="Use torch.compile.")] = False,
    accelerator: Annotated[AcceleratorName, Option(help="auto: a GPU if there is one.")] = "auto",
    autocast_output: Annotated[OutputName, Option(help=AUTOCAST_HELP)] = "torch",
    seed: Annotated[int, Option(min=0, help="Draws the weights and the batches.")] = 0,
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("runs/train_vit"),
) -> None:
    """Train a vision transformer on handwritten digits, with fastnorm's norms."""
    gpu = torch.cuda.is_available()
    if accelerator.value == "gpu" and not gpu:
        raise typer.BadParameter("--accelerator gpu: torch finds no GPU here; leave it out")
    check_profile(profile, steps)
    gpu = gpu and accelerator.value != "cpu"
    chosen = SIZES[size.value]
    prepare(small=not gpu and size.value == "small")

    def train_once(name: str, patch: FastNormCallback | None) -> Run:
        pl.seed_everything(seed, verbose=False)
        return train(
            name,
            ViTModule(chosen, norm.value, steps, compile_model),
            Digits(chosen, steps, seed),
            items_per_batch=chosen.batch,
            steps=steps,
            patch=patch,
            profile=profile,
            accelerator="gpu" if gpu else "cpu",
            devices=1,
            precision="bf16-mixed" if gpu else "32-true",
        )

    patch = FastNormCallback(autocast_output=autocast_output.value)
    runs = compare(train_once, patch, with_torch=compare_norms)
    print_runs(runs, patch, "images")
    console.print(f"Validation accuracy: {runs[-1].metrics['val_accuracy']:.3f}")
    save_runs(runs, out, f"ViT {size.value}, {norm.value} norm, {'gpu' if gpu else 'cpu'}")


if __name__ == "__main__":
    typer.run(main)
