"""Snapshots: what is read is what was written, never half of it."""

from __future__ import annotations

import math
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.checkpointing.rank_state import RANK_STATE_BYTES, capture_rank_state, restore_rank_state
from pacekeeper.checkpointing.snapshots import snapshot_slots
from pacekeeper.checkpointing.snapshots.snapshot_copies import HostCopies
from pacekeeper.checkpointing.snapshots.snapshot_slots import (
    SLOT_HEADER_BYTES,
    CopyOutcome,
    PeerSlot,
    SlotMemory,
    Snapshots,
    hold_file_lock,
    unpack_slot,
)
from pacekeeper.checkpointing.versions import NO_STATE_VERSION, StateVersion
from pacekeeper_analysis.errors import InputError

MODEL = 7
"""Fingerprint."""


def build_snapshots(
    folder: Path, round_: int = 1, fingerprint: int = MODEL, left: Callable[[], float] = lambda: math.inf
) -> Snapshots:
    return Snapshots(folder, "replica", round_=round_, world_size=2, fingerprint=fingerprint, memory=SlotMemory(left))


def save_snapshot(snapshots: Snapshots, step: int, state: dict[str, Any], fingerprint: int = MODEL) -> int:
    snapshots.write(step, state, fingerprint)
    return snapshots.publish(build_rank_states(step))


def list_versions(snapshots: Snapshots) -> list[StateVersion]:
    return [version for version, _ in snapshots.list_versions()]


def read_slot(snapshots: Snapshots, version: StateVersion) -> torch.Tensor:
    slot = snapshots.read(version)
    assert slot is not None
    return slot


def fill_slot(slot: PeerSlot, content: bytes) -> None:
    """`content`: of a whole slot."""
    slot.add(memoryview(content)[SLOT_HEADER_BYTES:])
    slot.finish(bytearray(content[:SLOT_HEADER_BYTES]))


def build_state(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 5), float(step)), "count": torch.tensor(step), "empty": torch.empty(0, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1 * step}]},
        "half": torch.full((7,), step, dtype=torch.bfloat16),
    }


def build_rank_states(step: int) -> torch.Tensor:
    return torch.full((2 * RANK_STATE_BYTES,), step, dtype=torch.uint8)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    else:
        assert found == wanted


