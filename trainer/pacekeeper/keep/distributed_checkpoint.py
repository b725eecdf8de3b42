"""torch.distributed.checkpoint's files, written and read without its pickles.

Its own `save` has ranks send each other pickled plans, and its reader unpickles the index and every value that is no
tensor. Here the same planner and the same writer and reader do the work; plans and results go by `exchange`, the index
is read from a file of `plain` values beside torch's, and other values are read as tensors are: `weights_only`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from pacekeeper import exchange
from pacekeeper.plain import allow, pack, unpack
from pacekeeper.torch_internals import StorageInfo, StoragePrefix, set_element
from pacekeeper_analysis.errors import InputError

INDEX = "index.plain"
TORCHS_INDEX = ".metadata"
"""For torch's own tools; nothing here reads it."""

allow(SavePlan, WriteItem, WriteItemType, TensorWriteData, BytesIOWriteData, WriteResult, StorageInfo, StoragePrefix)
allow(index.Metadata, index.MetadataIndex, index.TensorStorageMetadata, index.BytesStorageMetadata)
allow(index.ChunkStorageMetadata, index.TensorProperties)


class Failed(Exception):
    """Some rank could not write; the message says which and why. It comes to all ranks alike."""


def save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Writes this rank's part of `state` into `folder`; the group's first rank adds the index. Collective.

    No rank leaves before the last collective, whatever fails on it: its peers would wait for it in there.
    Raises Failed.
    """
    mine = _Saving(state, folder, group)
    plans = exchange.collect(mine.tried(mine.plan), group)
    part = exchange.scatter(None if plans is None else mine.parts(plans), group)
    written = part if isinstance(part, _Failure) else mine.tried(lambda: mine.write(part))
    results = exchange.collect(written, group)
    outcome = exchange.broadcast(None if results is None else mine.finish(results), group)
    if isinstance(outcome, _Failure):
        raise Failed(outcome.why)


def load(state: dict[str, Any], folder: Path) -> None:
    """Fills in `state` with what it names. Not collective: each rank reads what it needs.

    Raises InputError where the folder was written by something else, and what torch and the volume raise.
    """
    planner, reader = _Planner(), _Reader(folder)
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan(
        planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    )
    reader.read_data(planner.finish_plan(plan), planner).wait()


@dataclass(frozen=True)
class _Failure:
    """Goes in the place of what a rank was to give."""

    why: str


allow(_Failure)


class _Saving:
    """One rank's part in a `save`; `parts` and `finish` are the first rank's."""

    def __init__(self, state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
        self._state = state
        self._index = folder / INDEX
        self._rank = group.rank()
        self._planner = DefaultSavePlanner()
        self._writer = FileSystemWriter(folder, sync_files=True)
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        first = self._rank == 0
        self._planner.set_up_planner(self._state, self._writer.storage_meta(), is_coordinator=first)
        self._writer.set_up_storage_writer(is_coordinator=first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def parts(self, plans: Sequence[Any]) -> Sequence[SavePlan | _Failure]:
        """What each rank is to write, from their plans; where one could not plan, its failure for all of them."""

        def combined() -> list[SavePlan]:
            together, self._metadata = self._planner.create_global_plan(list(plans))
            return self._writer.prepare_global_plan(together)

        failure = _failure(plans)
        parts: list[SavePlan] | _Failure = self.tried(combined) if failure is None else failure
        return [parts] * len(plans) if isinstance(parts, _Failure) else parts

    def write(self, part: SavePlan) -> list[WriteResult]:
        plan = self._planner.finish_plan(part)
        own = StoragePrefix(f"__{self._rank}_")  # as torch makes it; it goes into paths, and comes from a peer
        if own != plan.storage_data:
            raise InputError(f"a peer's plan names files {plan.storage_data!r:.100} instead of {own.prefix!r}")
        writing = self._writer.write_data(plan, self._planner)
        writing.wait()
        return writing.value()

    def finish(self, results: Sequence[Any]) -> _Failure | None:
        """Writes the index, torch's and ours, from what each rank has written."""

        def written() -> None:
            assert self._metadata is not None
            self._writer.finish(self._metadata, list(results))
            places = {its.index: its.storage_data for of_rank in results for its in of_rank}
            whole = replace(self._metadata, storage_data=places, storage_meta=None)  # the reader has its own
            self._index.write_bytes(pack(whole))

        failed: _Failure | None = _failure(results) or self.tried(written)
        return failed

    def tried(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` gives, or its failure."""
        try:
            return attempt()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            return _Failure(f"rank {self._rank}: {type(error).__name__}: {error}")


def _failure(of_ranks: Sequence[Any]) -> _Failure | None:
    """All of the ranks' failures in one, each once; None: there is none."""
    failures = dict.fromkeys(its.why for its in of_ranks if isinstance(its, _Failure))
    return _Failure("; ".join(failures)) if failures else None


_FILE = re.compile(r"__\d+_\d+\.distcp")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = unpack((Path(self.path) / INDEX).read_bytes())
        if not isinstance(metadata, Metadata):
            raise InputError(f"{self.path}/{INDEX}: holds a {type(metadata).__name__} instead of a checkpoint's index")
        for where in metadata.storage_data.values():  # a peer has said it: it names no file elsewhere
            if not _FILE.fullmatch(str(where.relative_path)):
                raise InputError(f"{self.path}/{INDEX}: names file {where.relative_path!r}; give the job another path")
        return replace(metadata, storage_meta=StorageMeta(load_id=self.load_id))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As in the base class, where `weights_only` is False."""
        content = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)
        else:
            self.state_dict[read_item.dest_index.fqn] = content
