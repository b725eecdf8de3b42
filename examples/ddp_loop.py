"""A plain DDP loop that goes on from its own checkpoint. Pacekeeper watches and restarts it: one import.

pacekeeper run --local 2 examples/ddp_loop.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pacekeeper.auto  # noqa: F401

EPOCHS, SAVE_EVERY = 3, 10
folder = Path(os.environ.get("PACEKEEPER_CHECKPOINT_PATH", "checkpoints"))
newest = folder / "newest.pt"

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(256, 16)
dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

step = 0
if newest.exists():
    saved = torch.load(newest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
for epoch in range(step // len(loader), EPOCHS):
    sampler.set_epoch(epoch)  # the same order again after a restart
    for number, (x, y) in enumerate(loader, start=epoch * len(loader) + 1):
        if number <= step:
            continue  # an earlier round has had it
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = number
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "newest.writing")
            (folder / "newest.writing").replace(newest)  # a crash leaves the whole old one, never half of a new one
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
