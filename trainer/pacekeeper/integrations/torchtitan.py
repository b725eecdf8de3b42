"""Integration of torchtitan's Trainer: run `-m pacekeeper.integrations.torchtitan` instead of `-m torchtitan.train`.

The arguments are the same. Up to 0.2.2, torchtitan's `main` takes the class of the trainer; since then (2026-02-23,
#2386) it builds the one that the chosen configuration belongs to. Both are supported. With a custom Trainer and the
former: `torchtitan.train.main(wrap_trainer(MyTrainer))`.

It uses the methods that torchtitan's own trainers override: `train`, `train_step`, `should_continue_training`. Restarts
continue from the newest checkpoint, which torchtitan does itself. Data, parallelism and gradients stay torchtitan's.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

from pacekeeper.checkpointing.peer_saves.save_hooks import derive_name, wrap_checkpoint_functions
from pacekeeper.checkpointing.peer_saves.storage_reader import PeerStorageReader, read_number
from pacekeeper.environment import RANK_LEFT_EXIT_CODE, Environment
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import Phase

from .framework_training import FrameworkTraining, StepDirectives

_log = logging.getLogger(__name__)


def wrap_trainer(trainer: type[Any]) -> type[Any]:  # noqa: C901  # the methods of one nested class
    """Return a subclass of `trainer` that reports to Pacekeeper.

    `trainer`: torchtitan's Trainer, or a subclass of it.
    """

    class Watched(trainer):  # type: ignore[misc]  # a class that is known when it runs
        _training: FrameworkTraining | None = None
        _told = StepDirectives(save=False, leave=False)
        _saves = False
        """Whether torchtitan writes a checkpoint of the newest step."""

        def train(self) -> None:
            if Environment.read().peer_saves and self._writes_checkpoints():
                _find_saves_in_memory(self.checkpointer)
            try:
                super().train()
            except SystemExit:  # torchtitan closes its resources only after other exceptions
                self.close()
                raise
            if self._training is not None:
                self._training.end()

        def should_continue_training(self) -> bool:
            """Report to Pacekeeper.

            Called after loading the checkpoint, and after each step, its checkpoint and validation.
            """
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
            assert self._training is not None, "torchtitan calls should_continue_training first"
            self._told = self._training.end_step()
            writes_checkpoints, config = self._writes_checkpoints(), _get_config(self)
            if self._told.save and writes_checkpoints:
                self.checkpointer.interval = 1  # makes it due at this step
            is_last = self.step == config.training.steps
            self._saves = writes_checkpoints and (is_last or self.step % self.checkpointer.interval == 0)
            if self._told.leave and not writes_checkpoints:
                _log.warning(
                    "leaving on request, but torchtitan's checkpoints are off (checkpoint.enable): nothing is saved"
                )
                sys.exit(RANK_LEFT_EXIT_CODE)
            if self._saves:
                self._training.enter_phase(Phase.CHECKPOINT)
            elif _has_validation(config) and self.validator.should_validate(self.step):
                self._training.enter_phase(Phase.EVALUATE)

        def _writes_checkpoints(self) -> bool:
            """Return whether checkpoints are written. If they are off, newer checkpointers have no settings."""
            return bool(self.checkpointer.enable and not self.checkpointer.load_only)

        def _finish_saving(self, training: FrameworkTraining) -> None:
            """Publish a complete checkpoint.

            One that is still written in the background is waited for only if it was requested.
            """
            save_future = getattr(self.checkpointer, "save_future", None)
            if save_future is not None and not self._told.save:
                return
            if save_future is not None:
                save_future.result()
            training.publish_checkpoint(
                lambda: None
            )  # torchtitan skips checkpoints without metadata, which is written last

    Watched.__name__ = Watched.__qualname__ = trainer.__name__
    return Watched


def _find_saves_in_memory(checkpointer: Any) -> None:
    """Make torchtitan resume from the newest save in memory, if its storage has none that is newer.

    `dcp.load` then reads that save from memory (`PACEKEEPER_PEER_SAVES`).
    """
    wrap_checkpoint_functions()
    find_stored_step = checkpointer._find_load_step

    def find_load_step(*arguments: Any, **options: Any) -> int:
        step = int(find_stored_step(*arguments, **options))
        if arguments or options:  # another folder: what the training begins with
            return step
        try:
            folder = checkpointer.folder
            newest = PeerStorageReader(folder, name=derive_name("step-0")).find_newest()
            return step if newest is None else max(step, read_number(newest))
        except Exception as error:
            _log.warning("torchtitan's checkpoints are looked up in its folder alone: %s", error)
            return step

    checkpointer._find_load_step = find_load_step


def _get_config(trainer: Any) -> Any:
    return trainer.config if hasattr(trainer, "config") else trainer.job_config  # the latter up to 0.2.2


def _has_validation(config: Any) -> bool:
    section = config.validator if hasattr(config, "validator") else config.validation  # the latter up to 0.2.2
    return bool(section.enable)


def _forward_losses(metrics: Any, training: FrameworkTraining) -> None:
    """Report each loss that torchtitan logs, a mean over all ranks."""
    log = metrics.log

    def log_and_tell(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        training.report_loss(float(global_avg_loss))
        log(step, global_avg_loss, *args, **kwargs)

    metrics.log = log_and_tell


def run_training() -> None:
    """Run `python -m torchtitan.train`, and report to Pacekeeper.

    Raises InputError if torchtitan's `main` has neither of the known forms.
    """
    from torchtitan import train

    if len(inspect.signature(train.main).parameters) == 1:
        train.main(wrap_trainer(train.Trainer))
        return
    try:
        _wrap_built_trainers(train.ConfigManager)
    except AttributeError as error:
        raise InputError(
            f"this torchtitan starts in an unknown way ({error}): run -m torchtitan.train, with "
            "`import pacekeeper.auto` in one of your modules that it imports, or install torchtitan 0.2.2"
        ) from error
    train.main()


def _wrap_built_trainers(manager: Any) -> None:
    """Make each configuration that is read from now on build a trainer that reports to Pacekeeper."""
    parse = manager.parse_args

    def parse_args(*arguments: Any, **options: Any) -> Any:
        config = parse(*arguments, **options)
        config_class = type(config)
        config_class._owner = wrap_trainer(config_class._owner)
        return config

    manager.parse_args = parse_args


if __name__ == "__main__":
    run_training()
