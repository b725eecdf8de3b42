"""Reads and writes the files of torch.distributed.checkpoint without its pickles.

Its own `save` exchanges pickled plans between ranks, and its reader unpickles the index and every value that is no
tensor. This module uses the same planner and writes the same files. Plans and results go through `object_collectives`.
The index is read from an additional file in the format of `safe_serialization`. Other values are read as tensors are,
with `weights_only`. The index has a checksum of each item, so that a rank checks what it reads while it reads it, and
nothing else.
"""

from __future__ import annotations

import io
import mmap
import re
import tempfile
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

from pacekeeper import object_collectives
from pacekeeper.cgroup import compute_memory_left
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.safe_serialization import align_bytes, allow_classes, pack_value, unpack_value
from pacekeeper.torch_internals import StorageInfo, set_element
from pacekeeper_analysis.errors import InputError

from ..snapshots.snapshot_copies import map_pages
from ..worker_identity import identify_worker
from .checkpoint_folder import FolderFiles, describe_error, summarize_reasons
from .checkpoint_storage import CheckpointFiles, StorageUnavailableError, WritableStream
from .manifests import FileChecksum

CHECKPOINT_INDEX_FILE = "index.plain"
TORCH_INDEX_FILE = ".metadata"
"""Index for torch's own tools; Pacekeeper does not read it."""
_CHECKPOINT_RESERVE_BYTES = 64 << 20
"""Bytes of the control group's free memory that the copy of the state leaves to the training."""

MAX_READER_THREADS = 4
"""Number of threads that read and check items: a core checks 1 GB per second."""
MAX_PREFETCHED_BYTES = 1 << 30
"""Bytes that they may read ahead of the consumer."""

Item = TypeVar("Item")
PinMemory = Callable[[torch.Tensor], Callable[[], None]]
"""As `SlotCopies.pin`."""


class CheckpointWriteError(Exception):
    """This rank could not write, or the ranks could not agree on a plan; the message has the reason."""


class TornCheckpointError(Exception):
    """The content read is not what was written, or cannot be read; the message names the place."""


@dataclass
class StagedCopy:
    """A copy of what one rank writes."""

    items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]]
    metadata: Metadata | None
    """Metadata of what all ranks write together; only the first rank has it."""


