"""The job whose faults are recorded: two stages, two replicas, tensor groups of two, over gloo; watched, not steered.

Environment: FOLDER. A file `fault-<rank>.json` there strikes this rank while it is there: {"kind": …, "seconds": …}.
Most of a step is slept, as if a device worked: eight ranks on few cores would otherwise only measure each other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import pacekeeper.auto  # noqa: F401  # watches the rest
from pacekeeper.observe.monitoring import get_recorder

FOLDER = Path(os.environ["FOLDER"])
STAGES, REPLICAS, TENSOR_RANKS = 2, 2, 2
MICROBATCHES = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.008
ACTIVATIONS, PARTIAL_SUMS, GRADIENTS = 16_384, 8_192, 393_216
"""Numbers of 4 bytes: sent between stages, summed in a tensor group, summed over replicas once a step."""
TOKENS_SIGMA = 20.0
"""Standard deviation of the logarithm of lengths, a second of the fault's strength."""
OBJECTS_A_SECOND = 2e7
"""That a collection visits."""
MAX_STEPS_APART = 8
"""No two ranks are."""
USUAL_TOKENS = 1000
"""Of a step's samples; those of one replica's ranks are the same."""
MATRIX_WIDTH = 96
"""Width of the matrices that are really multiplied."""


class Samples(Dataset[torch.Tensor]):
    """Each takes as long to load as the fault sets."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, _index: int) -> torch.Tensor:
        fault = read_fault()
        if fault.get("kind") == "loader":
            time.sleep(fault["seconds"] / MICROBATCHES)
        return torch.zeros(8)


class RankJob:
    """One rank's part."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (STAGES, REPLICAS, TENSOR_RANKS), mesh_dim_names=("stage", "data", "tensor"))
        self.stage, self.replica = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
        self.data, self.tensor = mesh.get_group("data"), mesh.get_group("tensor")
        self.peer = dist.get_global_rank(mesh.get_group("stage"), 1 - self.stage)
        self.parameter = torch.nn.Parameter(torch.zeros(GRADIENTS))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.matrix = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH)
        self.batches = iter(DataLoader(Samples(), batch_size=1))
        self.tokens = USUAL_TOKENS
        self.step = 0
        _report_lengths(self)

    def train(self) -> None:
        while not (FOLDER / "stop").exists():
            inject_fault(self)
            self.tokens = draw_tokens(self.step, self.replica)
            for _ in range(MICROBATCHES):
                next(self.batches)
                self.forward()
                self.backward()
            self.reduce()
            self.optimizer.step()
            self.step += 1

    def forward(self) -> None:
        activations = torch.zeros(ACTIVATIONS)
        if self.stage == 1:
            dist.recv(activations, self.peer)
        self.compute(FORWARD_SECONDS)
        self.sum_partials()
        if self.stage == 0:
            dist.send(activations, self.peer)

    def backward(self) -> None:
        gradients = torch.zeros(ACTIVATIONS)
        if self.stage == 0:
            dist.recv(gradients, self.peer)
        self.compute(BACKWARD_SECONDS)
        self.sum_partials()
        if self.stage == 1:
            dist.send(gradients, self.peer)

    def sum_partials(self) -> None:
        fault = read_fault()
        if fault.get("kind") == "tensor-hang":
            time.sleep(1e6)
        dist.all_reduce(torch.zeros(PARTIAL_SUMS), group=self.tensor)

    def reduce(self) -> None:
        self.parameter.grad = torch.zeros(GRADIENTS)
        if read_fault().get("kind") == "mismatch":
            dist.all_gather([torch.zeros(GRADIENTS)] * REPLICAS, self.parameter.grad, group=self.data)
        dist.all_reduce(self.parameter.grad, group=self.data)

    def compute(self, seconds: float) -> None:
        self.matrix @ self.matrix
        time.sleep(seconds * self.tokens / USUAL_TOKENS)


def draw_tokens(step: int, replica: int) -> int:
    """Lengths that differ by replica and step, the same in the mean, where the fault sets it."""
    fault = read_fault()
    if fault.get("kind") != "lengths":
        return USUAL_TOKENS
    sigma = TOKENS_SIGMA * fault["seconds"]
    factor = random.Random(step * REPLICAS + replica).lognormvariate(-(sigma**2) / 2, sigma)
    return max(1, round(USUAL_TOKENS * factor))


def _report_lengths(job: RankJob) -> None:
    """As the library's own loader does in a script that uses it."""
    recorder = get_recorder()
    end_step = recorder.end_step

    def end_step_with_lengths() -> None:
        end_step(1, (float(job.tokens), float(job.tokens) ** 2))

    recorder.end_step = end_step_with_lengths  # type: ignore[assignment]  # of this one


def inject_fault(job: RankJob) -> None:
    """What the script itself does wrong in this step."""
    fault = read_fault()
    if fault.get("kind") != "garbage":
        _heap.clear()
    if agree_on_fault(job.step, fault).get("kind") == "synchronize":
        log_metrics(fault.get("seconds", 0.0))
    match fault.get("kind"):
        case "turns" if job.step % dist.get_world_size() == job.rank:
            time.sleep(fault["seconds"])
        case "slow-function":
            augment_sample(fault["seconds"])
        case "garbage" if (job.step + job.rank) % 8 == 0:
            collect_garbage(fault["seconds"])
        case "deadlock":
            lock = threading.Lock()
            with lock, lock:
                pass


def augment_sample(seconds: float) -> None:
    """A function of the script that is slow."""
    time.sleep(seconds)


def log_metrics(seconds: float) -> None:
    """All ranks synchronize once more in each step, and one writes a record."""
    dist.barrier()
    time.sleep(seconds)


def agree_on_fault(step: int, fault: dict[str, Any]) -> dict[str, Any]:
    """The fault that the first rank to begin this step saw: where it has ranks meet, all of them have to."""
    path = f"{FOLDER}/agreed-{os.environ['PACEKEEPER_ROUND']}-"
    with contextlib.suppress(FileExistsError):
        os.symlink(json.dumps(fault), f"{path}{step}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}{step - MAX_STEPS_APART}")
    agreed: dict[str, Any] = json.loads(os.readlink(f"{path}{step}"))
    return agreed


def collect_garbage(seconds: float) -> None:
    """Garbage whose collection takes about `seconds`: each collection visits all objects."""
    if not _heap:
        _heap.extend([] for _ in range(round(OBJECTS_A_SECOND * seconds)))
        for item in _heap:
            item.append(_heap)
    gc.collect()


_heap: list[Any] = []
_cached_fault: tuple[int, dict[str, Any]] = (-1, {})


def read_fault() -> dict[str, Any]:
    """Read again only when the file has changed."""
    global _cached_fault
    path = FOLDER / f"fault-{os.environ['RANK']}.json"
    try:
        modified_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    if modified_ns != _cached_fault[0]:
        _cached_fault = modified_ns, json.loads(path.read_text())
    return _cached_fault[1]


def iterate_ranks() -> Iterator[tuple[int, int, int, int]]:
    """Rank, stage, replica and place in its tensor group."""
    for rank in range(STAGES * REPLICAS * TENSOR_RANKS):
        yield rank, rank // (REPLICAS * TENSOR_RANKS), rank // TENSOR_RANKS % REPLICAS, rank % TENSOR_RANKS


if __name__ == "__main__":
    torch.set_num_threads(1)
    RankJob().train()
