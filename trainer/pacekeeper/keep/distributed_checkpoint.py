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
from pacekeeper.cgroup import memory_left
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.plain import aligned, allow, pack, unpack
from pacekeeper.torch_internals import StorageInfo, set_element
from pacekeeper_analysis.errors import InputError

from .checkpoints import described, in_short
from .copies import touch
from .manifests import FileSum, checksum
from .worker import this_worker

INDEX = "index.plain"
TORCHS_INDEX = ".metadata"
"""For torch's own tools; nothing here reads it."""
_RESERVE_BYTES = 64 << 20
"""Of the memory that the control group has left, what the copy of the state leaves to the training."""

READERS = 4
"""Threads that read items and check them: a core checks 1 GB a second."""
AHEAD_BYTES = 1 << 30
"""That they may be ahead of who takes the items up."""

Item = TypeVar("Item")
Pin = Callable[[torch.Tensor], Callable[[], None]]
"""As `SlotCopies.pin`."""


class Failed(Exception):
    """This rank could not write, or the ranks could not agree what to; the message says which and why."""


class Torn(Exception):
    """What was read is not what was written, or cannot be read; the message says where."""


@dataclass
class Staged:
    """A copy of what one rank is to write."""

    items: list[tuple[WriteItem, torch.Tensor | io.BytesIO]]
    whole: Metadata | None
    """What all ranks write together; the first rank has it."""


