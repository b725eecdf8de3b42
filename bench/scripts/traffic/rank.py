"""A rank of a job that is bound by communication: all-reduces of $BYTES bytes over gloo, one after another.

Rank 0 writes the two ports of their connection into $FOLDER/connection-<round>. It goes on as long as the file
$FOLDER/go is there, and rank 1 with it; when it began, when each all-reduce ended and when it rested stands in
$FOLDER/progress-<round> (seconds, monotonic).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE = 0.02


def main() -> None:
    dist.init_process_group("gloo")
    folder, number = Path(os.environ["FOLDER"]), os.environ["PACEKEEPER_ROUND"]
    tensor, go = torch.zeros(int(os.environ["BYTES"]) // 4), folder / "go"
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != 0:
        while True:
            dist.all_reduce(tensor)
    with (folder / f"progress-{number}").open("w", buffering=1) as progress:
        unfinished = folder / f"connection-{number}.new"
        unfinished.write_text(" ".join(map(str, ports())))
        unfinished.rename(unfinished.with_suffix(""))
        while True:
            while not go.exists():
                time.sleep(PAUSE)
            print("began", time.monotonic(), file=progress)
            while go.exists():
                dist.all_reduce(tensor)
                print("ended", time.monotonic(), file=progress)
            print("rests", time.monotonic(), file=progress)


def ports() -> tuple[int, int]:
    """Ours and the other rank's, of the only connection that this rank holds with another host."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as held:
                if held.family == socket.AF_INET and held.getpeername()[0] != held.getsockname()[0]:
                    return held.getsockname()[1], held.getpeername()[1]
    raise RuntimeError("this rank has no connection with another host")


if __name__ == "__main__":
    main()
