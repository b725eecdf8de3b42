"""A rank of a job that is bound by communication: all-reduces of 2 MB over gloo, one after another.

Rank 0 waits until the file $FOLDER/go is there; all then reduce $SECONDS long, and rank 0 writes the rate at which each
has sent (Mbit/s) into $FOLDER/rate-<round>.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

BYTES = 2_000_000


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["FOLDER"])
    tensor = torch.zeros(BYTES // 4)
    keep_going = torch.ones(1)
    dist.all_reduce(keep_going)
    (folder / f"ready-{os.environ['PACEKEEPER_ROUND']}-{rank}").touch()
    while rank == 0 and not (folder / "go").exists():
        time.sleep(0.01)
    dist.barrier()
    start, count = time.monotonic(), 0
    while keep_going:
        dist.all_reduce(tensor)
        count += 1
        keep_going = torch.tensor(float(time.monotonic() - start < float(os.environ["SECONDS"])))
        dist.broadcast(keep_going, 0)
    if rank == 0:
        world_size = dist.get_world_size()
        sent_bytes = 2 * (world_size - 1) / world_size * BYTES * count
        path = folder / f"rate-{os.environ['PACEKEEPER_ROUND']}"
        path.write_text(str(sent_bytes * 8 / (time.monotonic() - start) / 1e6))
    while True:  # until the round is ended
        time.sleep(1)


main()
