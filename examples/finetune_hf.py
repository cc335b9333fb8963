"""Patch transformers models that you did not write, check the patch, and train them on real text.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --family bert --steps 50 --dtype bfloat16

Builds a small Llama (RMSNorm, next byte) and a small BERT (LayerNorm, masked bytes) from their
configurations, so nothing is downloaded; the text is the language reference that ships with
Python. Under two minutes on a 2-core CPU; with a GPU the norms go to the Triton kernels.
"""

from __future__ import annotations

import pydoc_data.topics
import time
from collections.abc import Iterator
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import fastnorm

MASK, PAD, VOCABULARY = 256, 257, 258
"""Bytes are their own tokens; two more for BERT's mask and for padding."""

CONTEXT, BATCH, WIDTH, LAYERS = 64, 16, 96, 2
VALIDATION_SHARE = 0.1
MASKED_SHARE = 0.15

console = Console()


class Family(str, Enum):
    """The two kinds of model, or both one after the other."""

    llama = "llama"
    bert = "bert"
    both = "both"


class Dtype(str, Enum):
    """Of parameters and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def build(family: str) -> nn.Module:
    """A small model with fresh weights: about 300,000 parameters."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": PAD,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    return BertForMaskedLM(BertConfig(**sizes))


def corpus() -> tuple[Tensor, Tensor]:
    """Training and validation bytes, one after the other in the text."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.tensor(list(text.encode()))
    cut = int(len(tokens) * (1 - VALIDATION_SHARE))
    return tokens[:cut], tokens[cut:]


def batches(family: str, tokens: Tensor, count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """`count` batches [BATCH, CONTEXT] as the model of this family takes them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        ids = tokens[starts + torch.arange(CONTEXT)]
        if family == "llama":
            yield {"input_ids": ids, "labels": ids}
            continue
        hidden = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
        # -100: transformers' mark for positions without a loss.
        labels = ids.masked_fill(~hidden, -100)
        yield {"input_ids": ids.masked_fill(hidden, MASK), "labels": labels}


@torch.no_grad()
def validation_loss(model: nn.Module, family: str, tokens: Tensor) -> float:
    """Mean loss in nats per byte over eight fixed batches."""
    model.eval()
    device = next(model.parameters()).device
    losses = [model(**on(device, batch)).loss.item() for batch in batches(family, tokens, 8, 1)]
    model.train()
    return sum(losses) / len(losses)


def on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch on the model's device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def train(model: nn.Module, family: str, tokens: Tensor, steps: int) -> float:
    """AdamW with warm-up and cosine decay; returns bytes per second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    device = next(model.parameters()).device
    data = batches(family, tokens, steps, seed=2)
    start = time.perf_counter()
    for batch in track(data, f"training {family}", total=steps, console=console):
        model(**on(device, batch)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return steps * BATCH * CONTEXT / (time.perf_counter() - start)


def routes() -> Table:
    """What ran the norms, from fastnorm's own counters."""
    table = Table(title="routes taken by the norms, in calls")
    for heading in ("pass", "route", "calls"):
        table.add_column(heading)
    stats = fastnorm.stats()
    for name, counts in (("forward", stats.forward), ("backward", stats.backward)):
        for route, calls in counts.items():
            table.add_row(name, route, f"{calls:,}")
    return table


def run(family: str, steps: int, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Build, patch, verify, train and undo, saying what happens."""
    torch.manual_seed(seed)
    model = build(family).to(device, dtype).train()
    training, validation = corpus()
    console.rule(f"{family}: {sum(p.numel() for p in model.parameters()):,} parameters")

    report = fastnorm.patch(model, strict=True)
    console.print(report.table())

    sample = on(device, next(batches(family, training, 1, seed=3)))
    verification = fastnorm.verify(model, sample)
    console.print(verification.table())
    if not verification:
        raise typer.Exit(code=1)

    fastnorm.reset_stats()
    before = validation_loss(model, family, validation)
    speed = train(model, family, training, steps)
    after = validation_loss(model, family, validation)
    console.print(routes())

    report.undo()
    unpatched = validation_loss(model, family, validation)
    console.print(
        f"validation loss {before:.3f} -> {after:.3f} nats per byte in {steps} steps, "
        f"{speed:,.0f} bytes/s; by the model's own norms after undo: {unpatched:.3f}"
    )


def main(
    family: Annotated[Family, typer.Option(help="Which model.")] = Family.both,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 300,
    dtype: Annotated[Dtype, typer.Option(help="Of the model.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and dropout.")] = 0,
) -> None:
    """Patch, verify and train small transformers models on text that ships with Python."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU here; leave --device out")
    chosen = ["llama", "bert"] if family is Family.both else [family.value]
    for name in chosen:
        run(name, steps, torch.device(device), getattr(torch, dtype.value), seed)


if __name__ == "__main__":
    typer.run(main)
