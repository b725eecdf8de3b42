"""A judge sits through a run: it is told of every change, looks at the world now and then, and says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import behaviour, bookkeeping, end, nodes, promises, training, truth
from .record import Record
from .rules import UNDER_WAY_SECONDS, Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..schedule import Schedule
    from ..world import World

LOOK_SECONDS = 5.0
RULES: tuple[type[Rule], ...] = (
    *bookkeeping.RULES,
    *promises.RULES,
    *nodes.RULES,
    *behaviour.RULES,
    *training.RULES,
    *truth.RULES,
)


@dataclass(frozen=True)
class Violation:
    """Of an invariant."""

    at: float  # virtual seconds
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.rule}: {self.words}"


class Judge:
    """Of one run. `patience`: seconds for which a job that can train may stand still; `rules`: those that it knows."""

    def __init__(
        self, world: World, schedule: Schedule, patience: float = math.inf, rules: Iterable[type[Rule]] = RULES
    ) -> None:
        self.violations: list[Violation] = []
        """Each kind of trouble once, as it was when it showed first."""
        self._world = world
        self._schedule = schedule
        self._record = Record(world.now, patience)
        for node in world.api.all("nodes"):
            self._record.take_node(node, world.now())
        self._rules = [rule(world, self._record) for rule in rules]
        self._listeners: dict[str, list[Rule]] = {}
        for rule in self._rules:
            for kind in rule.kinds:
                self._listeners.setdefault(kind, []).append(rule)
        world.api.subscribe(self._hear)
        world.after(LOOK_SECONDS, self._look)

    @property
    def restarts(self) -> int:
        """That all jobs have counted so far."""
        return sum(job.restarts for job in self._record.jobs.values())

    def at_end(self) -> list[str]:
        """What is not yet as it shall be when all faults are over and time has passed; []: all is well."""
        return list(end.unsettled(self._world, self._record, self._schedule))

    def _hear(self, change: Change) -> None:
        self._record.hear(change)
        restored = change.at - self._record.restored_at <= UNDER_WAY_SECONDS
        for rule in self._listeners.get(change.plural, ()):
            if restored and rule.by_history:
                continue
            for words in rule.heard(change):
                self._complain(rule, words)

    def _look(self) -> None:
        for rule in self._rules:
            for words in rule.looked():
                self._complain(rule, words)
        self._world.after(LOOK_SECONDS, self._look)

    def _complain(self, rule: Rule, words: str) -> None:
        found = Violation(self._world.now(), rule.words, words)
        if all((known.rule, known.words) != (found.rule, found.words) for known in self.violations):
            self.violations.append(found)
            self._world.story.tell("judge", f"{rule.words}: {words}")


def watch(world: World, schedule: Schedule, patience: float = math.inf) -> Judge:
    """Before anything happens in `world`."""
    return Judge(world, schedule, patience)
