"""What all sides train: layers of one size under AdamW. No package but torch is needed for it."""

from __future__ import annotations

import torch
from torch import nn

RANKS = 2
WIDTH = 4096
BATCH = 8
LAYER_BYTES = 3 * 4 * WIDTH * WIDTH
"""Of the state: the layer's parameters and their two moments, in 32 bits."""


def count_layers(nbytes: int) -> int:
    """Enough that a rank's part of the state has about `nbytes` bytes."""
    return max(1, round(nbytes / LAYER_BYTES))


def make_net(layers: int, device: torch.device | str = "cpu") -> nn.Sequential:
    """Filled quickly, and differently from layer to layer."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    net.to_empty(device=device)
    for number, parameter in enumerate(net.parameters()):
        nn.init.constant_(parameter, (number + 1) / (layers * WIDTH))
    return net


def make_optimizer(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step."""
    generator = torch.Generator().manual_seed(seed)
    device = next(net.parameters()).device
    net(torch.randn(BATCH, WIDTH, generator=generator).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def list_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's parameters and moments."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    shards = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in [*net.parameters(), *moments]]
    return [shard.detach() for shard in shards]


def compute_digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Of each tensor, its 32-bit words added up: another one where any single bit is another."""
    return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in list_tensors(net, optimizer)]