class CheckpointSaver:
    """One rank's part in writing checkpoints: `stage` copies the state, `write` writes the copy in the background.

    Replicas share the work: of what several ranks have alike, each copies and writes a part. They agree on the parts
    once; the plan holds until names or shapes in the state change.
    """

    def __init__(
        self,
        peers: CpuGroup,
        pin_memory: PinMemory,
        read_memory_left: Callable[[], float] = compute_memory_left,
        free_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the saver.

        `pin_memory`: makes copies from a device into memory begin without waiting; as `SlotCopies.pin`.
        `read_memory_left`: returns the bytes of memory that the control group may still use.
        `free_memory`: releases memory that is less important than a checkpoint, if there is not enough.
        """
        self._peers = peers
        self._pin_memory = pin_memory
        self._rank = peers.group.rank()
        self._read_memory_left = read_memory_left
        self._free_memory = free_memory
        self._planner = DefaultSavePlanner()
        self._planned_outline: object = None
        """Outline of this rank's state (`_outline_item`) when `_own_plan` was agreed on; None: it was not."""
        self._own_plan: SavePlan | None = None
        """This rank's part of the plan."""
        self._metadata: Metadata | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Memory of the copy. It is retained with the plan, since new memory takes several times as long to fill."""
        self._unpin: Callable[[], None] = lambda: None

    def stage(self, state: dict[str, Any]) -> StagedCopy:
        """Copy what this rank writes of `state`, over the previous copy. Collective.

        No rank leaves before the last collective, even after a failure. Raises CheckpointWriteError.
        """
        try:
            outline = self._catch_failure(lambda: self._set_up_planner(state))
            if not self._peers.all_agree(self._planned_outline is not None and outline == self._planned_outline):
                self._planned_outline = None
                self._release_buffer()
                self._agree_on_plan(
                    outline
                    if isinstance(outline, _RankFailure)
                    else self._catch_failure(self._planner.create_local_plan)
                )
                self._ensure_memory()
                self._planned_outline = outline
            staged = self._catch_failure(self._copy_values)
        finally:
            self._planner.state_dict = {}  # releases the references to the live state
        if isinstance(staged, _RankFailure):
            raise CheckpointWriteError(staged.reason)
        return StagedCopy(staged, self._metadata)

    def write(
        self, staged: StagedCopy | str, folder: Path | CheckpointFiles, group: dist.ProcessGroup
    ) -> dict[str, FileChecksum]:
        """Write the copy into `folder`, and on the first rank the index, if no rank has failed. Collective.

        `staged` is the copy, or why there is none. Returns the checksums of the files that this rank has written. No
        rank leaves before the last collective, even after a failure. Raises CheckpointWriteError if this rank failed.
        """
        storage = _open_files(folder)
        if isinstance(staged, str):
            own_result: Any = _RankFailure(staged)
        else:
            own_result = self._catch_failure(lambda: _write_items(staged.items, storage, self._file_name))
        results = object_collectives.gather_objects(own_result, group)
        if isinstance(
            own_result, _RankFailure
        ):  # only its own reason: reasons of all ranks on all ranks would take too much memory
            raise CheckpointWriteError(own_result.reason)
        assert isinstance(staged, StagedCopy), "it has not failed"
        files = {self._file_name: own_result.file_checksum}
        if results is not None and _combine_failures(results) is None:
            assert staged.metadata is not None, "the first rank has it"
            files |= _write_index(staged.metadata, results, storage)
        return files

    def owns_file(self, name: str) -> bool:
        """Return whether this rank writes the file of this name in a checkpoint's folder."""
        return name == self._file_name or (self._rank == 0 and not _RANK_FILE_PATTERN.fullmatch(name))

    @property
    def has_buffer(self) -> bool:
        """Whether it has allocated the memory of its copies."""
        return len(self._buffer) > 0

    @property
    def _file_name(self) -> str:
        """Name of this rank's file, as torch's own."""
        return f"__{self._rank}_0.distcp"

    def _set_up_planner(self, state: dict[str, Any]) -> object:
        """Set the planner's state, and return its outline (`_outline_item`)."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return [_outline_item(name, value) for name, value in self._planner.state_dict.items()]

    def _agree_on_plan(self, own_plan: SavePlan | _RankFailure) -> None:
        """Agree with the peers on the plan. Raises CheckpointWriteError, on all ranks alike."""
        plans = object_collectives.gather_objects(own_plan, self._peers.group)
        assigned_plan = object_collectives.scatter_objects(
            None if plans is None else self._build_plans(plans), self._peers.group
        )
        if isinstance(assigned_plan, _RankFailure):
            raise CheckpointWriteError(assigned_plan.reason)
        self._own_plan = self._planner.finish_plan(assigned_plan)

    def _build_plans(self, plans: Sequence[Any]) -> Sequence[SavePlan | _RankFailure]:
        """Return what each rank writes, from their local plans; if one failed, its failure for all of them."""

        def combined() -> list[SavePlan]:
            global_plan, self._metadata = self._planner.create_global_plan(list(plans))
            return global_plan

        failure = _combine_failures(plans)
        parts: list[SavePlan] | _RankFailure = self._catch_failure(combined) if failure is None else failure
        return [parts] * len(plans) if isinstance(parts, _RankFailure) else parts

    def _ensure_memory(self) -> None:
        """Check that the copies of all ranks of a worker fit together: each alone would see memory that others need.

        Raises CheckpointWriteError, on all ranks alike.
        """
        memory_needs = self._gather_memory_needs()
        if describe_memory_shortage(memory_needs):
            if describe_memory_shortage([need for need in memory_needs if need[0] == identify_worker()]):
                self._free_memory()
            memory_needs = self._gather_memory_needs()
        if shortage := describe_memory_shortage(memory_needs):
            raise CheckpointWriteError(shortage)

    def _gather_memory_needs(self) -> list[tuple[str, int, float]]:
        """Return the needs for `describe_memory_shortage`.

        Collective. Raises CheckpointWriteError, on all ranks alike.
        """
        memory_needs = self._peers.all_gather(
            self._catch_failure(
                lambda: (identify_worker(), _sum_tensor_bytes(self._resolve_values()), self._read_memory_left())
            )
        )
        if failure := _combine_failures(memory_needs):
            raise CheckpointWriteError(failure.reason)
        return memory_needs

    def _release_buffer(self) -> None:
        self._unpin()
        self._buffer, self._unpin = torch.empty(0, dtype=torch.uint8), lambda: None

    def _copy_values(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Copy this rank's values into the buffer. Raises OSError if there is no memory for it."""
        values = self._resolve_values()
        tensors = [value for _, value in values if isinstance(value, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if (nbytes := _sum_tensor_bytes(values)) > len(self._buffer):
            self._release_buffer()
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
            if on_gpu:
                map_pages(self._buffer)
                self._unpin = self._pin_memory(self._buffer)
        copies = iter(_copy_into_buffer(self._buffer, tensors))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return [(item, next(copies) if isinstance(value, torch.Tensor) else value) for item, value in values]

    def _resolve_values(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Return what this rank writes, as references to the live state."""
        assert self._own_plan is not None, "it is planned"
        return [(item, self._resolve_value(item)) for item in self._own_plan.items]

    def _resolve_value(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what the planner resolves an item to; for tensors in a tenth of its time."""
        value = self._planner.state_dict[item.index.fqn]
        if isinstance(value, DTensor):
            value = value.to_local()
        return value.detach() if isinstance(value, torch.Tensor) else self._planner.resolve_data(item)

    def _catch_failure(self, attempt: Callable[[], Any]) -> Any:
        """Return the result of `attempt`, or its failure."""
        try:
            return attempt()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            return _RankFailure(f"rank {self._rank}: {describe_error(error)}")


def describe_memory_shortage(memory_needs: Sequence[tuple[str, int, float]]) -> str:
    """Return why the ranks of a worker cannot all have their copies; "": they can.

    `memory_needs`: for each rank its worker, the bytes of its copy, and the bytes that its control group has left
    before any copy is made.
    """
    for worker in dict.fromkeys(rank_worker for rank_worker, _, _ in memory_needs):
        ranks = [rank for rank, (rank_worker, _, _) in enumerate(memory_needs) if rank_worker == worker]
        nbytes, remaining = sum(memory_needs[rank][1] for rank in ranks), min(memory_needs[rank][2] for rank in ranks)
        if nbytes and nbytes + _CHECKPOINT_RESERVE_BYTES > remaining:
            return (
                f"rank {ranks[0]}: its worker's {len(ranks)} ranks need {nbytes >> 20} MiB to copy the state, but "
                f"their control group has {int(remaining) >> 20} MiB left; give the container more memory"
            )
    return ""


def load_checkpoint(state: dict[str, Any], folder: Path | CheckpointFiles, files: Mapping[str, FileChecksum]) -> None:
    """Fill in the entries of `state`. Not collective: each rank reads what it needs, and checks what it reads.

    `files`: checksums of the manifest. Raises TornCheckpointError or StorageUnavailableError, with `state` partly
    filled in, InputError if another program has written the folder, and errors of torch.
    """
    storage = _open_files(folder)
    checkpoint_index = _read_index(storage, files)
    planner = _WeightsOnlyPlanner()
    planner.set_up_planner(state, checkpoint_index.metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader = _ItemReader(storage, checkpoint_index.item_checksums, files)
    locations = checkpoint_index.metadata.storage_data
    items = [(entry, locations[entry.storage_index]) for entry in plan.items]
    for item, data in prefetch_items(sorted(items, key=lambda entry: _get_location(entry[1])), reader.read):
        content = io.BytesIO(data)
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
    """Yield each item with its content, in order. Threads read ahead of the consumer.

    At most MAX_PREFETCHED_BYTES, or one item, are in memory at a time. An error of `read` is raised when it is the
    item's turn.
    """
    with ThreadPoolExecutor(MAX_READER_THREADS, "pacekeeper-reader") as readers:
        pending: deque[tuple[Item, int, Future[bytes]]] = deque()
        for item, location in items:
            while pending and (
                len(pending) > MAX_READER_THREADS
                or location.length + sum(nbytes for _, nbytes, _ in pending) > MAX_PREFETCHED_BYTES
            ):
                oldest_item, _, future = pending.popleft()
                yield oldest_item, future.result()
            pending.append((item, location.length, readers.submit(read, location)))
        for oldest_item, _, future in pending:
            yield oldest_item, future.result()


@dataclass(frozen=True)
class _RankFailure:
    """Failure of a rank, instead of its result."""

    reason: str


@dataclass(frozen=True)
class _WrittenFile:
    """What a rank has written: the locations of its items, and checksums."""

    locations: dict[index.MetadataIndex, StorageInfo]
    item_checksums: dict[int, int]
    """CRC-32 of the item that begins at each offset."""
    file_checksum: FileChecksum


@dataclass(frozen=True)
class CheckpointIndex:
    """Content of a checkpoint and its locations."""

    metadata: Metadata
    item_checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    """CRC-32 of the item that begins there, by file and offset."""


allow_classes(
    SavePlan,
    WriteItem,
    WriteItemType,
    TensorWriteData,
    BytesIOWriteData,
    StorageInfo,
    _RankFailure,
    _WrittenFile,
    CheckpointIndex,
)
allow_classes(index.Metadata, index.MetadataIndex, index.TensorStorageMetadata, index.BytesStorageMetadata)
allow_classes(index.ChunkStorageMetadata, index.TensorProperties)


def _combine_failures(results: Sequence[Any]) -> _RankFailure | None:
    """Return one failure for those of all ranks; None: there is none."""
    reasons = summarize_reasons(result.reason for result in results if isinstance(result, _RankFailure))
    return _RankFailure(reasons) if reasons else None


def _sum_tensor_bytes(values: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]]) -> int:
    """Return the bytes that the copies of the tensors take."""
    return sum(align_bytes(value.nbytes) for _, value in values if isinstance(value, torch.Tensor))


def _outline_item(name: str, value: Any) -> object:
    """Return the properties of an item that a plan depends on: equal outlines have equal plans."""
    if isinstance(value, DTensor):
        return name, value.dtype, value.shape, value.placements, value.device_mesh
    return (name, value.dtype, value.shape) if isinstance(value, torch.Tensor) else name


def _copy_into_buffer(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors into `buffer`, one after the other. Each has its own storage, because torch.save writes storages."""
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
    """A file that is written sequentially, and the checksum of its content."""

    def __init__(self, file: WritableStream) -> None:
        self._file = file
        self.file_checksum = FileChecksum(0, 0)
        self._item_offset, self._item_crc = 0, 0

    def begin_item(self) -> None:
        """Begin an item at the present position."""
        self._item_offset, self._item_crc = self.file_checksum.nbytes, 0

    @property
    def current_item(self) -> tuple[int, int, int]:
        """Offset, bytes and CRC-32 of the content since `begin_item`."""
        return self._item_offset, self.file_checksum.nbytes - self._item_offset, self._item_crc

    def write(self, content: Any) -> int:
        nbytes = memoryview(content).nbytes
        self._file.write(content)
        self._item_crc = zlib.crc32(content, self._item_crc)
        self.file_checksum = FileChecksum(
            self.file_checksum.nbytes + nbytes, zlib.crc32(content, self.file_checksum.crc32)
        )
        return nbytes


def _open_files(folder: Path | CheckpointFiles) -> CheckpointFiles:
    return FolderFiles(folder) if isinstance(folder, Path) else folder


def _write_items(
    items: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]], storage: CheckpointFiles, name: str
) -> _WrittenFile:
    """Write a rank's file as torch does. Raises OSError."""

    def write(file: WritableStream) -> _WrittenFile:
        locations: dict[index.MetadataIndex, StorageInfo] = {}
        checksums: dict[int, int] = {}
        stream = _ChecksumWriter(file)
        for item, value in items:
            stream.begin_item()
            if isinstance(value, torch.Tensor):
                torch.save(value, cast(IO[bytes], stream))
            else:
                stream.write(value.getbuffer())
            offset, nbytes, checksums[offset] = stream.current_item
            locations[item.index] = StorageInfo(name, offset, nbytes)
        return _WrittenFile(locations, checksums, stream.file_checksum)

    return storage.write_file(name, _sum_tensor_bytes(items), write)


def _write_index(
    metadata: Metadata, parts: Sequence[_WrittenFile], storage: CheckpointFiles
) -> dict[str, FileChecksum]:
    """Write both indices, torch's and Pacekeeper's, from what each rank has written. Returns their checksums."""
    results = [
        [WriteResult(key, location.length, location) for key, location in part.locations.items()] for part in parts
    ]
    with tempfile.TemporaryDirectory(prefix="pacekeeper-index-") as folder:
        FileSystemWriter(folder, sync_files=False).finish(replace(metadata), results)
        torch_index = (Path(folder) / TORCH_INDEX_FILE).read_bytes()
    locations = {key: location for part in parts for key, location in part.locations.items()}
    checksums = {location.relative_path: part.item_checksums for part in parts for location in part.locations.values()}
    own_index = pack_value(CheckpointIndex(replace(metadata, storage_data=locations, storage_meta=None), checksums))
    files = {TORCH_INDEX_FILE: torch_index, CHECKPOINT_INDEX_FILE: bytes(own_index)}
    for name, content in files.items():
        storage.write_file(name, len(content), lambda file, content=content: file.write(content))  # type: ignore[misc]
    return {name: FileChecksum(len(content), zlib.crc32(content)) for name, content in files.items()}


_RANK_FILE_PATTERN = re.compile(r"__\d+_\d+\.distcp")


def _read_index(storage: CheckpointFiles, files: Mapping[str, FileChecksum]) -> CheckpointIndex:
    path = storage.describe(CHECKPOINT_INDEX_FILE)
    try:
        content = storage.read_file(CHECKPOINT_INDEX_FILE)
    except StorageUnavailableError:
        raise
    except OSError as error:
        raise TornCheckpointError(f"{path}: {error.strerror}") from error
    if FileChecksum(len(content), zlib.crc32(content)) != files.get(CHECKPOINT_INDEX_FILE):
        raise TornCheckpointError(f"{path}: its checksum has changed since it was written")
    loaded = unpack_value(content)
    if isinstance(loaded, Metadata):  # of a build without checksums in the index
        loaded = CheckpointIndex(loaded)
    if not isinstance(loaded, CheckpointIndex):
        raise InputError(f"{path}: holds a {type(loaded).__name__} instead of a checkpoint's index")
    for location in loaded.metadata.storage_data.values():  # the index is untrusted: it must not name a file elsewhere
        if not _RANK_FILE_PATTERN.fullmatch(str(location.relative_path)):
            raise InputError(f"{path}: names file {location.relative_path!r}; give the job another path")
    return loaded


def _get_location(storage: StorageInfo) -> tuple[str, int]:
    return storage.relative_path, storage.offset


class _ItemReader:
    """Reads and checks items of a checkpoint's files."""

    def __init__(
        self,
        storage: CheckpointFiles,
        checksums: Mapping[str, Mapping[int, int]],
        files: Mapping[str, FileChecksum],
    ) -> None:
        self._storage = storage
        self._item_checksums = checksums
        self._files = files
        self._checked_files: set[str] = set()
        """Files that were checked as a whole, because the index has no checksums for them."""
        self._check_lock = threading.Lock()
        """Lock for the check of a whole file, which runs once."""

    def read(self, storage: StorageInfo) -> bytes:
        """Return the content of an item. Raises TornCheckpointError, or StorageUnavailableError."""
        name, offset = _get_location(storage)
        path = self._storage.describe(name)
        try:
            if name not in self._item_checksums:
                self._check_whole_file(name, path)
            content = self._storage.read_range(name, offset, storage.length)
        except StorageUnavailableError:
            raise
        except OSError as error:
            raise TornCheckpointError(f"{path}: {error.strerror}") from error
        if name in self._item_checksums and zlib.crc32(content) != self._item_checksums[name].get(offset):
            raise TornCheckpointError(f"{path}: the checksum at offset {offset} has changed since it was written")
        return content

    def _check_whole_file(self, name: str, path: str) -> None:
        with self._check_lock:
            if name in self._checked_files:
                return
            if self._storage.compute_checksum(name) != self._files.get(name):
                raise TornCheckpointError(f"{path}: its checksum has changed since it was written")
            self._checked_files.add(name)


class _WeightsOnlyPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value as the base class does, but with weights_only."""
        content = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)
        else:
            self.state_dict[read_item.dest_index.fqn] = content
