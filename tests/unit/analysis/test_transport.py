"""Sums of transfers, communicators and process groups, running transfers in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_analysis.records import Collective
from pacekeeper_analysis.transport import (
    COMMUNICATOR,
    NAMED,
    OPERATION,
    Flag,
    Group,
    flows,
    groups_by_communicator,
    running_in_words,
)

MS = 1_000_000


def operation(start: int, end: int, **fields: Any) -> NDArray[np.void]:
    """Times in ms."""
    made = np.zeros((), OPERATION)
    made["index"], made["communicator"], made["start_ns"], made["end_ns"] = 1, 0xA1, start * MS, end * MS
    for name, value in fields.items():
        made[name] = value
    return made


def communicator(order: int, identity: int, size: int, rank: int, **fields: Any) -> NDArray[np.void]:
    made = np.zeros((), COMMUNICATOR)
    made["order"], made["id"], made["size"], made["rank"] = order, identity, size, rank
    for name, value in fields.items():
        made[name] = value
    return made


def test_channels_that_overlap_are_busy_once() -> None:
    measured = Flag.SEND | Flag.MEASURED
    (flow,) = flows(
        np.array(
            [
                operation(10, 30, peer=2, bytes=500, flags=measured, network_us=15_000, channel=0),
                operation(20, 25, peer=2, bytes=300, flags=measured, gpu_us=2_000, channel=1),
                operation(28, 40, peer=2, bytes=200, flags=measured, credit_us=1_000, network_us=5_000, channel=1),
                operation(50, 55, peer=2, bytes=100, flags=measured, channel=0),
            ]
        )
    )
    assert (flow.communicator, flow.peer, flow.sends, flow.measured) == (0xA1, 2, True, True)
    assert (flow.operations, flow.bytes) == (4, 1100)
    assert flow.busy_seconds == pytest.approx(0.035)
    assert (flow.network_seconds, flow.gpu_seconds, flow.credit_seconds) == pytest.approx((0.02, 0.002, 0.001))


def test_peers_directions_communicators_and_guesses_are_kept_apart() -> None:
    told = flows(
        np.array(
            [
                operation(0, 1, peer=2, bytes=1),
                operation(0, 1, peer=2, bytes=2, flags=Flag.SEND),
                operation(0, 1, peer=3, bytes=4),
                operation(0, 1, peer=2, bytes=8, communicator=2**64 - 1),
                operation(0, 1, peer=2, bytes=16, flags=Flag.MEASURED),
            ]
        )
    )
    assert {(flow.communicator, flow.peer, flow.sends, flow.measured): flow.bytes for flow in told} == {
        (0xA1, 2, False, False): 1,
        (0xA1, 2, True, False): 2,
        (0xA1, 3, False, False): 4,
        (2**64 - 1, 2, False, False): 8,
        (0xA1, 2, False, True): 16,
    }


@pytest.mark.parametrize(
    "fields", [{"end": 0}, {"end": 5}, {"bytes": -1}, {"flags": Flag.FOREIGN}, {"communicator": 0}], ids=str
)
def test_what_runs_is_foreign_or_makes_no_sense_is_left_out(fields: dict[str, Any]) -> None:
    assert flows(np.array([operation(**{"start": 10, "end": 20, **fields})])) == ()


def test_without_operations_there_are_no_flows() -> None:
    assert flows(np.zeros(0, OPERATION)) == ()


WORLD, DATA, TENSOR = Group(1, "0", 8, 3), Group(2, "mesh_dp", 4, 1), Group(3, "mesh_tp", 2, 1)


def test_size_and_rank_tell_which_group_a_communicator_belongs_to() -> None:
    made = np.array([communicator(2, 0xB, 4, 1), communicator(1, 0xA, 8, 3), communicator(3, 0xC, 2, 1)])
    assert groups_by_communicator(made, [WORLD, DATA, TENSOR]) == {0xA: 1, 0xB: 2, 0xC: 3}


def test_of_the_same_size_and_rank_the_order_of_creation_tells() -> None:
    other = Group(4, "mesh_pp", 2, 1)
    made = np.array([communicator(9, 0xD, 2, 1), communicator(3, 0xC, 2, 1)])
    assert groups_by_communicator(made, [TENSOR, other]) == {0xC: 3, 0xD: 4}
    assert groups_by_communicator(made, [other, TENSOR]) == {0xC: 4, 0xD: 3}


def test_a_name_tells_more_than_the_order() -> None:
    long = Group(4, "a_name_of_more_than_twenty_letters", 2, 1)
    made = np.array([communicator(1, 0xD, 2, 1, name=b"a_name_of_more_than"), communicator(2, 0xC, 2, 1)])
    assert groups_by_communicator(made, [TENSOR, long]) == {0xD: 4, 0xC: 3}


@pytest.mark.parametrize(
    "made",
    [
        [communicator(1, 0xC, 2, 1), communicator(2, 0xD, 2, 1)],  # one is PyTorch's, for a pair of ranks
        [communicator(1, 0xC, 2, 0)],
        [communicator(1, 0xC, 2, 1, finalized_ns=7)],
        [communicator(0, 0xC, 2, 1)],
        [communicator(1, 0xC, 4, 1, name=b"mesh_tp")],  # a name that fits, on one that does not
    ],
    ids=["more than groups", "another rank", "over", "void", "another size"],
)
def test_what_cannot_be_told_is_left_out(made: list[NDArray[np.void]]) -> None:
    assert groups_by_communicator(np.array(made), [TENSOR]) == {}


def test_running_transfers_are_told_by_age() -> None:
    begun = Flag.BEGUN
    operations = np.array(
        [
            operation(8_000, 0, peer=2, sequence=7, collective=Collective.ALL_REDUCE, channel=1, flags=begun),
            operation(
                2_000, 0, peer=5, collective=99, flags=begun | Flag.SEND | Flag.WAITS_FOR_CREDIT | Flag.WAITS_FOR_GPU
            ),
            operation(1_000, 1_500, peer=6, flags=begun),
            operation(1_000, 0, peer=7),
        ]
    )
    words = running_in_words(3, operations, np.array([communicator(1, 0xA1, 8, 3)]), 10_000 * MS)
    assert words == (
        "rank 3: sends to rank 5 in a communicator of 8 (operation 0, channel 0) for 8.0 s, "
        "waits for the GPU and the receiver; "
        "receives from rank 2 in a communicator of 8 (ALL_REDUCE 7, channel 1) for 2.0 s"
    )
    assert running_in_words(3, operations[2:], np.zeros(0, COMMUNICATOR), 0) == ""
    many = np.repeat(operations[:1], NAMED + 3)
    assert running_in_words(3, many, np.zeros(0, COMMUNICATOR), 0).endswith("; and 3 more")