class Saver:
    """One rank's part in writing checkpoints: `stage` copies the state, `write` writes the copy in the background.

    Replicas share the work: of what several ranks have alike, each copies and writes a part. Which, they agree on once;
    the plan holds until the state has other names or shapes.
    """

    def __init__(
        self,
        peers: CpuGroup,
        pin: Pin,
        left: Callable[[], float] = memory_left,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        """
        pin: has copies from a device into memory begin without waiting; as `SlotCopies.pin`.
        left: bytes of memory that the control group may still take.
        make_room: has what is worth less than a checkpoint give its memory back, where there is not enough.
        """
        self._peers = peers
        self._pin = pin
        self._rank = peers.group.rank()
        self._left = left
        self._make_room = make_room
        self._planner = DefaultSavePlanner()
        self._planned: object = None
        """What this rank had by `_outline`, when `_part` was agreed on; None: it was not."""
        self._part: SavePlan | None = None
        """What it writes of that."""
        self._whole: Metadata | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        """Of the copy; kept as long as the plan, since new memory takes several times as long to fill."""
        self._unpin: Callable[[], None] = lambda: None

    def stage(self, state: dict[str, Any]) -> Staged:
        """Copies what this rank is to write of `state`, over the copy before. Collective.

        No rank leaves before the last collective, whatever fails on it. Raises Failed.
        """
        try:
            outline = self._tried(lambda: self._take_up(state))
            if not self._peers.all_agree(self._planned is not None and outline == self._planned):
                self._planned = None
                self._give_back_room()
                self._plan(outline if isinstance(outline, _Failure) else self._tried(self._planner.create_local_plan))
                self._look_for_room()
                self._planned = outline
            staged = self._tried(self._copied)
        finally:
            self._planner.state_dict = {}  # the live state's: nothing of it is kept
        if isinstance(staged, _Failure):
            raise Failed(staged.why)
        return Staged(staged, self._whole)

    def write(self, staged: Staged | str, folder: Path, group: dist.ProcessGroup) -> dict[str, FileSum]:
        """Writes the copy into `folder`, and on the first rank the index, where no rank has failed; returns what the
        files are like that this rank has written. Collective. `staged`: or why there is no copy.

        No rank leaves before the last collective, whatever fails on it. Raises Failed, where this rank could not.
        """
        file = folder / self._file
        if isinstance(staged, str):
            written: Any = _Failure(staged)
        else:
            written = self._tried(lambda: _write(staged.items, file))
        parts = exchange.collect(written, group)
        if isinstance(written, _Failure):  # its own alone: the reasons of all, told by all, would be more than memory
            raise Failed(written.why)
        assert isinstance(staged, Staged), "it has not failed"
        files = {file.name: written.sum}
        if parts is not None and _failure(parts) is None:
            assert staged.whole is not None, "the first rank has it"
            _write_index(staged.whole, parts, folder)
            files |= {name: checksum(folder / name) for name in (INDEX, TORCHS_INDEX)}
        return files

    def wrote(self, name: str) -> bool:
        """Whether it is this rank that writes the file of this name into a checkpoint's folder."""
        return name == self._file or (self._rank == 0 and not _FILE.fullmatch(name))

    @property
    def has_room(self) -> bool:
        """Whether it has taken the memory for its copies."""
        return len(self._room) > 0

    @property
    def _file(self) -> str:
        """As torch names it."""
        return f"__{self._rank}_0.distcp"

    def _take_up(self, state: dict[str, Any]) -> object:
        """Has the planner hold `state`; returns its `_outline`."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return [_outline(name, value) for name, value in self._planner.state_dict.items()]

    def _plan(self, mine: SavePlan | _Failure) -> None:
        """Agrees with the peers on who writes what. Raises Failed, on all ranks alike."""
        plans = exchange.collect(mine, self._peers.group)
        part = exchange.scatter(None if plans is None else self._parts(plans), self._peers.group)
        if isinstance(part, _Failure):
            raise Failed(part.why)
        self._part = self._planner.finish_plan(part)

    def _parts(self, plans: Sequence[Any]) -> Sequence[SavePlan | _Failure]:
        """What each rank is to write, from what they have; where one could not say, its failure for all of them."""

        def combined() -> list[SavePlan]:
            together, self._whole = self._planner.create_global_plan(list(plans))
            return together

        failure = _failure(plans)
        parts: list[SavePlan] | _Failure = self._tried(combined) if failure is None else failure
        return [parts] * len(plans) if isinstance(parts, _Failure) else parts

    def _look_for_room(self) -> None:
        """For the copies of all ranks of a worker together: each would find room for its own, before the others have
        taken theirs. Raises Failed, on all ranks alike."""
        said = self._said_of_room()
        if shortage(said):
            if shortage([its for its in said if its[0] == this_worker()]):
                self._make_room()
            said = self._said_of_room()
        if why := shortage(said):
            raise Failed(why)

    def _said_of_room(self) -> list[tuple[str, int, float]]:
        """As for `shortage`. Collective. Raises Failed, on all ranks alike."""
        said = self._peers.gather(self._tried(lambda: (this_worker(), _size(self._values()), self._left())))
        if failure := _failure(said):
            raise Failed(failure.why)
        return said

    def _give_back_room(self) -> None:
        self._unpin()
        self._room, self._unpin = torch.empty(0, dtype=torch.uint8), lambda: None

    def _copied(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Raises OSError where there is no memory for it."""
        found = self._values()
        tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if (nbytes := _size(found)) > len(self._room):
            self._give_back_room()
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._room = torch.frombuffer(memory, dtype=torch.uint8)
            if on_gpu:
                touch(self._room)
                self._unpin = self._pin(self._room)
        copies = iter(_copies(self._room, tensors))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return [(item, next(copies) if isinstance(value, torch.Tensor) else value) for item, value in found]

    def _values(self) -> list[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """What this rank is to write, as it is in the live state."""
        assert self._part is not None, "it is planned"
        return [(item, self._value(item)) for item in self._part.items]

    def _value(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What the planner resolves an item to, in a tenth of the time for tensors."""
        value = self._planner.state_dict[item.index.fqn]
        if isinstance(value, DTensor):
            value = value.to_local()
        return value.detach() if isinstance(value, torch.Tensor) else self._planner.resolve_data(item)

    def _tried(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` gives, or its failure."""
        try:
            return attempt()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            return _Failure(f"rank {self._rank}: {described(error)}")


def shortage(said: Sequence[tuple[str, int, float]]) -> str:
    """Why the ranks of a worker cannot all have their copies; "": they can.

    said: by each rank: its worker, the bytes of its copy, and those that its control group has left before any is made.
    """
    for worker in dict.fromkeys(where for where, _, _ in said):
        ranks = [rank for rank, (where, _, _) in enumerate(said) if where == worker]
        nbytes, left = sum(said[rank][1] for rank in ranks), min(said[rank][2] for rank in ranks)
        if nbytes and nbytes + _RESERVE_BYTES > left:
            return (
                f"rank {ranks[0]}: its worker's {len(ranks)} ranks copy {nbytes >> 20} MiB of the state, and their "
                f"control group has {int(left) >> 20} MiB left; give the container more memory"
            )
    return ""


def load(state: dict[str, Any], folder: Path, files: Mapping[str, FileSum]) -> None:
    """Fills in `state` with what it names. Not collective: each rank reads what it needs, and checks what it reads.

    files: of the manifest. Raises Torn, with `state` filled in in part; InputError where the folder was written by
    something else; and what torch raises.
    """
    found = _read_index(folder, files)
    planner = _Planner()
    planner.set_up_planner(state, found.metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader = _Reader(folder, found.sums, files)
    places = found.metadata.storage_data
    items = [(its, places[its.storage_index]) for its in plan.items]
    for item, read in ahead(sorted(items, key=lambda its: _place(its[1])), reader.read):
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


def ahead(
    items: Iterable[tuple[Item, StorageInfo]], read: Callable[[StorageInfo], bytes]
) -> Iterator[tuple[Item, bytes]]:
    """Each item with what is read of it, in their order: in threads, while those before are taken up.

    No more than AHEAD_BYTES lie there at a time, or one item. Raises what `read` raises, when it is the item's turn.
    """
    with ThreadPoolExecutor(READERS, "pacekeeper-reader") as readers:
        coming: deque[tuple[Item, int, Future[bytes]]] = deque()
        for item, place in items:
            while coming and (
                len(coming) > READERS or place.length + sum(nbytes for _, nbytes, _ in coming) > AHEAD_BYTES
            ):
                first, _, content = coming.popleft()
                yield first, content.result()
            coming.append((item, place.length, readers.submit(read, place)))
        for first, _, content in coming:
            yield first, content.result()


@dataclass(frozen=True)
class _Failure:
    """Goes in the place of what a rank was to give."""

    why: str


@dataclass(frozen=True)
class _Written:
    """What a rank has written: where its items lie, and what its file is like."""

    places: dict[index.MetadataIndex, StorageInfo]
    sums: dict[int, int]
    """CRC-32 of the item that begins at this offset."""
    sum: FileSum


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, and where."""

    metadata: Metadata
    sums: dict[str, dict[int, int]] = field(default_factory=dict)
    """By file and offset: CRC-32 of the item that begins there."""


allow(SavePlan, WriteItem, WriteItemType, TensorWriteData, BytesIOWriteData, StorageInfo, _Failure, _Written, Index)
allow(index.Metadata, index.MetadataIndex, index.TensorStorageMetadata, index.BytesStorageMetadata)
allow(index.ChunkStorageMetadata, index.TensorProperties)


def _failure(of_ranks: Sequence[Any]) -> _Failure | None:
    """The ranks' failures in one; None: there is none."""
    reasons = in_short(its.why for its in of_ranks if isinstance(its, _Failure))
    return _Failure(reasons) if reasons else None


def _size(values: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]]) -> int:
    """Bytes that the copies of the tensors take."""
    return sum(aligned(value.nbytes) for _, value in values if isinstance(value, torch.Tensor))


def _outline(name: str, value: Any) -> object:
    """What a plan depends on, of an item: who has the same has the same items to write."""
    if isinstance(value, DTensor):
        return name, value.dtype, value.shape, value.placements, value.device_mesh
    return (name, value.dtype, value.shape) if isinstance(value, torch.Tensor) else name


def _copies(room: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that lie in `room` one behind the other, each with a storage of its own: torch.save writes storages."""
    memory: Any = room.numpy()
    offset, copies = 0, []
    for tensor in tensors:
        if tensor.numel():
            copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies.append(copy)
        offset += aligned(tensor.nbytes)
    return copies


# Files


class _Summing(io.RawIOBase):
    """A file that is written once from its beginning to its end, and the checksum of what was written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.sum = FileSum(0, 0)
        self._begin, self._crc = 0, 0

    def begin(self) -> None:
        """An item begins here."""
        self._begin, self._crc = self.sum.nbytes, 0

    @property
    def item(self) -> tuple[int, int, int]:
        """Offset, bytes and CRC-32 of what was written since `begin`."""
        return self._begin, self.sum.nbytes - self._begin, self._crc

    def write(self, content: Any) -> int:
        nbytes = memoryview(content).nbytes
        self._file.write(content)
        self._crc = zlib.crc32(content, self._crc)
        self.sum = FileSum(self.sum.nbytes + nbytes, zlib.crc32(content, self.sum.crc32))
        return nbytes


def _write(items: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]], path: Path) -> _Written:
    """As torch writes a rank's file. Raises OSError."""
    places: dict[index.MetadataIndex, StorageInfo] = {}
    sums: dict[int, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        stream = _Summing(file)
        for item, value in items:
            stream.begin()
            if isinstance(value, torch.Tensor):
                torch.save(value, cast(IO[bytes], stream))
            else:
                stream.write(value.getbuffer())
            offset, nbytes, sums[offset] = stream.item
            places[item.index] = StorageInfo(path.name, offset, nbytes)
        file.flush()
        os.fsync(file.fileno())
    return _Written(places, sums, stream.sum)


def _write_index(whole: Metadata, parts: Sequence[_Written], folder: Path) -> None:
    """The index, torch's and ours, from what each rank has written."""
    results = [[WriteResult(its, place.length, place) for its, place in part.places.items()] for part in parts]
    FileSystemWriter(folder, sync_files=True).finish(replace(whole), results)
    places = {its: place for part in parts for its, place in part.places.items()}
    sums = {place.relative_path: part.sums for part in parts for place in part.places.values()}
    with (folder / INDEX).open("wb") as file:
        file.write(pack(Index(replace(whole, storage_data=places, storage_meta=None), sums)))
        file.flush()
        os.fsync(file.fileno())


_FILE = re.compile(r"__\d+_\d+\.distcp")


def _read_index(folder: Path, files: Mapping[str, FileSum]) -> Index:
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Torn(f"{path}: {error.strerror}") from error
    if FileSum(len(content), zlib.crc32(content)) != files.get(INDEX):
        raise Torn(f"{path}: its checksum is another than when it was written")
    found = unpack(content)
    if isinstance(found, Metadata):  # of a build whose indices had no sums
        found = Index(found)
    if not isinstance(found, Index):
        raise InputError(f"{path}: holds a {type(found).__name__} instead of a checkpoint's index")
    for where in found.metadata.storage_data.values():  # a peer has said it: it names no file elsewhere
        if not _FILE.fullmatch(str(where.relative_path)):
            raise InputError(f"{path}: names file {where.relative_path!r}; give the job another path")
    return found


def _place(storage: StorageInfo) -> tuple[str, int]:
    return storage.relative_path, storage.offset


class _Reader:
    """Reads items of a checkpoint's files, and checks them."""

    def __init__(self, folder: Path, sums: Mapping[str, Mapping[int, int]], files: Mapping[str, FileSum]) -> None:
        self._folder = folder
        self._sums = sums
        self._files = files
        self._whole: set[str] = set()
        """Files that were checked as a whole: the index has no sums of them."""
        self._turn = threading.Lock()
        """For who checks a whole file, which is done once."""

    def read(self, storage: StorageInfo) -> bytes:
        """Raises Torn."""
        name, offset = _place(storage)
        path = self._folder / name
        try:
            if name not in self._sums:
                self._check_whole(name, path)
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(storage.length)
        except OSError as error:
            raise Torn(f"{path}: {error.strerror}") from error
        if name in self._sums and zlib.crc32(content) != self._sums[name].get(offset):
            raise Torn(f"{path}: what lies at {offset} has another checksum than when it was written")
        return content

    def _check_whole(self, name: str, path: Path) -> None:
        with self._turn:
            if name in self._whole:
                return
            if checksum(path) != self._files.get(name):
                raise Torn(f"{path}: its checksum is another than when it was written")
            self._whole.add(name)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As in the base class, where `weights_only` is False."""
        content = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)
        else:
            self.state_dict[read_item.dest_index.fqn] = content
