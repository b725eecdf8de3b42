"""The ring of records: what is written is read, whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.observe.ring_reader import RingReader
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.records import RING_STATE
from pacekeeper_rank.record_ring import DEFAULT_RING_CAPACITY, NO_PLACE, RingWriter, create_ring
from pacekeeper_rank.records import (
    MAX_ENTERED_GROUPS,
    RING_HEADER_BYTES,
    RING_MAGIC,
    Collective,
    Device,
    Phase,
    RecordKind,
    compute_ring_bytes,
)

pytestmark = pytest.mark.usefixtures("python_or_c")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_ring(tmp_path / "0", rank=3, round_=2, capacity=64)
    return tmp_path / "0"


def test_a_fresh_ring_holds_rank_and_round_and_nothing_else(path: Path) -> None:
    reader = RingReader(path)
    state = reader.state()
    assert (state["rank"], state["round"], state["pid"], state["phase"]) == (3, 2, 0, Phase.START)
    assert [state[name] for name in ("step", "checkpoint_step", "snapshot_step", "restored_step")] == [-1] * 4
    assert len(reader.records()) == 0


def test_every_field_of_a_record_arrives(path: Path) -> None:
    RingWriter(path).write(
        RecordKind.COLLECTIVE, 10, 20, 7, Phase.TRAIN, 1.5, Collective.ALL_REDUCE, 2**32 - 1, 9, 4096, peer=2, flags=1
    )
    (record,) = RingReader(path).records()
    assert {name: record[name].item() for name in record.dtype.names} == {
        "index": 1, "kind": 3, "phase": 1, "collective": 1, "flags": 1, "step": 7, "sequence": 9, "group": 2**32 - 1,
        "start_ns": 10, "end_ns": 20, "bytes": 4096, "value": 1.5, "peer": 2, "reserved": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in RING_STATE.names or () if name not in {"magic", "capacity", "entered"}]
)
def test_every_field_of_the_state_arrives_separately(path: Path, name: str) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    before = reader.state().copy()
    setattr(writer.state, name, 5)
    after = reader.state()
    assert after[name] == getattr(writer.state, name) == 5
    assert [other for other in RING_STATE.names or () if (before[other] != after[other]).any()] == [name]


def test_an_unknown_field_is_rejected(path: Path) -> None:
    with pytest.raises(AttributeError, match="stepp"):
        RingWriter(path).state.stepp = 1


def test_collectives_and_steps_are_visible_in_the_state(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    writer.enter_collective(Collective.BARRIER, 2**32 - 1, 4, 1_000, NO_PLACE)
    inside = reader.state()
    writer.leave_collective()
    writer.end_step(11, 2_000)
    outside = reader.state()
    assert (inside["collective"], inside["group"], inside["sequence"]) == (Collective.BARRIER, 2**32 - 1, 4)
    assert inside["collective_since_ns"] == 1_000
    assert (outside["collective"], outside["collectives_entered"]) == (Collective.NONE, 1)
    assert (outside["step"], outside["steps_in_round"], outside["step_end_ns"]) == (11, 1, 2_000)


def test_groups_without_a_place_are_not_counted_until_one_is_released(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    places = [writer.take_place(group) for group in range(1, 2 * MAX_ENTERED_GROUPS)]
    assert len(set(places)) == MAX_ENTERED_GROUPS
    for sequence, place in enumerate(places, 1):
        writer.enter_collective(Collective.BARRIER, sequence, sequence, 0, place)
    entered = reader.state()["entered"]
    found = {int(group): int(sequence) for group, sequence in entered[entered["group"] > 0]}
    assert found == {group: group for group in range(1, MAX_ENTERED_GROUPS)}
    writer.release_place(NO_PLACE)
    writer.release_place(places[4])
    assert writer.take_place(200) == places[4]
    assert reader.state()["entered"][5].tolist() == (200, 0)


def test_only_the_last_records_remain_and_later_ones_can_be_requested(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    for step in range(200):
        writer.write(RecordKind.STEP, 0, 0, step)
    assert reader.records()["step"].tolist() == list(range(136, 200))
    assert reader.records(since=198)["step"].tolist() == [198, 199]


@pytest.mark.parametrize("written", [0, 1, 2, 31, 63, 64, 65, 66, 96, 127, 128, 129, 200])
def test_a_reader_finds_all_records_however_often_the_ring_was_filled(path: Path, written: int) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    for step in range(1, written + 1):
        writer.write(RecordKind.STEP, 0, 0, step)
    for since in {0, 1, written // 2, written - 64, written - 1, written} & set(range(written + 1)):
        there = list(range(max(since, written - 64) + 1, written + 1))
        found = reader.records(since)
        assert found["index"].tolist() == found["step"].tolist() == there
    RingWriter(path).write(RecordKind.STEP, 0, 0, 999)
    assert reader.records(written)[["index", "step"]].tolist() == [(written + 1, 999)]


@pytest.mark.parametrize("place", [0, 1, 40, 63])
def test_a_slot_that_is_being_written_is_left_out(path: Path, place: int) -> None:
    """The next one in turn, whose record is the oldest."""
    writer, reader = RingWriter(path), RingReader(path)
    for step in range(1, 64 + place + 1):
        writer.write(RecordKind.STEP, 0, 0, step)
    writer._map[RING_HEADER_BYTES + 64 * place : RING_HEADER_BYTES + 64 * place + 8] = bytes(8)
    assert reader.records()["index"].tolist() == list(range(place + 2, 64 + place + 1))


def test_a_ring_has_all_of_its_memory_from_the_beginning() -> None:
    """On a volume that fills up later, a write to a page that is not there yet would kill the rank by SIGBUS."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "0")
        create_ring(path, rank=0, round_=1)
        assert path.stat().st_blocks * 512 >= compute_ring_bytes(DEFAULT_RING_CAPACITY)


