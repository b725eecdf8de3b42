"""The checker of a run: it receives every change, checks the world periodically, and collects violations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..kubernetes.api.changes import ObjectChange
from ..schedule import Schedule
from ..world import World
from . import behavior, bookkeeping, end_state, nodes, status_accuracy, training, write_ahead
from .cluster_history import ClusterHistory
from .rule import MAX_REQUEST_DELAY_SECONDS, Rule

CHECK_INTERVAL_SECONDS = 5.0
ALL_RULES: tuple[type[Rule], ...] = (
    *bookkeeping.BOOKKEEPING_RULES,
    *write_ahead.WRITE_AHEAD_RULES,
    *nodes.NODE_RULES,
    *behavior.BEHAVIOR_RULES,
    *training.TRAINING_RULES,
    *status_accuracy.STATUS_RULES,
)


@dataclass(frozen=True)
class Violation:
    """A violation of an invariant."""

    time: float  # virtual seconds
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.time:.3f} s: {self.rule}: {self.message}"


class Checker:
    """Checks one run.

    `patience`: seconds for which a job that can train may make no progress; `rules`: the invariants to check.
    """

    def __init__(
        self, world: World, schedule: Schedule, patience: float = math.inf, rules: Iterable[type[Rule]] = ALL_RULES
    ) -> None:
        self.violations: list[Violation] = []
        """Violations, each distinct one once, at its first occurrence."""
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
        """Number of restarts that all jobs have counted so far."""
        return sum(job.restarts for job in self._history.jobs.values())

    def check_end(self) -> list[str]:
        """Return what is not settled after all faults have ended and time has passed; []: everything is."""
        return list(end_state.find_unsettled(self._world, self._history, self._schedule))

    def _check_change(self, change: ObjectChange) -> None:
        self._history.record_change(change)
        restored = change.time - self._history.restored_at <= MAX_REQUEST_DELAY_SECONDS
        for rule in self._listeners.get(change.plural, ()):
            if restored and rule.by_history:
                continue
            for message in rule.check_change(change):
                self._report_violation(rule, message)

    def _check_world(self) -> None:
        for rule in self._rules:
            for message in rule.check_world():
                self._report_violation(rule, message)
        self._world.call_after(CHECK_INTERVAL_SECONDS, self._check_world)

    def _report_violation(self, rule: Rule, message: str) -> None:
        violation = Violation(self._world.now(), rule.description, message)
        if all(
            (reported.rule, reported.message) != (violation.rule, violation.message) for reported in self.violations
        ):
            self.violations.append(violation)
            self._world.log.record("judge", f"{rule.description}: {message}")


def start_checker(world: World, schedule: Schedule, patience: float = math.inf) -> Checker:
    """Start a checker. Call it before anything happens in `world`."""
    return Checker(world, schedule, patience)
