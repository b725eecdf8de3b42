"""Hugging Face's Trainer, told to Pacekeeper:

    from pacekeeper.integrations.huggingface import HuggingFaceCallback, find_newest_checkpoint

    trainer.add_callback(HuggingFaceCallback())
    trainer.train(resume_from_checkpoint=find_newest_checkpoint(output_dir))

Steps, evaluations, checkpoints and the loss are known then, also of a second Trainer in the process. SIGTERM and the
operator's requests make Trainer write a checkpoint between two steps. Data, batch sizes and gradients stay Trainer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.records import Phase

from .training import get_framework_training

COMPLETE_MARKER_FILE = "pacekeeper.json"
"""File in a checkpoint that all ranks have written their parts of: a crash leaves one without it."""

_TRAINER_STATE_FILE = "trainer_state.json"


def find_newest_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete one of the Trainer's, for `resume_from_checkpoint`; None: there is none, and the training
    begins.

    Trainer's own `resume_from_checkpoint=True` takes the newest, which a crash has perhaps left half written. One that
    was trained without the callback counts where Trainer has come to the file that it writes last.
    """
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*"))
    folders = {int(name[1]): path for name, path in found if name is not None}
    newest_first = [folders[step] for step in sorted(folders, reverse=True)]
    for complete in (_has_marker, _has_state):
        for folder in newest_first:
            if complete(folder):
                return str(folder)
    return None


class HuggingFaceCallback(TrainerCallback):
    """For one Trainer. Add it behind callbacks that ask for evaluations and checkpoints of their own: those that are
    asked for later are no phases."""

    def __init__(self) -> None:
        self._training = get_framework_training()

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
        """Trainer tells when an evaluation or a checkpoint is over, not when it begins: that is when it was asked."""
        if control.should_evaluate:
            self._training.enter_phase(Phase.EVALUATE)
        elif control.should_save:
            self._training.enter_phase(Phase.CHECKPOINT)


def _write_marker(folder: Path) -> None:
    """Behind all else, and in one step. A search of hyperparameters has its checkpoints elsewhere, and goes on from
    none."""
    if not folder.is_dir():
        return
    temporary = folder / f".{COMPLETE_MARKER_FILE}"
    temporary.write_text("{}")
    temporary.replace(folder / COMPLETE_MARKER_FILE)


def _has_marker(folder: Path) -> bool:
    return (folder / COMPLETE_MARKER_FILE).is_file()


def _has_state(folder: Path) -> bool:
    try:
        parse_json((folder / _TRAINER_STATE_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return True
