"""An FSDP2 script: it trains a few steps, and prints what it has computed."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Stream:
    """FSDP2 of torch 2.4 uses streams and events of CUDA on processors, too."""

    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Stream:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def import_fully_shard() -> Any:
    """Return torch's function. Before 2.6, it has another place."""
    fully_shard = getattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard", None)
    if fully_shard is None:
        fully_shard = importlib.import_module("torch.distributed._composable.fsdp").fully_shard
        current: Any = Stream()
        vars(torch.cuda).update(
            Stream=Stream,
            Event=Stream,
            current_stream=lambda *_: current,
            stream=lambda *_: contextlib.nullcontext(),
        )
    return fully_shard


logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
torch.set_num_threads(1)
fully_shard = import_fully_shard()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model: Any = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
# Before 2.6, parameters that are gathered again fail in the backward pass on processors.
for layer in model:
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()
    norm = torch.stack([parameter.grad.to_local().norm() for parameter in model.parameters()]).sum()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r} norm of the shard {norm.item()!r}")
state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
print(f"rank {dist.get_rank()} sums {[tensor.double().sum().item() for tensor in state.values()]}")
dist.barrier()
dist.destroy_process_group()
