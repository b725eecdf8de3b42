"""Sums of transfers, and descriptions of running transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.reports import FlowWindow
from pacekeeper_analysis.protocol.transport import (
    MAX_TRANSFERS_NAMED,
    PROXY_OPERATION,
    TRANSPORT_COMMUNICATOR,
    OperationFlag,
    collect_flow_windows,
    describe_running_transfers,
)
from pacekeeper_rank.records import Collective

MS = 1_000_000


def build_operation(start: int, end: int, **fields: Any) -> NDArray[np.void]:
    """Times in ms."""
    made = np.zeros((), PROXY_OPERATION)
    made["index"], made["communicator"], made["start_ns"], made["end_ns"] = 1, 0xA1, start * MS, end * MS
    for name, value in fields.items():
        made[name] = value
    return made


def build_communicator(order: int, identity: int, size: int, rank: int, **fields: Any) -> NDArray[np.void]:
    made = np.zeros((), TRANSPORT_COMMUNICATOR)
    made["order"], made["id"], made["size"], made["rank"] = order, identity, size, rank
    for name, value in fields.items():
        made[name] = value
    return made


MEASURED, SENT = OperationFlag.MEASURED, OperationFlag.SEND | OperationFlag.MEASURED
WORLD = build_communicator(1, 0xA1, 8, 3)
NOW = 100_000
"""ms"""


def collect_flows(*operations: NDArray[np.void], communicator: NDArray[np.void] = WORLD) -> list[FlowWindow]:
    """Of rank 40."""
    return list(collect_flow_windows(np.array(operations), np.array([communicator]), 40, NOW * MS))


def test_bytes_and_network_time_of_channels_are_summed() -> None:
    (flow,) = collect_flows(
        build_operation(NOW - 90, NOW - 70, peer=2, bytes=500, flags=SENT, network_us=15_000, channel=0),
        build_operation(NOW - 80, NOW - 75, peer=2, bytes=300, flags=SENT, network_us=5_000, gpu_us=2_000, channel=1),
    )
    assert flow == FlowWindow(0xA1, place=3, peer=2, rank=40, sent_bytes=800, network_seconds=0.02)


def test_peers_and_communicators_are_separate_and_a_receive_names_its_end_only() -> None:
    other = build_communicator(2, 2**64 - 1, 4, 0)
    ended = [
        build_operation(0, NOW - 9, peer=2, bytes=1, flags=SENT),
        build_operation(0, NOW - 9, peer=2, bytes=2, flags=MEASURED, network_us=7),
        build_operation(0, NOW - 9, peer=3, bytes=4, flags=MEASURED, network_us=7),
        build_operation(0, NOW - 9, peer=2, bytes=8, flags=SENT, communicator=2**64 - 1),
    ]
    found = collect_flow_windows(np.array(ended), np.array([WORLD, other]), 40, NOW * MS)
    assert {(flow.communicator, flow.place, flow.peer): flow.sent_bytes for flow in found} == {
        (0xA1, 3, 2): 1,
        (0xA1, 3, 3): 0,
        (2**64 - 1, 0, 2): 8,
    }
    assert not any(flow.network_seconds for flow in found)


@pytest.mark.parametrize(
    ("ends", "ages"),
    [
        ((50, 200, 2_900), {50: 0, 200: 0, 2_900: 2}),  # no window is shorter than 1 s
        ((100, 2_100, 4_100, 5_999), {100: 0, 2_100: 1, 4_100: 2, 5_999: 2}),  # thirds of what is stored
        ((1, 5_001, 14_999, 15_000, 99_000), {1: 0, 5_001: 1, 14_999: 2}),  # nor longer than 5 s
    ],
)
def test_windows_cover_what_the_file_holds(ends: tuple[int, ...], ages: dict[int, int]) -> None:
    ended = [build_operation(0, NOW - ago, peer=2, bytes=ago, flags=SENT) for ago in ends]
    sums: dict[int, int] = {}
    for ago, age in ages.items():
        sums[age] = sums.get(age, 0) + ago
    assert {flow.age: flow.sent_bytes for flow in collect_flows(*ended)} == sums


@pytest.mark.parametrize(
    "fields",
    [
        {"end": 0},
        {"end": NOW + 1},
        {"bytes": -1},
        {"bytes": 2**60},
        {"flags": OperationFlag.SEND},
        {"flags": SENT | OperationFlag.FOREIGN},
        {"communicator": 0},
        {"communicator": 0xB2},
        {"peer": -1},
        {"peer": 8},
    ],
    ids=str,
)
def test_running_unmeasured_foreign_and_invalid_operations_are_left_out(fields: dict[str, Any]) -> None:
    sound = {"start": NOW - 20, "end": NOW - 10, "peer": 2, "bytes": 5, "flags": SENT}
    assert len(collect_flows(build_operation(**sound))) == 1
    assert collect_flows(build_operation(**{**sound, **fields})) == []


@pytest.mark.parametrize(
    "communicator", [build_communicator(1, 0xA1, 8, -1), build_communicator(1, 0xA1, 8, 8)], ids=["before", "behind"]
)
def test_a_place_outside_of_its_communicator_is_invalid(communicator: NDArray[np.void]) -> None:
    assert collect_flows(build_operation(0, NOW, peer=2, flags=SENT), communicator=communicator) == []


def test_without_operations_there_are_no_flows() -> None:
    assert collect_flow_windows(np.zeros(0, PROXY_OPERATION), np.zeros(0, TRANSPORT_COMMUNICATOR), 0, NOW * MS) == ()


def test_running_transfers_are_described_by_age() -> None:
    begun = OperationFlag.BEGUN
    operations = np.array(
        [
            build_operation(8_000, 0, peer=2, sequence=7, collective=Collective.ALL_REDUCE, channel=1, flags=begun),
            build_operation(
                2_000,
                0,
                peer=5,
                collective=99,
                flags=begun | OperationFlag.SEND | OperationFlag.WAITS_FOR_CREDIT | OperationFlag.WAITS_FOR_GPU,
            ),
            build_operation(1_000, 1_500, peer=6, flags=begun),
            build_operation(1_000, 0, peer=7),
        ]
    )
    description = describe_running_transfers(3, operations, np.array([build_communicator(1, 0xA1, 8, 3)]), 10_000 * MS)
    assert description == (
        "rank 3: sends to rank 5 in a communicator of 8 (operation 0, channel 0) for 8.0 s, "
        "waits for the GPU and the receiver; "
        "receives from rank 2 in a communicator of 8 (ALL_REDUCE 7, channel 1) for 2.0 s"
    )
    assert describe_running_transfers(3, operations[2:], np.zeros(0, TRANSPORT_COMMUNICATOR), 0) == ""
    many = np.repeat(operations[:1], MAX_TRANSFERS_NAMED + 3)
    assert describe_running_transfers(3, many, np.zeros(0, TRANSPORT_COMMUNICATOR), 0).endswith("; and 3 more")
