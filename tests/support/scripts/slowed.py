"""A steered job whose ranks sleep for each sample, as long as FOLDER/seconds-<rank> says, which is read in each step.

Environment: FOLDER; SECONDS_A_SAMPLE where a rank has no such file; PARAMETERS: of the model, about.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk

GLOBAL_BATCH = 64
FOLDER = Path(os.environ["FOLDER"])
USUAL = float(os.environ["SECONDS_A_SAMPLE"])
WIDTH = 16


class Zeros(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(WIDTH)


def seconds_a_sample(rank: int) -> float:
    path = FOLDER / f"seconds-{rank}"
    return float(path.read_text()) if path.exists() else USUAL


job = pk.init()
net = job.replicate(nn.Linear(WIDTH, int(os.environ.get("PARAMETERS", "4096")) // WIDTH))
optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=1e-6), warmup_steps=0)
loader = job.dataloader(Zeros(), global_batch_size=GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH)
job.register(net=net, optimizer=optimizer, loader=loader)
job.restore()
for step in job.steps(loader, until=1_000_000):
    for batch in step.microbatches():
        time.sleep(len(batch) * seconds_a_sample(job.rank))
        (net(batch).square().sum() / step.total_weight).backward()
    optimizer.step()
    optimizer.zero_grad()
