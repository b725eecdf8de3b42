"""A steered job in each of whose steps a rank drawn at random takes five times as long as the others, by a fake clock.

Environment: FOLDER, where a file `calm` ends that; UNTIL: the last step.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk
from testing.training.fake_clock import install_fake_clock

SECONDS = 0.02
GLOBAL_BATCH = 8


class Zeros(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(4)


folder = Path(os.environ["FOLDER"])
clock = install_fake_clock(folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
job = pk.init()
net = job.replicate(nn.Linear(4, 4))
optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
loader = job.dataloader(Zeros(), global_batch_size=GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH)
job.register(net=net, optimizer=optimizer, loader=loader)
job.restore()
for number, step in enumerate(job.steps(loader, until=int(os.environ["UNTIL"]))):
    slow = random.Random(number).randrange(job.world_size) == job.rank and not (folder / "calm").exists()
    for batch in step.microbatches():
        clock.work(SECONDS * (5 if slow else 1))
        loss = net(batch).square().sum()
        (loss / step.total_weight).backward()
    optimizer.step()
    optimizer.zero_grad()
