"""A DDP script that does not use Pacekeeper: it forks its ranks, so that torch is imported once.

Usage: training.py RANKS STEPS [ACTION:RANK:STEP[:ARGUMENT] …]. An action takes place before the rank's step,
and `fail` in its dataset.
ACTION_TIMES=FILE: appends a line for each action, with its name and time.

Environment: STATE: a folder for checkpoints, from which a later run continues, and for `steps`, a log of rank 0: a line
with "start" and the time at its start, and one for each step, with its number and its end. Times are Unix seconds.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

try:
    import pacekeeper
except ImportError:
    pass
else:
    sys.exit(f"{pacekeeper.__file__}: Pacekeeper is in the script's environment")


Action = tuple[str, int, int, int, str]
"""Name, rank, first and last step, and argument."""


CHECKPOINT_EVERY = 50
"""Steps between two checkpoints."""


class Awake(Exception):
    pass


def fetch_features() -> None:
    time.sleep(1e6)


def wake_up(*_: Any) -> None:
    raise Awake


def act(action: str, argument: str) -> None:
    times = os.environ.get("ACTION_TIMES")
    if times is not None:
        with open(times, "a") as file:
            file.write(f"{action} {time.time()}\n")
    if action == "slow":
        time.sleep(float(argument))
    elif action == "sleep":
        with contextlib.suppress(Awake):
            fetch_features()
    elif action == "exit":
        sys.exit(int(argument))
    else:
        os.kill(os.getpid(), getattr(signal, action))


def load(rank: int, steps: int, broken: set[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Batches from a forked worker, whose garbage collections must not reach the rank's records."""
    import gc

    for step in range(steps):
        if torch.utils.data.get_worker_info() is not None and step % 10 == 0:
            gc.collect()
        if (rank, step) in broken:
            raise ValueError("a bad sample")
        yield torch.full((4, 16), float(rank + step))


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, rank: int, steps: int, actions: list[Action]) -> None:
        self.rank, self.steps = rank, steps
        self.broken = {(place, first) for action, place, first, _, _ in actions if action == "fail"}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return load(self.rank, self.steps, self.broken)


def train(rank: int, ranks: int, steps: int, actions: list[Action], rendezvous: str) -> None:
    folder = os.environ.get("STATE", "")
    if folder and rank == 0:
        write_log(folder, "start")
    signal.signal(signal.SIGUSR1, wake_up)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Batches(rank, steps, actions), batch_size=None, num_workers=int(ranks == 1))
    loss = torch.zeros(1)
    first_step = restore(folder, model, optimizer)
    for step, batch in enumerate(loader, first_step):
        if step == steps:
            break
        time.sleep(0.015)
        for action, place, first, last, argument in actions:
            if place == rank and first <= step <= last:
                act(action, argument)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if folder and rank == 0:
            write_log(folder, str(step))
            if (step + 1) % CHECKPOINT_EVERY == 0:
                save(folder, {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    print(f"rank {rank} of {ranks}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def restore(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the step to continue from."""
    path = os.path.join(folder, "checkpoint.pt")
    if not folder or not os.path.exists(path):
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(folder: str, state: dict[str, Any]) -> None:
    path = os.path.join(folder, "checkpoint.pt")
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def write_log(folder: str, event: str) -> None:
    with open(os.path.join(folder, "steps"), "a") as log:
        log.write(f"{event} {time.time()}\n")


def parse_action(text: str) -> Action:
    action, rank, steps, argument = (*text.split(":"), "")[:4]
    first, _, last = steps.partition("-")
    return action, int(rank), int(first), int(last or first), argument


def main() -> None:
    ranks, steps = int(sys.argv[1]), int(sys.argv[2])
    actions = [parse_action(text) for text in sys.argv[3:]]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, steps, actions, os.path.join(folder, "rendezvous")) for rank in range(ranks)]
        processes = [context.Process(target=train, args=each) for each in arguments]
        for process in processes:
            process.start()
        codes = []
        for process in processes:
            process.join()
            codes.append(process.exitcode)
    print("exit codes", *("other" if code and abs(code) != 9 else code for code in codes), flush=True)
    sys.exit(3 if any(codes) else 0)


if __name__ == "__main__":
    main()
