"""An FSDP2 loop that saves by torch.distributed.checkpoint; its storage answers only once the training has resumed.

Rank 1 is killed in the first round, after the save of step 2. $FOLDER/resumed-<rank> has the step that is found after
that, $FOLDER/end-<rank> the parameters after step 4.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pacekeeper

FOLDER = Path(os.environ["FOLDER"])
STORAGE = FOLDER / "storage"
RELEASED = FOLDER / "released"


class BlockedWriter(FileSystemWriter):
    def write_data(self, *arguments: Any) -> Any:
        while not RELEASED.exists():
            time.sleep(0.005)
        return super().write_data(*arguments)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(8, 6)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
step = 0


def get_state() -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


reader = pacekeeper.PeerStorageReader(STORAGE)
if reader.find_newest() is not None:
    state = get_state()
    load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = state["step"]
    (FOLDER / f"resumed-{rank}").write_text(str(step))
    RELEASED.touch()

while step < 4:
    step += 1
    model(torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save(get_state(), storage_writer=pacekeeper.PeerStorageWriter(BlockedWriter(STORAGE / f"step-{step}")))
    if step == 2 and rank == 1 and not RELEASED.exists():
        os.kill(os.getpid(), signal.SIGKILL)
parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
torch.save([parameter.full_tensor() for parameter in parameters], FOLDER / f"end-{rank}")
dist.destroy_process_group()