def test_the_two_newest_can_be_read_by_a_later_round(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    for step in (5, 10, 15):
        assert save_snapshot(writer, step, build_state(step)) == step
    reader = build_snapshots(tmp_path, round_=2)
    assert sorted(list_versions(reader)) == [StateVersion(10, 1), StateVersion(15, 1)]
    for step in (10, 15):
        found, ranks = unpack_slot(read_slot(reader, StateVersion(step, 1)), None)
        assert_same(found, build_state(step))
        assert ranks == [bytes([step]) * RANK_STATE_BYTES] * 2


def test_a_half_written_snapshot_is_void_and_the_one_before_remains(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    for step in (5, 10):
        save_snapshot(writer, step, build_state(step))
    writer.write(15, build_state(15), MODEL)  # killed before the rank states came
    assert sorted(list_versions(build_snapshots(tmp_path))) == [NO_STATE_VERSION, StateVersion(10, 1)]


def test_a_state_that_grows_gets_new_slots(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    save_snapshot(writer, 1, {"model": torch.zeros(2)})
    save_snapshot(writer, 2, build_state(2))
    save_snapshot(writer, 3, build_state(3))
    found, _ = unpack_slot(read_slot(build_snapshots(tmp_path), StateVersion(3, 1)), None)
    assert_same(found, build_state(3))


def test_a_model_that_has_grown_since_the_round_began_is_another_model(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    save_snapshot(writer, 5, build_state(5))
    save_snapshot(writer, 10, {"model": torch.zeros(2)}, MODEL + 1)
    assert list_versions(build_snapshots(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_a_flipped_bit_is_found_and_the_other_slot_remains(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    for step in (5, 10):
        save_snapshot(writer, step, build_state(step))
    path = tmp_path / "replica.1"
    good = path.read_bytes()
    for place in (24, 32, 40, 48, 64, 4096, 4096 + 2 * RANK_STATE_BYTES, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        reader = build_snapshots(tmp_path)
        assert reader.read(StateVersion(10, 1)) is None
        assert list_versions(reader) == [StateVersion(5, 1), NO_STATE_VERSION]
        assert_same(unpack_slot(read_slot(reader, StateVersion(5, 1)), None)[0], build_state(5))


def test_a_torn_slot_is_invalid_for_every_rank_and_a_peers_copy_of_it_counts(tmp_path: Path) -> None:
    """The other ranks of its worker would request it repeatedly otherwise."""
    writer = build_snapshots(tmp_path)
    for step in (5, 10):
        save_snapshot(writer, step, build_state(step))
    path = tmp_path / "replica.1"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    reader, other = build_snapshots(tmp_path), build_snapshots(tmp_path)
    assert reader.read(StateVersion(10, 1)) is None
    assert list_versions(reader) == list_versions(other) == [StateVersion(5, 1), NO_STATE_VERSION]
    fill_slot(reader.allocate_slot(len(good)), good)
    for each in (reader, other):
        assert_same(unpack_slot(read_slot(each, StateVersion(10, 1)), None)[0], build_state(10))
        assert_same(unpack_slot(read_slot(each, StateVersion(5, 1)), None)[0], build_state(5))


def test_parts_that_have_changed_places_are_found(tmp_path: Path) -> None:
    writer, mib = build_snapshots(tmp_path), 1 << 20
    save_snapshot(writer, 5, {"weight": torch.arange(3 * mib // 4, dtype=torch.int32)})
    path = tmp_path / "replica.0"
    good = path.read_bytes()
    path.write_bytes(good[:4096] + good[4096 + mib : 4096 + 2 * mib] + good[4096 : 4096 + mib] + good[4096 + 2 * mib :])
    assert build_snapshots(tmp_path).read(StateVersion(5, 1)) is None


def test_a_state_that_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    save_snapshot(build_snapshots(tmp_path), 5, build_state(5))
    found, _ = unpack_slot(read_slot(build_snapshots(tmp_path), StateVersion(5, 1)), None)
    content = (tmp_path / "replica.0").stat().st_size
    with (tmp_path / "replica.0").open("r+b") as file:
        file.write(bytes(content))
    assert_same(found, build_state(5))


def test_the_slot_that_a_round_loaded_is_not_the_first_that_it_writes(tmp_path: Path) -> None:
    for restored, remaining in ((5, 0), (10, 1)):
        writer = build_snapshots(tmp_path)
        for step in (5, 10):
            save_snapshot(writer, step, build_state(step))
        later = build_snapshots(tmp_path, round_=2)
        read_slot(later, StateVersion(restored, 1))
        later.write(15, build_state(15), MODEL)  # killed before the rank states came
        assert list_versions(build_snapshots(tmp_path))[remaining] == StateVersion(restored, 1)


def test_a_slot_takes_no_memory_beyond_the_control_groups_limit(tmp_path: Path) -> None:
    left = 65 << 20
    snapshots = build_snapshots(tmp_path, left=lambda: left)
    save_snapshot(snapshots, 5, build_state(5))
    with pytest.raises(OSError, match=r"a slot needs 2 MiB, but the control group has 65 MiB left"):
        snapshots.write(10, {"weight": torch.zeros(2 << 20, dtype=torch.uint8)}, MODEL)
    assert list_versions(build_snapshots(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_ranks_that_allocate_at_the_same_moment_do_not_take_the_same_memory(tmp_path: Path) -> None:
    """Otherwise each of them would find space for its slot, before the other has taken its own."""
    total = 96 << 20

    def compute_left() -> float:
        return total - sum(512 * path.stat().st_blocks for path in tmp_path.iterdir())

    def build_shard(rank: int) -> Snapshots:
        name = f"shard-{rank}-of-2"
        return Snapshots(tmp_path, name, round_=1, world_size=2, fingerprint=MODEL, memory=SlotMemory(compute_left))

    first, second = build_shard(0), build_shard(1)

    def allocate_first(file: int, offset: int, nbytes: int) -> None:
        monkeypatch.undo()
        with pytest.raises(OSError, match=r"a slot needs 20 MiB, but the control group has 75 MiB left"):
            second.write(5, {"weight": torch.zeros(20 << 20, dtype=torch.uint8)}, MODEL)
        os.posix_fallocate(file, offset, nbytes)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("os.posix_fallocate", allocate_first)
    save_snapshot(first, 5, {"weight": torch.zeros(20 << 20, dtype=torch.uint8)})
    assert list_versions(first) == [StateVersion(5, 1), NO_STATE_VERSION]
    assert list_versions(second) == [NO_STATE_VERSION, NO_STATE_VERSION]


def test_a_rank_waits_for_its_turn_to_allocate_and_not_indefinitely(tmp_path: Path) -> None:
    turn = tmp_path / "turn"
    with hold_file_lock(turn), pytest.raises(TimeoutError, match="was taken for"), hold_file_lock(turn, timeout=0.0):
        pass
    with hold_file_lock(turn, timeout=0.0):
        pass


def test_a_freed_slot_leaves_the_other_and_is_written_next(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    for step in (5, 10):
        save_snapshot(writer, step, build_state(step))
    assert writer.write(15, build_state(15), MODEL) is CopyOutcome.COPIED, "the slot was there"
    writer.release_slot()
    assert [path.name for path in tmp_path.glob("replica.*")] == ["replica.1"]
    assert list_versions(build_snapshots(tmp_path)) == [NO_STATE_VERSION, StateVersion(10, 1)]
    assert writer.write(20, build_state(20), MODEL) is CopyOutcome.ALLOCATED_AND_COPIED
    writer.publish(build_rank_states(20))
    assert list_versions(build_snapshots(tmp_path)) == [StateVersion(20, 1), StateVersion(10, 1)]


def test_a_peers_replica_replaces_the_oldest(tmp_path: Path) -> None:
    holder, lacking = tmp_path / "holder", tmp_path / "lacking"
    for folder in (holder, lacking):
        folder.mkdir()
    writer, older = build_snapshots(holder), build_snapshots(lacking)
    for step in (5, 10):
        save_snapshot(older, step, build_state(step))
    save_snapshot(writer, 15, build_state(15))
    content = read_slot(writer, StateVersion(15, 1))
    receiver = build_snapshots(lacking, round_=2)
    fill_slot(receiver.allocate_slot(len(content)), bytes(content.numpy()))
    assert list_versions(receiver) == [StateVersion(15, 1), StateVersion(10, 1)]
    assert_same(unpack_slot(read_slot(receiver, StateVersion(15, 1)), None)[0], build_state(15))


def test_a_worker_with_memory_for_one_slot_replaces_its_own_by_a_peers_replica(tmp_path: Path) -> None:
    holder, lacking = tmp_path / "holder", tmp_path / "lacking"
    for folder in (holder, lacking):
        folder.mkdir()
    total = 100 << 20

    def compute_left() -> float:
        return total - sum(512 * path.stat().st_blocks for path in lacking.iterdir())

    def build_large_state(step: int) -> dict[str, Any]:
        return {"weight": torch.full((20 << 20,), step, dtype=torch.uint8)}

    writer = build_snapshots(holder)
    save_snapshot(writer, 15, build_large_state(15))
    content = read_slot(writer, StateVersion(15, 1))
    save_snapshot(build_snapshots(lacking, left=compute_left), 10, build_large_state(10))
    receiver = build_snapshots(lacking, round_=2, left=compute_left)
    with pytest.raises(OSError, match="a slot needs 20 MiB"):
        receiver.allocate_slot(len(content))
    assert set(list_versions(receiver)) == {StateVersion(10, 1), NO_STATE_VERSION}
    fill_slot(receiver.allocate_slot(len(content), may_replace=True), bytes(content.numpy()))
    assert set(list_versions(receiver)) == {StateVersion(15, 1), NO_STATE_VERSION}
    with pytest.raises(OSError, match="a slot needs 40 MiB"):
        receiver.allocate_slot(2 * len(content), may_replace=True)
    assert set(list_versions(receiver)) == {StateVersion(15, 1), NO_STATE_VERSION}, "it is not given up for nothing"


def test_snapshots_ahead_of_a_round_that_went_back_are_replaced_first(tmp_path: Path) -> None:
    """Its steps are higher: by them, each new copy would replace the one before, the only one of use."""
    before = build_snapshots(tmp_path)
    for step in (90, 100):
        save_snapshot(before, step, build_state(step))
    after, snapshots = build_snapshots(tmp_path / "home", round_=2), build_snapshots(tmp_path, round_=2)
    (tmp_path / "home").mkdir()
    held = []
    for step in (52, 54, 56):
        save_snapshot(after, step, build_state(step))
        content = read_slot(after, StateVersion(step, 2))
        fill_slot(snapshots.allocate_peer_slot(len(content)), bytes(content.numpy()))
        held.append(sorted(list_versions(snapshots)))
    assert held == [
        [StateVersion(52, 2), StateVersion(100, 1)],
        [StateVersion(52, 2), StateVersion(54, 2)],
        [StateVersion(54, 2), StateVersion(56, 2)],
    ]


def test_a_peer_slot_is_overwritten_in_its_memory_and_is_void_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation of new memory would take as long as a copy takes to fill it."""
    writer = build_snapshots(tmp_path)
    for step in (5, 10):
        save_snapshot(writer, step, build_state(step))
    nbytes = (tmp_path / "replica.0").stat().st_size
    snapshots = build_snapshots(tmp_path, round_=2, left=lambda: 0)
    with monkeypatch.context() as without:
        without.setattr("os.posix_fallocate", None)
        snapshots.allocate_peer_slot(nbytes)
    assert (tmp_path / "replica.0").stat().st_size == nbytes
    assert list_versions(snapshots) == [NO_STATE_VERSION, StateVersion(10, 1)]
    with pytest.raises(OSError, match="a slot needs"):
        snapshots.allocate_peer_slot(nbytes + 8)


def test_a_peer_slot_leaves_the_memory_that_the_worker_needs_itself(tmp_path: Path) -> None:
    snapshots = build_snapshots(tmp_path, left=lambda: 100 << 20)
    with pytest.raises(
        OSError, match=r"a slot needs 16 MiB, .* 100 MiB left, of which 16 MiB and a tenth are reserved"
    ):
        snapshots.allocate_peer_slot(16 << 20, reserved=16 << 20)
    with pytest.raises(OSError, match="a slot needs 32 MiB"):  # with the reserve, more than nine tenths
        snapshots.allocate_peer_slot(32 << 20)
    snapshots.allocate_peer_slot(16 << 20, reserved=8 << 20)
    assert (tmp_path / "replica.0").stat().st_size == 16 << 20


def test_the_memory_that_is_still_to_be_allocated_is_known(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    assert writer.unallocated_slots == 2
    save_snapshot(writer, 5, build_state(5))
    assert writer.unallocated_slots == 1
    save_snapshot(writer, 10, build_state(10))
    assert writer.unallocated_slots == 0
    assert build_snapshots(tmp_path, round_=2).unallocated_slots == 0, "it gets the memory of what is there"


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "another one"])
def test_a_replaced_peer_slot_writes_nothing(replaced: bool, tmp_path: Path) -> None:
    slot = build_snapshots(tmp_path).allocate_peer_slot(1 << 20)
    path = tmp_path / "replica.0"
    path.rename(tmp_path / "gone")
    if replaced:
        path.write_bytes(bytes(1 << 20))
    with pytest.raises(FileNotFoundError):
        slot.add(memoryview(b"\1" * 4096))
    assert not replaced or path.read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize("again", [False, True], ids=["new memory", "memory that is there"])
def test_a_process_that_is_forked_during_a_delivery_does_not_hold_a_peer_slots_memory(
    again: bool, tmp_path: Path
) -> None:
    snapshots = build_snapshots(tmp_path)
    if again:
        snapshots.allocate_peer_slot(1 << 20)
    slot = snapshots.allocate_peer_slot(1 << 20)
    slot.add(memoryview(bytes(4096)))
    assert check_in_fork(lambda: "replica.0" not in list_files_in_use())
    slot.add(memoryview(bytes(4096)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slot_that_no_longer_fits_is_removed_before_another_is_created(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "asynchronous", asynchronous)
    writer = build_snapshots(tmp_path)
    held: list[int] = []
    before = os.posix_fallocate

    def allocate_and_count(file: int, offset: int, nbytes: int) -> None:
        held.append(list_files_in_use().count("replica.0 (deleted)"))
        before(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate_and_count)
    for nbytes in (1 << 20, 2 << 20):
        weight = torch.zeros(nbytes, dtype=torch.uint8)
        assert writer.write(5, {"weight": weight}, MODEL, wait=True) is CopyOutcome.ALLOCATED_AND_COPIED
    assert held == [0, 0]


def test_pages_are_allocated_in_another_thread_and_pinned_by_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned in another thread, they would break a graph capture, and belong to another GPU."""
    seen: list[tuple[str, bool]] = []

    def record_thread(what: str) -> None:
        seen.append((what, threading.current_thread() is threading.main_thread()))

    def pin_and_record(_copies: HostCopies, _memory: torch.Tensor) -> Callable[[], None]:
        record_thread("pinned")
        return lambda: None

    monkeypatch.setattr(HostCopies, "asynchronous", True)
    monkeypatch.setattr(HostCopies, "pin", pin_and_record)
    monkeypatch.setattr(snapshot_slots, "map_pages", lambda _: record_thread("touched"))
    assert (
        build_snapshots(tmp_path).write(5, {"weight": torch.zeros(10)}, MODEL, wait=True)
        is CopyOutcome.ALLOCATED_AND_COPIED
    )
    assert seen == [("touched", False), ("pinned", True)]


def test_a_slot_that_was_begun_for_a_smaller_state_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "asynchronous", True)
    writer, go = build_snapshots(tmp_path), threading.Event()
    before = os.posix_fallocate

    def wait_and_allocate(*arguments: int) -> None:
        assert go.wait(120.0)
        before(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", wait_and_allocate)
    assert writer.write(5, {"weight": torch.zeros(10)}, MODEL) is CopyOutcome.DEFERRED
    go.set()
    assert writer.write(6, {"weight": torch.ones(20)}, MODEL, wait=True) is CopyOutcome.ALLOCATED_AND_COPIED
    writer.publish(torch.zeros(2 * RANK_STATE_BYTES, dtype=torch.uint8))
    slot = writer.read(StateVersion(6, 1))
    assert slot is not None
    state, _ = unpack_slot(slot, None)
    assert state["weight"].tolist() == [1.0] * 20


def list_files_in_use() -> str:
    """Return the names of the files that this process has open or mapped."""
    handles = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the list itself
            handles.append(str(Path("/proc/self/fd", handle).readlink()))
    return "\n".join([*handles, Path("/proc/self/maps").read_text()])


def test_a_process_that_is_forked_while_it_holds_the_lock_does_not_hold_it(tmp_path: Path) -> None:
    turn, over = tmp_path / "turn", os.pipe()
    with hold_file_lock(turn):
        child = os.fork()
        if child == 0:
            os.close(over[1])
            os.read(over[0], 1)  # until the test is over
            os._exit(0)
    try:
        with hold_file_lock(turn, timeout=0.0):
            pass
    finally:
        for end in over:
            os.close(end)
        os.waitpid(child, 0)


def check_in_fork(holds: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if holds() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_is_freed_for_a_ranks_own_slot(tmp_path: Path) -> None:
    left = [64 << 20]

    def make_room() -> bool:
        left.append(left.pop() + (1 << 20))
        return True

    snapshots = Snapshots(
        tmp_path,
        "replica",
        round_=1,
        world_size=2,
        fingerprint=MODEL,
        memory=SlotMemory(lambda: left[0], make_room),
    )
    assert save_snapshot(snapshots, 5, build_state(5)) == 5
    assert left == [65 << 20], "once"
    with pytest.raises(OSError, match="a slot needs 3 MiB"):
        snapshots.write(10, {"weight": torch.zeros(3 << 20, dtype=torch.uint8)}, MODEL)


def test_a_loader_that_copies_receives_the_slots_own_memory(tmp_path: Path) -> None:
    """A loader that stores what it receives would hold the whole slot in memory."""
    writer = build_snapshots(tmp_path)
    save_snapshot(writer, 5, build_state(5))
    slot = read_slot(writer, StateVersion(5, 1))
    found, _ = unpack_slot(slot, None, copying_objects={"model"})
    begin, end = slot.data_ptr(), slot.data_ptr() + len(slot)
    assert begin < found["model"]["weight"].data_ptr() < end
    assert not begin < found["optimizer"]["state"][0]["step"].data_ptr() < end
    assert not begin < found["half"].data_ptr() < end
    assert_same(found, build_state(5))


def test_bytes_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = build_snapshots(tmp_path)
    save_snapshot(writer, 5, build_state(5))
    checked: list[torch.Tensor] = []
    monkeypatch.setattr("pacekeeper.checkpointing.snapshots.snapshot_slots.check_slot", checked.append)
    unpack_slot(read_slot(writer, StateVersion(5, 1)), None)
    assert len(checked) == 1


def test_the_snapshot_of_another_model_and_a_torn_file_are_ignored(tmp_path: Path) -> None:
    save_snapshot(build_snapshots(tmp_path), 5, build_state(5))
    (tmp_path / "replica.1").write_bytes(b"torn")
    assert list_versions(build_snapshots(tmp_path, fingerprint=8)) == [NO_STATE_VERSION, NO_STATE_VERSION]
    assert list_versions(build_snapshots(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_insufficient_memory_is_an_error_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", raise_no_space)
    with pytest.raises(OSError, match="No space"):
        build_snapshots(tmp_path).write(5, build_state(5), MODEL)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_an_invalid_slot_from_a_peer_is_an_input_error_and_runs_nothing(tmp_path: Path) -> None:
    writer = build_snapshots(tmp_path)
    save_snapshot(writer, 5, build_state(5))
    good = read_slot(writer, StateVersion(5, 1))
    content = good.numpy().tobytes()
    start = content.index(b"[{")
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    for hostile in (
        b"",
        content[:100],
        content[:-300],
        bomb,
        content[:start] + bomb + content[start + len(bomb) :],
        content[:start] + b"[" * 500 + content[start + 500 :],
    ):
        with pytest.raises(InputError):
            unpack_slot(torch.frombuffer(bytearray(hostile) or bytearray(1), dtype=torch.uint8), None)
    assert not (tmp_path / "exploded").exists()
    assert_same(unpack_slot(good, None)[0], build_state(5))


def test_an_unsupported_value_of_the_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^sched\.0\.when: a pathlib.* cannot be saved"):
        build_snapshots(tmp_path).write(5, {"sched": [{"when": tmp_path}]}, MODEL)


def test_rank_states_restore_all_generators() -> None:
    import random

    import numpy as np

    packed = capture_rank_state(samples=123)
    assert len(packed) == RANK_STATE_BYTES

    def draw_numbers() -> tuple[float, float, list[float], float]:
        return random.gauss(0, 1), float(np.random.randn()), torch.rand(3).tolist(), random.random()

    first = draw_numbers()
    assert restore_rank_state(packed) == 123
    assert draw_numbers() == first
