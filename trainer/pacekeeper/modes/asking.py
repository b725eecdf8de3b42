"""What scripts ask to be told each so many steps: one rank asks, and all ranks know when it is due. Pure.

Asking has no collective in it, so a script may ask on one rank only. A rank tells its peers of a question once, at the
next ordinal; from then on all of them know at each ordinal whether it is due, and complete a synchronisation together
where one is. What nobody asks any more stays known: a synchronisation is completed at once then, no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .course import crossed


class Question(NamedTuple):
    """Whether `name` is to happen, each `every` steps of the job."""

    name: str
    every: int


Told = list[tuple[str, int, int]]
"""Names, their steps in between, and the job's step up to which they were answered."""


class Questions:
    """Of one rank, and what it knows of its peers'."""

    def __init__(self, step: int) -> None:
        """`step`: of the job, at which it begins."""
        self._answered = step
        """The job's step at the last ordinal at which every rank could ask."""
        self._known: dict[Question, int] = {}
        """To all ranks, each with the step up to which it was answered: the same on all of them."""
        self._new: dict[Question, int] = {}
        """To this rank alone so far."""

    def ask(self, question: Question) -> None:
        if question not in self._known:
            self._new.setdefault(question, self._answered)

    def is_due(self, question: Question, step: int) -> bool:
        """After step `step` of the job: of one that was asked, by what this rank knows."""
        since = self._known.get(question, self._new.get(question, self._answered))
        return crossed(since, step, question.every)

    def due(self, step: int) -> frozenset[Question]:
        """After step `step` of the job: of those that are known, the same on all ranks."""
        return frozenset(question for question, since in self._known.items() if crossed(since, step, question.every))

    @property
    def to_tell(self) -> Told:
        """What the peers do not know yet."""
        return [(*question, since) for question, since in self._new.items()]

    def learn(self, told: Iterable[Told]) -> None:
        """What all ranks have told, this one among them: the same on all of them."""
        for name, every, since in (one for its in told for one in its):
            question = Question(name, every)
            self._known[question] = min(since, self._known.get(question, since))
        self._new = {question: since for question, since in self._new.items() if question not in self._known}

    def pass_ordinal(self, step: int, all_answered: bool) -> None:
        """An ordinal after step `step` of the job, at which every rank could ask.

        all_answered: also what only the asking rank knows of, as in Sync. Otherwise nothing of it is lost: it is due at
        the next ordinal.
        """
        self._answered = step
        self._known = dict.fromkeys(self._known, step)
        if all_answered:
            self._new = dict.fromkeys(self._new, step)
