"""What the flight recorder's record means for a rank that makes no progress."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pacekeeper import torch_internals
from pacekeeper.health.stall_detector import compute_stall_deadline
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper_rank import torch_internals as recorded
from pacekeeper_rank.collectives.flight_recorder import (
    FLIGHT_POLL_INTERVAL_SECONDS,
    FlightMonitor,
    compute_query_delay,
    find_oldest_collective,
    preserve_graph_captures,
)
from pacekeeper_rank.record_ring import NO_PLACE, RingWriter, create_ring
from pacekeeper_rank.records import Collective, Device, Phase

SETTINGS = LauncherSettings(worker="w", address="127.0.0.1")


def build_entry(number: int, state: str, **changes: Any) -> dict[str, Any]:
    """Written by hand after the fields that torch 2.9 and 2.15 write (FlightRecorderDetail.hpp, format 2.10)."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[3]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[3]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "record_id": number,
        "retired": False,
        "state": state,
        "thread_id": "139825464281984",
        "thread_name": "python",
        "time_created_ns": 1795344156339252136,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 600000,
        **changes,
    }


def build_record(*entries: dict[str, Any], completed: int = 6, started: int = 6, **changes: Any) -> bytes:
    content = {
        "comm_lib_version": "2.30.7",
        "nccl_comm_state": {},
        "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}},
        "pg_status": {
            "0": {
                "last_completed_collective": str(completed),
                "last_enqueued_collective": "8",
                "last_started_collective": str(started),
            }
        },
        "version": "2.10",
        **({"entries": list(entries)} if entries else {}),
        **changes,
    }
    return json.dumps(content).encode()


def test_the_oldest_incomplete_collective_is_found() -> None:
    found = find_oldest_collective(
        build_record(build_entry(8, "scheduled"), build_entry(7, "started", profiling_name="nccl:_all_gather_base"))
    )
    assert (found.device, found.collective, found.sequence) == (Device.STARTED, Collective.ALL_GATHER, 7)
    found = find_oldest_collective(build_record(build_entry(7, "scheduled"), build_entry(8, "scheduled")))
    assert (found.device, found.collective, found.sequence) == (Device.SCHEDULED, Collective.ALL_REDUCE, 7)
    assert (
        find_oldest_collective(
            build_record(build_entry(6, "completed"), build_entry(5, "started", retired=True))
        ).device
        is Device.IDLE
    )
    assert find_oldest_collective(build_record()).device is Device.IDLE


def test_a_group_has_the_same_number_on_its_ranks_and_another_than_other_groups() -> None:
    def find_group(ranks: str) -> int | None:
        return find_oldest_collective(build_record(build_entry(7, "started"), pg_config={"0": {"ranks": ranks}})).group

    assert find_group("[0, 1]") is not None
    assert find_group("[0, 1]") == find_group("[0, 1]") != find_group("[2, 3]")


def test_a_field_that_the_recorder_cannot_know_is_ignored() -> None:
    without_timing = build_record(build_entry(7, "scheduled"), completed=6, started=-1)
    assert find_oldest_collective(without_timing).device is Device.RUNNING
    in_a_batch = build_entry(7, "scheduled", is_p2p=True, profiling_name="nccl:send 0->1", p2p_seq_id=3)
    assert find_oldest_collective(build_record(in_a_batch)).device is Device.RUNNING
    begun = build_entry(8, "started", is_p2p=True, profiling_name="nccl:recv 0<-1", p2p_seq_id=4)
    found = find_oldest_collective(build_record(in_a_batch, begun))
    assert (found.device, found.collective, found.group) == (Device.STARTED, Collective.RECV, None)


@pytest.mark.parametrize(
    "strange",
    [
        b"", b"\xff", b"[]", b"{}", b'{"entries": 3}', b'{"entries": [3]}', b'{"entries": [{}]}',
        build_record(build_entry(7, "started", process_group="0")),
        build_record(build_entry(7, "started", collective_seq_id="many")),
        build_record(build_entry(7, "scheduled"), pg_status={"0": {"last_started_collective": None}}),
        build_record(pg_config={}),
    ],
)  # fmt: skip
def test_a_record_of_another_kind_is_ignored(strange: bytes) -> None:
    assert find_oldest_collective(strange).device is Device.RUNNING


