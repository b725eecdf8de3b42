"""What one rank writes and reads of a checkpoint, and what a peer's plan may have it write."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.state_dict_loader import load as torchs_load

from pacekeeper import object_collectives
from pacekeeper.checkpointing.storage import distributed_checkpoint
from pacekeeper.checkpointing.storage.distributed_checkpoint import (
    CHECKPOINT_INDEX_FILE,
    TORCH_INDEX_FILE,
    CheckpointSaver,
    CheckpointWriteError,
    TornCheckpointError,
    describe_memory_shortage,
    load_checkpoint,
)
from pacekeeper.checkpointing.storage.manifests import compute_checksum
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.safe_serialization import pack_value, unpack_value
from pacekeeper.torch_internals import StorageInfo
from pacekeeper_analysis.errors import InputError

DATA = "__0_0.distcp"
ALONE = cast(ProcessGroup, SimpleNamespace(rank=lambda: 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "checkpoint"


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> CheckpointSaver:
    """Of a rank that is alone."""
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    return CheckpointSaver(alone(), unpinned)


def alone() -> CpuGroup:
    return cast(CpuGroup, SimpleNamespace(group=ALONE, all_agree=bool, all_gather=lambda mine: [mine]))


def unpinned(_: torch.Tensor) -> Callable[[], None]:
    return lambda: None


def a_state(value: float) -> dict[str, Any]:
    """An item of 4 MiB, small ones, and one that is no tensor."""
    return {
        "large": torch.full((1 << 20,), value),
        "turned": torch.arange(6.0).reshape(2, 3).t() * value,
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "count": torch.tensor(7),
        "other": {"bytes": b"bytes", "number": value},
    }


def none_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(its) if isinstance(its, torch.Tensor) else {} for name, its in state.items()} | {
        "other": {"bytes": b"", "number": 0.0}
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [name for name in one if name != "other"]
    return one["other"] == other["other"] and all(torch.equal(one[name], other[name]) for name in tensors)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def lying(folder: Path, name: str) -> tuple[int, int]:
    """Offset and bytes of an item."""
    places = unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).metadata.storage_data
    return next((place.offset, place.length) for its, place in places.items() if its.fqn == name)


def test_what_is_read_is_what_was_written(saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    assert files == {path.name: compute_checksum(path) for path in folder.iterdir()}
    assert files.keys() == {DATA, CHECKPOINT_INDEX_FILE, TORCH_INDEX_FILE}
    found = none_of(a_state(2.0))
    load_checkpoint(found, folder, files)
    assert same(found, a_state(2.0))


def test_torchs_own_tools_read_it_too(saver: CheckpointSaver, folder: Path) -> None:
    saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    found = none_of(a_state(2.0))
    with pytest.warns(UserWarning, match="load in a single process"):
        torchs_load(found, checkpoint_id=folder, no_dist=True)
    assert same(found, a_state(2.0))


def test_a_copy_is_written_while_the_state_changes_and_the_next_copy_takes_its_place(
    saver: CheckpointSaver, folder: Path
) -> None:
    state = a_state(2.0)
    staged = saver.stage(state)
    state["large"].zero_()
    files = saver.write(staged, folder / "first", ALONE)
    load_checkpoint(found := none_of(state), folder / "first", files)
    assert same(found, a_state(2.0))
    room = saver._buffer.data_ptr()
    files = saver.write(saver.stage(a_state(3.0)), folder / "second", ALONE)
    load_checkpoint(found, folder / "second", files)
    assert same(found, a_state(3.0))
    assert saver._buffer.data_ptr() == room


def test_a_state_of_another_shape_is_planned_anew(saver: CheckpointSaver, folder: Path) -> None:
    saver.stage({"large": torch.ones(8)})
    files = saver.write(saver.stage({"large": torch.ones(9), "more": torch.ones(1)}), folder, ALONE)
    load_checkpoint(found := {"large": torch.zeros(9), "more": torch.zeros(1)}, folder, files)
    assert torch.equal(found["large"], torch.ones(9))
    assert torch.equal(found["more"], torch.ones(1))


def test_a_copy_for_which_there_is_no_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    saver = CheckpointSaver(alone(), unpinned, read_memory_left=lambda: 66 << 20)
    state = a_state(1.0)
    with pytest.raises(
        CheckpointWriteError,
        match=r"rank 0: its worker's 1 ranks need 4 MiB to copy the state, but their control group has 66 MiB left",
    ):
        saver.stage(state)
    assert not saver._planner.state_dict, "nobody keeps the live state until the next one"
    saver.stage({"small": torch.ones(3)})


def test_what_is_worth_less_makes_room_for_a_copy_on_the_worker_that_is_short(
    saver: CheckpointSaver, folder: Path
) -> None:
    """Otherwise no checkpoint would ever be taken again."""
    left, gone = [66 << 20], []

    def make_room() -> None:
        gone.append(left.pop())
        left.append(70 << 20)

    saver = CheckpointSaver(alone(), unpinned, read_memory_left=lambda: left[-1], free_memory=make_room)
    assert not saver.has_buffer
    load_checkpoint(found := none_of(a_state(1.0)), folder, saver.write(saver.stage(a_state(1.0)), folder, ALONE))
    assert same(found, a_state(1.0))
    assert gone == [66 << 20], "once"
    assert saver.has_buffer


def test_only_the_worker_that_is_short_makes_room(saver: CheckpointSaver) -> None:
    peers = SimpleNamespace(group=ALONE, all_agree=bool, all_gather=lambda mine: [mine, ("another worker", 1 << 20, 0)])
    gone: list[bool] = []
    saver = CheckpointSaver(
        cast(CpuGroup, peers), unpinned, read_memory_left=lambda: 1 << 40, free_memory=lambda: gone.append(True)
    )
    with pytest.raises(CheckpointWriteError, match="rank 1: its worker's 1 ranks"):
        saver.stage(a_state(1.0))
    assert gone == []


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ([("a", 30, 100), ("a", 30, 100), ("b", 30, 100)], ""),
        ([("a", 30, 100), ("b", 40, 100), ("b", 40, 70)], "rank 1: its worker's 2 ranks need 80 MiB"),
        ([("a", 30, 100), ("a", 30, 100), ("a", 30, 100)], "rank 0: its worker's 3 ranks need 90 MiB"),
        ([("a", 0, 0), ("b", 30, float("inf"))], ""),
    ],
    ids=["room", "too little on the second", "for two, not for three", "nothing to copy"],
)
def test_the_ranks_of_a_worker_do_not_take_the_same_memory(said: list[tuple[str, int, float]], short: str) -> None:
    """MiB; the reserve is 64."""
    told = describe_memory_shortage(
        [(worker, int(nbytes) << 20, left * (1 << 20) + (24 << 20)) for worker, nbytes, left in said]
    )
    assert told.startswith(short)
    assert bool(told) == bool(short)


def test_a_new_plan_gives_pinned_memory_back_before_it_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def pin(memory: torch.Tensor) -> Callable[[], None]:
        log.append(f"pin {len(memory)}")
        return lambda: log.append(f"unpin {len(memory)}")

    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    saver = CheckpointSaver(alone(), pin)
    for length in (1 << 10, 1 << 10, 3 << 10):
        saver.stage({"weights": torch.ones(length)})
    assert log == ["pin 4096", "unpin 4096", "pin 12288"], "what is pinned is what is needed"


@pytest.mark.parametrize("name", ["large", "turned", "other.bytes"])
@pytest.mark.parametrize("end", [0, -1], ids=["first byte", "last byte"])
def test_a_flipped_bit_is_seen_by_who_reads_it_and_by_nobody_else(
    name: str, end: int, saver: CheckpointSaver, folder: Path
) -> None:
    files = saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    offset, nbytes = lying(folder, name)
    flip(folder / DATA, offset + (0 if end == 0 else nbytes - 1))
    with pytest.raises(TornCheckpointError, match=rf"{DATA}: the checksum at offset {offset} has changed"):
        load_checkpoint(none_of(a_state(2.0)), folder, files)
    load_checkpoint(found := {"half": torch.zeros(3, dtype=torch.bfloat16)}, folder, files)
    assert torch.equal(found["half"], a_state(2.0)["half"])


def test_items_are_read_ahead_in_order_and_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_checkpoint, "MAX_PREFETCHED_BYTES", 100)
    sizes = [40, 30, 30, 10, 250, 60, 50, 1, 1, 1, 1, 1, 1, 1]
    begun: list[int] = []

    def read(place: StorageInfo) -> bytes:
        begun.append(place.offset)
        return bytes([place.offset])

    items = [(number, StorageInfo("file", number, size)) for number, size in enumerate(sizes)]
    taken: list[int] = []
    for number, content in distributed_checkpoint.prefetch_items(items, read):
        assert content == bytes([number])
        taken.append(number)
        there = [sizes[its] for its in begun if its not in taken]
        assert sum(there) <= 100 or len(there) == 1
        assert len(there) <= distributed_checkpoint.MAX_READER_THREADS + 1
    assert taken == list(range(len(sizes)))


def test_what_cannot_be_read_fails_when_it_is_its_turn() -> None:
    def read(place: StorageInfo) -> bytes:
        if place.offset == 2:
            raise TornCheckpointError("it is torn")
        return b""

    found = distributed_checkpoint.prefetch_items(
        [(number, StorageInfo("file", number, 1)) for number in range(4)], read
    )
    assert [next(found)[0], next(found)[0]] == [0, 1]
    with pytest.raises(TornCheckpointError):
        next(found)


def test_nothing_is_read_but_what_is_loaded(saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    before = bytes_read()
    load_checkpoint({"half": torch.zeros(3, dtype=torch.bfloat16)}, folder, files)
    assert bytes_read() - before < 1 << 17
    before = bytes_read()
    load_checkpoint({"large": torch.zeros(1 << 20)}, folder, files)
    assert 1 << 22 <= bytes_read() - before < (1 << 22) + (1 << 17)


def bytes_read() -> int:
    """By this process, from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", [DATA, CHECKPOINT_INDEX_FILE])