def test_a_full_volume_is_reported_and_nothing_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        create_ring(tmp_path / "0", rank=0, round_=1)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_writes_nothing_into_the_ring(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    writer.write(RecordKind.STEP, 0, 0, 1)
    place = writer.take_place(7)
    writer.end_step(1, 2_000)

    def write_as_worker() -> None:
        for step in range(200):
            writer.write(RecordKind.GC, 0, 0, step)
        writer.enter_phase(Phase.EVALUATE)
        writer.enter_collective(Collective.BARRIER, 7, 3, 1_000, place)
        writer.end_step(8, 3_000)
        writer.end_load(5_000)
        writer.state.loss = 3.0
        assert (writer.state.step, writer.state.rank) == (8, 3), "it reads what it has written, and what was there"

    before = path.read_bytes()
    run_in_fork(write_as_worker)
    run_in_fork(lambda: run_in_fork(write_as_worker))
    assert path.read_bytes() == before
    writer.write(RecordKind.STEP, 0, 0, 2)
    writer.end_step(2, 4_000)
    assert reader.records()["step"].tolist() == [1, 2], "the rank itself goes on"
    assert reader.state()["step"] == 2


def run_in_fork(call: Callable[[], None]) -> None:
    """Run `call` with success in a process that is forked from this one."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_second_writer_continues_behind_the_first(path: Path) -> None:
    for step in range(3):
        RingWriter(path).write(RecordKind.STEP, 0, 0, step)
    assert RingReader(path).records()["index"].tolist() == [1, 2, 3]


def test_a_reader_detects_that_a_later_round_has_a_ring_of_its_own(path: Path) -> None:
    reader = RingReader(path)
    assert reader.is_current
    create_ring(path, rank=3, round_=3, capacity=64)
    assert not reader.is_current
    assert RingReader(path).state()["round"] == 3


def test_threads_share_a_writer_without_losing_a_record(path: Path) -> None:
    writer = RingWriter(path)

    def write_steps(number: int) -> None:
        for _ in range(16):
            writer.write(RecordKind.STEP, 0, 0, number)

    threads = [threading.Thread(target=write_steps, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = RingReader(path).records()
    assert records["index"].tolist() == list(range(1, 65))
    assert sorted(records["step"].tolist()) == sorted([0, 1, 2, 3] * 16)


def test_a_reader_never_sees_half_a_record(path: Path) -> None:
    """A process overwrites the small ring without a pause; all fields of what is read must belong together."""
    child = os.fork()
    if child == 0:
        writer = RingWriter(path)
        number = 0
        while True:
            number += 1
            writer.write(RecordKind.STEP, number, number, number, 0, float(number), 0, number, number, number)
    try:
        reader, seen = RingReader(path), 0
        deadline = time.monotonic() + 120
        while seen < 20_000 and time.monotonic() < deadline:
            records = reader.records()
            seen += len(records)
            for name in ("step", "start_ns", "end_ns", "value", "group", "sequence", "bytes"):
                assert (records[name] == records["index"]).all(), name
        assert seen >= 20_000
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("content", [b"", b"x" * 10_000])
def test_a_file_that_is_no_ring_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0").write_bytes(content)
    with pytest.raises(InputError, match="ring of records"):
        RingReader(tmp_path / "0")


@pytest.mark.parametrize("size", [0, 100, RING_HEADER_BYTES + 64 * 8])
def test_a_ring_that_is_truncated_while_it_is_read_ends_no_reader(path: Path, size: int) -> None:
    """A mapped file would: by SIGBUS, at the first access behind its end."""
    writer, reader = RingWriter(path), RingReader(path)
    for step in range(64):
        writer.write(RecordKind.STEP, 0, 0, step)
    os.truncate(path, size)
    assert set(reader.records()["index"].tolist()) <= set(range(1, 9))
    if size < RING_STATE.itemsize:
        with pytest.raises(InputError, match="truncated"):
            reader.state()
    with pytest.raises(InputError, match="ring of records"):
        RingReader(path)


def test_a_sparse_ring_of_any_size_is_rejected(path: Path) -> None:
    """Its reader would need all of that memory."""
    with path.open("r+b") as file:
        file.write(struct.pack("<QQ", RING_MAGIC, 1 << 34))
    os.truncate(path, compute_ring_bytes(1 << 34))
    with pytest.raises(InputError, match="at most"):
        RingReader(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path), os.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "0")
    with pytest.raises((InputError, OSError)):
        RingReader(tmp_path / "0")


FIRST_LAYOUT = """
magic:u8 capacity:u8 rank:i4 round:i4 pid:i4 phase:i4 phase_since_ns:i8 step:i8 step_end_ns:i8 steps_in_round:i8
collective:i4 group:u4 sequence:i8 collective_since_ns:i8 collectives_entered:i8 checkpoint_step:i8 snapshot_step:i8
restored_step:i8 samples:i8 global_batch:i8 loss:f8 plan_version:i8 checkpoint_request:i8 share:i8 sync_mode:i8
bad_loss_step:i8
"""
"""Of the state, when MAGIC was given to it. A sidecar's image may be older or newer than the trainer's."""


def test_a_ring_of_the_first_version_is_read_and_one_of_this_version_by_that(path: Path) -> None:
    first = np.dtype([(name, f"<{kind}") for name, _, kind in (item.partition(":") for item in FIRST_LAYOUT.split())])
    writer = RingWriter(path)
    writer.end_step(11, 2_000)
    writer.state.share_granularity, writer.state.device = 4, Device.STARTED
    content = path.read_bytes()
    seen_by_the_first = np.frombuffer(content[: first.itemsize], first)[0]
    assert seen_by_the_first.tolist() == RingReader(path).state().tolist()[: len(first.names or ())]
    path.write_bytes(content[: first.itemsize].ljust(RING_HEADER_BYTES, b"\0") + content[RING_HEADER_BYTES:])
    state = RingReader(path).state()
    assert (state["step"], state["share_granularity"], state["device"], state["longest_load_ns"]) == (
        11,
        0,
        Device.NONE,
        0,
    )
