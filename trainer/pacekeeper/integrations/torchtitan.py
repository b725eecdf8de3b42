"""torchtitan's Trainer, told to Pacekeeper: `-m pacekeeper.integrations.torchtitan` in place of `-m torchtitan.train`,
with the same arguments. torchtitan's `main` takes the class of the trainer up to 0.2.2; since then (2026-02-23, #2386)
it builds the one that the chosen configuration belongs to. Both are supported. With a Trainer of one's own and the
former: `torchtitan.train.main(watched(MyTrainer))`.

It goes by what torchtitan has its own trainers override: `train`, `train_step`, `should_continue_training`. Restarts go
on from the newest checkpoint, as torchtitan does by itself. Data, parallelism and gradients stay torchtitan's.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

from pacekeeper.environment import RANK_LEFT_EXIT_CODE
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.records import Phase

from .training import FrameworkTraining, StepDirectives

_log = logging.getLogger(__name__)


def wrap_trainer(trainer: type[Any]) -> type[Any]:
    """A Trainer that is `trainer` and tells what it does.

    trainer: torchtitan's Trainer, or one that is made from it.
    """

    class Watched(trainer):  # type: ignore[misc]  # a class that is known when it runs
        _training: FrameworkTraining | None = None
        _told = StepDirectives(save=False, leave=False)
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
                _forward_losses(self.metrics_processor, self._training)
                if self._writes_checkpoints():
                    self._interval = self.checkpointer.interval
            if self._writes_checkpoints():
                self.checkpointer.interval = self._interval
            if self._saves:
                self._saves = False
                self._finish_saving(self._training)
            self._training.resume_training()
            return bool(super().should_continue_training())

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            assert self._training is not None, "torchtitan has asked whether to continue"
            self._told = self._training.end_step()
            writes, config = self._writes_checkpoints(), _get_config(self)
            if self._told.save and writes:
                self.checkpointer.interval = 1  # it is due at this step, then
            last = self.step == config.training.steps
            self._saves = writes and (last or self.step % self.checkpointer.interval == 0)
            if self._told.leave and not writes:
                _log.warning("told to leave, and torchtitan's checkpoints are off (checkpoint.enable): nothing is kept")
                sys.exit(RANK_LEFT_EXIT_CODE)
            if self._saves:
                self._training.enter_phase(Phase.CHECKPOINT)
            elif _has_validation(config) and self.validator.should_validate(self.step):
                self._training.enter_phase(Phase.EVALUATE)

        def _writes_checkpoints(self) -> bool:
            """Where they are off, newer checkpointers have no settings."""
            return bool(self.checkpointer.enable and not self.checkpointer.load_only)

        def _finish_saving(self, training: FrameworkTraining) -> None:
            """What is still being written in the background is not told, unless somebody waits for it."""
            writing = getattr(self.checkpointer, "save_future", None)
            if writing is not None and not self._told.save:
                return
            if writing is not None:
                writing.result()
            training.publish_checkpoint(lambda: None)  # torchtitan passes over what has no metadata yet, which come last

    Watched.__name__ = Watched.__qualname__ = trainer.__name__
    return Watched


def _get_config(trainer: Any) -> Any:
    return trainer.config if hasattr(trainer, "config") else trainer.job_config  # the latter up to 0.2.2


def _has_validation(config: Any) -> bool:
    section = config.validator if hasattr(config, "validator") else config.validation  # the latter up to 0.2.2
    return bool(section.enable)


def _forward_losses(metrics: Any, training: FrameworkTraining) -> None:
    """Each that torchtitan logs, a mean over all ranks."""
    log = metrics.log

    def log_and_tell(step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
        training.report_loss(float(global_avg_loss))
        log(step, global_avg_loss, *rest, **named)

    metrics.log = log_and_tell


def run_training() -> None:
    """Does what `python -m torchtitan.train` does, and tells it.

    Raises InputError where torchtitan's `main` is neither of those that are known.
    """
    from torchtitan import train

    if len(inspect.signature(train.main).parameters) == 1:
        train.main(wrap_trainer(train.Trainer))
        return
    try:
        _wrap_built_trainers(train.ConfigManager)
    except AttributeError as error:
        raise InputError(
            f"this torchtitan starts in a way that is not known here ({error}): run -m torchtitan.train, with "
            "`import pacekeeper.auto` in a module of yours that it imports, or torchtitan 0.2.2"
        ) from error
    train.main()


def _wrap_built_trainers(manager: Any) -> None:
    """Has each configuration that is read from now on build a trainer that tells what it does."""
    parse = manager.parse_args

    def parse_args(*arguments: Any, **options: Any) -> Any:
        config = parse(*arguments, **options)
        kind = type(config)
        kind._owner = wrap_trainer(kind._owner)
        return config

    manager.parse_args = parse_args


if __name__ == "__main__":
    run_training()
