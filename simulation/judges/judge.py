"""A judge sits through a run: it is told of every change, looks at the world now and then, and says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import behaviour, bookkeeping, end, nodes, promises, training, truth
from .record import ClusterHistory
from .rules import MAX_REQUEST_DELAY_SECONDS, Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..schedule import Schedule
    from ..world import World

CHECK_INTERVAL_SECONDS = 5.0
ALL_RULES: tuple[type[Rule], ...] = (
    *bookkeeping.BOOKKEEPING_RULES,
    *promises.WRITE_AHEAD_RULES,
    *nodes.NODE_RULES,
    *behaviour.BEHAVIOR_RULES,
    *training.TRAINING_RULES,
    *truth.STATUS_RULES,
)


@dataclass(frozen=True)
class Violation:
    """Of an invariant."""

    time: float  # virtual seconds
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.time:.3f} s: {self.rule}: {self.message}"


class Checker:
    """Of one run. `patience`: seconds for which a job that can train may stand still; `rules`: those that it knows."""

    def __init__(
        self, world: World, schedule: Schedule, patience: float = math.inf, rules: Iterable[type[Rule]] = ALL_RULES
    ) -> None:
        self.violations: list[Violation] = []
        """Each kind of trouble once, as it was when it showed first."""
        self._world = world
        self._schedule = schedule
        self._history = ClusterHistory(world.now, patience)
        for node in world.api.list_all("nodes"):
            self._history.record_node(node, world.now())
        self._rules = [rule(world, self._history) for rule in rules]
        self._listeners: dict[str, list[Rule]] = {}
        for rule in self._rules:
            for kind in rule.kinds:
                self._listeners.setdefault(kind, []).append(rule)
        world.api.subscribe(self._check_change)
        world.call_after(CHECK_INTERVAL_SECONDS, self._check_world)

    @property
    def restarts(self) -> int:
        """That all jobs have counted so far."""
        return sum(job.restarts for job in self._history.jobs.values())

    def check_end(self) -> list[str]:
        """What is not yet as it shall be when all faults are over and time has passed; []: all is well."""
        return list(end.find_unsettled(self._world, self._history, self._schedule))

    def _check_change(self, change: ObjectChange) -> None:
        self._history.record_change(change)
        restored = change.time - self._history.restored_at <= MAX_REQUEST_DELAY_SECONDS
        for rule in self._listeners.get(change.plural, ()):
            if restored and rule.by_history:
                continue
            for words in rule.check_change(change):
                self._report_violation(rule, words)

    def _check_world(self) -> None:
        for rule in self._rules:
            for words in rule.check_world():
                self._report_violation(rule, words)
        self._world.call_after(CHECK_INTERVAL_SECONDS, self._check_world)

    def _report_violation(self, rule: Rule, words: str) -> None:
        found = Violation(self._world.now(), rule.description, words)
        if all((known.rule, known.message) != (found.rule, found.message) for known in self.violations):
            self.violations.append(found)
            self._world.log.record("judge", f"{rule.description}: {words}")


def start_checker(world: World, schedule: Schedule, patience: float = math.inf) -> Checker:
    """Before anything happens in `world`."""
    return Checker(world, schedule, patience)
