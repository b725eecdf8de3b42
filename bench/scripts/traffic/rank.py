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

POLL_INTERVAL_SECONDS = 0.02


def main() -> None:
    dist.init_process_group("gloo")
    folder, number = Path(os.environ["FOLDER"]), os.environ["PACEKEEPER_ROUND"]
    tensor, go_file = torch.zeros(int(os.environ["BYTES"]) // 4), folder / "go"
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != 0:
        while True:
            dist.all_reduce(tensor)
    with (folder / f"progress-{number}").open("w", buffering=1) as progress:
        temporary = folder / f"connection-{number}.new"
        temporary.write_text(" ".join(map(str, find_ports())))
        temporary.rename(temporary.with_suffix(""))
        while True:
            while not go_file.exists():
                time.sleep(POLL_INTERVAL_SECONDS)
            print("began", time.monotonic(), file=progress)
            while go_file.exists():
                dist.all_reduce(tensor)
                print("ended", time.monotonic(), file=progress)
            print("rests", time.monotonic(), file=progress)


def find_ports() -> tuple[int, int]:
    """Ours and the other rank's, of the only connection that this rank holds with another host."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername()[0] != connection.getsockname()[0]:
                    return connection.getsockname()[1], connection.getpeername()[1]
    raise RuntimeError("this rank has no connection with another host")


if __name__ == "__main__":
    main()
