"""A job that holds much of the GPU's memory: a script for `pacekeeper run`, with a snapshot each step.

Environment: FOLDER, HOLD_BYTES, KERNEL_SECONDS, BACKEND. Of each rank, FOLDER/diary-<rank> has a line for each stage
that it comes to: monotonic seconds, process id, `round <number> <stage>`. In step 3 of the first round a kernel of
KERNEL_SECONDS runs, during which the rank may be killed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

BEGAN = time.monotonic()

import torch  # noqa: E402  # nothing, where the launcher has it imported

import pacekeeper as pk  # noqa: E402
from bench.scripts.gpu.machine import DEVICE, ON_GPU, Busy, wait_until_done  # noqa: E402
from bench.scripts.gpu.training import BATCH, Samples, compute_loss_sum, make_net  # noqa: E402

RANK, ROUND = os.environ.get("RANK", "0"), os.environ["PACEKEEPER_ROUND"]
KERNEL_STEP, STEPS = 3, 6


def main() -> None:
    write_stage("started", BEGAN)
    if ON_GPU:
        torch.cuda.init()
        torch.ones(1, device=DEVICE)
        wait_until_done()
    write_stage("device")
    held = torch.empty(int(os.environ["HOLD_BYTES"]), dtype=torch.uint8, device=DEVICE)
    held.fill_(1)
    wait_until_done()
    write_stage("memory")
    busy = Busy()
    write_stage("calibrated")
    job = pk.init(backend=os.environ["BACKEND"] or None, snapshot_every=1)
    write_stage("joined")
    model = job.replicate(make_net().to(DEVICE))
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = job.dataloader(Samples(STEPS * BATCH), BATCH, max_microbatch=BATCH, shuffle=False)
    job.register(model=model, optimizer=optimizer, loader=loader)
    restored = job.restore()
    wait_until_done()
    write_stage(f"restored {restored}")
    for step in job.steps(loader, until=STEPS):
        for _, x, y in step.microbatches():
            if step.number == KERNEL_STEP and ROUND == "1":
                busy(float(os.environ["KERNEL_SECONDS"]))
                write_stage("kernel")
                wait_until_done()
            (compute_loss_sum(model, x.to(DEVICE), y.to(DEVICE)) / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_until_done()
        write_stage(f"step {step.number}")
    write_stage("end")


def write_stage(stage: str, at: float | None = None) -> None:
    with Path(os.environ["FOLDER"], f"diary-{RANK}").open("a") as file:
        file.write(f"{at or time.monotonic():.4f} {os.getpid()} round {ROUND} {stage}\n")


main()
