"""Which save is loaded from memory, and which rank serves its shards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pacekeeper.checkpointing.peer_saves.save_choice import (
    SaveEntry,
    WorkerSaves,
    assign_servers,
    choose_save,
    find_index_server,
)
from pacekeeper.checkpointing.versions import StateVersion


def describe_entry(sequence: int, checkpoint_id: str = "", is_stored: bool = False, world_size: int = 2) -> SaveEntry:
    return SaveEntry(StateVersion(sequence, 1), world_size, checkpoint_id or f"step-{sequence}", is_stored)


def describe_worker(worker: str, entries: Sequence[SaveEntry], *shards: tuple[int, int]) -> WorkerSaves:
    """Of the shards, each is a sequence number and a rank of two."""
    held = frozenset((StateVersion(sequence, 1), 2, rank) for sequence, rank in shards)
    return WorkerSaves(worker, tuple(entries), held)


OLD, NEW = describe_entry(1), describe_entry(2)


@pytest.mark.parametrize(
    ("saves", "chosen"),
    [
        pytest.param(
            [describe_worker("a", [OLD, NEW], (1, 0), (2, 0)), describe_worker("b", [NEW], (1, 1), (2, 1))], 2, id="new"
        ),
        pytest.param(
            [describe_worker("a", [OLD, NEW], (1, 0), (2, 0)), describe_worker("b", [], (1, 1))], 1, id="not complete"
        ),
        pytest.param(
            [describe_worker("a", [OLD], (1, 0), (2, 0)), describe_worker("b", [OLD], (1, 1), (2, 1))], 1, id="no index"
        ),
        pytest.param([describe_worker("a", [NEW], (2, 0)), describe_worker("c", [])], None, id="none"),
        pytest.param([describe_worker("a", [NEW], (2, 0), (2, 1)), describe_worker("c", [])], 2, id="a peer's copy"),
    ],
)
def test_the_newest_save_counts_whose_parts_are_all_there(saves: Sequence[WorkerSaves], chosen: int | None) -> None:
    found = choose_save(saves, lambda _: True)
    assert (found and found.version.step) == chosen


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_older_save_of_the_same_name_does_not_count_if_the_storage_has_a_newer_one(is_stored: bool) -> None:
    entries = [describe_entry(1, "newest"), describe_entry(2, "newest", is_stored)]
    found = choose_save([describe_worker("a", entries, (1, 0), (1, 1), (2, 0))], lambda _: True)
    assert (found is None) == is_stored


def test_one_worker_that_knows_of_the_storage_is_enough() -> None:
    saves = [describe_worker("a", [NEW], (2, 0)), describe_worker("b", [describe_entry(2, is_stored=True)], (2, 1))]
    found = choose_save(saves, lambda _: True)
    assert found is not None
    assert found.is_stored


def test_only_what_is_wanted_counts() -> None:
    saves = [describe_worker("a", [OLD, NEW], (1, 0), (1, 1), (2, 0), (2, 1))]
    assert choose_save(saves, lambda entry: entry.checkpoint_id == "step-1") == OLD


def test_each_shard_is_served_by_its_own_rank_or_by_a_worker_that_has_a_copy() -> None:
    both, first = ((2, 0), (2, 1)), ((2, 0),)
    assert assign_servers(NEW, [describe_worker("a", [], *both), describe_worker("b", [], *both)]) == [0, 1]
    assert assign_servers(NEW, [describe_worker("c", []), describe_worker("b", [], *both)]) == [1, 1]
    ranks_of_a = [describe_worker("a", [], *both)] * 2
    assert assign_servers(NEW, [describe_worker("c", [])] * 2 + ranks_of_a) == [2, 3]
    assert assign_servers(NEW, [describe_worker("a", [], *both), describe_worker("b", [], *first)]) == [0, 0]


def test_the_index_comes_from_a_rank_whose_worker_has_it() -> None:
    assert find_index_server(NEW, [describe_worker("c", [OLD]), describe_worker("b", [OLD, NEW])]) == 1
