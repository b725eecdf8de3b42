"""A steered job whose rank 1 takes three times as long for a sample as the others, by sleeping.

Environment: FOLDER, where each rank writes how many samples each of its steps had; UNTIL: the last step; FAKE_CLOCK:
anything: the seconds pass by a fake clock instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk

SECONDS_A_SAMPLE = (0.002, 0.006)
GLOBAL_BATCH = 24


class Zeros(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(4)


def create_work() -> Callable[[float], None]:
    """What takes the given seconds."""
    if "FAKE_CLOCK" not in os.environ:
        return time.sleep
    from testing.training.fake_clock import install_fake_clock

    return install_fake_clock(Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).work


work = create_work()
job = pk.init()
net = job.replicate(nn.Linear(4, 4))
optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
loader = job.dataloader(Zeros(), global_batch_size=GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH)
job.register(net=net, optimizer=optimizer, loader=loader)
job.restore()
with (Path(os.environ["FOLDER"]) / f"samples-{job.rank}").open("a", buffering=1) as diary:
    for step in job.steps(loader, until=int(os.environ["UNTIL"])):
        samples = 0
        for batch in step.microbatches():
            samples += len(batch)
            work(SECONDS_A_SAMPLE[job.rank] * len(batch))
            loss = net(batch).square().sum()
            (loss / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.write(f"{samples}\n")
