"""What one rank writes and reads of a checkpoint, and what a peer's plan may make it write."""

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
SINGLE_RANK = cast(ProcessGroup, SimpleNamespace(rank=lambda: 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "checkpoint"


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> CheckpointSaver:
    """The saver of a single rank."""
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    return CheckpointSaver(build_single_group(), skip_pinning)


def build_single_group() -> CpuGroup:
    return cast(CpuGroup, SimpleNamespace(group=SINGLE_RANK, all_agree=bool, all_gather=lambda mine: [mine]))


def skip_pinning(_: torch.Tensor) -> Callable[[], None]:
    return lambda: None


def build_state(value: float) -> dict[str, Any]:
    """An item of 4 MiB, small ones, and one that is no tensor."""
    return {
        "large": torch.full((1 << 20,), value),
        "turned": torch.arange(6.0).reshape(2, 3).t() * value,
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "count": torch.tensor(7),
        "other": {"bytes": b"bytes", "number": value},
    }


def build_empty_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(its) if isinstance(its, torch.Tensor) else {} for name, its in state.items()} | {
        "other": {"bytes": b"", "number": 0.0}
    }


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [name for name in one if name != "other"]
    return one["other"] == other["other"] and all(torch.equal(one[name], other[name]) for name in tensors)


def flip_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def find_item(folder: Path, name: str) -> tuple[int, int]:
    """Return the offset and the bytes of an item."""
    places = unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).metadata.storage_data
    return next((place.offset, place.length) for its, place in places.items() if its.fqn == name)


def test_a_state_is_read_as_it_was_written(saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    assert files == {path.name: compute_checksum(path) for path in folder.iterdir()}
    assert files.keys() == {DATA, CHECKPOINT_INDEX_FILE, TORCH_INDEX_FILE}
    found = build_empty_state(build_state(2.0))
    load_checkpoint(found, folder, files)
    assert is_same(found, build_state(2.0))


def test_torchs_own_tools_read_it_too(saver: CheckpointSaver, folder: Path) -> None:
    saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    found = build_empty_state(build_state(2.0))
    with pytest.warns(UserWarning, match="load in a single process"):
        torchs_load(found, checkpoint_id=folder, no_dist=True)
    assert is_same(found, build_state(2.0))


def test_a_copy_is_written_while_the_state_changes_and_the_next_copy_reuses_its_memory(
    saver: CheckpointSaver, folder: Path
) -> None:
    state = build_state(2.0)
    staged = saver.stage(state)
    state["large"].zero_()
    files = saver.write(staged, folder / "first", SINGLE_RANK)
    load_checkpoint(found := build_empty_state(state), folder / "first", files)
    assert is_same(found, build_state(2.0))
    room = saver._buffer.data_ptr()
    files = saver.write(saver.stage(build_state(3.0)), folder / "second", SINGLE_RANK)
    load_checkpoint(found, folder / "second", files)
    assert is_same(found, build_state(3.0))
    assert saver._buffer.data_ptr() == room


def test_a_state_of_another_shape_is_planned_again(saver: CheckpointSaver, folder: Path) -> None:
    saver.stage({"large": torch.ones(8)})
    files = saver.write(saver.stage({"large": torch.ones(9), "more": torch.ones(1)}), folder, SINGLE_RANK)
    load_checkpoint(found := {"large": torch.zeros(9), "more": torch.zeros(1)}, folder, files)
    assert torch.equal(found["large"], torch.ones(9))
    assert torch.equal(found["more"], torch.ones(1))


def test_a_copy_for_which_there_is_no_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    saver = CheckpointSaver(build_single_group(), skip_pinning, read_memory_left=lambda: 66 << 20)
    state = build_state(1.0)
    with pytest.raises(
        CheckpointWriteError,
        match=r"rank 0: its worker's 1 ranks need 4 MiB to copy the state, but their control group has 66 MiB left",
    ):
        saver.stage(state)
    assert not saver._planner.state_dict, "no reference to the live state remains until the next one"
    saver.stage({"small": torch.ones(3)})


def test_a_worker_short_of_memory_frees_what_is_worth_less(saver: CheckpointSaver, folder: Path) -> None:
    """Otherwise no checkpoint would ever be taken again."""
    left, gone = [66 << 20], []

    def free_memory() -> None:
        gone.append(left.pop())
        left.append(70 << 20)

    saver = CheckpointSaver(
        build_single_group(), skip_pinning, read_memory_left=lambda: left[-1], free_memory=free_memory
    )
    assert not saver.has_buffer
    load_checkpoint(
        found := build_empty_state(build_state(1.0)),
        folder,
        saver.write(saver.stage(build_state(1.0)), folder, SINGLE_RANK),
    )
    assert is_same(found, build_state(1.0))
    assert gone == [66 << 20], "once"
    assert saver.has_buffer


def test_only_the_worker_that_is_short_frees_memory(saver: CheckpointSaver) -> None:
    peers = SimpleNamespace(
        group=SINGLE_RANK, all_agree=bool, all_gather=lambda mine: [mine, ("another worker", 1 << 20, 0)]
    )
    gone: list[bool] = []
    saver = CheckpointSaver(
        cast(CpuGroup, peers), skip_pinning, read_memory_left=lambda: 1 << 40, free_memory=lambda: gone.append(True)
    )
    with pytest.raises(CheckpointWriteError, match="rank 1: its worker's 1 ranks"):
        saver.stage(build_state(1.0))
    assert gone == []


@pytest.mark.parametrize(
    ("shares", "short"),
    [
        ([("a", 30, 100), ("a", 30, 100), ("b", 30, 100)], ""),
        ([("a", 30, 100), ("b", 40, 100), ("b", 40, 70)], "rank 1: its worker's 2 ranks need 80 MiB"),
        ([("a", 30, 100), ("a", 30, 100), ("a", 30, 100)], "rank 0: its worker's 3 ranks need 90 MiB"),
        ([("a", 0, 0), ("b", 30, float("inf"))], ""),
    ],
    ids=["room", "too little on the second", "for two, not for three", "nothing to copy"],
)
def test_the_ranks_of_a_worker_do_not_take_the_same_memory(shares: list[tuple[str, int, float]], short: str) -> None:
    """In MiB; the reserve is 64."""
    message = describe_memory_shortage(
        [(worker, int(nbytes) << 20, left * (1 << 20) + (24 << 20)) for worker, nbytes, left in shares]
    )
    assert message.startswith(short)
    assert bool(message) == bool(short)


def test_a_new_plan_releases_pinned_memory_before_it_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def pin_and_log(memory: torch.Tensor) -> Callable[[], None]:
        log.append(f"pin {len(memory)}")
        return lambda: log.append(f"unpin {len(memory)}")

    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine])
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: each[0])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    saver = CheckpointSaver(build_single_group(), pin_and_log)
    for length in (1 << 10, 1 << 10, 3 << 10):
        saver.stage({"weights": torch.ones(length)})
    assert log == ["pin 4096", "unpin 4096", "pin 12288"], "what is pinned is what is needed"


