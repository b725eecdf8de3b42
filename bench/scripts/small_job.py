"""A small data-parallel job with a checkpoint every step, as a user might write it: no Pacekeeper in it.

Environment: FOLDER (on tmpfs). After every optimizer step each rank appends a line to FOLDER/rank-<rank>: monotonic
seconds, process id, incarnation, step. A restored state that is not the saved one ends the run with code 3.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(os.environ["FOLDER"])
WIDTH = 256
STEP_SECONDS = 0.05


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = restore_checkpoint(model, optimizer)
    parallel = DistributedDataParallel(model)
    diary = (FOLDER / f"rank-{rank}").open("a", buffering=1)
    incarnation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    while True:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        diary.write(f"{time.monotonic()} {os.getpid()} {incarnation} {step}\n")
        if rank == 0:
            save_checkpoint(model, optimizer, step)
        time.sleep(STEP_SECONDS)


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save({**content, "hash": hash_state(content)}, FOLDER / "checkpoint.new")
    (FOLDER / "checkpoint.new").replace(FOLDER / "checkpoint")


def restore_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step that the checkpoint was taken at; 0 where there is none."""
    path = FOLDER / "checkpoint"
    if not path.exists():
        return 0
    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    restored = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": content["step"]}
    if hash_state(restored) != content["hash"]:
        sys.exit(3)
    step: int = content["step"]
    return step


def hash_state(content: dict[str, Any]) -> str:
    """Over every tensor of model and optimizer, and the step."""
    digest = hashlib.sha256(str(content["step"]).encode())
    moments = content["optimizer"]["state"]
    tensors = [*content["model"].values(), *(moments[key][name] for key in moments for name in sorted(moments[key]))]
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


main()
