"""A loop written with Hugging Face's Accelerate, with gradient accumulation. Pacekeeper watches it: one import.

pacekeeper run --local 2 examples/accelerate_loop.py
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import pacekeeper.auto  # noqa: F401

EPOCHS, SAVE_EVERY, ACCUMULATE = 3, 10, 2
folder = Path(os.environ.get("PACEKEEPER_CHECKPOINT_PATH", "checkpoints"))

set_seed(0)
order = DataLoaderConfiguration(use_seedable_sampler=True)  # by seed and epoch: a restart has the same
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dataloader_config=order)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(256, 16)
dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4, shuffle=True))

done = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")]
step = max(done, default=0)
if step:
    accelerator.load_state(str(folder / f"step-{step}"))
steps_an_epoch = len(loader) // ACCUMULATE
for epoch in range(step // steps_an_epoch, EPOCHS):
    loader.set_epoch(epoch)
    for x, y in skip_first_batches(loader, (step - epoch * steps_an_epoch) * ACCUMULATE):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step-{step}.writing"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / f"step-{step}.writing").replace(folder / f"step-{step}")
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
accelerator.end_training()
