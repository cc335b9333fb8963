"""A GPT in the plain pre-norm form: what GPT-2 is, with LayerNorm or RMSNorm.

Nothing in here knows about fastnorm. The two functions at the end split the model over devices
with torch's own FSDP2 and tensor parallelism.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        width: features of a token, a multiple of `heads`.
        layers: transformer blocks.
        heads: attention heads.
        context: longest sequence, in tokens.
        vocabulary: rows of the embedding table.
        norm: "layer" or "rms".
        causal: a token sees only those before it.
    """

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int = 256
    norm: str = "layer"
    causal: bool = True


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.causal = config.causal
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        # Heads lead, then q, k, v: whole heads stay together when tensor parallelism splits the
        # rows of `qkv`, and -1 is the number of heads that this device has.
        split = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = split.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        norm = NORMS[config.norm]
        self.attention_norm = norm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = norm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def init_weights(model: nn.Module, config: GPTConfig) -> None:
    """GPT-2's start: normal, less for the layers that write into the residual stream.

    GPT-2's 0.02 is for about a thousand features; fewer need larger weights for the same outputs.
    """
    std = 0.02 * (1024 / config.width) ** 0.5
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Attention | MLP):
            nn.init.normal_(module.out.weight, std=std / (2 * config.layers) ** 0.5)


class GPT(nn.Module):
    """Tokens in, next-token logits out. The output layer shares the embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = NORMS[config.norm](config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        init_weights(self, config)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] of int64 -> [batch, tokens, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_data_parallel(gpt: GPT, mesh: DeviceMesh) -> None:
    """FSDP2: every block is one group of sharded parameters, the rest is the root's group."""
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)


def shard_tensor_parallel(gpt: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism, with the tokens between the matrix products split over the devices.

    The norms see a slice of the sequence (SequenceParallel), which is why their weights are
    replicated and their weight gradients are summed over the devices.
    """
    tokens_split = Shard(1)
    parallelize_module(
        gpt,
        mesh,
        {
            "token_embedding": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=tokens_split
            ),
            "position_embedding": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0)
            ),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=tokens_split, output_layouts=Replicate()),
        },
    )
    gather = PrepareModuleInput(input_layouts=(tokens_split,), desired_input_layouts=(Replicate(),))
    for block in gpt.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": gather,
                "attention.qkv": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=tokens_split),
                "mlp_norm": SequenceParallel(),
                "mlp": gather,
                "mlp.up": ColwiseParallel(),
                "mlp.out": RowwiseParallel(output_layouts=tokens_split),
            },
        )
    # Splitting replaced both weights by DTensors of the same layout: make them one again.
    gpt.tie_weights()