def test_the_record_of_this_torch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gloo, since there is no NCCL here: the same recorder writes it, but never when a collective has begun."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")  # as the launcher does: before 2.15 the recorder is off
    record = recorded.dump_flight_record()
    assert record is not None
    assert json.loads(record)["version"].startswith("2.")
    assert find_oldest_collective(record).device is Device.RUNNING
    dist.init_process_group("gloo", store=torch_internals.HashStore(), rank=0, world_size=1)
    try:
        assert recorded.list_backends() == ["cpu:gloo,cuda:gloo"]
        dist.all_reduce(torch.ones(3))
        content = json.loads(_distributed_c10d._dump_fr_trace_json(True, True))
    finally:
        dist.destroy_process_group()
    (written,) = content["entries"]
    by_hand = build_entry(1, "scheduled")
    assert by_hand.keys() <= written.keys()
    same = ("collective_seq_id", "is_p2p", "process_group", "state")
    assert {name: written[name] for name in same} == {name: by_hand[name] for name in same}
    assert written["profiling_name"] == "gloo:all_reduce"
    still_under_way = {**content, "entries": [{**written, "retired": False}], "pg_status": {}}
    found = find_oldest_collective(json.dumps(still_under_way).encode())
    assert (found.device, found.collective, found.sequence) == (Device.SCHEDULED, Collective.ALL_REDUCE, 1)


class FakeRank:
    """A rank on a GPU, whose flight recorder returns the record of the test."""

    def __init__(self, path: Path) -> None:
        create_ring(path, rank=0, round_=1, capacity=64)
        self.writer, self.reader = RingWriter(path), RingReader(path)
        self.record, self.polls, self.uses_gpu, self.uses_nccl = build_record(), 0, True, True
        self.watch = FlightMonitor(
            self.writer.state, lambda: self.uses_gpu, lambda: self.uses_nccl, self._return_record
        )
        self.writer.enter_phase(Phase.TRAIN)
        self.now = 100.0

    def _return_record(self) -> bytes:
        self.polls += 1
        return self.record

    def end_step(self, seconds: float) -> None:
        self.now += seconds
        self.writer.end_step(int(self.writer.state.steps_in_round), int(self.now * 1e9))
        self.check_after()

    def check_after(self, after: float = 0.0) -> Device:
        self.now += after
        self.watch.check(self.now)
        return Device(int(self.reader.state()["device"]))


@pytest.fixture
def rank(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path / "0")


def test_the_recorder_is_polled_only_while_the_rank_makes_no_progress(rank: FakeRank) -> None:
    for _ in range(10):
        rank.end_step(0.1)
    assert rank.check_after(0.9) is Device.RUNNING
    assert rank.polls == 0
    rank.record = build_record(build_entry(7, "started"))
    assert rank.check_after(0.2) is Device.STARTED
    state = rank.reader.state()
    assert (state["device_collective"], state["device_sequence"]) == (Collective.ALL_REDUCE, 7)
    assert state["device_group"] != 0
    rank.record = build_record()
    assert rank.check_after(0.5) is Device.IDLE
    rank.writer.enter_collective(Collective.ALL_REDUCE, 1, 8, 0, NO_PLACE)
    assert rank.check_after(0.5) is Device.RUNNING
    assert rank.polls == 2


def test_the_recorder_is_polled_before_the_launcher_reports_a_stall(rank: FakeRank) -> None:
    for _ in range(10):
        rank.end_step(3.0)
    assert rank.check_after(14.0) is Device.RUNNING
    assert rank.check_after(1.5) is Device.IDLE
    for steps, seconds in ((0, None), (3, 0.1), (5, 0.1), (5, 30.0)):
        stalled_after = compute_stall_deadline(
            Phase.TRAIN, steps, seconds, SETTINGS, earlier_step_seconds=seconds or None
        )
        assert compute_query_delay(steps, seconds) + 2 * FLIGHT_POLL_INTERVAL_SECONDS <= stalled_after


def test_the_recorder_is_not_polled_in_long_phases_and_on_ranks_without_a_gpu(rank: FakeRank) -> None:
    for _ in range(10):
        rank.end_step(0.1)
    rank.writer.enter_phase(Phase.COMPILE)
    assert [rank.check_after(5.0) for _ in range(3)] == [Device.RUNNING] * 3
    rank.uses_gpu, rank.writer.state.device = False, Device.NONE
    rank.writer.enter_phase(Phase.TRAIN)
    assert [rank.check_after(5.0) for _ in range(3)] == [Device.NONE] * 3
    assert rank.polls == 0


def test_without_nccl_nothing_runs_on_the_gpu(rank: FakeRank) -> None:
    rank.uses_nccl = False
    for _ in range(10):
        rank.end_step(0.1)
    assert rank.check_after(2.0) is Device.IDLE
    assert rank.polls == 0


DRIVER = """
static __thread int now;
int refusal;
int cuThreadExchangeStreamCaptureMode(int *mode) { int before = now; now = *mode; *mode = before; return refusal; }
"""
"""A double of the CUDA driver's one call."""


def test_a_thread_keeps_its_queries_out_of_the_graph_captures_of_others(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True, timeout=600)
    driver = ctypes.CDLL(str(library))
    preserve_graph_captures(str(library))
    mode = ctypes.c_int(0)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 1
    ctypes.c_int.in_dll(driver, "refusal").value = 3
    with pytest.raises(RuntimeError, match="error 3"):
        preserve_graph_captures(str(library))
