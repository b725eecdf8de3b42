"""torch.distributed.checkpoint's files, written and read without its pickles.

Its own `save` has ranks send each other pickled plans, and its reader unpickles the index and every value that is no
tensor. Here the same planner does the work and the files are the same; plans and results go by `exchange`, the index is
read from a file of `plain` values beside torch's, and other values are read as tensors are: `weights_only`. The index
has a checksum of each item, so that a rank checks what it reads, as it reads it, and nothing else.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from pacekeeper import exchange
from pacekeeper.cgroup import compute_memory_left
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.plain import align_bytes, allow_classes, pack_value, unpack_value
from pacekeeper.torch_internals import StorageInfo, set_element
from pacekeeper_analysis.errors import InputError

from .checkpoints import describe_error, summarize_reasons
from .copies import map_pages
from .manifests import FileChecksum, compute_checksum
from .worker import identify_worker

CHECKPOINT_INDEX_FILE = "index.plain"
TORCH_INDEX_FILE = ".metadata"
"""For torch's own tools; nothing here reads it."""
_CHECKPOINT_RESERVE_BYTES = 64 << 20
"""Of the memory that the control group has left, what the copy of the state leaves to the training."""

MAX_READER_THREADS = 4
"""Threads that read items and check them: a core checks 1 GB a second."""
MAX_PREFETCHED_BYTES = 1 << 30
"""That they may be ahead of who takes the items up."""

Item = TypeVar("Item")
PinMemory = Callable[[torch.Tensor], Callable[[], None]]
"""As `SlotCopies.pin`."""


class CheckpointWriteError(Exception):
    """This rank could not write, or the ranks could not agree what to; the message says which and why."""


class TornCheckpointError(Exception):
    """What was read is not what was written, or cannot be read; the message says where."""


@dataclass
class StagedCopy:
    """A copy of what one rank is to write."""

    items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]]
    metadata: Metadata | None
    """What all ranks write together; the first rank has it."""


