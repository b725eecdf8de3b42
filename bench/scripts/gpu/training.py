"""What ranks on a GPU train: a small net in float64, so that sums in another order differ by 1e-12 and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import pacekeeper as pk
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty

from .machine import DEVICE, Busy, wait_until_done

BATCH = 8
LEARNING_RATE = 0.05
PLAIN_OUTER_SGD = pk.OuterSGD(lr=1.0, momentum=0.0, penalty=Penalty(enabled=False))
"""Synchronizations take the mean of the replicas."""
PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER, sync_every=4, sync_seconds=0.1)
BUSY_SECONDS = (0.01, 0.02)
"""Of a rank's step: in A-EDiT the ranks make different numbers of them."""


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


def compute_loss_sum(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (net(x) - y).square().sum()
    return loss


def train_rank(
    until: int, modes: dict[str, str], backend: str = "gloo", sharded: bool = False, compiled: str = ""
) -> dict[str, Any]:
    """A rank of a job. `modes`: from the job's step on, by the plan; "0": from the beginning. compiled: "", or by which
    mode of torch.compile the model is.

    Returns its parameters, the modes of its steps in order, and `steps`: of each the number of common parameters that
    there were before it, and the samples that it used.
    """
    plans = {int(step): SyncMode(mode) for step, mode in modes.items()}
    plan = replace(PLAN, sync_mode=plans.pop(0))
    rank = int(os.environ["RANK"])
    runtime = RuntimeFolder.from_environment()
    if rank == 0:
        write_json(runtime.plan, plan.to_json())
    busy = Busy()
    job = pk.init(backend=backend)
    net = make_net().to(DEVICE)
    model = job.fully_shard(net) if sharded else job.replicate(net)
    forward: Any = torch.compile(model, mode=compiled) if compiled else model
    optimizer = job.optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), outer=PLAIN_OUTER_SGD, warmup_steps=0
    )
    loader = job.dataloader(Samples(until * BATCH), BATCH, max_microbatch=3, shuffle=False)
    job.register(model=model, optimizer=optimizer, loader=loader)
    job.restore()
    replication, synchronous = job._replication, 0
    step_modes: list[SyncMode] = []
    steps: list[tuple[int, list[int]]] = []
    for step in job.steps(loader, until=until):
        step_modes.append(tuple(SyncMode)[job.recorder.ring.state.sync_mode])
        newest = replication.newest_synchronizations
        steps.append((synchronous + (newest[0].number if newest else 0), []))
        synchronous += not replication.is_local
        for indices, x, y in step.microbatches():
            busy(BUSY_SECONDS[rank] / 2)
            loss = compute_loss_sum(forward, x.to(DEVICE), y.to(DEVICE))
            step.add_loss(loss.detach())
            (loss / step.total_weight).backward()
            steps[-1][1].extend(indices.tolist())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and plans and job.step >= min(plans):
            change_step = min(plans)
            write_json(runtime.plan, replace(plan, version=1 + change_step, sync_mode=plans.pop(change_step)).to_json())
    wait_until_done()
    return {
        "parameters": _list_parameters(net),
        "modes": [mode for number, mode in enumerate(step_modes) if number == 0 or step_modes[number - 1] is not mode],
        "steps": steps,
        "loss": job.loss,
    }


def replay_in_one_process(until: int, ranks: Sequence[Sequence[tuple[int, Sequence[int]]]]) -> list[list[float]]:
    """The parameters of plain PyTorch on the CPU that makes the `steps` of all ranks in one process.

    Replicas that had the same parameters before their steps have the mean behind them, weighed by their samples.
    """
    data, common_net = Samples(until * BATCH), make_net()
    for number in range(1 + max(number for rank in ranks for number, _ in rank)):
        nets, weights = [], []
        for rank in ranks:
            net = deepcopy(common_net)
            step_samples = [samples for synchronized, samples in rank if synchronized == number]
            for samples in step_samples:
                _apply_sgd_step(net, data, samples)
            nets.append(net)
            weights.append(sum(map(len, step_samples)))
        with torch.no_grad():
            for parameter, *values in zip(common_net.parameters(), *(net.parameters() for net in nets), strict=True):
                parameter.copy_(
                    sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
                )
    return _list_parameters(common_net)


def train_in_one_process(until: int) -> list[list[float]]:
    """The same with whole global batches."""
    net, data = make_net(), Samples(until * BATCH)
    for step in range(until):
        _apply_sgd_step(net, data, range(step * BATCH, (step + 1) * BATCH))
    return _list_parameters(net)


def _apply_sgd_step(net: nn.Module, data: Samples, samples: Sequence[int]) -> None:
    """Of SGD without momentum."""
    indices = list(samples)
    gradients = torch.autograd.grad(
        compute_loss_sum(net, data.x[indices], data.y[indices]) / len(indices), list(net.parameters())
    )
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=LEARNING_RATE)


def _list_parameters(net: nn.Module) -> list[list[float]]:
    return [_gather_parameter(parameter).flatten().tolist() for parameter in net.parameters()]


def _gather_parameter(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu()
