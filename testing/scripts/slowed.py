"""A managed job whose ranks sleep for each sample, as long as FOLDER/seconds-<rank> sets, or FOLDER/seconds-<host> for
any rank there; they are read in each step.

Environment: FOLDER, where each rank writes when its steps ended, their rounds, numbers and samples; SECONDS_A_SAMPLE
where a rank has no such file; PARAMETERS: of the model, about; FAKE_CLOCK: the seconds that a step really takes, where
those of its samples pass by a fake clock instead.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk

GLOBAL_BATCH = 64
FOLDER = Path(os.environ["FOLDER"])
ROUND = int(os.environ.get("PACEKEEPER_ROUND", "0"))
USUAL = float(os.environ["SECONDS_A_SAMPLE"])
WIDTH = 16


class Zeros(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(WIDTH)


def seconds_a_sample(rank: int) -> float:
    for name in (rank, socket.gethostname()):
        with suppress(FileNotFoundError):
            return float((FOLDER / f"seconds-{name}").read_text())
    return USUAL


def create_work() -> Callable[[float], None]:
    """What takes the given seconds."""
    if "FAKE_CLOCK" not in os.environ:
        return time.sleep
    from testing.training.fake_clock import install_fake_clock

    return install_fake_clock(FOLDER, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).work


work, pause = create_work(), float(os.environ.get("FAKE_CLOCK", "0"))
job = pk.init()
net = job.replicate(nn.Linear(WIDTH, int(os.environ.get("PARAMETERS", "4096")) // WIDTH))
optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=1e-6), warmup_steps=0)
loader = job.dataloader(Zeros(), global_batch_size=GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH)
job.register(net=net, optimizer=optimizer, loader=loader)
job.restore()
with (FOLDER / f"steps-{job.rank}").open("a", buffering=1) as diary:
    for step in job.steps(loader, until=1_000_000):
        samples = 0
        for batch in step.microbatches():
            samples += len(batch)
            work(len(batch) * seconds_a_sample(job.rank))
            (net(batch).square().sum() / step.total_weight).backward()
        time.sleep(pause)
        optimizer.step()
        optimizer.zero_grad()
        diary.write(f"{time.time()} {ROUND} {step.number} {samples}\n")
