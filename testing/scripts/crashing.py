"""Runs an example unchanged: kills a rank after a step of a round, and keeps what each rank ends with.

argv: the example. CRASH: round, rank and optimizer step of that round, as "1 1 25"; "": none. FOLDER: for
weights.<rank>, steps.<rank>: round and number of each optimizer step; records.<rank>.npy,
state.<rank>.npy: of its ring.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder

rank, this_round = int(os.environ["RANK"]), int(os.environ["PACEKEEPER_ROUND"])
crash = tuple(int(number) for number in os.environ["CRASH"].split())
folder = Path(os.environ["FOLDER"])
steps = 0


def count_step(*_: Any) -> None:
    global steps
    steps += 1
    with (folder / f"steps.{rank}").open("a") as diary:
        diary.write(f"{this_round} {steps}\n")
    if (this_round, rank, steps) == crash:
        os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGKILL")))


register_optimizer_step_post_hook(count_step)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
ended = runpy.run_path(sys.argv[0], run_name="__main__")
weights = {
    name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    for name, value in ended["model"].named_parameters()
}
torch.save(weights, folder / f"weights.{rank}")
ring = RingReader(RuntimeFolder.from_environment().ring(int(os.environ["LOCAL_RANK"])))
np.save(folder / f"records.{rank}.npy", ring.records())
np.save(folder / f"state.{rank}.npy", ring.state())
