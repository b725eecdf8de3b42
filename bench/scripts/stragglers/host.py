"""Runs ranks: `python -m bench.scripts.stragglers.host MODULE …`, in the virtual environment of the side.

Each line of its input is a Run and a time-out; for each it forks the ranks, which have torch imported by then, and
answers with a line: a list of Outcomes in rank order, or {"error": …}. MODULE: more to import before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .run import RANKS, Place, Run

CLONE_NEWNET = 0x40000000
PREIMPORTS = ("torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo")
"""The last one is what an optimizer's first zero_grad() imports."""


def main() -> None:
    for name in (*PREIMPORTS, *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each rank's first full collection would copy all pages of what is imported
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(perform_run(Run.from_json(request["run"]), request["timeout"])) + "\n")
        answers.flush()


def perform_run(run: Run, timeout: float) -> Any:
    """The ranks' outcomes as JSON, or an error."""
    folder = Path(tempfile.mkdtemp(prefix="bench-of-pacekeeper-", dir="/dev/shm"))
    ports = find_free_ports(RANKS + 1)
    places = [Place(rank, ports, folder) for rank in range(RANKS)]
    outcome = run_ranks([partial(run_rank, run, place) for place in places], folder, timeout)
    shutil.rmtree(folder)
    return outcome


def run_ranks(ranks: Sequence[Callable[[], dict[str, Any]]], folder: Path, timeout: float) -> Any:
    """What each rank gave back from a process of its own, in rank order, or an error. All of them have ended."""
    paths = [folder / f"outcome-{rank}.json" for rank in range(len(ranks))]
    children = [fork_rank(work, rank, path) for rank, (work, path) in enumerate(zip(ranks, paths, strict=True))]
    try:
        wait_for_ranks(children, paths, timeout)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # ended or not: a child that was not waited for keeps its id
            os.waitpid(pid, 0)
    answers = [json.loads(path.read_text()) for path in paths if path.exists()]
    errors = [answer["error"] for answer in answers if "error" in answer]
    missing = len(ranks) - len(answers)
    if errors or missing:
        return {"error": errors[0] if errors else f"{missing} ranks gave nothing back in {timeout:.0f} s"}
    return answers


def fork_rank(work: Callable[[], dict[str, Any]], rank: int, path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        answer = work()
    except BaseException:
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    path.with_suffix(".new").write_text(json.dumps(answer))
    path.with_suffix(".new").rename(path)
    os._exit(0)


def run_rank(run: Run, place: Place) -> dict[str, Any]:
    from . import sides

    if run.namespaces:
        enter_network(run.namespaces[place.rank])
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR=run.addresses[0],
        MASTER_PORT=str(place.ports[0]),
        GLOO_SOCKET_IFNAME=run.interface,
    )
    return sides.find_side(run.side)(run, place).to_json()


def wait_for_ranks(children: list[int], paths: list[Path], timeout: float) -> None:
    """Until all have ended, or the time is over; when one has ended badly, its peers have a few seconds left."""
    deadline = time.monotonic() + timeout
    running = {os.pidfd_open(pid): path for pid, path in zip(children, paths, strict=True)}
    while running and (remaining := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(running), [], [], remaining)
        for fd in ready:
            os.close(fd)
            path = running.pop(fd)
            if not path.exists() or "error" in json.loads(path.read_text()):
                deadline = min(deadline, time.monotonic() + 3)
    for fd in running:
        os.close(fd)


def enter_network(namespace: str) -> None:
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}")


def find_free_ports(count: int) -> tuple[int, ...]:
    """Of the loopback, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


if __name__ == "__main__":
    main()
