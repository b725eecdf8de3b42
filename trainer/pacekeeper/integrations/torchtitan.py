"""torchtitan's Trainer, told to Pacekeeper: `-m pacekeeper.integrations.torchtitan` in place of `-m torchtitan.train`,
with the same arguments; or, with a Trainer of one's own, `torchtitan.train.main(watched(MyTrainer))`.

It goes by what torchtitan has its own trainers override: `train`, `train_step`, `should_continue_training`. Restarts go
on from the newest checkpoint, as torchtitan does by itself. Data, parallelism and gradients stay torchtitan's.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from pacekeeper.environment import LEFT_WHEN_TOLD
from pacekeeper_analysis.records import Phase

from .training import FrameworkTraining, Told

_log = logging.getLogger(__name__)


def watched(trainer: type[Any]) -> type[Any]:
    """A Trainer that is `trainer` and tells what it does.

    trainer: torchtitan.train.Trainer, or one that is made from it.
    """

    class Watched(trainer):  # type: ignore[misc]  # a class that is known when it runs
        _training: FrameworkTraining | None = None
        _told = Told(save=False, leave=False)
        _saves = False
        """Whether torchtitan writes a checkpoint of the newest step."""

        def train(self) -> None:
            try:
                super().train()
            except SystemExit:  # torchtitan closes what is open after other exceptions only
                self.close()
                raise
            if self._training is not None:
                self._training.end()

        def should_continue_training(self) -> bool:
            """Asked when the checkpoint is loaded, and when a step, its checkpoint and its validation are done."""
            if self._training is None:
                self._training = FrameworkTraining()
                self._training.begin(self.step)
                _hear_losses(self.metrics_processor, self._training)
                self._interval = self.checkpointer.interval
            self.checkpointer.interval = self._interval
            if self._saves:
                self._saves = False
                self._finish_saving(self._training)
            self._training.train()
            return bool(super().should_continue_training())

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            assert self._training is not None, "torchtitan has asked whether to continue"
            self._told = self._training.step_ended()
            checkpointer = self.checkpointer
            if self._told.save:
                checkpointer.interval = 1  # it is due at this step, then
            last = self.step == self.job_config.training.steps
            writes = checkpointer.enable and not checkpointer.load_only
            self._saves = writes and (last or self.step % checkpointer.interval == 0)
            if self._told.leave and not writes:
                _log.warning("told to leave, and torchtitan's checkpoints are off (checkpoint.enable): nothing is kept")
                sys.exit(LEFT_WHEN_TOLD)
            if self._saves:
                self._training.enter(Phase.CHECKPOINT)
            elif self.job_config.validation.enable and self.validator.should_validate(self.step):
                self._training.enter(Phase.EVALUATE)

        def _finish_saving(self, training: FrameworkTraining) -> None:
            """What is still being written in the background is not told, unless somebody waits for it."""
            writing = getattr(self.checkpointer, "save_future", None)
            if writing is not None and not self._told.save:
                return
            if writing is not None:
                writing.result()
            training.saved(lambda: None)  # torchtitan passes over what has no metadata yet, which come last

    Watched.__name__ = Watched.__qualname__ = trainer.__name__
    return Watched


def _hear_losses(metrics: Any, training: FrameworkTraining) -> None:
    """Each that torchtitan logs, a mean over all ranks."""
    log = metrics.log

    def log_and_tell(step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
        training.report_loss(float(global_avg_loss))
        log(step, global_avg_loss, *rest, **named)

    metrics.log = log_and_tell


if __name__ == "__main__":
    from torchtitan.train import Trainer, main

    main(watched(Trainer))
