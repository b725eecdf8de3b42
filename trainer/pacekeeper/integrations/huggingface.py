"""Integration of Hugging Face's Trainer.

    from pacekeeper.integrations.huggingface import HuggingFaceCallback, find_newest_checkpoint

    trainer.add_callback(HuggingFaceCallback())
    trainer.train(resume_from_checkpoint=find_newest_checkpoint(output_dir))

Pacekeeper then observes steps, evaluations, checkpoints and the loss, also of a second Trainer in the process. On
SIGTERM and on the operator's requests Trainer writes a checkpoint between two steps. Data, batch sizes and gradients
stay Trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pacekeeper.checkpointing.peer_saves.trainer_folders import (
    BEGUN_MARKER_FILE,
    Completeness,
    get_completeness,
    list_checkpoints,
    mark_complete,
)
from pacekeeper.environment import Environment
from pacekeeper_rank.records import Phase

from .framework_training import get_framework_training


def find_newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the Trainer's newest complete checkpoint for `resume_from_checkpoint`; None: there is none.

    Trainer's own `resume_from_checkpoint=True` takes the newest, which a crash may have left incomplete. A checkpoint
    that was written without the callback counts as complete if it has the file that Trainer writes last. With
    `PACEKEEPER_PEER_SAVES`, a worker may have been lost with the newest: `Trainer.train` then takes the one before.
    """
    folders = [(_read_completeness(folder), step, folder) for step, folder in list_checkpoints(output_dir).items()]
    completeness, _, newest = max(folders, default=(Completeness.NONE, 0, None))
    return None if completeness is Completeness.NONE else str(newest)


class HuggingFaceCallback(TrainerCallback):
    """Callback for one Trainer.

    Add it after callbacks that request evaluations and checkpoints: what is requested later is not recorded as a phase.
    """

    def __init__(self) -> None:
        self._training = get_framework_training()
        environment = Environment.read()
        if environment.peer_saves and environment.runtime is not None:
            from pacekeeper.checkpointing.peer_saves.trainer_saves import wrap_trainer_saves

            wrap_trainer_saves()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.begin(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.resume_training()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.optimizer_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save |= self._training.end_step().save
        self._enter_next_phase(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._enter_next_phase(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.resume_training()
        self._enter_next_phase(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        self._training.publish_checkpoint(lambda: _write_marker(folder) if args.should_save else None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        if "loss" in logs:
            self._training.report_loss(float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.end()

    def _enter_next_phase(self, control: TrainerControl) -> None:
        """Enter the phase that was requested: Trainer reports only the end of an evaluation or a checkpoint."""
        if control.should_evaluate:
            self._training.enter_phase(Phase.EVALUATE)
        elif control.should_save:
            self._training.enter_phase(Phase.CHECKPOINT)


def _write_marker(folder: Path) -> None:
    """Write the marker last, unless it is written with saves in memory.

    A hyperparameter search has its checkpoints elsewhere, and resumes none.
    """
    if folder.is_dir() and not (folder / BEGUN_MARKER_FILE).exists():
        mark_complete(folder)


def _read_completeness(folder: Path) -> Completeness:
    try:
        return get_completeness(folder)
    except OSError:
        return Completeness.NONE
