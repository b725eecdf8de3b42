"""Quarantine usage: counts of blamed and quarantined nodes, which breaker, budget, and probe concurrency depend on.

The counts are updated with each NodeQuarantine, so that a decision about one of a thousand need not visit the others.
The node that is decided on never counts among the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...api.conditions import QuarantineCondition
from ...api.node_quarantine import NodeSuspicion, QuarantinePhase, QuarantineVerdict, Witness
from .node_probes import is_refused_for_room
from .quarantine_steps import Quarantine, QuarantineRules

SIMULTANEOUS_FAILURE_SECONDS = 60.0
"""Seconds within which nodes that are blamed count as failing together."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class _NodeUsage:
    """What one node counts for."""

    approved: bool = False
    awaits_approval: bool = False  # a person must approve its quarantine
    probing: bool = False  # a probe of its suspicion is running
    blamed_spans: tuple[_Span, ...] = ()  # a node blamed within one of these fails together with it; disjoint, in order
    cleared_at: float | None = None  # when a probe passed; None: it is not settled
    held_by_breaker: bool = False  # as one of many that failed together, and not settled


_NO_USAGE = _NodeUsage()


@dataclass
class _SpanSet:
    """A multiset of time spans. Those of one node are disjoint."""

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
        """Return how many spans contain this time."""
        return bisect_right(self.begins, at) - bisect_left(self.ends, at)


@dataclass
class QuarantineUsage:
    """The counts over all NodeQuarantines."""

    _usage_by_node: dict[str, _NodeUsage] = field(default_factory=dict)
    _granted: set[str] = field(default_factory=set)
    _blamed_spans: _SpanSet = field(default_factory=_SpanSet)  # of all blamed nodes
    _unsettled_spans: _SpanSet = field(default_factory=_SpanSet)  # of the blamed nodes that are not settled
    _approved_count: int = 0
    _awaiting_approval_count: int = 0
    _probing_count: int = 0
    _held_count: int = 0

    @classmethod
    def from_quarantines(cls, quarantines: Iterable[Quarantine]) -> QuarantineUsage:
        usage = cls()
        for quarantine in quarantines:
            usage.update(quarantine)
        return usage

    def update(self, quarantine: Quarantine) -> None:
        """Count the NodeQuarantine as it is now."""
        self._set_usage(quarantine.name, _compute_usage(quarantine))

    def remove(self, name: str) -> None:
        """Remove a NodeQuarantine that is gone, with its pending approval."""
        self._granted.discard(name)
        self._set_usage(name, _NO_USAGE)

    def grant(self, name: str) -> None:
        """Count an approval that is being written, regardless of older states of the object that arrive until then."""
        self._granted.add(name)
        self._set_usage(name, self._usage_by_node.get(name, _NO_USAGE))

    def settle(self, quarantine: Quarantine | None, name: str) -> None:
        """End a pending approval: `quarantine` shows its outcome; None: the object is gone."""
        self._granted.discard(name)
        self._set_usage(name, _NO_USAGE if quarantine is None else _compute_usage(quarantine))

    def count_failing_together(self, quarantine: Quarantine) -> int:
        """Return how many nodes are blamed at about the same time as this one, itself included.

        A node that a probe has cleared since still counts: its recovery shows nothing about those that failed with it.
        """
        own_spans = self._usage_by_node.get(quarantine.name, _NO_USAGE).blamed_spans
        return 1 + max(
            (self._blamed_spans.count(at) - _contains_time(own_spans, at) for at in _list_open_sign_times(quarantine)),
            default=0,
        )

    def count_unsettled(self, quarantine: Quarantine) -> int:
        """Return how many other nodes failed with many, and are neither cleared by a probe nor dropped."""
        own_usage = self._usage_by_node.get(quarantine.name, _NO_USAGE)
        blamed = own_usage.blamed_spans if own_usage.cleared_at is None else ()
        at_once = max(
            (self._unsettled_spans.count(at) - _contains_time(blamed, at) for at in _list_open_sign_times(quarantine)),
            default=0,
        )
        return max(at_once, self._held_count - own_usage.held_by_breaker)

    def get_last_cleared_at(self, name: str) -> float | None:
        """Return when the last of the other nodes was cleared; None: none is known."""
        times = (usage.cleared_at for node, usage in self._usage_by_node.items() if node != name)
        return max((at for at in times if at is not None), default=None)

    def count_used_budget(self, name: str, *, include_requests: bool) -> int:
        """Return how much of the budget other nodes use. `include_requests`: requests for approval count as well."""
        own_usage = self._usage_by_node.get(name, _NO_USAGE)
        count = self._approved_count - own_usage.approved
        if include_requests:
            count += self._awaiting_approval_count - own_usage.awaits_approval
        return count

    def count_probing(self, name: str) -> int:
        """Return how many other suspicions have a running probe."""
        return self._probing_count - self._usage_by_node.get(name, _NO_USAGE).probing

    def _set_usage(self, name: str, usage: _NodeUsage) -> None:
        if name in self._granted:
            usage = replace(usage, approved=True, awaits_approval=False)
        previous = self._usage_by_node.pop(name, _NO_USAGE)
        if usage != _NO_USAGE:
            self._usage_by_node[name] = usage
        self._approved_count += usage.approved - previous.approved
        self._awaiting_approval_count += usage.awaits_approval - previous.awaits_approval
        self._probing_count += usage.probing - previous.probing
        self._held_count += usage.held_by_breaker - previous.held_by_breaker
        if (usage.blamed_spans, usage.cleared_at) != (previous.blamed_spans, previous.cleared_at):
            self._blamed_spans.remove(previous.blamed_spans)
            self._blamed_spans.add(usage.blamed_spans)
            self._unsettled_spans.remove(previous.blamed_spans if previous.cleared_at is None else ())
            self._unsettled_spans.add(usage.blamed_spans if usage.cleared_at is None else ())


