"""The shortest script that Pacekeeper steers: it survives crashes, and slow ranks get smaller shares of each batch.

pacekeeper run --local 4 examples/quickstart.py
"""

import torch
import torch.nn.functional as F

import pacekeeper as pk

job = pk.init(seed=1)
torch.manual_seed(1)
model = job.replicate(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)))
optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

inputs = torch.randn(4096, 16)
dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
loader = job.dataloader(dataset, global_batch_size=256, max_microbatch=64)

job.restore(model=model, optimizer=optimizer, loader=loader)
for step in job.steps(loader, until=300):
    for x, y in step.microbatches():
        step.backward(F.mse_loss(model(x), y, reduction="sum"))
    optimizer.step()
    optimizer.zero_grad()
    if job.rank == 0 and step.due("print", every=50):
        print(f"step {job.step}: loss {job.loss:.2f}", flush=True)
