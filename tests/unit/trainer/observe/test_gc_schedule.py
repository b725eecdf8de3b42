"""Garbage is collected at the planned steps and at no others, and collections are timed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pacekeeper.observe.gc_schedule import GCSchedule
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.gc_timing import time_collections

Collections = list[tuple[int, int, int]]


class Node:
    """Belongs to a cycle that only the collector takes apart."""

    def __init__(self) -> None:
        self.me = self


def make_garbage() -> None:
    """Make ten times the garbage that automatic collection waits for."""
    for _ in range(10 * max(gc.get_threshold()[0], 100)):
        Node()


@pytest.fixture
def collections() -> Iterator[Collections]:
    """Of the whole process, from a clean start, and automatic again in the end."""
    gc.collect()
    found: Collections = []
    stop = time_collections(lambda start, end, generation: found.append((start, end, generation)))
    yield found
    stop()
    gc.enable()


def test_automatic_collection_is_off_between_the_planned_steps(collections: Collections) -> None:
    planned = GCSchedule()
    for step in range(1, 13):
        collections.clear()
        planned.collect_if_due(step, every=5)
        assert [generation for *_, generation in collections] == ([2] if step in (5, 10) else [])
        make_garbage()
        assert len(collections) == (1 if step in (5, 10) else 0)


def test_zero_restores_automatic_collection(collections: Collections) -> None:
    planned = GCSchedule()
    planned.collect_if_due(1, every=5)
    assert not gc.isenabled()
    planned.collect_if_due(2, every=0)
    assert gc.isenabled()
    make_garbage()
    assert collections


def test_collection_stays_off_if_the_script_switched_it_off(collections: Collections) -> None:
    gc.disable()
    planned = GCSchedule()
    planned.collect_if_due(1, every=5)
    planned.collect_if_due(2, every=0)
    assert not gc.isenabled()
    assert not collections


def test_a_multiple_that_was_skipped_counts(collections: Collections) -> None:
    """Where steps are counted by samples, a boundary may come some steps after the last."""
    planned = GCSchedule()
    collected = []
    for step in (10, 13, 17, 21, 22, 44, 45):
        collections.clear()
        planned.collect_if_due(step, every=10)
        collected += [step] * len(collections)
    assert collected == [10, 21, 44]


def test_another_plan_begins_at_the_step_where_it_arrives(collections: Collections) -> None:
    planned = GCSchedule()
    planned.collect_if_due(1, every=100)
    for step, every in ((99, 3), (100, 3), (102, 3)):
        planned.collect_if_due(step, every)
    assert len(collections) == 2


def test_a_forked_process_collects_automatically() -> None:
    """A DataLoader's worker reaches no boundary, and would hold all its garbage."""
    planned = GCSchedule()
    planned.collect_if_due(1, every=5)
    assert not gc.isenabled()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not gc.isenabled()
    planned.collect_if_due(2, every=0)


def test_the_timer_leaves_short_collections_out_and_ends() -> None:
    long: list[Any] = []
    stop = time_collections(lambda *collection: long.append(collection), min_ns=10**12)
    every: list[Any] = []
    stop_every = time_collections(lambda *collection: every.append(collection))
    gc.collect(1)
    stop()
    stop_every()
    gc.collect()
    assert not long
    assert [generation for *_, generation in every] == [1]
    assert all(start <= end for start, end, _ in every)


def test_a_negative_interval_is_rejected() -> None:
    with pytest.raises(InputError, match="gc_every=-1 must be 0"):
        GCSchedule().collect_if_due(1, every=-1)
