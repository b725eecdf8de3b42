"""Trains in turns: a line on standard input is a turn's number of steps, and its answer what the steps have taken.

The answer is a line of JSON. `wall`: seconds of the script's part of a step, the median over the turn without its first
step. `processor`: the same on all threads, and what they take between the script's parts, by step; also in seconds.
`between`: the latter alone.
`anonymous_bytes`: memory at the end of the turn.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

STEP_SECONDS = 0.05
LAYERS = 24


def make_step() -> Any:
    """Return one training step with nine collectives: eight of DDP, and the loss."""
    torch.manual_seed(0)
    # Of three layers each.
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)]), bucket_cap_mb=0.04
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples: Any = [torch.randn(64) for _ in range(64)]
    batches = itertools.chain.from_iterable(DataLoader(samples, batch_size=8) for _ in itertools.count())

    def step() -> None:
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    return step


def read_anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
step = make_step()
for line in sys.stdin:
    parts, processor_parts = [], []
    processor_start = 0.0
    for number in range(int(line)):
        start, processor = time.perf_counter(), time.process_time()
        if number == 1:
            processor_start = processor
        step()
        parts.append(time.perf_counter() - start)
        processor_parts.append(time.process_time() - processor)
        time.sleep(max(0.0, STEP_SECONDS - parts[-1]))
    between = time.process_time() - processor_start - sum(processor_parts[1:])
    answer = {
        "wall": statistics.median(parts[1:]),
        "between": between / (len(parts) - 1),
        "processor": statistics.median(processor_parts[1:]) + between / (len(parts) - 1),
        "anonymous_bytes": read_anonymous_bytes(),
    }
    print(json.dumps(answer), file=answers, flush=True)
