"""Of what the ranks hold, the newest that all of them can have is chosen."""

from __future__ import annotations

import pytest

from pacekeeper.keep.versions import NOTHING, Version, choose


@pytest.mark.parametrize(
    ("held", "sharded", "expected"),
    [
        ([[(9, 1), (8, 1)], [(8, 1), (9, 1)]], True, (Version(9, 1), 0)),
        ([[(9, 1), (8, 1)], [(8, 1), (7, 1)]], True, (Version(8, 1), 0)),  # rank 1 was killed before its copy of 9
        ([[(8, 1), (7, 1)], [(9, 1), (8, 1)]], False, (Version(9, 1), 1)),  # a replica is as good as any other
        ([[(9, 1), (8, 1)], [(-1, -1), (-1, -1)]], True, (NOTHING, 0)),  # a spare has no shard
        ([[(-1, -1), (-1, -1)], [(9, 1), (8, 1)]], False, (Version(9, 1), 1)),
        ([[(9, 1), (4, 1)], [(9, 2), (4, 1)]], True, (Version(4, 1), 0)),  # the same step of two rounds
        ([[(-1, -1)], [(-1, -1)]], False, (NOTHING, 0)),
    ],
)
def test_the_newest_state_that_all_can_have_is_chosen(
    held: list[list[tuple[int, int]]], sharded: bool, expected: tuple[Version, int]
) -> None:
    version, source = choose([[Version(*version) for version in rank] for rank in held], sharded)
    assert version == expected[0]
    if version != NOTHING:
        assert source == expected[1]