class CheckpointSaver:
    """One rank's part in writing checkpoints: `stage` copies the state, `write` writes the copy in the background.

    Replicas share the work: of what several ranks have alike, each copies and writes a part. Which, they agree on once;
    the plan holds until the state has other names or shapes.
    """

    def __init__(
        self,
        peers: CpuGroup,
        pin_memory: PinMemory,
        read_memory_left: Callable[[], float] = compute_memory_left,
        free_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """
        pin: has copies from a device into memory begin without waiting; as `SlotCopies.pin`.
        left: bytes of memory that the control group may still take.
        make_room: has what is worth less than a checkpoint give its memory back, where there is not enough.
        """
        self._peers = peers
        self._pin_memory = pin_memory
        self._rank = peers.group.rank()
        self._read_memory_left = read_memory_left
        self._free_memory = free_memory
        self._planner = DefaultSavePlanner()
        self._planned_outline: object = None
        """What this rank had by `_outline`, when `_part` was agreed on; None: it was not."""
        self._own_plan: SavePlan | None = None
        """What it writes of that."""
        self._metadata: Metadata | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Of the copy; kept as long as the plan, since new memory takes several times as long to fill."""
        self._unpin: Callable[[], None] = lambda: None

    def stage(self, state: dict[str, Any]) -> StagedCopy:
        """Copies what this rank is to write of `state`, over the copy before. Collective.

        No rank leaves before the last collective, whatever fails on it. Raises Failed.
        """
        try:
            outline = self._catch_failure(lambda: self._set_up_planner(state))
            if not self._peers.all_agree(self._planned_outline is not None and outline == self._planned_outline):
                self._planned_outline = None
                self._release_buffer()
                self._agree_on_plan(outline if isinstance(outline, _RankFailure) else self._catch_failure(self._planner.create_local_plan))
                self._ensure_memory()
                self._planned_outline = outline
            staged = self._catch_failure(self._copy_values)
        finally:
            self._planner.state_dict = {}  # the live state's: nothing of it is kept
        if isinstance(staged, _RankFailure):
            raise CheckpointWriteError(staged.reason)
        return StagedCopy(staged, self._metadata)

    def write(self, staged: StagedCopy | str, folder: Path, group: dist.ProcessGroup) -> dict[str, FileChecksum]:
        """Writes the copy into `folder`, and on the first rank the index, where no rank has failed; returns what the
        files are like that this rank has written. Collective. `staged`: or why there is no copy.

        No rank leaves before the last collective, whatever fails on it. Raises Failed, where this rank could not.
        """
        file = folder / self._file_name
        if isinstance(staged, str):
            written: Any = _RankFailure(staged)
        else:
            written = self._catch_failure(lambda: _write_items(staged.items, file))
        parts = exchange.gather_objects(written, group)
        if isinstance(written, _RankFailure):  # its own alone: the reasons of all, told by all, would be more than memory
            raise CheckpointWriteError(written.reason)
        assert isinstance(staged, StagedCopy), "it has not failed"
        files = {file.name: written.sum}
        if parts is not None and _combine_failures(parts) is None:
            assert staged.metadata is not None, "the first rank has it"
            _write_index(staged.metadata, parts, folder)
            files |= {name: compute_checksum(folder / name) for name in (CHECKPOINT_INDEX_FILE, TORCH_INDEX_FILE)}
        return files

    def owns_file(self, name: str) -> bool:
        """Whether it is this rank that writes the file of this name into a checkpoint's folder."""
        return name == self._file_name or (self._rank == 0 and not _RANK_FILE_PATTERN.fullmatch(name))

    @property
    def has_buffer(self) -> bool:
        """Whether it has taken the memory for its copies."""
        return len(self._buffer) > 0

    @property
    def _file_name(self) -> str:
        """As torch names it."""
        return f"__{self._rank}_0.distcp"

    def _set_up_planner(self, state: dict[str, Any]) -> object:
        """Has the planner hold `state`; returns its `_outline`."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return [_outline_item(name, value) for name, value in self._planner.state_dict.items()]

    def _agree_on_plan(self, mine: SavePlan | _RankFailure) -> None:
        """Agrees with the peers on who writes what. Raises Failed, on all ranks alike."""
        plans = exchange.gather_objects(mine, self._peers.group)
        part = exchange.scatter_objects(None if plans is None else self._build_plans(plans), self._peers.group)
        if isinstance(part, _RankFailure):
            raise CheckpointWriteError(part.reason)
        self._own_plan = self._planner.finish_plan(part)

    def _build_plans(self, plans: Sequence[Any]) -> Sequence[SavePlan | _RankFailure]:
        """What each rank is to write, from what they have; where one could not say, its failure for all of them."""

        def combined() -> list[SavePlan]:
            together, self._metadata = self._planner.create_global_plan(list(plans))
            return together

        failure = _combine_failures(plans)
        parts: list[SavePlan] | _RankFailure = self._catch_failure(combined) if failure is None else failure
        return [parts] * len(plans) if isinstance(parts, _RankFailure) else parts

    def _ensure_memory(self) -> None:
        """For the copies of all ranks of a worker together: each would find room for its own, before the others have
        taken theirs. Raises Failed, on all ranks alike."""
        said = self._gather_memory_needs()
        if describe_memory_shortage(said):
            if describe_memory_shortage([its for its in said if its[0] == identify_worker()]):
                self._free_memory()
            said = self._gather_memory_needs()
        if why := describe_memory_shortage(said):
            raise CheckpointWriteError(why)

    def _gather_memory_needs(self) -> list[tuple[str, int, float]]:
        """As for `shortage`. Collective. Raises Failed, on all ranks alike."""
        said = self._peers.all_gather(self._catch_failure(lambda: (identify_worker(), _sum_tensor_bytes(self._resolve_values()), self._read_memory_left())))
        if failure := _combine_failures(said):
            raise CheckpointWriteError(failure.reason)
        return said

    def _release_buffer(self) -> None:
        self._unpin()
        self._buffer, self._unpin = torch.empty(0, dtype=torch.uint8), lambda: None

    def _copy_values(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Raises OSError where there is no memory for it."""
        found = self._resolve_values()
        tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if (nbytes := _sum_tensor_bytes(found)) > len(self._buffer):
            self._release_buffer()
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
            if on_gpu:
                map_pages(self._buffer)
                self._unpin = self._pin_memory(self._buffer)
        copies = iter(_copy_into_buffer(self._buffer, tensors))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return [(item, next(copies) if isinstance(value, torch.Tensor) else value) for item, value in found]

    def _resolve_values(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """What this rank is to write, as it is in the live state."""
        assert self._own_plan is not None, "it is planned"
        return [(item, self._resolve_value(item)) for item in self._own_plan.items]

    def _resolve_value(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What the planner resolves an item to, in a tenth of the time for tensors."""
        value = self._planner.state_dict[item.index.fqn]
        if isinstance(value, DTensor):
            value = value.to_local()
        return value.detach() if isinstance(value, torch.Tensor) else self._planner.resolve_data(item)

    def _catch_failure(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` gives, or its failure."""
        try:
            return attempt()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            return _RankFailure(f"rank {self._rank}: {describe_error(error)}")


def describe_memory_shortage(memory_needs: Sequence[tuple[str, int, float]]) -> str:
    """Why the ranks of a worker cannot all have their copies; "": they can.

    said: by each rank: its worker, the bytes of its copy, and those that its control group has left before any is made.
    """
    for worker in dict.fromkeys(where for where, _, _ in memory_needs):
        ranks = [rank for rank, (where, _, _) in enumerate(memory_needs) if where == worker]
        nbytes, left = sum(memory_needs[rank][1] for rank in ranks), min(memory_needs[rank][2] for rank in ranks)
        if nbytes and nbytes + _CHECKPOINT_RESERVE_BYTES > left:
            return (
                f"rank {ranks[0]}: its worker's {len(ranks)} ranks copy {nbytes >> 20} MiB of the state, and their "
                f"control group has {int(left) >> 20} MiB left; give the container more memory"
            )
    return ""


def load_checkpoint(state: dict[str, Any], folder: Path, files: Mapping[str, FileChecksum]) -> None:
    """Fills in `state` with what it names. Not collective: each rank reads what it needs, and checks what it reads.

    files: of the manifest. Raises Torn, with `state` filled in in part; InputError where the folder was written by
    something else; and what torch raises.
    """
    found = _read_index(folder, files)
    planner = _WeightsOnlyPlanner()
    planner.set_up_planner(state, found.metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader = _ItemReader(folder, found.item_checksums, files)
    places = found.metadata.storage_data
    items = [(its, places[its.storage_index]) for its in plan.items]
    for item, read in prefetch_items(sorted(items, key=lambda its: _get_location(its[1])), reader.read):
        content = io.BytesIO(read)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, content)
            continue
        tensor = torch.load(content, map_location="cpu", weights_only=True)
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def prefetch_items(
    items: Iterable[tuple[Item, StorageInfo]], read: Callable[[StorageInfo], bytes]
) -> Iterator[tuple[Item, bytes]]:
    """Each item with what is read of it, in their order: in threads, while those before are taken up.

    No more than MAX_PREFETCHED_BYTES lie there at a time, or one item. Raises what `read` raises, when it is the item's turn.
    """
    with ThreadPoolExecutor(MAX_READER_THREADS, "pacekeeper-reader") as readers:
        coming: deque[tuple[Item, int, Future[bytes]]] = deque()
        for item, place in items:
            while coming and (
                len(coming) > MAX_READER_THREADS or place.length + sum(nbytes for _, nbytes, _ in coming) > MAX_PREFETCHED_BYTES
            ):
                first, _, content = coming.popleft()
                yield first, content.result()
            coming.append((item, place.length, readers.submit(read, place)))
        for first, _, content in coming:
            yield first, content.result()


@dataclass(frozen=True)
class _RankFailure:
    """Goes in the place of what a rank was to give."""

    reason: str


@dataclass(frozen=True)
class _WrittenFile:
    """What a rank has written: where its items lie, and what its file is like."""

    locations: dict[index.MetadataIndex, StorageInfo]
    item_checksums: dict[int, int]
    """CRC-32 of the item that begins at this offset."""
    file_checksum: FileChecksum


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds, and where."""

    metadata: Metadata
    item_checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    """By file and offset: CRC-32 of the item that begins there."""


allow_classes(SavePlan, WriteItem, WriteItemType, TensorWriteData, BytesIOWriteData, StorageInfo, _RankFailure, _WrittenFile, CheckpointIndex)
allow_classes(index.Metadata, index.MetadataIndex, index.TensorStorageMetadata, index.BytesStorageMetadata)
allow_classes(index.ChunkStorageMetadata, index.TensorProperties)


def _combine_failures(of_ranks: Sequence[Any]) -> _RankFailure | None:
    """The ranks' failures in one; None: there is none."""
    reasons = summarize_reasons(its.reason for its in of_ranks if isinstance(its, _RankFailure))
    return _RankFailure(reasons) if reasons else None


def _sum_tensor_bytes(values: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]]) -> int:
    """Bytes that the copies of the tensors take."""
    return sum(align_bytes(value.nbytes) for _, value in values if isinstance(value, torch.Tensor))


def _outline_item(name: str, value: Any) -> object:
    """What a plan depends on, of an item: who has the same has the same items to write."""
    if isinstance(value, DTensor):
        return name, value.dtype, value.shape, value.placements, value.device_mesh
    return (name, value.dtype, value.shape) if isinstance(value, torch.Tensor) else name


def _copy_into_buffer(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that lie in `room` one behind the other, each with a storage of its own: torch.save writes storages."""
    memory: Any = buffer.numpy()
    offset, copies = 0, []
    for tensor in tensors:
        if tensor.numel():
            copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies.append(copy)
        offset += align_bytes(tensor.nbytes)
    return copies


# Files


class _ChecksumWriter(io.RawIOBase):
    """A file that is written once from its beginning to its end, and the checksum of what was written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.file_checksum = FileChecksum(0, 0)
        self._item_offset, self._item_crc = 0, 0

    def begin_item(self) -> None:
        """An item begins here."""
        self._item_offset, self._item_crc = self.file_checksum.nbytes, 0

    @property
    def current_item(self) -> tuple[int, int, int]:
        """Offset, bytes and CRC-32 of what was written since `begin`."""
        return self._item_offset, self.file_checksum.nbytes - self._item_offset, self._item_crc

    def write(self, content: Any) -> int:
        nbytes = memoryview(content).nbytes
        self._file.write(content)
        self._item_crc = zlib.crc32(content, self._item_crc)
        self.file_checksum = FileChecksum(self.file_checksum.nbytes + nbytes, zlib.crc32(content, self.file_checksum.crc32))
        return nbytes


def _write_items(items: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]], path: Path) -> _WrittenFile:
    """As torch writes a rank's file. Raises OSError."""
    places: dict[index.MetadataIndex, StorageInfo] = {}
    sums: dict[int, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        stream = _ChecksumWriter(file)
        for item, value in items:
            stream.begin_item()
            if isinstance(value, torch.Tensor):
                torch.save(value, cast(IO[bytes], stream))
            else:
                stream.write(value.getbuffer())
            offset, nbytes, sums[offset] = stream.current_item
            places[item.index] = StorageInfo(path.name, offset, nbytes)
        file.flush()
        os.fsync(file.fileno())
    return _WrittenFile(places, sums, stream.file_checksum)


def _write_index(whole: Metadata, parts: Sequence[_WrittenFile], folder: Path) -> None:
    """The index, torch's and ours, from what each rank has written."""
    results = [[WriteResult(its, place.length, place) for its, place in part.locations.items()] for part in parts]
    FileSystemWriter(folder, sync_files=True).finish(replace(whole), results)
    places = {its: place for part in parts for its, place in part.locations.items()}
    sums = {place.relative_path: part.item_checksums for part in parts for place in part.locations.values()}
    with (folder / CHECKPOINT_INDEX_FILE).open("wb") as file:
        file.write(pack_value(CheckpointIndex(replace(whole, storage_data=places, storage_meta=None), sums)))
        file.flush()
        os.fsync(file.fileno())


_RANK_FILE_PATTERN = re.compile(r"__\d+_\d+\.distcp")


def _read_index(folder: Path, files: Mapping[str, FileChecksum]) -> CheckpointIndex:
    path = folder / CHECKPOINT_INDEX_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TornCheckpointError(f"{path}: {error.strerror}") from error
    if FileChecksum(len(content), zlib.crc32(content)) != files.get(CHECKPOINT_INDEX_FILE):
        raise TornCheckpointError(f"{path}: its checksum is another than when it was written")
    found = unpack_value(content)
    if isinstance(found, Metadata):  # of a build whose indices had no sums
        found = CheckpointIndex(found)
    if not isinstance(found, CheckpointIndex):
        raise InputError(f"{path}: holds a {type(found).__name__} instead of a checkpoint's index")
    for where in found.metadata.storage_data.values():  # a peer has said it: it names no file elsewhere
        if not _RANK_FILE_PATTERN.fullmatch(str(where.relative_path)):
            raise InputError(f"{path}: names file {where.relative_path!r}; give the job another path")
    return found


def _get_location(storage: StorageInfo) -> tuple[str, int]:
    return storage.relative_path, storage.offset


class _ItemReader:
    """Reads items of a checkpoint's files, and checks them."""

    def __init__(self, folder: Path, sums: Mapping[str, Mapping[int, int]], files: Mapping[str, FileChecksum]) -> None:
        self._folder = folder
        self._item_checksums = sums
        self._files = files
        self._checked_files: set[str] = set()
        """Files that were checked as a whole: the index has no sums of them."""
        self._check_lock = threading.Lock()
        """For who checks a whole file, which is done once."""

    def read(self, storage: StorageInfo) -> bytes:
        """Raises Torn."""
        name, offset = _get_location(storage)
        path = self._folder / name
        try:
            if name not in self._item_checksums:
                self._check_whole_file(name, path)
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(storage.length)
        except OSError as error:
            raise TornCheckpointError(f"{path}: {error.strerror}") from error
        if name in self._item_checksums and zlib.crc32(content) != self._item_checksums[name].get(offset):
            raise TornCheckpointError(f"{path}: what lies at {offset} has another checksum than when it was written")
        return content

    def _check_whole_file(self, name: str, path: Path) -> None:
        with self._check_lock:
            if name in self._checked_files:
                return
            if compute_checksum(path) != self._files.get(name):
                raise TornCheckpointError(f"{path}: its checksum is another than when it was written")
            self._checked_files.add(name)


class _WeightsOnlyPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As in the base class, where `weights_only` is False."""
        content = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)
        else:
            self.state_dict[read_item.dest_index.fqn] = content
