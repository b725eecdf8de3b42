"""Saves in memory for a script that does not choose the writer: torch.distributed.checkpoint's functions are wrapped.

Only where the owner asks for it (`PACEKEEPER_PEER_SAVES=1`): a save that has returned is not yet in the storage.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager

from pacekeeper.torch_internals import open_checkpoint_storage

from .save_group import DEFAULT_SAVE_NAME
from .storage_reader import PeerStorageReader
from .storage_writer import PeerStorageWriter

MAX_AUTOMATIC_NAMES = 4
"""Number of names that are kept in memory: each has memory of its own, and a script may give each save a new name."""
_STORAGE_CLASSES = ("FileSystemWriter", "FsspecWriter", "FileSystemReader", "FsspecReader")
"""Names of torch's own writers and readers of files and URLs. Their modules differ between versions."""
_log = logging.getLogger(__name__)
_names: set[str] = set()

Options = dict[str, Any]


@functools.cache
def wrap_checkpoint_functions() -> None:
    """Make `save`, `async_save`, and `load` of torch.distributed.checkpoint use memory from now on.

    Calls with a writer or reader other than torch's own for files and URLs stay as they are.
    """
    for module, name, choose in (
        (state_dict_saver, "save", choose_writer),
        (state_dict_saver, "async_save", choose_async_writer),
        (state_dict_loader, "load", choose_reader),
    ):
        wrapped = _wrap_function(getattr(module, name), choose)
        for holder in (module, checkpoint):
            setattr(holder, name, wrapped)


def choose_writer(options: Options) -> Options:
    """Return the options of `save` with a writer that keeps the save in memory. Collective."""
    if not options.get("use_collectives", True):
        return options
    return _replace_storage(options, "storage_writer", PeerStorageWriter)


def choose_async_writer(options: Options) -> Options:
    """As `choose_writer`, for `async_save`."""
    kind = options.get("async_checkpointer_type")
    if kind is not None and kind is not state_dict_saver.AsyncCheckpointerType.THREAD:
        return options
    chosen = choose_writer(options)
    storage = options.get("storage_writer")
    if chosen is not options and isinstance(storage, AsyncStager):
        chosen.setdefault("async_stager", storage)  # as torch does for a writer that is one
    return chosen


def choose_reader(options: Options) -> Options:
    """Return the options of `load` with a reader that reads from memory what is there. Collective."""
    return _replace_storage(options, "storage_reader", PeerStorageReader)


def derive_name(checkpoint_id: str | os.PathLike[str]) -> str:
    """Return the name of saves whose IDs differ only in their numbers: `step` for `/checkpoints/step-200`."""
    words = re.findall("[a-z]+", PurePosixPath(os.fspath(checkpoint_id)).name.lower())
    return "_".join(words) or DEFAULT_SAVE_NAME


def _replace_storage(options: Options, key: str, peer_storage: Callable[..., Any]) -> Options:
    storage, checkpoint_id = options.get(key), options.get("checkpoint_id")
    if options.get("no_dist") or not dist.is_initialized():
        return options
    if storage is None and checkpoint_id:
        storage = open_checkpoint_storage(checkpoint_id, key == "storage_reader")
    if storage is None:
        return options
    kind = type(storage)
    if kind.__name__ not in _STORAGE_CLASSES or not kind.__module__.startswith("torch.distributed.checkpoint."):
        return options
    name = derive_name(checkpoint_id or storage.checkpoint_id)
    if name not in _names and len(_names) >= MAX_AUTOMATIC_NAMES:
        return options
    _names.add(name)
    return {**options, key: peer_storage(storage, process_group=options.get("process_group"), name=name)}


def _wrap_function(function: Callable[..., Any], choose: Callable[[Options], Options]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(state_dict: Any, *arguments: Any, **options: Any) -> Any:
        if not arguments:  # of an older signature
            try:
                options = choose(options)
            except Exception as error:
                _log.warning("%s uses the storage alone: %s", function.__name__, error)
        return function(state_dict, *arguments, **options)

    return call
