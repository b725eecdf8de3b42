"""Queries of scripts whether something is due: one rank may ask, and all ranks compute when it is due. Pure.

A query names an interval in steps. It has no collective in it, so a script may ask on one rank only. A rank reports a
query to its peers once, at the next sync point. From then on all ranks compute at each sync point whether it is due,
and complete a synchronization together if one is. A query that is no longer used stays in the list: its only effect is
that a synchronization completes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .training_config import crosses_multiple


class DueQuery(NamedTuple):
    """Query whether `name` is due, every `every` steps of the job."""

    name: str
    every: int


DueQueryReport = list[tuple[str, int, int]]
"""Queries as name, interval in steps, and the job's step up to which they were answered."""


class DueQueries:
    """Queries of one rank, and those that its peers have reported."""

    def __init__(self, step: int) -> None:
        """Create the queries at step `step` of the job."""
        self._answered_step = step
        """The job's step at the last sync point at which every rank could ask."""
        self._shared_queries: dict[DueQuery, int] = {}
        """Queries that all ranks have, each with the step up to which it was answered: the same on all ranks."""
        self._own_queries: dict[DueQuery, int] = {}
        """Queries that only this rank has so far."""

    def add_query(self, query: DueQuery) -> None:
        if query not in self._shared_queries:
            self._own_queries.setdefault(query, self._answered_step)

    def is_due(self, query: DueQuery, step: int) -> bool:
        """Return whether `query` is due after step `step` of the job, by what this rank has."""
        answered = self._shared_queries.get(query, self._own_queries.get(query, self._answered_step))
        return crosses_multiple(answered, step, query.every)

    def list_due(self, step: int) -> frozenset[DueQuery]:
        """Return the shared queries that are due after step `step` of the job: the same on all ranks."""
        return frozenset(
            query for query, answered in self._shared_queries.items() if crosses_multiple(answered, step, query.every)
        )

    @property
    def unreported(self) -> DueQueryReport:
        """Queries that the peers do not have yet."""
        return [(*query, answered) for query, answered in self._own_queries.items()]

    def merge_reports(self, reports: Iterable[DueQueryReport]) -> None:
        """Add the reports of all ranks, including this one: the same on all of them."""
        for name, every, answered in (entry for report in reports for entry in report):
            query = DueQuery(name, every)
            self._shared_queries[query] = min(answered, self._shared_queries.get(query, answered))
        self._own_queries = {
            query: answered for query, answered in self._own_queries.items() if query not in self._shared_queries
        }

    def pass_sync_point(self, step: int, all_answered: bool) -> None:
        """Record a sync point after step `step` of the job at which every rank could ask.

        `all_answered`: also queries that only this rank has were answered, as in Sync. Otherwise none of them is lost:
        it is due at the next sync point.
        """
        self._answered_step = step
        self._shared_queries = dict.fromkeys(self._shared_queries, step)
        if all_answered:
            self._own_queries = dict.fromkeys(self._own_queries, step)
