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


def make(
    folder: Path, round_: int = 1, fingerprint: int = MODEL, left: Callable[[], float] = lambda: math.inf
) -> Snapshots:
    return Snapshots(folder, "replica", round_=round_, world_size=2, fingerprint=fingerprint, memory=SlotMemory(left))


def keep(snapshots: Snapshots, step: int, state: dict[str, Any], fingerprint: int = MODEL) -> int:
    snapshots.write(step, state, fingerprint)
    return snapshots.publish(rank_states(step))


def versions(snapshots: Snapshots) -> list[StateVersion]:
    return [version for version, _ in snapshots.list_versions()]


def read(snapshots: Snapshots, version: StateVersion) -> torch.Tensor:
    slot = snapshots.read(version)
    assert slot is not None
    return slot


def fill(slot: PeerSlot, content: bytes) -> None:
    """`content`: of a whole slot."""
    slot.add(memoryview(content)[SLOT_HEADER_BYTES:])
    slot.finish(bytearray(content[:SLOT_HEADER_BYTES]))


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 5), float(step)), "count": torch.tensor(step), "empty": torch.empty(0, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1 * step}]},
        "half": torch.full((7,), step, dtype=torch.bfloat16),
    }


def rank_states(step: int) -> torch.Tensor:
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
    writer = make(tmp_path)
    for step in (5, 10, 15):
        assert keep(writer, step, state(step)) == step
    reader = make(tmp_path, round_=2)
    assert sorted(versions(reader)) == [StateVersion(10, 1), StateVersion(15, 1)]
    for step in (10, 15):
        found, ranks = unpack_slot(read(reader, StateVersion(step, 1)), None)
        assert_same(found, state(step))
        assert ranks == [bytes([step]) * RANK_STATE_BYTES] * 2