@pytest.mark.parametrize("name", ["large", "turned", "other.bytes"])
@pytest.mark.parametrize("end", [0, -1], ids=["first byte", "last byte"])
def test_a_flipped_bit_is_detected_by_the_rank_that_reads_it_and_by_no_other(
    name: str, end: int, saver: CheckpointSaver, folder: Path
) -> None:
    files = saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    offset, nbytes = find_item(folder, name)
    flip_bit(folder / DATA, offset + (0 if end == 0 else nbytes - 1))
    with pytest.raises(TornCheckpointError, match=rf"{DATA}: the checksum at offset {offset} has changed"):
        load_checkpoint(build_empty_state(build_state(2.0)), folder, files)
    load_checkpoint(found := {"half": torch.zeros(3, dtype=torch.bfloat16)}, folder, files)
    assert torch.equal(found["half"], build_state(2.0)["half"])


def test_items_are_prefetched_in_order_and_only_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_checkpoint, "MAX_PREFETCHED_BYTES", 100)
    sizes = [40, 30, 30, 10, 250, 60, 50, 1, 1, 1, 1, 1, 1, 1]
    begun: list[int] = []

    def read_item(place: StorageInfo) -> bytes:
        begun.append(place.offset)
        return bytes([place.offset])

    items = [(number, StorageInfo("file", number, size)) for number, size in enumerate(sizes)]
    taken: list[int] = []
    for number, content in distributed_checkpoint.prefetch_items(items, read_item):
        assert content == bytes([number])
        taken.append(number)
        there = [sizes[its] for its in begun if its not in taken]
        assert sum(there) <= 100 or len(there) == 1
        assert len(there) <= distributed_checkpoint.MAX_READER_THREADS + 1
    assert taken == list(range(len(sizes)))