def test_a_file_that_is_gone_or_another_is_torn(name: str, saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(TornCheckpointError, match=name):
        load_checkpoint(none_of(a_state(2.0)), folder, files)
    (folder / name).unlink()
    with pytest.raises(TornCheckpointError, match=f"{name}: No such file"):
        load_checkpoint(none_of(a_state(2.0)), folder, files)


def test_an_index_without_sums_of_items_is_read_and_its_files_are_checked_whole(
    saver: CheckpointSaver, folder: Path
) -> None:
    files = saver.write(saver.stage(a_state(2.0)), folder, ALONE)
    (folder / CHECKPOINT_INDEX_FILE).write_bytes(
        pack_value(unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).metadata)
    )
    files[CHECKPOINT_INDEX_FILE] = compute_checksum(folder / CHECKPOINT_INDEX_FILE)
    load_checkpoint(found := none_of(a_state(2.0)), folder, files)
    assert same(found, a_state(2.0))
    flip(folder / DATA, lying_of(folder))
    with pytest.raises(TornCheckpointError, match=f"{DATA}: its checksum"):
        load_checkpoint(found, folder, files)


def lying_of(folder: Path) -> int:
    places = unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).storage_data
    return next(int(place.offset) for its, place in places.items() if its.fqn == "large")


