"""An FSDP2 loop that goes on from its own sharded checkpoint. Pacekeeper watches and restarts it: one import.

pacekeeper run --local 2 examples/fsdp2_loop.py
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import pacekeeper.auto  # noqa: F401

STEPS, SAVE_EVERY = 40, 10
folder = Path(os.environ.get("PACEKEEPER_CHECKPOINT_PATH", "checkpoints"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def build_state(step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


done = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")]
if done:
    saved = build_state(0)
    load(saved, checkpoint_id=folder / f"step-{max(done)}")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
for step in range(max(done, default=0) + 1, STEPS + 1):
    torch.manual_seed(1000 * step + dist.get_rank())  # the same samples again after a restart
    x = torch.randn(8, 16)
    loss = (model(x) - x[:, :2].square()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % SAVE_EVERY == 0:
        save(build_state(step), checkpoint_id=folder / f"step-{step}.writing")
        if dist.get_rank() == 0:
            (folder / f"step-{step}.writing").replace(folder / f"step-{step}")  # whole: all ranks have written
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