def test_an_unreadable_item_fails_in_its_turn() -> None:
    def read_item(place: StorageInfo) -> bytes:
        if place.offset == 2:
            raise TornCheckpointError("it is torn")
        return b""

    found = distributed_checkpoint.prefetch_items(
        [(number, StorageInfo("file", number, 1)) for number in range(4)], read_item
    )
    assert [next(found)[0], next(found)[0]] == [0, 1]
    with pytest.raises(TornCheckpointError):
        next(found)


def test_only_loaded_items_are_read(saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    before = count_bytes_read()
    load_checkpoint({"half": torch.zeros(3, dtype=torch.bfloat16)}, folder, files)
    assert count_bytes_read() - before < 1 << 17
    before = count_bytes_read()
    load_checkpoint({"large": torch.zeros(1 << 20)}, folder, files)
    assert 1 << 22 <= count_bytes_read() - before < (1 << 22) + (1 << 17)


def count_bytes_read() -> int:
    """Return how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", [DATA, CHECKPOINT_INDEX_FILE])
def test_a_missing_or_changed_file_is_torn(name: str, saver: CheckpointSaver, folder: Path) -> None:
    files = saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(TornCheckpointError, match=name):
        load_checkpoint(build_empty_state(build_state(2.0)), folder, files)
    (folder / name).unlink()
    with pytest.raises(TornCheckpointError, match=f"{name}: No such file"):
        load_checkpoint(build_empty_state(build_state(2.0)), folder, files)


def test_an_index_without_checksums_of_items_is_read_and_its_files_are_checked_whole(
    saver: CheckpointSaver, folder: Path
) -> None:
    files = saver.write(saver.stage(build_state(2.0)), folder, SINGLE_RANK)
    (folder / CHECKPOINT_INDEX_FILE).write_bytes(
        pack_value(unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).metadata)
    )
    files[CHECKPOINT_INDEX_FILE] = compute_checksum(folder / CHECKPOINT_INDEX_FILE)
    load_checkpoint(found := build_empty_state(build_state(2.0)), folder, files)
    assert is_same(found, build_state(2.0))
    flip_bit(folder / DATA, find_large_item(folder))
    with pytest.raises(TornCheckpointError, match=f"{DATA}: its checksum"):
        load_checkpoint(found, folder, files)


def find_large_item(folder: Path) -> int:
    places = unpack_value((folder / CHECKPOINT_INDEX_FILE).read_bytes()).storage_data
    return next(int(place.offset) for its, place in places.items() if its.fqn == "large")


@pytest.mark.parametrize("storage", [*map(_StoragePrefix, ["../../x", "/tmp/x", "__1_"]), "__0_", None], ids=repr)
def test_a_peers_plan_cannot_name_a_file(
    storage: Any, saver: CheckpointSaver, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_collectives, "scatter_objects", lambda each, _: replace(each[0], storage_data=storage))
    saver.write(saver.stage(build_state(1.0)), folder, SINGLE_RANK)
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


def test_each_rank_reports_why_it_could_not_write(
    saver: CheckpointSaver, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def add_failed_peer(mine: Any, _: object) -> Sequence[Any]:
        return [mine, type(mine)(why="rank 1: it is full")] if hasattr(mine, "why") else [mine]

    monkeypatch.setattr(object_collectives, "gather_objects", add_failed_peer)
    tmp_path.joinpath("volume").write_text("")
    staged = saver.stage(build_state(1.0))
    with pytest.raises(CheckpointWriteError, match=rf"^rank 0: NotADirectoryError: [^;]*{errno.ENOTDIR}[^;]*$"):
        saver.write(staged, folder, SINGLE_RANK)
    with pytest.raises(CheckpointWriteError, match=r"^rank 0: no memory$"):
        saver.write("rank 0: no memory", folder, SINGLE_RANK)


def test_the_first_rank_writes_no_index_after_a_failure_of_another_and_does_not_report_it(
    saver: CheckpointSaver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reports only its own failure to all others, since the messages would grow with the square otherwise."""
    staged = saver.stage(build_state(1.0))
    failure = distributed_checkpoint._RankFailure("rank 1: it is full")
    monkeypatch.setattr(object_collectives, "gather_objects", lambda mine, _: [mine, failure])
    assert saver.write(staged, folder, SINGLE_RANK).keys() == {DATA}
    assert [path.name for path in folder.iterdir()] == [DATA]
