"""A small regression, trained by Lightning with Pacekeeper's callback. Each fit goes on from the last checkpoint.

pacekeeper run --local 2 examples/lightning_trainer.py
"""

import os

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from pacekeeper.integrations.lightning import LightningCallback

Batch = tuple[torch.Tensor, torch.Tensor]


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        error: torch.Tensor = self.layers(x) - y
        return error.square().mean()

    def validation_step(self, batch: Batch) -> None:
        self.log("error", self.training_step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


seed_everything(0)
inputs = torch.randn(256, 16)
dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
folder = os.environ.get("PACEKEEPER_CHECKPOINT_PATH", "checkpoints")
model = Regression()
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=4,
    accumulate_grad_batches=2,
    log_every_n_steps=5,
    callbacks=[LightningCallback(), ModelCheckpoint(folder, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(
    model, DataLoader(dataset, batch_size=4, shuffle=True), DataLoader(dataset, batch_size=32), ckpt_path="last"
)
