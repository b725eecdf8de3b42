"""What scripts ask to be told each so many steps: one rank asks, and all ranks know when it is due. Pure.

Asking has no collective in it, so a script may ask on one rank only. A rank tells its peers of a question once, at the
next ordinal; from then on all of them know at each ordinal whether it is due, and complete a synchronisation together
where one is. What nobody asks any more stays known: a synchronisation is completed at once then, no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .course import crosses_multiple


class DueQuery(NamedTuple):
    """Whether `name` is to happen, each `every` steps of the job."""

    name: str
    every: int


DueQueryReport = list[tuple[str, int, int]]
"""Names, their steps in between, and the job's step up to which they were answered."""


class DueQueries:
    """Of one rank, and what it knows of its peers'."""

    def __init__(self, step: int) -> None:
        """`step`: of the job, at which it begins."""
        self._answered_step = step
        """The job's step at the last ordinal at which every rank could ask."""
        self._shared_queries: dict[DueQuery, int] = {}
        """To all ranks, each with the step up to which it was answered: the same on all of them."""
        self._own_queries: dict[DueQuery, int] = {}
        """To this rank alone so far."""

    def add_query(self, query: DueQuery) -> None:
        if query not in self._shared_queries:
            self._own_queries.setdefault(query, self._answered_step)

    def is_due(self, query: DueQuery, step: int) -> bool:
        """After step `step` of the job: of one that was asked, by what this rank knows."""
        since = self._shared_queries.get(query, self._own_queries.get(query, self._answered_step))
        return crosses_multiple(since, step, query.every)

    def list_due(self, step: int) -> frozenset[DueQuery]:
        """After step `step` of the job: of those that are known, the same on all ranks."""
        return frozenset(question for question, since in self._shared_queries.items() if crosses_multiple(since, step, question.every))

    @property
    def unreported(self) -> DueQueryReport:
        """What the peers do not know yet."""
        return [(*question, since) for question, since in self._own_queries.items()]

    def merge_reports(self, reports: Iterable[DueQueryReport]) -> None:
        """What all ranks have told, this one among them: the same on all of them."""
        for name, every, since in (one for its in reports for one in its):
            question = DueQuery(name, every)
            self._shared_queries[question] = min(since, self._shared_queries.get(question, since))
        self._own_queries = {question: since for question, since in self._own_queries.items() if question not in self._shared_queries}

    def pass_sync_point(self, step: int, all_answered: bool) -> None:
        """An ordinal after step `step` of the job, at which every rank could ask.

        all_answered: also what only the asking rank knows of, as in Sync. Otherwise nothing of it is lost: it is due at
        the next ordinal.
        """
        self._answered_step = step
        self._shared_queries = dict.fromkeys(self._shared_queries, step)
        if all_answered:
            self._own_queries = dict.fromkeys(self._own_queries, step)