@pytest.mark.parametrize("storage", [*map(_StoragePrefix, ["../../x", "/tmp/x", "__1_"]), "__0_", None], ids=repr)
def test_a_peers_plan_names_no_file(
    storage: Any, saver: CheckpointSaver, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: replace(each[0], storage_data=storage))
    saver.write(saver.stage(a_state(1.0)), folder, ALONE)
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert {path.relative_to(folder).as_posix() for path in files} == {DATA, CHECKPOINT_INDEX_FILE, TORCH_INDEX_FILE}


def test_an_index_that_names_files_elsewhere_is_not_read(folder: Path) -> None:
    storage = {index.MetadataIndex("weight"): _StorageInfo("../../x", 0, 1)}
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_INDEX_FILE).write_bytes(pack_value(index.Metadata({}, storage_data=storage)))
    with pytest.raises(InputError, match="names file"):
        load_checkpoint(
            {"weight": torch.ones(3)}, folder, {CHECKPOINT_INDEX_FILE: compute_checksum(folder / CHECKPOINT_INDEX_FILE)}
        )


def test_each_rank_tells_why_it_could_not_write_itself(
    saver: CheckpointSaver, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_a_peer_that_failed(mine: Any, _: object) -> Sequence[Any]:
        return [mine, type(mine)(why="rank 1: it is full")] if hasattr(mine, "why") else [mine]

    monkeypatch.setattr(object_collectives, "gather_objects", with_a_peer_that_failed)
    tmp_path.joinpath("volume").write_text("")
    staged = saver.stage(a_state(1.0))
    with pytest.raises(CheckpointWriteError, match=rf"^rank 0: NotADirectoryError: [^;]*{errno.ENOTDIR}[^;]*$"):
        saver.write(staged, folder, ALONE)
    with pytest.raises(CheckpointWriteError, match=r"^rank 0: no memory$"):
        saver.write("rank 0: no memory", folder, ALONE)


def test_the_first_rank_writes_no_index_where_another_has_failed_and_says_nothing_for_it(
    saver: CheckpointSaver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank tells all others why it failed: where each told it for all, they would need the square of it."""
    staged = saver.stage(a_state(1.0))
    failure = distributed_checkpoint._RankFailure("rank 1: it is full")
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine, failure])
    assert saver.write(staged, folder, ALONE).keys() == {DATA}
    assert [path.name for path in folder.iterdir()] == [DATA]
