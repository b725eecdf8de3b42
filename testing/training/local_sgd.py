"""A tiny model on replicas and shards, trained as Local-SGD has it, for tests in real ranks (`run_ranks`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from pacekeeper.replication import parallel
from pacekeeper.replication.local_sgd import ForwardPass, OuterSGD, Replicas, Synchronization

WIDTH = 6
BATCH = 8
"""Samples of a replica's step, over all of its shards."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh()
        return out


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 3, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.checkpointing = checkpointing
        self.skipped: int | None = None
        """A block that the next forward passes leave out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                y = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
                x = x + y
        out: Tensor = self.head(x)
        return out


def make_net(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(11)
    return Net(**options).to(dtype)


def draw_samples(seed: int, replica: int, step: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs [count, 4] and targets [count, 2] of a smooth function, the same in every run."""
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * replica + step)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return x, torch.stack([(x[:, 0] * x[:, 1]).sin(), x[:, 2] - x[:, 3].abs()], dim=1) + noise


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss: Tensor = (model(x.to(dtype)) - y.to(dtype)).square().sum()
    return loss


def create_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def create_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def init_process_group() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("sync", "shard"))


@dataclass
class ReplicaRun:
    """How a replica trains; `Training` does it."""

    settings: OuterSGD = field(default_factory=OuterSGD)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = create_adamw
    dtype: torch.dtype = torch.float64
    seed: int = 1
    steps: tuple[int, ...] = (3,)
    """Between two synchronizations, of each replica; of all alike, where there is one number."""
    batches: tuple[int, ...] = (BATCH,)
    """Samples of each replica's step; of all alike, where there is one number."""
    eager: bool = False
    """Every synchronization is finished as soon as it has begun."""
    checkpointing: bool = False
    compiled: str = ""
    """"whole" or "blocks": by torch.compile, and used before the replicas were created."""
    evaluate: bool = False
    """A forward pass without gradients stands before each synchronization."""
    skipped: int | None = None
    """A block that the step after each synchronization leaves out."""
    poison: Callable[[int, int], float] = lambda *_: 1.0
    """From replica and synchronization to a factor of the inputs of the step before it."""
    corrupt_input: Callable[[int, int], float] = lambda *_: 1.0
    """From replica and synchronization to a factor of the pseudo-gradient that it sends."""


class ReplicaTraining:
    """One rank's part."""

    def __init__(self, mesh: DeviceMesh, run: ReplicaRun) -> None:
        self.run = run
        self.replica, self.shard = mesh.get_local_rank("sync"), mesh.get_local_rank("shard")
        self.shards = mesh["shard"].size()
        self.steps = run.steps[self.replica % len(run.steps)]
        self.batch = run.batches[self.replica % len(run.batches)]
        self.net = make_net(run.dtype, checkpointing=run.checkpointing)
        if self.shards > 1:
            parallel.shard_model(self.net, mesh, self.net.blocks, {})
            parallel.synchronize_gradients(self.net, True, local=True)
        self.optimizer = run.optimizer(self.net)
        forward = ForwardPass(self.net, self.net.blocks)
        compiled: Iterable[nn.Module] = [self.net] if run.compiled == "whole" else self.net.blocks
        for module in compiled if run.compiled else ():
            module.compile(backend="eager", dynamic=False)
        if run.compiled:
            with torch.no_grad():
                self.net(torch.ones(BATCH, 4, dtype=run.dtype))
        shard_group = mesh.get_group("shard") if self.shards > 1 else None
        self.replicas = Replicas(forward, mesh.get_group("sync"), shard_group, run.settings)
        self.replicas.attach(self.optimizer)
        self.optimizer.register_step_pre_hook(lambda *_: self._record_common_parameters())
        self.replicas.start()
        self.done = 0
        self.number = 0
        self._begun = 0
        self.common: list[str] = []
        """Digest of this rank's parameters after each synchronization, before the next step changes them."""
        self.own: list[str] = []
        """The same before each."""
        self._last = [parameter.detach().clone() for parameter in self.net.parameters()]

    def run_steps_and_syncs(self, count: int) -> Iterator[Synchronization]:
        """Steps, and one synchronization after the other; they are pending, unless the run is eager."""
        for _ in range(count):
            self.number += 1
            for index in range(self.steps):
                self.net.skipped = self.run.skipped if index == 0 else None
                last = index == self.steps - 1
                self.step(self.run.poison(self.replica, self.number) if last else 1.0)
            self.own.append(compute_digest(self.net.parameters()))
            if (factor := self.run.corrupt_input(self.replica, self.number)) != 1.0:
                self._move(factor)
            if self.run.evaluate:
                with torch.no_grad():
                    self.net(torch.ones(1, 4, dtype=self.run.dtype))
            unequal = len(set(self.run.steps)) > 1
            synchronization = self.replicas.begin(self.steps, unequal, samples=self.steps * self.batch)
            self._begun += 1
            if self.run.eager:
                self.replicas.finish()
            yield synchronization
        self.replicas.finish()
        self._record_common_parameters()

    def step(self, poison: float = 1.0) -> None:
        """`poison`: multiplies the inputs."""
        x, y = draw_samples(self.run.seed, self.replica, self.done, self.batch)
        own_part = slice(self.shard, None, self.shards)
        (loss_sum(self.net, poison * x[own_part], y[own_part]) / self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def compute_held_out_loss(self) -> float:
        """The mean loss of samples that no replica trains on."""
        x, y = draw_samples(999, 0, 0, 200)
        with torch.no_grad():
            return float(loss_sum(self.net, x, y)) / len(x)

    def _record_common_parameters(self) -> None:
        if len(self.common) < self._begun:
            assert not self.replicas.is_pending, "the optimizer steps while a synchronization is pending"
            self.common.append(compute_digest(self.net.parameters()))
            self._last = [parameter.detach().clone() for parameter in self.net.parameters()]

    @torch.no_grad()
    def _move(self, factor: float) -> None:
        """As far from the last common parameters as training did, times `factor`."""
        for parameter, last in zip(self.net.parameters(), self._last, strict=True):
            parameter.copy_(last + factor * (parameter - last))


def compute_digest(tensors: Iterable[Tensor]) -> str:
    """Of this rank's part of them, bit by bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(part.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def gather_parameters(net: nn.Module) -> list[Tensor]:
    """The parameters, gathered. Collective over the shards."""
    return [
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for parameter in net.parameters()
    ]
