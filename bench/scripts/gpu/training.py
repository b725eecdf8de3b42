"""What ranks on a GPU train: a small net in float64, so that sums in another order differ by 1e-12 and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk
from pacekeeper.runtime import Runtime, write_json
from pacekeeper_analysis.plan import Role, SyncMode, WorkerPlan
from pacekeeper_analysis.pseudo_gradient import Penalty

from .machine import DEVICE, wait_until_done

BATCH = 8
LEARNING_RATE = 0.05
PLAIN = pk.OuterSGD(lr=1.0, momentum=0.0, penalty=Penalty(enabled=False))
"""Synchronisations take the mean of the replicas."""
A_MOMENT = 1e-6
"""Seconds of A-EDiT's clock: up after each step, so that ranks whose samples cost alike make one step each."""
PLAN = WorkerPlan(version=1, membership=1, role=Role.MEMBER, sync_every=1, sync_seconds=A_MOMENT)


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i, its features [4] and its target [1]."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :1] * self.x[:, 1:2]).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def make_net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(torch.float64)


def loss_sum(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().sum()


def train(
    until: int, modes: dict[str, str], sync_every: int = 1, backend: str = "gloo", sharded: bool = False
) -> dict[str, Any]:
    """A rank of a job. `modes`: from the job's step on, by the plan; "0": from the beginning.

    Returns its parameters, the modes of its steps in order, and the samples that it used.
    """
    plans = {int(step): SyncMode(mode) for step, mode in modes.items()}
    plan = replace(PLAN, sync_every=sync_every, sync_mode=plans.pop(0))
    leads = os.environ["RANK"] == "0"
    runtime = Runtime.from_environment()
    if leads:
        write_json(runtime.plan, plan.to_json())
    job = pk.init(backend=backend)
    net = make_net().to(DEVICE)
    model = job.fully_shard(net) if sharded else job.replicate(net)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), outer=PLAIN, warmup_steps=0)
    loader = job.dataloader(Samples(until * BATCH), BATCH, max_microbatch=3, shuffle=False)
    job.register(model=model, optimizer=optimizer, loader=loader)
    job.restore()
    seen, used = [], []
    for step in job.steps(loader, until=until):
        seen.append(tuple(SyncMode)[job.recorder.ring.state.sync_mode])
        for indices, x, y in step.microbatches():
            loss = loss_sum(model, x.to(DEVICE), y.to(DEVICE))
            step.add_loss(loss)
            (loss / step.total_weight).backward()
            used += indices.tolist()
        optimizer.step()
        optimizer.zero_grad()
        if leads and plans and job.step >= min(plans):
            at = min(plans)
            write_json(runtime.plan, replace(plan, version=1 + at, sync_mode=plans.pop(at)).to_json())
    wait_until_done()
    return {
        "parameters": [_whole(parameter).flatten().tolist() for parameter in net.parameters()],
        "modes": _changes(seen),
        "used": used,
        "loss": job.loss,
    }


def single_process(until: int) -> list[list[float]]:
    """The parameters of plain PyTorch on the CPU, with whole global batches."""
    net, data = make_net(), Samples(until * BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(until):
        _step(net, optimizer, data, range(step * BATCH, (step + 1) * BATCH))
    return [parameter.flatten().tolist() for parameter in net.parameters()]


def local_sgd(until: int, replicas: int, sync_every: int) -> list[list[float]]:
    """The same of replicas that train by themselves and take their mean after so many steps."""
    data, share = Samples(until * BATCH), BATCH // replicas
    nets = [make_net() for _ in range(replicas)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=LEARNING_RATE) for net in nets]
    for step in range(until):
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            first = step * BATCH + number * share
            _step(net, optimizer, data, range(first, first + share))
        if (step + 1) % sync_every == 0 or step + 1 == until:
            for of_one in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([parameter.detach() for parameter in of_one]).mean(0)
                for parameter in of_one:
                    parameter.data.copy_(mean)
    return [parameter.flatten().tolist() for parameter in nets[0].parameters()]


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, data: Samples, samples: Sequence[int]) -> None:
    index = list(samples)
    (loss_sum(net, data.x[index], data.y[index]) / len(index)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().cpu()


def _changes(seen: Sequence[SyncMode]) -> list[SyncMode]:
    return [mode for number, mode in enumerate(seen) if number == 0 or seen[number - 1] is not mode]
