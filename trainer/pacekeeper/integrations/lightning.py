"""Integration of Lightning's Trainer.

    from pacekeeper.integrations.lightning import LightningCallback

    trainer = Trainer(..., callbacks=[LightningCallback(), ModelCheckpoint(folder, save_last=True)])
    trainer.fit(model, ..., ckpt_path="last")

Pacekeeper then observes steps, evaluations, checkpoints and the loss. On SIGTERM and on the operator's requests all
ranks write the last checkpoint between two steps. Data, batch sizes and gradients stay Lightning's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch

from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import Phase

from .framework_training import get_framework_training


class LightningCallback(lightning.Callback):
    """Callback for one Trainer."""

    def __init__(self) -> None:
        self._training = get_framework_training()
        self._steps: int | None = None
        """Batches after which an optimizer has stepped; None: unknown. (Lightning counts each optimizer's steps.)"""
        self._last_global_step = 0
        """Lightning's count after the last batch."""
        self._saving = False

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Raise InputError if there is no checkpoint that a restart would use."""
        if stage == "fit" and _find_last_checkpoint(trainer) is None:
            raise InputError(
                "callbacks: no ModelCheckpoint saves the last checkpoint, which a restart needs; add "
                'ModelCheckpoint(folder, save_last=True), and call fit(…, ckpt_path="last")'
            )

    def state_dict(self) -> dict[str, int | None]:
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, int | None]) -> None:
        self._steps = state_dict["steps"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._last_global_step = trainer.global_step
        if self._steps is None:
            self._steps = trainer.global_step
        self._training.begin(self._steps)  # its SIGTERM handler replaces Lightning's until the end

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._finish_saving()
        self._training.resume_training()

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._training.optimizer_begins()

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._last_global_step:
            return  # its gradient is accumulated into a later batch's step
        self._last_global_step = trainer.global_step
        assert self._steps is not None, "on_train_start comes first"
        self._steps += 1
        directives = self._training.end_step()
        log_interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a part of the Trainer
        if log_interval and self._steps % log_interval == 0 and (loss := _read_loss(outputs)) is not None:
            self._training.report_loss(loss)
        if directives.save:
            trainer.save_checkpoint(str(_find_last_checkpoint(trainer)))
            self._finish_saving()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._finish_saving()
        self._training.enter_phase(Phase.EVALUATE)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._training.resume_training()

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._training.enter_phase(Phase.EVALUATE)

    def on_test_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._training.resume_training()

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._saving:
            self._saving = True
            self._training.enter_phase(Phase.CHECKPOINT)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._finish_saving()
        self._training.end()

    def _finish_saving(self) -> None:
        """Publish the checkpoint when training continues: Lightning reports only its beginning."""
        if self._saving:
            self._saving = False
            self._training.publish_checkpoint(lambda: None)  # Lightning renames a complete file


def _find_last_checkpoint(trainer: lightning.Trainer) -> Path | None:
    """Return the path that `ckpt_path="last"` uses; None: there is none."""
    callback: Any
    for callback in trainer.checkpoint_callbacks:
        # By attributes: `lightning.pytorch` and `pytorch_lightning` have different classes.
        if getattr(callback, "save_last", False) and (folder := getattr(callback, "dirpath", None)):
            return Path(folder) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    return None


def _read_loss(outputs: Any) -> float | None:
    """Return the loss of this rank's batch, as `training_step` has returned it."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) if isinstance(loss, torch.Tensor) else None
