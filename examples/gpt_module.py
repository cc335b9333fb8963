"""The GPT as a LightningModule: losses, optimizer, and how it is split over devices."""

import math

import lightning.pytorch as pl
import torch
from gpt import GPT, GPTConfig, shard_data_parallel, shard_tensor_parallel
from torch import Tensor
from torch.nn import functional as F


class GPTModule(pl.LightningModule):
    """Next-byte prediction.

    Args:
        width, layers, heads, context, vocabulary, norm: as for `GPTConfig`.
        learning_rate: at the end of the warm-up.
        steps: length of the cosine schedule.
        compile: run the model through `torch.compile`.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        vocabulary: int = 256,
        norm: str = "layer",
        learning_rate: float = 1e-3,
        steps: int = 200,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        """Builds the model here so that a sharded one is split before the optimizer exists."""
        if self.gpt is not None:
            return
        options = self.hparams
        self.gpt = GPT(
            GPTConfig(
                width=options.width,
                layers=options.layers,
                heads=options.heads,
                context=options.context,
                vocabulary=options.vocabulary,
                norm=options.norm,
            )
        )
        mesh = self.device_mesh  # only ModelParallelStrategy, for FSDP2 and tensor parallelism
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            shard_tensor_parallel(self.gpt, mesh["tensor_parallel"])
        if mesh is not None and mesh["data_parallel"].size() > 1:
            shard_data_parallel(self.gpt, mesh["data_parallel"])
        if options.compile:
            self.gpt.compile()

    def _loss(self, batch: Tensor) -> Tensor:
        """[batch, context + 1] of int64 -> mean cross entropy in nats per byte."""
        logits = self.gpt(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if not hasattr(self, "flops_per_batch"):  # for Lightning's ThroughputMonitor
            self.flops_per_batch = self._training_flops(tokens=batch[:, 1:].numel())
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def _training_flops(self, tokens: int) -> int:
        """Matrix products of a step: 6 for each weight and token, and attention's. Norms are 0."""
        weights = sum(p.numel() for p in self.gpt.parameters() if p.dim() > 1)
        options = self.hparams
        return tokens * (6 * weights + 12 * options.layers * options.width * options.context)

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Not Trainer(gradient_clip_val=...): Lightning refuses it beside a fused optimizer.
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.hparams.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _learning_rate_factor(self, step: int) -> float:
        """Linear warm-up over a twentieth of the steps, then half a cosine down to a tenth."""
        steps = self.hparams.steps
        warmup = max(1, steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
