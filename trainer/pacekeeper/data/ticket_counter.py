"""The counter from which the ranks of a job lease their samples: an atomic one in the round's store."""

from __future__ import annotations

import itertools

from pacekeeper.torch_internals import Store

from .leases import ENDLESS_TICKETS

_counter_numbers = itertools.count(1)
_RETAINED_ANSWERS = 1024
"""Number of results that a replica's first rank leaves for the others.

They lag by no more than the microbatches that their loader's workers prefetch.
"""


class TicketCounter:
    """Counter from 0. Its `take` is an argument of `Loader.start_leases`."""

    def __init__(self, store: Store, rank: int, replica_size: int) -> None:
        """Create the counter.

        All ranks create theirs at the same sync points, so that the same counters share a number.

        `store`: store of the round. The ranks of a replica get the same results.
        """
        self._store = store
        self._counter_key = f"pacekeeper/tickets/{next(_counter_numbers)}"
        self._answer_prefix = f"{self._counter_key}/{rank // replica_size}"
        self._is_replica_shared = replica_size > 1
        self._is_replica_leader = rank % replica_size == 0
        self._take_calls = 0

    def close(self) -> None:
        """Leave no tickets for later calls of `take`. Any rank may call it, more than once."""
        self._store.add(self._counter_key, ENDLESS_TICKETS)

    def take(self, count: int) -> int:
        """Return the first of the next `count` tickets. Raises torch's DistError if the store is gone."""
        self._take_calls += 1
        if self._is_replica_shared and not self._is_replica_leader:
            return int(self._store.get(f"{self._answer_prefix}/{self._take_calls}"))
        first: int = self._store.add(self._counter_key, count) - count
        if self._is_replica_shared:
            self._store.set(f"{self._answer_prefix}/{self._take_calls}", str(first))
            if self._take_calls > _RETAINED_ANSWERS:
                self._store.delete_key(f"{self._answer_prefix}/{self._take_calls - _RETAINED_ANSWERS}")
        return first
