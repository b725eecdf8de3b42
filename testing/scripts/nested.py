"""Eight ranks as 2 replicas × 2 stages × 2 parts of a layer, which hang on request.

Environment: FOLDER (diary of each rank); STEPS; FAULTS: a JSON list of {"rank", "step", "kind": "sleep" | "sleep in
backward" | "deadlock" | "broadcast" | "order" | "before sending" | "stop" | "kill"}; SLEEP (seconds a step). A file
`fault-<rank>` in FOLDER, with such a kind in it, strikes this rank once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pacekeeper.auto  # noqa: F401

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["PACEKEEPER_ROUND"])
FOLDER = Path(os.environ["FOLDER"])
FAULT_FILE = FOLDER / f"fault-{RANK}"
SLEEP = float(os.environ.get("SLEEP", "0"))


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
    data, stages, tensor = (mesh.get_group(name) for name in ("data", "pipeline", "tensor"))
    stage_ranks = dist.get_process_group_ranks(stages)
    first, last = stage_ranks
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    single_group: Any = dist.new_group([RANK], use_local_synchronization=True)
    for step in range(1, int(os.environ["STEPS"]) + 1):
        time.sleep(SLEEP)
        kind = get_fault(step)
        step_group: Any = dist.new_group([RANK, RANK ^ 1], use_local_synchronization=True)  # another one each step
        dist.all_reduce(torch.ones(1), group=single_group)
        begin_fault(kind)
        if kind == "broadcast":
            dist.broadcast(torch.ones(4), group_src=0, group=tensor)
        groups = [step_group, tensor] if kind == "order" else [tensor, step_group]
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)
        activations = torch.ones(4)
        if first == RANK:
            if kind == "before sending":
                time.sleep(3600)
            dist.send(activations, last, group=stages)
            dist.recv(activations, last, group=stages)
        else:
            dist.recv(activations, first, group=stages)
            dist.send(activations, first, group=stages)
        (weight * activations).sum().backward()
        assert weight.grad is not None
        work = dist.all_reduce(weight.grad, group=data, async_op=True)
        if kind == "sleep in backward":
            time.sleep(3600)
        assert work is not None
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        dist.destroy_process_group(step_group)
        write_diary(f"step {step}")


def begin_fault(kind: str) -> None:
    match kind:
        case "sleep":
            time.sleep(3600)
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def get_fault(step: int) -> str:
    """What happens to this rank in this step; "": nothing."""
    if FAULT_FILE.exists():
        kind = FAULT_FILE.read_text()
        FAULT_FILE.unlink()
        return kind
    faults = json.loads(os.environ.get("FAULTS", "[]"))
    due_kinds = [fault["kind"] for fault in faults if (fault["rank"], fault["step"]) == (RANK, step) and ROUND == 1]
    return due_kinds[0] if due_kinds else ""


def write_diary(text: str) -> None:
    with (FOLDER / f"diary-{RANK}").open("a") as file:
        file.write(f"{time.monotonic():.4f} {os.getpid()} round {ROUND} {text}\n")


main()