def test_a_half_written_snapshot_is_void_and_the_one_before_remains(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for step in (5, 10):
        keep(writer, step, state(step))
    writer.write(15, state(15), MODEL)  # killed before the rank states came
    assert sorted(versions(make(tmp_path))) == [NO_STATE_VERSION, StateVersion(10, 1)]


def test_a_state_that_grows_gets_new_slots(tmp_path: Path) -> None:
    writer = make(tmp_path)
    keep(writer, 1, {"model": torch.zeros(2)})
    keep(writer, 2, state(2))
    keep(writer, 3, state(3))
    found, _ = unpack_slot(read(make(tmp_path), StateVersion(3, 1)), None)
    assert_same(found, state(3))


def test_a_model_that_has_grown_since_the_round_began_is_another_model(tmp_path: Path) -> None:
    writer = make(tmp_path)
    keep(writer, 5, state(5))
    keep(writer, 10, {"model": torch.zeros(2)}, MODEL + 1)
    assert versions(make(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_a_bit_that_flips_anywhere_is_found_and_the_other_slot_remains(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for step in (5, 10):
        keep(writer, step, state(step))
    path = tmp_path / "replica.1"
    good = path.read_bytes()
    for place in (24, 32, 40, 48, 64, 4096, 4096 + 2 * RANK_STATE_BYTES, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        reader = make(tmp_path)
        assert reader.read(StateVersion(10, 1)) is None
        assert versions(reader) == [StateVersion(5, 1), NO_STATE_VERSION]
        assert_same(unpack_slot(read(reader, StateVersion(5, 1)), None)[0], state(5))


def test_a_torn_slot_is_none_for_whoever_looks_and_a_peers_copy_of_it_counts(tmp_path: Path) -> None:
    """The other ranks of its worker, too, which would have it again and again otherwise."""
    writer = make(tmp_path)
    for step in (5, 10):
        keep(writer, step, state(step))
    path = tmp_path / "replica.1"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    reader, other = make(tmp_path), make(tmp_path)
    assert reader.read(StateVersion(10, 1)) is None
    assert versions(reader) == versions(other) == [StateVersion(5, 1), NO_STATE_VERSION]
    fill(reader.allocate_slot(len(good)), good)
    for each in (reader, other):
        assert_same(unpack_slot(read(each, StateVersion(10, 1)), None)[0], state(10))
        assert_same(unpack_slot(read(each, StateVersion(5, 1)), None)[0], state(5))


def test_parts_that_have_changed_places_are_found(tmp_path: Path) -> None:
    writer, mib = make(tmp_path), 1 << 20
    keep(writer, 5, {"weight": torch.arange(3 * mib // 4, dtype=torch.int32)})
    path = tmp_path / "replica.0"
    good = path.read_bytes()
    path.write_bytes(good[:4096] + good[4096 + mib : 4096 + 2 * mib] + good[4096 : 4096 + mib] + good[4096 + 2 * mib :])
    assert make(tmp_path).read(StateVersion(5, 1)) is None


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    keep(make(tmp_path), 5, state(5))
    found, _ = unpack_slot(read(make(tmp_path), StateVersion(5, 1)), None)
    content = (tmp_path / "replica.0").stat().st_size
    with (tmp_path / "replica.0").open("r+b") as file:
        file.write(bytes(content))
    assert_same(found, state(5))


def test_the_slot_that_a_round_comes_from_is_not_the_first_that_it_writes(tmp_path: Path) -> None:
    for restored, remaining in ((5, 0), (10, 1)):
        writer = make(tmp_path)
        for step in (5, 10):
            keep(writer, step, state(step))
        later = make(tmp_path, round_=2)
        read(later, StateVersion(restored, 1))
        later.write(15, state(15), MODEL)  # killed before the rank states came
        assert versions(make(tmp_path))[remaining] == StateVersion(restored, 1)


def test_a_slot_takes_no_memory_that_the_control_group_has_not(tmp_path: Path) -> None:
    left = 65 << 20
    snapshots = make(tmp_path, left=lambda: left)
    keep(snapshots, 5, state(5))
    with pytest.raises(OSError, match=r"a slot needs 2 MiB, but the control group has 65 MiB left"):
        snapshots.write(10, {"weight": torch.zeros(2 << 20, dtype=torch.uint8)}, MODEL)
    assert versions(make(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_ranks_that_take_memory_at_the_same_moment_do_not_take_the_same_memory(tmp_path: Path) -> None:
    """Each of them would have found room for its slot, before the other has taken its own."""
    total = 96 << 20

    def left() -> float:
        return total - sum(512 * path.stat().st_blocks for path in tmp_path.iterdir())

    def shard(rank: int) -> Snapshots:
        name = f"shard-{rank}-of-2"
        return Snapshots(tmp_path, name, round_=1, world_size=2, fingerprint=MODEL, memory=SlotMemory(left))

    first, second = shard(0), shard(1)

    def allocate(file: int, offset: int, nbytes: int) -> None:
        monkeypatch.undo()
        with pytest.raises(OSError, match=r"a slot needs 20 MiB, but the control group has 75 MiB left"):
            second.write(5, {"weight": torch.zeros(20 << 20, dtype=torch.uint8)}, MODEL)
        os.posix_fallocate(file, offset, nbytes)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("os.posix_fallocate", allocate)
    keep(first, 5, {"weight": torch.zeros(20 << 20, dtype=torch.uint8)})
    assert versions(first) == [StateVersion(5, 1), NO_STATE_VERSION]
    assert versions(second) == [NO_STATE_VERSION, NO_STATE_VERSION]


def test_who_looks_for_memory_waits_for_its_turn_and_not_for_ever(tmp_path: Path) -> None:
    turn = tmp_path / "turn"
    with hold_file_lock(turn), pytest.raises(TimeoutError, match="was taken for"), hold_file_lock(turn, timeout=0.0):
        pass
    with hold_file_lock(turn, timeout=0.0):
        pass


def test_what_is_given_up_leaves_the_other_slot_and_its_place_is_written_next(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for step in (5, 10):
        keep(writer, step, state(step))
    assert writer.write(15, state(15), MODEL) is CopyOutcome.COPIED, "the slot was there"
    writer.release_slot()
    assert [path.name for path in tmp_path.glob("replica.*")] == ["replica.1"]
    assert versions(make(tmp_path)) == [NO_STATE_VERSION, StateVersion(10, 1)]
    assert writer.write(20, state(20), MODEL) is CopyOutcome.ALLOCATED_AND_COPIED
    writer.publish(rank_states(20))
    assert versions(make(tmp_path)) == [StateVersion(20, 1), StateVersion(10, 1)]


def test_a_peers_replica_takes_the_place_of_the_oldest(tmp_path: Path) -> None:
    holder, lacking = tmp_path / "holder", tmp_path / "lacking"
    for folder in (holder, lacking):
        folder.mkdir()
    writer, older = make(holder), make(lacking)
    for step in (5, 10):
        keep(older, step, state(step))
    keep(writer, 15, state(15))
    content = read(writer, StateVersion(15, 1))
    receiver = make(lacking, round_=2)
    fill(receiver.allocate_slot(len(content)), bytes(content.numpy()))
    assert versions(receiver) == [StateVersion(15, 1), StateVersion(10, 1)]
    assert_same(unpack_slot(read(receiver, StateVersion(15, 1)), None)[0], state(15))


def test_a_worker_with_room_for_one_slot_gets_a_peers_replica_in_the_place_of_what_it_has(tmp_path: Path) -> None:
    holder, lacking = tmp_path / "holder", tmp_path / "lacking"
    for folder in (holder, lacking):
        folder.mkdir()
    total = 100 << 20

    def left() -> float:
        return total - sum(512 * path.stat().st_blocks for path in lacking.iterdir())

    def large(step: int) -> dict[str, Any]:
        return {"weight": torch.full((20 << 20,), step, dtype=torch.uint8)}

    writer = make(holder)
    keep(writer, 15, large(15))
    content = read(writer, StateVersion(15, 1))
    keep(make(lacking, left=left), 10, large(10))
    receiver = make(lacking, round_=2, left=left)
    with pytest.raises(OSError, match="a slot needs 20 MiB"):
        receiver.allocate_slot(len(content))
    assert set(versions(receiver)) == {StateVersion(10, 1), NO_STATE_VERSION}
    fill(receiver.allocate_slot(len(content), may_replace=True), bytes(content.numpy()))
    assert set(versions(receiver)) == {StateVersion(15, 1), NO_STATE_VERSION}
    with pytest.raises(OSError, match="a slot needs 40 MiB"):
        receiver.allocate_slot(2 * len(content), may_replace=True)
    assert set(versions(receiver)) == {StateVersion(15, 1), NO_STATE_VERSION}, "it is not given up for nothing"


def test_what_a_round_that_went_back_leaves_ahead_of_it_is_the_first_to_go(tmp_path: Path) -> None:
    """Its steps are higher: by them, each new copy would take the place of the one before, the only one of use."""
    before = make(tmp_path)
    for step in (90, 100):
        keep(before, step, state(step))
    after, shelf = make(tmp_path / "home", round_=2), make(tmp_path, round_=2)
    (tmp_path / "home").mkdir()
    held = []
    for step in (52, 54, 56):
        keep(after, step, state(step))
        content = read(after, StateVersion(step, 2))
        fill(shelf.allocate_peer_slot(len(content)), bytes(content.numpy()))
        held.append(sorted(versions(shelf)))
    assert held == [
        [StateVersion(52, 2), StateVersion(100, 1)],
        [StateVersion(52, 2), StateVersion(54, 2)],
        [StateVersion(54, 2), StateVersion(56, 2)],
    ]


def test_a_guests_slot_is_written_over_in_its_memory_and_is_void_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory would take as long to have as it takes to fill, for each copy."""
    writer = make(tmp_path)
    for step in (5, 10):
        keep(writer, step, state(step))
    nbytes = (tmp_path / "replica.0").stat().st_size
    shelf = make(tmp_path, round_=2, left=lambda: 0)
    with monkeypatch.context() as without:
        without.setattr("os.posix_fallocate", None)
        shelf.allocate_peer_slot(nbytes)
    assert (tmp_path / "replica.0").stat().st_size == nbytes
    assert versions(shelf) == [NO_STATE_VERSION, StateVersion(10, 1)]
    with pytest.raises(OSError, match="a slot needs"):
        shelf.allocate_peer_slot(nbytes + 8)


def test_a_guest_leaves_what_the_worker_needs_itself(tmp_path: Path) -> None:
    shelf = make(tmp_path, left=lambda: 100 << 20)
    with pytest.raises(
        OSError, match=r"a slot needs 16 MiB, .* 100 MiB left, of which 16 MiB and a tenth are reserved"
    ):
        shelf.allocate_peer_slot(16 << 20, reserved=16 << 20)
    with pytest.raises(OSError, match="a slot needs 32 MiB"):  # with the reserve, more than nine tenths
        shelf.allocate_peer_slot(32 << 20)
    shelf.allocate_peer_slot(16 << 20, reserved=8 << 20)
    assert (tmp_path / "replica.0").stat().st_size == 16 << 20


def test_what_is_yet_to_take_memory_is_known(tmp_path: Path) -> None:
    writer = make(tmp_path)
    assert writer.unallocated_slots == 2
    keep(writer, 5, state(5))
    assert writer.unallocated_slots == 1
    keep(writer, 10, state(10))
    assert writer.unallocated_slots == 0
    assert make(tmp_path, round_=2).unallocated_slots == 0, "it gets the memory of what is there"


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "another one"])
def test_a_guest_that_has_given_way_writes_nothing(replaced: bool, tmp_path: Path) -> None:
    slot = make(tmp_path).allocate_peer_slot(1 << 20)
    path = tmp_path / "replica.0"
    path.rename(tmp_path / "gone")
    if replaced:
        path.write_bytes(bytes(1 << 20))
    with pytest.raises(FileNotFoundError):
        slot.add(memoryview(b"\1" * 4096))
    assert not replaced or path.read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize("again", [False, True], ids=["new memory", "memory that is there"])
def test_a_process_that_is_forked_in_mid_delivery_does_not_keep_a_guests_memory(again: bool, tmp_path: Path) -> None:
    shelf = make(tmp_path)
    if again:
        shelf.allocate_peer_slot(1 << 20)
    slot = shelf.allocate_peer_slot(1 << 20)
    slot.add(memoryview(bytes(4096)))
    assert in_a_fork(lambda: "replica.0" not in in_use())
    slot.add(memoryview(bytes(4096)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slot_that_does_not_fit_any_more_is_gone_before_another_is_made(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "asynchronous", asynchronous)
    writer = make(tmp_path)
    held: list[int] = []
    before = os.posix_fallocate

    def allocate(file: int, offset: int, nbytes: int) -> None:
        held.append(in_use().count("replica.0 (deleted)"))
        before(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    for nbytes in (1 << 20, 2 << 20):
        weight = torch.zeros(nbytes, dtype=torch.uint8)
        assert writer.write(5, {"weight": weight}, MODEL, wait=True) is CopyOutcome.ALLOCATED_AND_COPIED
    assert held == [0, 0]


def test_pages_come_beside_the_training_and_are_pinned_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned in another thread, they would break a graph that is captured meanwhile, and be another GPU's."""
    seen: list[tuple[str, bool]] = []

    def here(what: str) -> None:
        seen.append((what, threading.current_thread() is threading.main_thread()))

    def pin(_copies: HostCopies, _memory: torch.Tensor) -> Callable[[], None]:
        here("pinned")
        return lambda: None

    monkeypatch.setattr(HostCopies, "asynchronous", True)
    monkeypatch.setattr(HostCopies, "pin", pin)
    monkeypatch.setattr(snapshot_slots, "map_pages", lambda _: here("touched"))
    assert make(tmp_path).write(5, {"weight": torch.zeros(10)}, MODEL, wait=True) is CopyOutcome.ALLOCATED_AND_COPIED
    assert seen == [("touched", False), ("pinned", True)]


def test_a_slot_that_was_begun_for_a_smaller_state_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "asynchronous", True)
    writer, go = make(tmp_path), threading.Event()
    before = os.posix_fallocate

    def allocate(*arguments: int) -> None:
        assert go.wait(10.0)
        before(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert writer.write(5, {"weight": torch.zeros(10)}, MODEL) is CopyOutcome.DEFERRED
    go.set()
    assert writer.write(6, {"weight": torch.ones(20)}, MODEL, wait=True) is CopyOutcome.ALLOCATED_AND_COPIED
    writer.publish(torch.zeros(2 * RANK_STATE_BYTES, dtype=torch.uint8))
    slot = writer.read(StateVersion(6, 1))
    assert slot is not None
    state, _ = unpack_slot(slot, None)
    assert state["weight"].tolist() == [1.0] * 20


def in_use() -> str:
    """Names of the files that this process has open or mapped."""
    handles = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the list itself
            handles.append(str(Path("/proc/self/fd", handle).readlink()))
    return "\n".join([*handles, Path("/proc/self/maps").read_text()])


def test_a_process_that_is_forked_in_a_turn_does_not_keep_it(tmp_path: Path) -> None:
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


def in_a_fork(holds: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if holds() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_slot_of_ones_own_comes_before_what_gives_way(tmp_path: Path) -> None:
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
    assert keep(snapshots, 5, state(5)) == 5
    assert left == [65 << 20], "once"
    with pytest.raises(OSError, match="a slot needs 3 MiB"):
        snapshots.write(10, {"weight": torch.zeros(3 << 20, dtype=torch.uint8)}, MODEL)


def test_what_copies_what_it_loads_is_given_the_slots_own_memory(tmp_path: Path) -> None:
    """Whoever keeps what it is given would keep the whole slot in memory with it."""
    writer = make(tmp_path)
    keep(writer, 5, state(5))
    slot = read(writer, StateVersion(5, 1))
    found, _ = unpack_slot(slot, None, copying_objects={"model"})
    begin, end = slot.data_ptr(), slot.data_ptr() + len(slot)
    assert begin < found["model"]["weight"].data_ptr() < end
    assert not begin < found["optimizer"]["state"][0]["step"].data_ptr() < end
    assert not begin < found["half"].data_ptr() < end
    assert_same(found, state(5))


def test_bytes_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make(tmp_path)
    keep(writer, 5, state(5))
    checked: list[torch.Tensor] = []
    monkeypatch.setattr("pacekeeper.checkpointing.snapshots.snapshot_slots.check_slot", checked.append)
    unpack_slot(read(writer, StateVersion(5, 1)), None)
    assert len(checked) == 1


def test_the_snapshot_of_another_model_and_a_torn_file_count_as_nothing(tmp_path: Path) -> None:
    keep(make(tmp_path), 5, state(5))
    (tmp_path / "replica.1").write_bytes(b"torn")
    assert versions(make(tmp_path, fingerprint=8)) == [NO_STATE_VERSION, NO_STATE_VERSION]
    assert versions(make(tmp_path)) == [StateVersion(5, 1), NO_STATE_VERSION]


def test_memory_that_does_not_suffice_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        make(tmp_path).write(5, state(5), MODEL)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_slot_from_a_peer_that_is_none_is_an_input_error_and_runs_nothing(tmp_path: Path) -> None:
    writer = make(tmp_path)
    keep(writer, 5, state(5))
    good = read(writer, StateVersion(5, 1))
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
    assert_same(unpack_slot(good, None)[0], state(5))


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^sched\.0\.when: a pathlib.* cannot be saved"):
        make(tmp_path).write(5, {"sched": [{"when": tmp_path}]}, MODEL)


def test_rank_states_bring_all_generators_back() -> None:
    import random

    import numpy as np

    packed = capture_rank_state(samples=123)
    assert len(packed) == RANK_STATE_BYTES

    def drawn() -> tuple[float, float, list[float], float]:
        return random.gauss(0, 1), float(np.random.randn()), torch.rand(3).tolist(), random.random()

    first = drawn()
    assert restore_rank_state(packed) == 123
    assert drawn() == first
