"""Saves in memory for Hugging Face's Trainer with FSDP and sharded state dicts.

Trainer itself resumes from the newest folder, complete or not. Here, its `train` resumes from the newest checkpoint
that all ranks can read, in memory or in the storage. Its `_save_checkpoint` marks a folder once all ranks have written
their small files, and then removes old folders that no restart needs.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pacekeeper.observe.monitoring import show_phase
from pacekeeper_rank.records import Phase
from pacekeeper_rank.watching.import_hook import ImportHook

from .rank_channel import RankChannel
from .save_hooks import derive_name, wrap_checkpoint_functions
from .storage_reader import PeerStorageReader
from .trainer_folders import (
    SHARDED_PARTS,
    Completeness,
    begin_checkpoint,
    flush_files,
    get_completeness,
    is_part_stored,
    is_sharded,
    list_checkpoints,
    mark_complete,
    read_step,
    remove_old_checkpoints,
)

_TRAINER_MODULE = "transformers.trainer"
_USED_METHODS = ("train", "_save_checkpoint", "_get_output_dir")
_OTHER_FOLDER = "other"
"""What a rank reports that resumes from a folder of another run."""
_log = logging.getLogger(__name__)


@cache
def wrap_trainer_saves() -> None:
    """Make `torch.distributed.checkpoint` use memory, and Trainer resume from there, when it has been imported."""
    wrap_checkpoint_functions()
    trainer = getattr(sys.modules.get(_TRAINER_MODULE), "Trainer", None)
    if trainer is not None:
        _wrap_methods(trainer)
    else:
        hook = ImportHook({_TRAINER_MODULE: lambda _, module: _wrap_methods(getattr(module, "Trainer", None))})
        sys.meta_path.insert(0, hook)  # type: ignore[arg-type]  # no base class


def choose_checkpoint(channel: RankChannel, output_dir: Path, resumed: Any) -> Any:
    """Return the checkpoint to resume from. Collective; the same checkpoint on all ranks.

    `resumed`: what the script passes as `resume_from_checkpoint`. A checkpoint of `output_dir` (True: the newest) that
    not all ranks can read gives way to the newest one before it that they can. None: the training begins.
    Raises OSError on all ranks if the storage of one does not answer, RuntimeError if a rank does not.
    """
    listings = _gather_reads(channel, lambda: [_read_named_step(output_dir, resumed), [*list_checkpoints(output_dir)]])
    named_steps = [named for named, _ in listings]
    newest = max((step for step in named_steps if isinstance(step, int)), default=None)
    if newest is None or _OTHER_FOLDER in named_steps:
        return resumed
    chosen, has_unsharded = None, False
    for step, least in order_candidates({step for _, steps in listings for step in steps}, newest):
        folder = output_dir / f"checkpoint-{step}"
        completeness, is_unsharded = _examine_folder(channel, folder)
        has_unsharded |= is_unsharded
        if is_unsharded and step == newest:
            break
        is_marked = completeness is Completeness.MARKED
        if (completeness is least or (is_marked and step == newest)) and _can_load(channel, folder, is_marked):
            chosen = step
            break
    if chosen is None and has_unsharded:
        return resumed  # Trainer loads it, or its error says more than a training that begins from the start
    _discard_newer_saves(output_dir, chosen, newest)
    if chosen != newest and channel.rank == 0:
        _log.warning(
            "checkpoint-%d in %s cannot be read by all ranks, since it was lost with a worker, or was not completed; "
            "the training %s",
            newest,
            output_dir,
            "begins from the start" if chosen is None else f"resumes from checkpoint-{chosen}",
        )
    if chosen is None:
        return None
    is_named = resumed is not True and bool(resumed) and read_step(output_dir, resumed) == chosen
    return resumed if is_named else os.path.join(output_dir, f"checkpoint-{chosen}")


def order_candidates(steps: Collection[int], newest: int) -> list[tuple[int, Completeness]]:
    """Return the steps to resume from, the best first, each with the completeness that it needs.

    The one that the script names is first, then marked ones, and then others.
    """
    older = sorted((step for step in steps if step < newest), reverse=True)
    by_completeness = [[(step, least) for step in older] for least in (Completeness.MARKED, Completeness.STATE)]
    return [(newest, Completeness.STATE), *by_completeness[0], *by_completeness[1]]


def _examine_folder(channel: RankChannel, folder: Path) -> tuple[Completeness, bool]:
    """Return a folder's completeness for all ranks, and whether it is complete, but not sharded. Collective.

    Each rank looks, also if it does not list the folder: a network file system may list what was there before.
    """
    shown = _gather_reads(channel, lambda: [get_completeness(folder).value, is_sharded(folder)])
    completeness = Completeness(min(value for value, _ in shown))
    return completeness, completeness is not Completeness.NONE and not any(sees_model for _, sees_model in shown)


def _read_named_step(output_dir: Path, resumed: Any) -> int | str | None:
    """Return the step that this rank resumes from; None: it begins. Raises OSError."""
    if resumed is True:
        return next(iter(list_checkpoints(output_dir)), None)
    if not resumed:
        return None
    step = read_step(output_dir, resumed)
    return _OTHER_FOLDER if step is None else step


def _can_load(channel: RankChannel, folder: Path, may_be_in_memory: bool) -> bool:
    """Return whether all ranks can load model and optimizer of a checkpoint. Collective. Raises as above."""
    for part in SHARDED_PARTS:
        is_in_memory = may_be_in_memory and PeerStorageReader(folder / part, name=derive_name(part)).is_in_memory()
        if not is_in_memory and not all(_gather_reads(channel, functools.partial(is_part_stored, folder, part))):
            return False
    return True


def _discard_newer_saves(output_dir: Path, chosen: int | None, newest: int) -> None:
    """Discard the saves in memory that are newer than what is resumed from. Collective.

    The slots of the next saves are those of outdated ones. What is complete, and newer than the script wants, stays.
    """

    def is_discarded(checkpoint_id: str) -> bool:
        folder = Path(checkpoint_id).parent
        step = read_step(output_dir, folder)
        if step is None or (chosen is not None and step <= chosen):
            return False
        try:
            return step <= newest or get_completeness(folder) is not Completeness.MARKED
        except OSError:
            return False

    for part in SHARDED_PARTS:
        PeerStorageReader(output_dir, name=derive_name(part)).discard_saves(is_discarded)


def _gather_reads(channel: RankChannel, read: Callable[[], Any]) -> list[Any]:
    """Return what each rank reads from the storage. Collective. Raises OSError on all of them if one cannot read."""
    try:
        own = [read(), None]
    except Exception as error:  # the other ranks wait for the answer
        own = [None, f"{type(error).__name__}: {error}"]
    gathered = channel.all_gather(own)
    for _, failure in gathered:
        if failure is not None:
            raise OSError(failure)
    return [value for value, _ in gathered]


def _wrap_methods(trainer_class: Any) -> None:
    """Wrap the methods of Trainer. One without these methods stays as it is."""
    if not all(hasattr(trainer_class, name) for name in _USED_METHODS):
        _log.warning("Trainer resumes from the newest folder: this version of transformers is not supported")
        return
    train, save = trainer_class.train, trainer_class._save_checkpoint

    @functools.wraps(train)
    def resume_and_train(self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        return train(self, _find_checkpoint(self, resume_from_checkpoint), *arguments, **options)

    @functools.wraps(save)
    def save_and_mark(self: Any, model: Any, trial: Any, *arguments: Any, **options: Any) -> Any:
        if not _saves_shards(self):
            return save(self, model, trial, *arguments, **options)
        output_dir = Path(self._get_output_dir(trial=trial))
        folder = output_dir / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            _log_failure(lambda: begin_checkpoint(folder))
        limit = self.args.save_total_limit
        is_shared = not self.args.save_on_each_node  # else no node knows what the storage has
        if is_shared:
            self.args.save_total_limit = None  # Trainer removes none itself
        try:
            result = save(self, model, trial, *arguments, **options)
        finally:
            self.args.save_total_limit = limit
        with show_phase(Phase.CHECKPOINT):
            _log_failure(lambda: _complete_checkpoint(folder, self.args))
        if self.args.should_save and is_shared and limit is not None and limit > 0:
            step, best = self.state.global_step, self.state.best_model_checkpoint
            _log_failure(lambda: remove_old_checkpoints(output_dir, step, limit, best))
        return result

    trainer_class.train, trainer_class._save_checkpoint = resume_and_train, save_and_mark


def _find_checkpoint(trainer: Any, resumed: Any) -> Any:
    """Return what Trainer resumes from; `resumed` if the ranks cannot find out. Collective."""
    try:
        if not _saves_shards(trainer):
            return resumed
        with show_phase(Phase.RESTORE):
            return choose_checkpoint(_open_channel(), Path(trainer.args.output_dir), resumed)
    except Exception as error:
        _log.warning("Trainer chooses the checkpoint to resume from by itself: %s", error)
        return resumed


def _complete_checkpoint(folder: Path, arguments: Any) -> None:
    """Mark a checkpoint, of which this rank has written its files, once all ranks have. Collective."""
    is_marking = arguments.should_save  # one of all ranks, or one on each node
    _gather_reads(_open_channel(), lambda: flush_files(folder, arguments.process_index, is_marking))
    if is_marking:
        mark_complete(folder)


def _saves_shards(trainer: Any) -> bool:
    """Return whether model and optimizer of a Trainer are saved by torch.distributed.checkpoint."""
    if not getattr(trainer, "is_fsdp_enabled", False) or not dist.is_initialized():
        return False
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return "SHARDED_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))


def _log_failure(call: Callable[[], object]) -> None:
    """Call, and go on if it fails: the training does not need it."""
    try:
        call()
    except Exception as error:
        _log.warning("a checkpoint in Trainer's folder is not marked, or an old one not removed: %s", error)


@cache
def _open_channel() -> RankChannel:
    """Return the channel of all ranks. Collective at the first call."""
    return RankChannel("trainer", range(dist.get_world_size()))
