"""Real text that ships with Python, as bytes: nothing is downloaded."""

import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VALIDATION_SHARE = 0.1


def topics_text() -> str:
    """The help topics that `help()` shows: the language reference, about 465 kB."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def stdlib_text() -> str:
    """The standard library's own sources, tests and third-party packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return "\n\n".join(path.read_text("utf-8", "replace") for path in _source_files(root))


def _source_files(root: Path) -> Iterator[Path]:
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            yield path


CORPORA = {"topics": topics_text, "stdlib": stdlib_text}


class Windows(Dataset):
    """`count` windows of a text at places drawn once from `seed`: item i is always the same.

    Fixed places make two runs comparable step by step, on one device or on several.
    """

    def __init__(self, text: Tensor, context: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text = text
        self.context = context
        self.starts = torch.randint(len(text) - context, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        """[context + 1] of int64: a window and the byte that follows it."""
        start = self.starts[index]
        return self.text[start : start + self.context + 1].long()


class TextData(pl.LightningDataModule):
    """Batches of windows; the last tenth of the text is for validation.

    Args:
        corpus: "topics" or "stdlib".
        context: tokens in a window.
        batch: windows in a batch of one device.
        steps: batches of one epoch, each on `replicas` devices.
        validation_batches: as `steps`, for validation.
        replicas: devices that see different data.
        seed: draws the windows.
    """

    def __init__(
        self,
        corpus: str = "topics",
        context: int = 128,
        batch: int = 16,
        steps: int = 200,
        validation_batches: int = 8,
        replicas: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.context = context
        self.batch = batch
        self.steps = steps
        self.validation_batches = validation_batches
        self.replicas = replicas
        self.seed = seed

    def setup(self, stage: str) -> None:
        text = torch.frombuffer(bytearray(CORPORA[self.corpus](), "utf-8"), dtype=torch.uint8)
        split = int(len(text) * (1 - VALIDATION_SHARE))
        windows = self.batch * self.replicas
        self.train = Windows(text[:split], self.context, windows * self.steps, self.seed)
        self.validation = Windows(
            text[split:], self.context, windows * self.validation_batches, self.seed + 1
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.batch)
