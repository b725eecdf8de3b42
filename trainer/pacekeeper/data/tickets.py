"""The counter that the ranks of a job lease their samples from: an atomic one in the store of the round."""

from __future__ import annotations

import itertools

from pacekeeper.torch_internals import Store

from .leases import ENDLESS_TICKETS

_counter_numbers = itertools.count(1)
_RETAINED_ANSWERS = 1024
"""Answers that a replica's first rank leaves for the others, who are never so far behind it: by no more than the
microbatches that its loader's workers prefetch."""


class TicketCounter:
    """Counts from 0. Its `take` is what `Loader.start_leases` wants."""

    def __init__(self, store: Store, rank: int, replica_size: int) -> None:
        """All ranks make theirs at the same ordinals: that is how they know which is which.

        store: of the round. The ranks of a replica get the same answers.
        """
        self._store = store
        self._counter_key = f"pacekeeper/tickets/{next(_counter_numbers)}"
        self._answer_prefix = f"{self._counter_key}/{rank // replica_size}"
        self._is_replica_shared = replica_size > 1
        self._is_replica_leader = rank % replica_size == 0
        self._take_calls = 0

    def close(self) -> None:
        """Whoever takes from now on finds nothing left. Any rank may say so, more than once."""
        self._store.add(self._counter_key, ENDLESS_TICKETS)

    def take(self, count: int) -> int:
        """The first of the next `count` tickets. Raises torch's DistError where the store is gone."""
        self._take_calls += 1
        if self._is_replica_shared and not self._is_replica_leader:
            return int(self._store.get(f"{self._answer_prefix}/{self._take_calls}"))
        first: int = self._store.add(self._counter_key, count) - count
        if self._is_replica_shared:
            self._store.set(f"{self._answer_prefix}/{self._take_calls}", str(first))
            if self._take_calls > _RETAINED_ANSWERS:
                self._store.delete_key(f"{self._answer_prefix}/{self._take_calls - _RETAINED_ANSWERS}")
        return first
