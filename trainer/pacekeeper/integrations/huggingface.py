"""Integration of Hugging Face's Trainer.

    from pacekeeper.integrations.huggingface import HuggingFaceCallback, find_newest_checkpoint

    trainer.add_callback(HuggingFaceCallback())
    trainer.train(resume_from_checkpoint=find_newest_checkpoint(output_dir))

Pacekeeper then observes steps, evaluations, checkpoints and the loss, also of a second Trainer in the process. On
SIGTERM and on the operator's requests Trainer writes a checkpoint between two steps. Data, batch sizes and gradients
stay Trainer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.records import Phase

from .framework_training import get_framework_training

COMPLETE_MARKER_FILE = "pacekeeper.json"
"""File in a checkpoint that all ranks have completed: a checkpoint that a crash interrupted does not have it."""

_TRAINER_STATE_FILE = "trainer_state.json"


def find_newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the Trainer's newest complete checkpoint for `resume_from_checkpoint`; None: there is none.

    Trainer's own `resume_from_checkpoint=True` takes the newest, which a crash may have left incomplete. A checkpoint
    that was written without the callback counts as complete if it has the file that Trainer writes last.
    """
    matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*"))
    folders = {int(match[1]): path for match, path in matches if match is not None}
    newest_first = [folders[step] for step in sorted(folders, reverse=True)]
    for is_complete in (_has_marker, _has_state):
        for folder in newest_first:
            if is_complete(folder):
                return str(folder)
    return None


class HuggingFaceCallback(TrainerCallback):
    """Callback for one Trainer.

    Add it after callbacks that request evaluations and checkpoints: what is requested later is not recorded as a phase.
    """

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
        """Enter the phase that was requested: Trainer reports only the end of an evaluation or a checkpoint."""
        if control.should_evaluate:
            self._training.enter_phase(Phase.EVALUATE)
        elif control.should_save:
            self._training.enter_phase(Phase.CHECKPOINT)


def _write_marker(folder: Path) -> None:
    """Write the marker last, and atomically.

    A hyperparameter search has its checkpoints elsewhere, and resumes none.
    """
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
