"""NCCL's profiler plugin, called by a stand-in for NCCL, and what is read of its file."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.observe.collectives.nccl_transport import TransportReader, open_transport
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.records import RING_STATE
from pacekeeper_analysis.protocol.reports import FlowWindow
from pacekeeper_analysis.protocol.transport import (
    COMMUNICATORS_OFFSET,
    MAX_RECORDED_OPERATIONS,
    OPERATIONS_OFFSET,
    PROXY_OPERATION,
    STEPS_UNTIL_OFFSET,
    TRANSPORT_COMMUNICATOR,
    TRANSPORT_FILE_BYTES,
    TRANSPORT_HEADER,
    OperationFlag,
    collect_flow_windows,
    describe_running_transfers,
)
from pacekeeper_rank.record_ring import create_ring
from pacekeeper_rank.records import Collective
from testing.training.nccl import PLUGIN_SOURCE, NcclDriver, build_driver

MS = 1_000_000


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> NcclDriver:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return build_driver(tmp_path_factory.mktemp("address"), "-fsanitize=address,undefined")


@pytest.mark.parametrize("version", [4, 5, 6])
def test_peer_direction_bytes_and_waits_of_each_transfer_are_reported(driver: NcclDriver, version: int) -> None:
    began = time.monotonic_ns()
    reader = driver.run_scenario(version, "normal")
    assert _read_header(driver)["version"] == version
    world, pair = reader.communicators()
    assert [world[name] for name in ("id", "size", "rank", "name", "finalized_ns")] == [0xA1, 4, 1, b"world", 0]
    assert [pair[name] for name in ("id", "size", "rank", "name")] == [0xFFFF_FFFF_FFFF_FFF1, 2, 0, b""]
    assert began < world["created_ns"] <= pair["created_ns"] < pair["finalized_ns"] < time.monotonic_ns()

    send, receive, single = reader.operations()
    for operation, peer, nbytes, steps in ((send, 2, 1000, 2), (receive, 0, 800, 1)):
        assert operation["communicator"] == 0xA1
        assert (operation["collective"], operation["sequence"]) == (Collective.ALL_REDUCE, 7)
        assert (operation["peer"], operation["channel"]) == (peer, 3)
        assert (operation["bytes"], operation["steps"]) == (nbytes, steps)
    assert send["flags"] == OperationFlag.SEND | OperationFlag.MEASURED | OperationFlag.BEGUN
    assert receive["flags"] == OperationFlag.MEASURED | OperationFlag.BEGUN
    # Two steps that overlap count once: 10 ms the GPU, the second one 20 more; 5 ms credit; 20 ms the network.
    duration = send["end_ns"] - send["start_ns"]
    assert 35 * MS <= duration < 60_000 * MS, "it begins when it is its turn, 5 ms after it was started"
    assert 10_000 <= send["gpu_us"] <= duration / 1000
    assert 5_000 <= send["credit_us"] <= duration / 1000 - 30_000 + 1
    assert 20_000 <= send["network_us"] <= duration / 1000 - 15_000 + 1
    assert 10_000 <= receive["network_us"] <= (receive["end_ns"] - receive["start_ns"]) / 1000
    assert receive["gpu_us"] >= 5_000
    assert receive["credit_us"] == 0
    assert single["communicator"] == 0xFFFF_FFFF_FFFF_FFF1
    assert (single["collective"], single["sequence"]) == (Collective.SEND, 1)
    assert (single["bytes"], single["steps"], single["flags"]) == (4_000, 0, OperationFlag.SEND), (
        "the most that it may be"
    )

    received, sent = collect_flow_windows(reader.operations(), reader.communicators(), 5, time.monotonic_ns())
    assert received == FlowWindow(0xA1, place=1, peer=0, rank=5), "the time of a receive holds the sender's"
    assert sent == FlowWindow(0xA1, 1, 2, 5, sent_bytes=1000, network_seconds=round(send["network_us"] * 1e-6, 6))


def test_only_a_processs_own_records_of_itself_are_trusted(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "foreign")
    operations = reader.operations()
    assert [(each["communicator"], each["sequence"], each["peer"]) for each in operations] == [(0, 0, 2), (0, 0, 2)]
    assert all(each["flags"] & OperationFlag.FOREIGN for each in operations)
    assert collect_flow_windows(operations, reader.communicators(), 0, time.monotonic_ns()) == ()


def test_events_after_an_end_change_nothing(driver: NcclDriver) -> None:
    operation, behind = driver.run_scenario(6, "late").operations()
    assert (operation["bytes"], operation["steps"], operation["gpu_us"]) == (500, 1, 0)
    assert operation["end_ns"] - operation["start_ns"] < 300 * MS
    assert operation["flags"] == OperationFlag.SEND | OperationFlag.MEASURED | OperationFlag.BEGUN, (
        "it waits for nothing any more"
    )
    assert behind["end_ns"] > 0


def test_an_operation_under_way_reports_what_it_waits_for(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "running")
    queued, running = reader.operations()
    assert (queued["end_ns"], queued["flags"]) == (0, 0)
    assert (running["end_ns"], running["bytes"]) == (0, 500)
    assert (
        running["flags"]
        == OperationFlag.SEND | OperationFlag.MEASURED | OperationFlag.BEGUN | OperationFlag.WAITS_FOR_NETWORK
    )
    description = describe_running_transfers(
        1, reader.operations(), reader.communicators(), int(running["start_ns"]) + 4_200 * MS
    )
    sends = "sends to rank 3 in a communicator of 4 (BROADCAST 8, channel 3) for 4.2 s"
    assert description == f"rank 1: {sends}, waits for the network", "and not of what waits for its turn"


def test_reused_entries_no_longer_belong_to_the_earlier_operation(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "lapped")
    operations = reader.operations()
    assert len(operations) == MAX_RECORDED_OPERATIONS
    assert list(operations["index"][[0, -1]]) == [4, MAX_RECORDED_OPERATIONS + 3]
    assert (operations["end_ns"] > 0).all()
    without_collective, without_communicator = operations[-2:]
    assert (without_collective["communicator"], without_collective["collective"]) == (0xA1, Collective.NONE)
    assert (without_communicator["peer"], without_communicator["communicator"]) == (-2, 0)
    assert list(reader.communicators()["order"][[0, -1]]) == [2, 257]


def test_a_process_that_a_rank_has_forked_writes_nothing(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "forks")
    assert len(reader.operations()) == 0
    assert list(reader.communicators()["id"]) == [0xA1]


def test_the_plugin_can_be_unloaded_and_loaded_again(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "unloaded")
    assert list(reader.communicators()["id"]) == [0xA1, 0xB2]
    assert reader.operations()["end_ns"][0] > 0, "a proxy thread may be behind the end of the last communicator"


@pytest.mark.parametrize("transport", ["", "missing/0.transport", "x" * 5_000])
def test_the_plugin_does_nothing_without_a_file(driver: NcclDriver, transport: str) -> None:
    driver.run(6, "inert", transport=transport and str(driver.folder / transport))


def test_the_first_process_has_the_file(driver: NcclDriver) -> None:
    reader = driver.run_scenario(6, "running")
    before = reader.operations().tobytes()
    driver.run(6, "inert", transport=str(driver.folder / "0.transport"))
    assert reader.operations().tobytes() == before
    assert [path.name for path in driver.folder.glob("*.transport*")] == ["0.transport"]


@pytest.mark.parametrize(("owner", "scenario"), [(0, "normal"), (1, "inert")])
def test_a_program_that_a_rank_starts_leaves_the_file_to_the_rank(
    driver: NcclDriver, owner: int, scenario: str
) -> None:
    ring, path = driver.folder / f"ring-{owner}", driver.folder / f"owned-{owner}.file"
    create_ring(ring, 0, 1, capacity=64, owner=owner)
    driver.run(5, scenario, transport=str(path), ring=str(ring))
    assert path.exists() == (owner == 0)
    assert RING_STATE.fields is not None
    assert f"OWNER_AT = {RING_STATE.fields['owner'][1]}" in PLUGIN_SOURCE.read_text()


def test_a_full_volume_is_no_crash(driver: NcclDriver) -> None:
    """A file may not grow beyond a limit here, as it may not on a volume that is full."""
    command = [driver.folder / "nccl_driver", driver.plugin, "6", "inert"]
    limited = ["sh", "-c", 'trap "" XFSZ; ulimit -f 100; exec "$@"', "sh", *map(str, command)]
    environment = {**os.environ, "PACEKEEPER_TRANSPORT": str(driver.folder / "full.transport")}
    done = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not list(driver.folder.glob("full.transport*"))


def test_the_sanitizer_detects_an_error(driver: NcclDriver) -> None:
    with pytest.raises(AssertionError, match=r"insufficient space|heap-buffer-overflow"):
        driver.run(6, "overrun", transport="")


@pytest.mark.parametrize("version", [4, 5, 6])
def test_a_million_calls_in_random_orders_cause_no_error(driver: NcclDriver, version: int) -> None:
    transport = driver.folder / "0.transport"
    transport.unlink(missing_ok=True)
    started = int(driver.run(version, "random", version, 1_000_000, transport=str(transport)))
    assert started > 250_000, "most handles were good ones"
    reader = TransportReader(transport)
    operations = reader.operations()
    assert len(operations) == MAX_RECORDED_OPERATIONS
    assert (np.diff(operations["index"].astype("i8")) == 1).all()
    ended = operations[operations["end_ns"] > 0]
    assert len(ended) > 1_000
    assert (ended["start_ns"] <= ended["end_ns"]).all()
    assert (ended["bytes"] >= 0).all()
    longest = (ended["end_ns"] - ended["start_ns"]) / 1000 + 1
    assert all((ended[name] <= longest).all() for name in ("network_us", "gpu_us", "credit_us"))
    collect_flow_windows(operations, reader.communicators(), 0, time.monotonic_ns())


def test_threads_do_not_race(tmp_path: Path) -> None:
    """Under ThreadSanitizer: four threads on one file, with handles of their own and wrong ones."""
    driver = build_driver(tmp_path, "-fsanitize=thread")
    assert len(driver.run_scenario(6, "threads").operations()) == MAX_RECORDED_OPERATIONS


def test_a_reader_leaves_out_what_is_being_written(tmp_path: Path) -> None:
    reader = TransportReader(_write_file(tmp_path, [1, 0, 3], end_ns=20))
    assert list(reader.operations()["index"]) == [1, 3]


def test_readers_enable_the_recording_of_steps(tmp_path: Path) -> None:
    path = _write_file(tmp_path, [], end_ns=0)
    TransportReader(path).measure_steps(1 << 40)
    assert path.read_bytes()[STEPS_UNTIL_OFFSET : STEPS_UNTIL_OFFSET + 8] == (1 << 40).to_bytes(8, "little")


def test_no_file_means_unknown_and_another_file_is_rejected(tmp_path: Path) -> None:
    assert open_transport(tmp_path / "0.transport") is None
    for content in (b"", bytes(TRANSPORT_FILE_BYTES - 1), bytes(TRANSPORT_FILE_BYTES)):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(InputError, match=r"bad: .*transfers"):
            open_transport(tmp_path / "bad")


def _read_header(driver: NcclDriver) -> np.void:
    header: np.void = np.fromfile(driver.folder / "0.transport", TRANSPORT_HEADER, count=1)[0]
    return header


def _write_file(folder: Path, indices: list[int], end_ns: int) -> Path:
    """Write a file as the plugin does, with operations that started at 10."""
    header = np.zeros((), TRANSPORT_HEADER)
    header["magic"], header["capacity"] = 0x504B_4E43_434C_0001, MAX_RECORDED_OPERATIONS
    operations = np.zeros(MAX_RECORDED_OPERATIONS, PROXY_OPERATION)
    operations["index"][: len(indices)] = indices
    operations["start_ns"], operations["end_ns"] = 10, end_ns
    path = folder / "made"
    between = bytes(OPERATIONS_OFFSET - COMMUNICATORS_OFFSET)
    assert len(between) % TRANSPORT_COMMUNICATOR.itemsize == 0
    path.write_bytes(header.tobytes() + between + operations.tobytes())
    return path
