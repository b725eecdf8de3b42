"""A DDP script: ddp.py FOLDER [END]. It saves and loads a checkpoint, and prints what it has computed.

END: what rank 1 does after some steps: `raise` an exception in the dataset, `exit` with code 3, `kill` itself, or
`leave` without a word, so that its peer fails in a collective. In all other cases, its peer ends itself by SIGTERM.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAILING_STEP = 3
folder, end = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""


class Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if end == "raise" and self.rank == 1 and index == 8 * FAILING_STEP:
            raise ValueError(f"sample {index} is broken")
        return torch.full((16,), float(index % 5 + self.rank))


def has_left(leaving: Path) -> bool:
    """Return whether the process whose ID is in the file has ended."""
    try:
        status = Path("/proc", leaving.read_text() or "self", "stat").read_text()
    except FileNotFoundError:
        return leaving.exists()
    return status.rpartition(")")[2].split()[0] == "Z"


def end_early(rank: int) -> None:
    leaving = folder / "leaving"
    if rank == 0:
        if end == "leave":
            # Until its peer is gone: gloo has another message for a peer that goes while it is sent something.
            while not has_left(leaving):
                time.sleep(0.01)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    elif end == "exit":
        sys.exit(3)
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "leave":
        leaving.write_text(str(os.getpid()))
        os._exit(4)


def digest(tensors: list[torch.Tensor]) -> str:
    content = b"".join(bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist()) for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)), bucket_cap_mb=0.001
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
group: Any = dist.new_group()
step = 0
for epoch in range(2):
    # The second epoch's batches come from a forked process.
    for batch in DataLoader(Samples(rank), batch_size=8, num_workers=epoch):
        if end and step == FAILING_STEP:
            end_early(rank)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        total = loss.detach().clone()
        work = dist.all_reduce(total, group=group, async_op=True)
        if work is not None:
            work.wait()
        print(f"rank {rank} step {step} loss {loss.item()!r} total {total.item()!r}")
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(total, 0)
path = folder / f"{rank}.pt"
torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
state = torch.load(path)  # older ones warn about its default, and show this line
model.module.load_state_dict(state["model"])
try:
    torch.load(folder / "missing.pt")
except FileNotFoundError:
    logging.info("no other checkpoint")
warnings.warn("a warning of the script", stacklevel=1)
gathered: list[object] = [None] * dist.get_world_size()
dist.all_gather_object(gathered, digest(list(model.parameters())))
logging.info("rank %s: parameters %s", rank, gathered)
dist.barrier()
dist.destroy_process_group()
print("done", time.perf_counter() > 0)
