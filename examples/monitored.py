"""A plain PyTorch script that Pacekeeper monitors and restarts: only its first import is of Pacekeeper.

pacekeeper run --local 4 examples/monitored.py
"""

import os

import torch
import torch.distributed as dist

import pacekeeper.auto  # noqa: F401

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(1, int(os.environ.get("STEPS", "200")) + 1):
    x = torch.randn(32, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
