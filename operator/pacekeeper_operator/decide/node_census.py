"""How all nodes that are blamed or quarantined stand: what breaker, budget and turns for probes go by.

Kept as suspicions come and go, so that judging one of a thousand costs no look at the others. Who is judged never
counts among the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..api import QuarantineCondition, QuarantinePhase, NodeSuspicion, QuarantineVerdict, Witness
from .node_probes import is_refused_for_room
from .node_steps import Quarantine, QuarantineRules

SIMULTANEOUS_FAILURE_SECONDS = 60.0
"""Nodes that are blamed within so long of each other fail at once."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class _NodeUsage:
    """Of one node."""

    approved: bool = False
    awaits_approval: bool = False  # a person is, for approval
    probing: bool = False  # as a suspicion
    blamed_spans: tuple[_Span, ...] = ()  # whoever is blamed within one of these fails at once with it; apart, in order
    cleared_at: float | None = None  # a probe has shown that it is well; None: it is not settled
    held_by_breaker: bool = False  # as one of many that failed at once, and not settled


_NO_USAGE = _NodeUsage()


@dataclass
class _SpanSet:
    """Spans of time. Those of one node lie apart."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, spans: Iterable[_Span]) -> None:
        for begin, end in spans:
            insort(self.begins, begin)
            insort(self.ends, end)

    def remove(self, spans: Iterable[_Span]) -> None:
        for begin, end in spans:
            del self.begins[bisect_left(self.begins, begin)]
            del self.ends[bisect_left(self.ends, end)]

    def count(self, at: float) -> int:
        """How many hold that moment."""
        return bisect_right(self.begins, at) - bisect_left(self.ends, at)


@dataclass
class QuarantineUsage:
    """Of all NodeQuarantines."""

    _usage_by_node: dict[str, _NodeUsage] = field(default_factory=dict)
    _granted: set[str] = field(default_factory=set)
    _blamed_spans: _SpanSet = field(default_factory=_SpanSet)  # of all that are blamed
    _unsettled_spans: _SpanSet = field(default_factory=_SpanSet)  # of those that are not settled
    _approved_count: int = 0
    _awaiting_approval_count: int = 0
    _probing_count: int = 0
    _held_count: int = 0

    @classmethod
    def from_quarantines(cls, quarantines: Iterable[Quarantine]) -> QuarantineUsage:
        census = cls()
        for quarantine in quarantines:
            census.update(quarantine)
        return census

    def update(self, quarantine: Quarantine) -> None:
        """As it is now."""
        self._set_usage(quarantine.name, _compute_usage(quarantine))

    def remove(self, name: str) -> None:
        """It is gone, and whatever was on its way to it."""
        self._granted.discard(name)
        self._set_usage(name, _NO_USAGE)

    def grant(self, name: str) -> None:
        """An approval is on its way: it counts from now on, whatever else is heard of the node meanwhile."""
        self._granted.add(name)
        self._set_usage(name, self._usage_by_node.get(name, _NO_USAGE))

    def settle(self, quarantine: Quarantine | None, name: str) -> None:
        """What has become of that approval is known."""
        self._granted.discard(name)
        self._set_usage(name, _NO_USAGE if quarantine is None else _compute_usage(quarantine))

    def count_failing_together(self, quarantine: Quarantine) -> int:
        """How many nodes are blamed at about the same time as this one, itself included. One that a probe has cleared
        since counts on: that it is well again shows nothing of those that failed with it."""
        own = self._usage_by_node.get(quarantine.name, _NO_USAGE).blamed_spans
        return 1 + max((self._blamed_spans.count(at) - _contains_time(own, at) for at in _list_open_sign_times(quarantine)), default=0)

    def count_unsettled(self, quarantine: Quarantine) -> int:
        """How many nodes besides this one failed with many, and are neither cleared by a probe nor given up."""
        own = self._usage_by_node.get(quarantine.name, _NO_USAGE)
        blamed = own.blamed_spans if own.cleared_at is None else ()
        at_once = max((self._unsettled_spans.count(at) - _contains_time(blamed, at) for at in _list_open_sign_times(quarantine)), default=0)
        return max(at_once, self._held_count - own.held_by_breaker)

    def get_last_cleared_at(self, name: str) -> float:
        """When the last of the others was cleared; 0: none is known."""
        return max((s.cleared_at or 0.0 for other, s in self._usage_by_node.items() if other != name), default=0.0)

    def count_used_budget(self, name: str, *, include_requests: bool) -> int:
        """Of the budget, by others. `asked_too`: requests to a person count as well."""
        own = self._usage_by_node.get(name, _NO_USAGE)
        count = self._approved_count - own.approved
        if include_requests:
            count += self._awaiting_approval_count - own.awaits_approval
        return count

    def count_probing(self, name: str) -> int:
        """Other suspicions whose probes run."""
        return self._probing_count - self._usage_by_node.get(name, _NO_USAGE).probing

    def _set_usage(self, name: str, usage: _NodeUsage) -> None:
        if name in self._granted:
            usage = replace(usage, approved=True, asked=False)
        before = self._usage_by_node.pop(name, _NO_USAGE)
        if usage != _NO_USAGE:
            self._usage_by_node[name] = usage
        self._approved_count += usage.approved - before.approved
        self._awaiting_approval_count += usage.awaits_approval - before.awaits_approval
        self._probing_count += usage.probing - before.probing
        self._held_count += usage.held_by_breaker - before.held_by_breaker
        if (usage.blamed_spans, usage.cleared_at) != (before.blamed_spans, before.cleared_at):
            self._blamed_spans.remove(before.blamed_spans)
            self._blamed_spans.add(usage.blamed_spans)
            self._unsettled_spans.remove(before.blamed_spans if before.cleared_at is None else ())
            self._unsettled_spans.add(usage.blamed_spans if usage.cleared_at is None else ())


def _contains_time(spans: Iterable[_Span], at: float) -> bool:
    return any(begin <= at <= end for begin, end in spans)


def _list_sign_times(signs: Iterable[NodeSuspicion]) -> list[float]:
    """When they were said, in order: first and last by each namespace, so that what is said again unsays nothing."""
    return sorted({at for sign in signs for at in (sign.first_reported_at, sign.at)})


def _list_open_sign_times(quarantine: Quarantine) -> list[float]:
    """Moments at which it was blamed, that no probe has refuted."""
    return [at for at in _list_sign_times(quarantine.open_signs) if at > (quarantine.cleared_at or 0.0)]


def is_worth_probing(quarantine: Quarantine) -> bool:
    """The platform looks at a node for one strong sign, or for weak ones of two namespaces."""
    return _has_enough_signs(quarantine.open_signs)


def _has_enough_signs(signs: Sequence[NodeSuspicion]) -> bool:
    return any(not sign.weak for sign in signs) or len(signs) > 1


def is_unverifiable(quarantine: Quarantine) -> bool:
    """Nobody but jobs has ever spoken against the node, and no probe can: the last two were refused for want of room.

    So one namespace that holds all GPUs of some nodes could keep them blamed for as long as it likes. Two probes are a
    minute apart at least. Whatever many nodes have in common shows within that time: they are not Ready, or GPU series
    show what has become of them, which are read a while after their jobs complain. One refusal comes within a second.
    """
    if any(sign.witness is not Witness.NONE for sign in quarantine.open_signs):
        return False
    if any(c.type == QuarantineCondition.WITNESSED and c.status == "True" for c in quarantine.status.conditions):
        return False
    ended = [probe for probe in quarantine.status.probes if probe.finished is not None]
    return len(ended) > 1 and all(is_refused_for_room(probe) for probe in ended[-2:])


def _compute_usage(quarantine: Quarantine) -> _NodeUsage:
    blamed, cleared_at = _compute_blamed_spans(quarantine), quarantine.cleared_at
    return _NodeUsage(
        approved=quarantine.spec.approved,
        awaits_approval=not quarantine.spec.approved and quarantine.status.phase is QuarantinePhase.PENDING,
        probing=quarantine.is_suspicion and quarantine.is_probing,
        blamed_spans=blamed,
        cleared_at=cleared_at if blamed else None,
        held_by_breaker=bool(blamed) and cleared_at is None and quarantine.verdict is QuarantineVerdict.BREAKER,
    )


def _compute_blamed_spans(quarantine: Quarantine) -> tuple[_Span, ...]:
    """One that no probe can look at is blamed by words only, and so is one by what is said after a probe has cleared
    it."""
    cleared_at = math.inf if quarantine.cleared_at is None else quarantine.cleared_at
    signs = [sign for sign in quarantine.spec.signs if sign.first_reported_at <= cleared_at]
    if quarantine.is_over or not _has_enough_signs(signs) or is_unverifiable(quarantine):
        return ()
    spans: list[_Span] = []
    for at in (at for at in _list_sign_times(signs) if at <= cleared_at):
        begin, end = at - SIMULTANEOUS_FAILURE_SECONDS, at + SIMULTANEOUS_FAILURE_SECONDS
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return tuple(spans)


@dataclass(frozen=True)
class QuarantineContext:
    """The cluster around one NodeQuarantine."""

    rules: QuarantineRules = field(default_factory=QuarantineRules)
    usage: QuarantineUsage = field(default_factory=QuarantineUsage)
    node_count: int = 0  # of the whole cluster; 0: not known
    pause_reason: str = ""  # why remedies are paused; "": they are not

    @property
    def is_breaker_disabled(self) -> bool:
        """The breaker is set so that it cannot trip in this cluster."""
        return 0 < self.node_count < self.rules.breaker_nodes