def _contains_time(spans: Iterable[_Span], at: float) -> bool:
    return any(begin <= at <= end for begin, end in spans)


def _list_sign_times(signs: Iterable[NodeSuspicion]) -> list[float]:
    """Return when the signs came, in order: each namespace's first and last, so that a repetition hides nothing."""
    return sorted({at for sign in signs for at in (sign.first_reported_at, sign.at)})


def _list_open_sign_times(quarantine: Quarantine) -> list[float]:
    """Return the times at which the node was blamed, and which no probe has refuted."""
    return [at for at in _list_sign_times(quarantine.open_signs) if at > (quarantine.cleared_at or 0.0)]


def is_worth_probing(quarantine: Quarantine) -> bool:
    """Return whether the signs justify a probe: one strong sign, or weak signs from two namespaces."""
    return _has_enough_signs(quarantine.open_signs)


def _has_enough_signs(signs: Sequence[NodeSuspicion]) -> bool:
    return any(not sign.weak for sign in signs) or len(signs) > 1


def is_unverifiable(quarantine: Quarantine) -> bool:
    """Return whether only jobs blame the node, and no probe can confirm it: the last two were refused for lack of room.

    Otherwise one namespace that holds all GPUs of some nodes could keep them blamed indefinitely. Two refusals are
    required because they are a minute apart at least, while one comes within a second. A fault that many nodes share
    shows within that minute: they are not Ready, or their GPU series, read a while after the jobs' reports, show it.
    """
    if any(sign.witness is not Witness.NONE for sign in quarantine.open_signs):
        return False
    if any(c.type == QuarantineCondition.WITNESSED and c.status == "True" for c in quarantine.status.conditions):
        return False
    ended = [probe for probe in quarantine.status.probes if probe.finished is not None]
    return len(ended) > 1 and all(is_refused_for_room(probe) for probe in ended[-2:])


def _compute_usage(quarantine: Quarantine) -> _NodeUsage:
    blamed_spans, cleared_at = _compute_blamed_spans(quarantine), quarantine.cleared_at
    return _NodeUsage(
        approved=quarantine.spec.approved,
        awaits_approval=not quarantine.spec.approved and quarantine.status.phase is QuarantinePhase.PENDING,
        probing=quarantine.is_suspicion and quarantine.is_probing,
        blamed_spans=blamed_spans,
        cleared_at=cleared_at if blamed_spans else None,
        held_by_breaker=bool(blamed_spans) and cleared_at is None and quarantine.verdict is QuarantineVerdict.BREAKER,
    )


def _compute_blamed_spans(quarantine: Quarantine) -> tuple[_Span, ...]:
    """Return the time spans in which the node counts as blamed.

    There are none for a node that no probe can check, and none for signs that came after a probe cleared the node.
    """
    cleared_at = math.inf if quarantine.cleared_at is None else quarantine.cleared_at
    signs = [sign for sign in quarantine.spec.suspicions if sign.first_reported_at <= cleared_at]
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
    node_count: int | None = None  # of the whole cluster; None: not known
    pause_reason: str = ""  # why remedies are paused; "": they are not

    @property
    def is_breaker_disabled(self) -> bool:
        """Whether the breaker cannot trip, since the cluster has fewer nodes than its threshold."""
        return self.node_count is not None and self.node_count < self.rules.breaker_nodes
