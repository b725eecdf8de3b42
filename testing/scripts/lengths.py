"""A steered job whose sequences cost as the square of their length, by sleeping, while its loader takes the length.

Environment: FOLDER, where each rank writes the squares of each of its steps; UNTIL: the last step; SECONDS_A_SQUARE;
FAKE_CLOCK: anything: the seconds pass by a fake clock instead.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk

SECONDS_A_SQUARE = float(os.environ.get("SECONDS_A_SQUARE", "1e-8"))
BATCH = (1600, 1000, 900, 900, 300, 200, 100, 100)
"""Parts of equal length for two ranks have squares of 3.4 and 1.9 million; of equal cost, of 2.7 million each."""
SCALES = [random.Random(number).uniform(0.7, 1.3) for number in range(1000)]
LENGTHS = [length * scale for scale in SCALES for length in BATCH]


class Texts(Dataset[tuple[Tensor, float]]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.zeros(4), LENGTHS[index]


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
loader = job.dataloader(
    Texts(), global_batch_size=len(BATCH), max_microbatch=len(BATCH), shuffle=False, lengths=LENGTHS
)
job.register(net=net, optimizer=optimizer, loader=loader)
job.restore()
with (Path(os.environ["FOLDER"]) / f"steps-{job.rank}").open("a", buffering=1) as diary:
    for step in job.steps(loader, until=int(os.environ["UNTIL"])):
        squares = 0.0
        for batch, lengths in step.microbatches():
            squares += lengths.square().sum().item()
            work(SECONDS_A_SQUARE * lengths.square().sum().item())
            loss = net(batch).square().sum()
            (loss / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.write(f"{squares}\n")
