"""A job in which a kernel of one rank never ends: a script for launchers.

Environment: STEPS; FOLDER (of the ranks' diaries); BACKEND; FAULTS: a JSON list of {"rank": …, "round": …, "step": …,
"reads_loss": whether the rank reads its loss behind that kernel, as scripts do that print it; otherwise it goes on, and
waits at the end of the backward pass like its peers}.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

import pacekeeper as pk
from bench.scripts.gpu.machine import DEVICE, Busy, wait_until_done
from bench.scripts.gpu.training import BATCH, Samples, compute_loss_sum, make_net

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["PACEKEEPER_ROUND"])
STEPS = int(os.environ["STEPS"])


def main() -> None:
    busy = Busy()
    job = pk.init(backend=os.environ["BACKEND"])
    model = job.replicate(make_net().to(DEVICE))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = job.dataloader(Samples(STEPS * BATCH), BATCH, max_microbatch=BATCH, shuffle=False)
    for step in job.steps(loader, until=STEPS):
        for _, x, y in step.microbatches():
            busy(0.05)
            loss = compute_loss_sum(model, x.to(DEVICE), y.to(DEVICE))
            inject_fault(step.number, busy, loss)
            (loss / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_until_done()
        write_diary(f"step {step.number}")
    write_diary("end")


def inject_fault(step: int, busy: Busy, loss: torch.Tensor) -> None:
    for fault in json.loads(os.environ["FAULTS"]):
        if (fault["rank"], fault["round"], fault["step"]) == (RANK, ROUND, step):
            write_diary("kernel")
            busy.run_forever()
            if fault["reads_loss"]:
                loss.item()


def write_diary(text: str) -> None:
    with Path(os.environ["FOLDER"], f"diary-{RANK}").open("a") as file:
        file.write(f"{time.monotonic():.4f} {os.getpid()} round {ROUND} {text}\n")


main()
