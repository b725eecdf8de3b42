"""The counter that the ranks of a job lease their samples from: an atomic one in the store of the round."""

from __future__ import annotations

import itertools

from pacekeeper.torch_internals import Store

from .leases import ENDLESS

_numbers = itertools.count(1)
_KEPT = 1024
"""Answers that a replica's first rank leaves for the others, who are never so far behind it: by no more than the
microbatches that its loader's workers prefetch."""


class Tickets:
    """Counts from 0. Its `take` is what `Loader.start_leases` wants."""

    def __init__(self, store: Store, rank: int, replica_size: int) -> None:
        """All ranks make theirs at the same ordinals: that is how they know which is which.

        store: of the round. The ranks of a replica get the same answers.
        """
        self._store = store
        self._counter = f"pacekeeper/tickets/{next(_numbers)}"
        self._answers = f"{self._counter}/{rank // replica_size}"
        self._shared = replica_size > 1
        self._answers_for_others = rank % replica_size == 0
        self._taken = 0

    def close(self) -> None:
        """Whoever takes from now on finds nothing left. Any rank may say so, more than once."""
        self._store.add(self._counter, ENDLESS)

    def take(self, count: int) -> int:
        """The first of the next `count` tickets. Raises torch's DistError where the store is gone."""
        self._taken += 1
        if self._shared and not self._answers_for_others:
            return int(self._store.get(f"{self._answers}/{self._taken}"))
        first: int = self._store.add(self._counter, count) - count
        if self._shared:
            self._store.set(f"{self._answers}/{self._taken}", str(first))
            if self._taken > _KEPT:
                self._store.delete_key(f"{self._answers}/{self._taken - _KEPT}")
        return first
