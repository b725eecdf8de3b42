"""The newest state that all ranks can have is chosen, and each worker receives one copy of it."""

from __future__ import annotations

import pytest

from pacekeeper.checkpointing.versions import NO_STATE_VERSION, StateVersion, choose_version, plan_transfers


@pytest.mark.parametrize(
    ("held", "sharded", "expected"),
    [
        ([[(9, 1), (8, 1)], [(8, 1), (9, 1)]], True, StateVersion(9, 1)),
        ([[(9, 1), (8, 1)], [(8, 1), (7, 1)]], True, StateVersion(8, 1)),  # rank 1 was killed before its copy of 9
        ([[(8, 1), (7, 1)], [(9, 1), (8, 1)]], False, StateVersion(9, 1)),  # a replica is as good as any other
        ([[(9, 1), (8, 1)], [(-1, -1), (-1, -1)]], True, NO_STATE_VERSION),  # a spare has no shard
        ([[(-1, -1), (-1, -1)], [(9, 1), (8, 1)]], False, StateVersion(9, 1)),
        ([[(9, 1), (4, 1)], [(9, 2), (4, 1)]], True, StateVersion(4, 1)),  # the same step of two rounds
        ([[(-1, -1)], [(-1, -1)]], False, NO_STATE_VERSION),
    ],
)
def test_the_newest_state_that_all_can_have_is_chosen(
    held: list[list[tuple[int, int]]], sharded: bool, expected: StateVersion
) -> None:
    assert choose_version([[StateVersion(*version) for version in rank] for rank in held], sharded) == expected


@pytest.mark.parametrize(
    ("holds", "keeps", "expected"),
    [
        ("1111", "1010", []),
        ("1100", "1010", [(0, 2)]),  # one rank of the worker receives for both
        ("1101", "1010", [(0, 2)]),
        ("0011", "1010", [(2, 0)]),
        ("110000", "101010", [(0, 2), (0, 4)]),
        ("10000000", "11111111", [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (3, 7)]),  # each holder sends it
        ("11001100", "10101010", [(0, 2), (4, 6)]),  # each sends to as many as the others
        ("0110", "1001", [(1, 0), (2, 3)]),  # no peer holds it: a rank that has it sends it
    ],
)
def test_each_worker_that_lacks_a_replica_gets_one(holds: str, keeps: str, expected: list[tuple[int, int]]) -> None:
    assert plan_transfers([has == "1" for has in holds], [its == "1" for its in keeps]) == expected
