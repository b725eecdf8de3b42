"""How all nodes that are blamed or quarantined stand: what breaker, budget and turns for probes go by.

Kept as suspicions come and go, so that judging one of a thousand costs no look at the others. Who is judged never
counts among the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..api import QuarantineCondition, QuarantinePhase, Sign, Verdict, Witness
from .node_probes import refused_for_room
from .node_steps import Quarantine, Rules

AT_ONCE_SECONDS = 60.0
"""Nodes that are blamed within so long of each other fail at once."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class _Stand:
    """Of one node."""

    approved: bool = False
    asked: bool = False  # a person is, for approval
    probing: bool = False  # as a suspicion
    blamed: tuple[_Span, ...] = ()  # whoever is blamed within one of these fails at once with it; apart, in order
    cleared_at: float | None = None  # a probe has shown that it is well; None: it is not settled
    held: bool = False  # as one of many that failed at once, and not settled


_NOTHING = _Stand()


@dataclass
class _Spans:
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
class Census:
    """Of all NodeQuarantines."""

    _stands: dict[str, _Stand] = field(default_factory=dict)
    _granted: set[str] = field(default_factory=set)
    _spans: _Spans = field(default_factory=_Spans)  # of all that are blamed
    _open: _Spans = field(default_factory=_Spans)  # of those that are not settled
    _approved: int = 0
    _asked: int = 0
    _probing: int = 0
    _held: int = 0

    @classmethod
    def of(cls, quarantines: Iterable[Quarantine]) -> Census:
        census = cls()
        for quarantine in quarantines:
            census.put(quarantine)
        return census

    def put(self, quarantine: Quarantine) -> None:
        """As it is now."""
        self._stand(quarantine.name, _stand_of(quarantine))

    def remove(self, name: str) -> None:
        """It is gone, and whatever was on its way to it."""
        self._granted.discard(name)
        self._stand(name, _NOTHING)

    def grant(self, name: str) -> None:
        """An approval is on its way: it counts from now on, whatever else is heard of the node meanwhile."""
        self._granted.add(name)
        self._stand(name, self._stands.get(name, _NOTHING))

    def settle(self, quarantine: Quarantine | None, name: str) -> None:
        """What has become of that approval is known."""
        self._granted.discard(name)
        self._stand(name, _NOTHING if quarantine is None else _stand_of(quarantine))

    def failing_at_once(self, quarantine: Quarantine) -> int:
        """How many nodes are blamed at about the same time as this one, itself included. One that a probe has cleared
        since counts on: that it is well again shows nothing of those that failed with it."""
        own = self._stands.get(quarantine.name, _NOTHING).blamed
        return 1 + max((self._spans.count(at) - _holds(own, at) for at in _said_of(quarantine)), default=0)

    def unsettled(self, quarantine: Quarantine) -> int:
        """How many nodes besides this one failed with many, and are neither cleared by a probe nor given up."""
        own = self._stands.get(quarantine.name, _NOTHING)
        blamed = own.blamed if own.cleared_at is None else ()
        at_once = max((self._open.count(at) - _holds(blamed, at) for at in _said_of(quarantine)), default=0)
        return max(at_once, self._held - own.held)

    def cleared_last(self, name: str) -> float:
        """When the last of the others was cleared; 0: none is known."""
        return max((s.cleared_at or 0.0 for other, s in self._stands.items() if other != name), default=0.0)

    def spent(self, name: str, *, asked_too: bool) -> int:
        """Of the budget, by others. `asked_too`: requests to a person count as well."""
        own = self._stands.get(name, _NOTHING)
        count = self._approved - own.approved
        if asked_too:
            count += self._asked - own.asked
        return count

    def probing(self, name: str) -> int:
        """Other suspicions whose probes run."""
        return self._probing - self._stands.get(name, _NOTHING).probing

    def _stand(self, name: str, stand: _Stand) -> None:
        if name in self._granted:
            stand = replace(stand, approved=True, asked=False)
        before = self._stands.pop(name, _NOTHING)
        if stand != _NOTHING:
            self._stands[name] = stand
        self._approved += stand.approved - before.approved
        self._asked += stand.asked - before.asked
        self._probing += stand.probing - before.probing
        self._held += stand.held - before.held
        if (stand.blamed, stand.cleared_at) != (before.blamed, before.cleared_at):
            self._spans.remove(before.blamed)
            self._spans.add(stand.blamed)
            self._open.remove(before.blamed if before.cleared_at is None else ())
            self._open.add(stand.blamed if stand.cleared_at is None else ())


def _holds(spans: Iterable[_Span], at: float) -> bool:
    return any(begin <= at <= end for begin, end in spans)


def _moments(signs: Iterable[Sign]) -> list[float]:
    """When they were said, in order: first and last by each namespace, so that what is said again unsays nothing."""
    return sorted({at for sign in signs for at in (sign.first, sign.at)})


def _said_of(quarantine: Quarantine) -> list[float]:
    """Moments at which it was blamed, that no probe has refuted."""
    return [at for at in _moments(quarantine.open_signs) if at > (quarantine.cleared_at or 0.0)]


def worth_a_look(quarantine: Quarantine) -> bool:
    """The platform looks at a node for one strong sign, or for weak ones of two namespaces."""
    return _weighty(quarantine.open_signs)


def _weighty(signs: Sequence[Sign]) -> bool:
    return any(not sign.weak for sign in signs) or len(signs) > 1


def unheard(quarantine: Quarantine) -> bool:
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
    return len(ended) > 1 and all(refused_for_room(probe) for probe in ended[-2:])


def _stand_of(quarantine: Quarantine) -> _Stand:
    blamed, cleared_at = _blamed(quarantine), quarantine.cleared_at
    return _Stand(
        approved=quarantine.spec.approved,
        asked=not quarantine.spec.approved and quarantine.status.phase is QuarantinePhase.PENDING,
        probing=quarantine.suspicion and quarantine.probe_runs,
        blamed=blamed,
        cleared_at=cleared_at if blamed else None,
        held=bool(blamed) and cleared_at is None and quarantine.verdict is Verdict.BREAKER,
    )


def _blamed(quarantine: Quarantine) -> tuple[_Span, ...]:
    """One that no probe can look at is blamed by words only, and so is one by what is said after a probe has cleared
    it."""
    cleared_at = math.inf if quarantine.cleared_at is None else quarantine.cleared_at
    signs = [sign for sign in quarantine.spec.signs if sign.first <= cleared_at]
    if quarantine.over or not _weighty(signs) or unheard(quarantine):
        return ()
    spans: list[_Span] = []
    for at in (at for at in _moments(signs) if at <= cleared_at):
        begin, end = at - AT_ONCE_SECONDS, at + AT_ONCE_SECONDS
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return tuple(spans)


@dataclass(frozen=True)
class Around:
    """The cluster around one NodeQuarantine."""

    rules: Rules = field(default_factory=Rules)
    census: Census = field(default_factory=Census)
    nodes: int = 0  # of the whole cluster; 0: not known
    paused: str = ""  # why remedies are paused; "": they are not

    @property
    def unbroken(self) -> bool:
        """The breaker is set so that it cannot trip in this cluster."""
        return 0 < self.nodes < self.rules.breaker_nodes
