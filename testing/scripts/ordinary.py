"""A script of two ranks as people write them: watched only, with waits in the middle, and work after the last step.

Environment: FOLDER; VARIANT: "waits" (a child process, a FIFO, a busy child, each for longer than ten steps; then rank
0 exports while rank 1 has left), "uneven" (rank 1 has fewer batches), or "silent" (rank 1 exits with 3 and prints
nothing).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pacekeeper.auto  # noqa: F401

RANK, SCRIPT_MODE, FOLDER = int(os.environ["RANK"]), os.environ["VARIANT"], Path(os.environ["FOLDER"])
STEPS = 60
LONGER_THAN_A_HANG = 3.2
BUSY = f"import time; end = time.time() + {LONGER_THAN_A_HANG}\nwhile time.time() < end: pass"


def main() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + (SCRIPT_MODE == "uneven" and RANK == 0) + 1):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if SCRIPT_MODE == "waits" and RANK == 1:
            wait_for_others(step)
        if SCRIPT_MODE == "silent" and RANK == 1 and step == 10:
            os._exit(3)
    if SCRIPT_MODE == "waits":
        finish_script()


def wait_for_others(step: int) -> None:
    if step == 20:
        subprocess.run(["sleep", str(LONGER_THAN_A_HANG)], check=True)
    if step == 30:
        os.mkfifo(FOLDER / "fifo")
        threading.Timer(LONGER_THAN_A_HANG, (FOLDER / "fifo").write_text, ["done"]).start()
        assert (FOLDER / "fifo").read_text() == "done"
    if step == 40:
        subprocess.run([sys.executable, "-c", BUSY], check=True)


def finish_script() -> None:
    """Rank 1 has left the group and ends; rank 0 exports, and has a thread that uploads."""
    dist.destroy_process_group()
    if RANK == 0:
        time.sleep(LONGER_THAN_A_HANG)
        threading.Thread(target=upload_export).start()


def upload_export() -> None:
    time.sleep(LONGER_THAN_A_HANG)
    (FOLDER / "uploaded").touch()


if __name__ == "__main__":
    main()
