"""The ranks of a replica get the same tickets, however far the first of them is ahead."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from pacekeeper.data import ticket_counter
from pacekeeper.data.leases import ENDLESS_TICKETS
from pacekeeper.data.ticket_counter import TicketCounter


def build_counters(
    store: HashStore, ranks: int, replica_size: int, monkeypatch: pytest.MonkeyPatch
) -> list[TicketCounter]:
    """Build them as if each rank were a process of its own."""
    found = []
    for rank in range(ranks):
        monkeypatch.setattr(ticket_counter, "_counter_numbers", itertools.count(1))
        found.append(TicketCounter(store, rank, replica_size))
    return found


def test_each_ticket_goes_to_one_replica_and_to_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = build_counters(HashStore(), 4, 2, monkeypatch)
    taken = [[rank.take(3) for rank in ranks] for _ in range(5)]
    assert taken == [[first, first, first + 3, first + 3] for first in range(0, 30, 6)]


def test_a_rank_that_is_far_behind_finds_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a loader prefetch, for example 8 of them with 32 microbatches each."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))  # of a wait for an answer that is gone
    first, mate = build_counters(store, 2, 2, monkeypatch)
    taken = [first.take(2) for _ in range(300)]
    assert [mate.take(2) for _ in range(300)] == taken == list(range(0, 600, 2))


def test_any_rank_may_end_the_tickets_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, mate, other, last = build_counters(HashStore(), 4, 2, monkeypatch)
    assert [first.take(3), mate.take(3)] == [0, 0]
    last.close()
    mate.close()
    assert all(rank.take(1) >= ENDLESS_TICKETS for rank in (other, last, first, mate))


def test_old_answers_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store lives as long as the round."""
    store = HashStore()
    first, mate = build_counters(store, 2, 2, monkeypatch)
    before = store.num_keys()
    for _ in range(3000):
        first.take(1)
        mate.take(1)
    assert store.num_keys() - before < 1500
