"""A small training job that uses everything whose state matters: dropout, AdamW, a schedule, shuffling, shares.

Environment: FOLDER (what each rank saw, and what it learned); UNTIL; SHARD=1 for FSDP2; SNAPSHOT_EVERY; SAMPLES; SLEEP
(seconds a step); FAULTS: a JSON list of {"rank", "round", "step", "kind": "sigkill"}; WIDTH; STOP_EVERY: the steps
after which the ranks poll whether a file `stop` in FOLDER ends the job. A file
`fault-<rank>` there strikes this rank once, but not in its first step, nor before a checkpoint, where a hang may last
for half an hour: `raise` an error, `fill` its memory, or `hang`. A file `outage` there lets no start succeed until the
time that it holds (Unix seconds). A file `slow-<rank>` has its `augment` take as many
seconds in each step as it sets.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import pacekeeper as pk

FOLDER = Path(os.environ["FOLDER"])
WIDTH = int(os.environ.get("WIDTH", "16"))
ROUND = int(os.environ.get("PACEKEEPER_ROUND", "0"))
CHECKPOINT_EVERY = int(os.environ.get("PACEKEEPER_CHECKPOINT_EVERY") or "0") or 1 << 62


class Numbers(Dataset[tuple[int, Tensor]]):
    """Sample i and its features."""

    def __init__(self, size: int) -> None:
        self.features = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.features[index]


def main() -> None:
    torch.set_num_threads(1)
    reach_storage(FOLDER / "outage")
    snapshot_every = os.environ.get("SNAPSHOT_EVERY")
    job = pk.init(
        mesh={"shard": -1} if os.environ.get("SHARD") else None,
        snapshot_every=int(snapshot_every) if snapshot_every else None,
    )
    random.seed(job.rank)
    np.random.seed(job.rank)
    torch.manual_seed(1)
    net: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
    )
    net = job.fully_shard(net) if os.environ.get("SHARD") else job.replicate(net)
    torch.manual_seed(100 + job.rank)
    optimizer = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01), warmup_steps=0)
    schedule = job.lr_lambda(optimizer, lambda samples: 1 / (1 + samples / 500))
    loader = job.dataloader(Numbers(int(os.environ.get("SAMPLES", "100"))), global_batch_size=24, max_microbatch=5)
    job.register(net=net, optimizer=optimizer, schedule=schedule, loader=loader)
    restored = job.restore()
    with (FOLDER / f"seen-{job.rank}.jsonl").open("a", buffering=1) as diary:
        diary.write(json.dumps({"round": ROUND, "restored": restored, "at": time.time()}) + "\n")
        for index, step in enumerate(job.steps(loader, until=int(os.environ["UNTIL"]))):
            used, total = [], 0.0
            for indices, features in step.microbatches():
                noise = random.random() + float(np.random.rand())
                loss = ((net(features) - features.roll(1, 1)) ** 2).sum() * (1 + 0.01 * noise)
                step.add_loss(loss)
                (loss / step.total_weight).backward()
                used += indices.tolist()
                total += loss.item()
            inject_fault(job.rank, step.number)
            if index > 0 and step.number % CHECKPOINT_EVERY:
                inject_requested_fault(job.rank)
            sleep_if_slow(FOLDER / f"slow-{job.rank}")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            time.sleep(float(os.environ.get("SLEEP", "0")))
            entry = {"round": ROUND, "step": step.number, "seen": used, "loss": total.hex(), "at": time.time()}
            diary.write(json.dumps(entry) + "\n")
            if (
                "STOP_EVERY" in os.environ
                and step.due("stop", every=int(os.environ["STOP_EVERY"]))
                and is_stop_requested()
            ):
                break
    digest = compute_digest(net, optimizer)
    (FOLDER / f"learned-{job.rank}").write_text(digest)


def is_stop_requested() -> bool:
    """All ranks or none: they may poll at different times."""
    votes = torch.tensor(int((FOLDER / "stop").exists()))
    dist.all_reduce(votes)
    return votes.item() > 0


def sleep_if_slow(slow_file: Path) -> None:
    if slow_file.exists():
        time.sleep(float(slow_file.read_text()))


def reach_storage(outage_file: Path) -> None:
    if outage_file.exists() and time.time() < float(outage_file.read_text()):
        raise OSError(f"{outage_file.parent} cannot be reached")


def inject_fault(rank: int, step: int) -> None:
    for fault in json.loads(os.environ.get("FAULTS", "[]")):
        if (fault["rank"], fault["round"]) == (rank, ROUND) and step >= fault["step"]:  # AsyncEDiT leaves numbers out
            os.kill(os.getpid(), signal.SIGKILL)


def inject_requested_fault(rank: int) -> None:
    fault_file = FOLDER / f"fault-{rank}"
    if fault_file.exists():
        kind = fault_file.read_text()
        fault_file.unlink()
        if kind == "raise":
            raise RuntimeError(f"rank {rank} fails on request")
        if kind == "fill":
            torch.ones(1 << 29)  # 2 GiB
        lock = threading.Lock()
        with lock, lock:  # a deadlock: no wait for anything that may come
            raise AssertionError


def compute_digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the parameters (this rank's part), of the optimizer's moments and of its learning rate."""
    digest = hashlib.sha256()
    tensors = [*net.state_dict().values()]
    tensors += [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().numpy().tobytes())
    digest.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
