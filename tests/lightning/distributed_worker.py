"""One of two gloo processes: a small GPT under each engine, with torch's and fastnorm's norms."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn import functional as F

import fastnorm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import (  # noqa: E402
    GPT,
    NORMS,
    Block,
    GPTConfig,
    shard_data_parallel,
    shard_tensor_parallel,
)

PROCESSES = 2
ENGINES = ("ddp", "fsdp1", "fsdp2", "fsdp2_bf16", "hsdp", "tp")
#: When the norms are replaced: never, before the engine takes the model, or after.
WHEN = ("never", "before", "after")
#: (engine, norm, when, backend) of the whole models.
CASES = [(*case, "auto") for case in itertools.product(ENGINES, NORMS, WHEN)]
#: The compiled ones come first: what an eager case registers must not help them.
KERNEL_CASES = [
    (engine, norm, "after", "triton")
    for engine in ("tp_compiled", "tp", "ddp", "fsdp2")
    for norm in NORMS
]

PLACEMENTS = {
    "replicated": Replicate(),
    "batch": Shard(0),
    "sequence": Shard(1),
    "normalised": Shard(2),
}
#: torch's own rms_norm raises for this, and so do we on its operators.
TORCH_REFUSES = ("rms", "normalised")
#: (norm, placement, backend) of the single norms.
PLACEMENT_CASES = [
    case
    for case in itertools.product(NORMS, PLACEMENTS, ("auto", "triton"))
    if case != (*TORCH_REFUSES, "auto")
]


def run_all(rank: int, port: int, out: str) -> None:
    """Runs every case and saves what rank 0 saw: whole models, single norms, checkpoints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, PROCESSES, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    models = {case: _run(rank, *case) for case in (*KERNEL_CASES, *CASES)}
    norms = {case: _norm_of_dtensor(*case) for case in PLACEMENT_CASES}
    read = {p: checkpoint_round_trip(f"{out}.{p}", p) for p in (False, True)}
    if rank == 0:
        torch.save({"models": models, "norms": norms, "checkpoints": read}, out)
    dist.barrier()
    dist.destroy_process_group()


def _norm_of_dtensor(norm: str, where: str, backend: str) -> dict[str, Any]:
    """Values, gradients and placements of torch's norm and of the same norm patched."""
    placement = PLACEMENTS[where]
    mesh = init_device_mesh("cpu", (PROCESSES,))
    layer, x, dy = norm_and_input(norm)
    layer = distribute_module(layer, mesh)
    found = {}
    for name in ("torch", "fastnorm"):
        if name == "fastnorm":
            fastnorm.patch(layer)
        elif (norm, where) == TORCH_REFUSES:
            continue
        layer.zero_grad()
        leaf = distribute_tensor(x, mesh, [placement]).requires_grad_()
        fastnorm.reset_stats()
        with fastnorm.backend(backend):
            y = layer(leaf)
            y.backward(distribute_tensor(dy, mesh, [Replicate()]))
        results = {"y": y, "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}
        found[name] = {
            "values": {n: _full(t) for n, t in results.items()},
            "layouts": {n: _layout(t) for n, t in results.items()},
            "calls": {**fastnorm.stats().forward, **fastnorm.stats().backward},
        }
    return found


def norm_and_input(norm: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A norm over 8 features with weights that are not ones; x and dy, [4, 6, 8]."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 4, 6, 8, generator=generator)
    layer = NORMS[norm](8)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=1.0, generator=generator)
    return layer, x, dy


def build(norm: str) -> GPT:
    """The model of every case, the same numbers each time; no weight is all ones."""
    torch.manual_seed(0)
    config = GPTConfig(width=16, layers=2, heads=2, context=8, vocabulary=32, norm=norm)
    gpt = GPT(config)
    for module in gpt.modules():
        if isinstance(module, tuple(NORMS.values())):
            nn.init.normal_(module.weight, mean=1.0, std=0.3)
    return gpt


def tokens() -> Tensor:
    """[4, 9] of int64: four windows of eight tokens and their successors."""
    return torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def _wrap(engine: str, gpt: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(
            gpt, static_graph=True, gradient_as_bucket_view=True
        )
    if engine == "fsdp1":
        policy = ModuleWrapPolicy({Block, nn.LayerNorm, nn.RMSNorm})
        return FullyShardedDataParallel(
            gpt, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if engine == "fsdp2":
        shard_data_parallel(gpt, mesh)
    elif engine == "fsdp2_bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(gpt, mesh=mesh, mp_policy=policy)
    elif engine == "hsdp":
        names = ("replicate", "shard")
        shard_data_parallel(gpt, init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=names))
    else:
        shard_tensor_parallel(gpt, mesh)
    if engine == "tp_compiled":
        for block in gpt.blocks:
            block.compile(backend="aot_eager")
    return gpt


def _run(rank: int, engine: str, norm: str, when: str, backend: str) -> dict[str, Any]:
    gpt = build(norm)
    if when == "before":
        fastnorm.patch(gpt)
    model = _wrap(engine, gpt)
    if when == "after":
        fastnorm.patch(gpt)
    outputs: list[object] = []
    gpt.norm.register_forward_hook(lambda module, args, y: outputs.append(_layout(y)))
    batch = tokens()
    if not engine.startswith(
        "tp"
    ):  # tensor parallel processes see the same rows, the others their share
        batch = batch.chunk(PROCESSES)[rank]
    fastnorm.reset_stats()
    with fastnorm.backend(backend):
        loss = loss_of(model, batch)
        loss.backward()
    stats = fastnorm.stats()
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss)
    gradients = _per_parameter(engine, model, gpt, _full)
    layouts = _per_parameter(engine, model, gpt, _layout)
    return {
        "loss": mean_loss / PROCESSES,
        "gradients": gradients,
        "gradient_layouts": layouts,
        "output_layouts": outputs,
        # FSDP1 would warn of its own deprecated tensors here, and is going away.
        "state_keys": [] if engine == "fsdp1" else sorted(get_model_state_dict(model)),
        "calls": {"forward": stats.forward, "backward": stats.backward},
    }


def _per_parameter(
    engine: str, model: nn.Module, gpt: GPT, read: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """What `read` says of each gradient, by the names of the model before it was wrapped."""
    if engine != "fsdp1":
        return {name: read(p.grad) for name, p in gpt.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        wrapper = "_fsdp_wrapped_module."
        return {n.replace(wrapper, ""): read(p.grad) for n, p in model.named_parameters()}


def _full(gradient: Tensor) -> Tensor:
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach().clone()


def _layout(tensor: Tensor) -> str:
    """How a tensor lies on the devices, as text."""
    return str(tensor.placements) if isinstance(tensor, DTensor) else "plain"


def checkpoint_round_trip(folder: str, written_patched: bool) -> bool:
    """Whether an FSDP2 model reads the sharded checkpoint of one that is patched if it is not."""
    models = []
    for patched in (written_patched, not written_patched):
        gpt = build("layer")
        _wrap("fsdp2", gpt)
        if patched:
            fastnorm.patch(gpt)
        models.append(gpt)
    written, read = models
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.zero_()
    distributed_checkpoint.save(get_model_state_dict(written), checkpoint_id=folder)
    state = get_model_state_dict(read)
    distributed_checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(read, state)
    pairs = zip(written.parameters(), read.parameters(), strict=True)
    return all(torch.equal(_full(a), _full(b)) for a, b in pairs)
