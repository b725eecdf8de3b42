"""How all nodes that are blamed or quarantined stand: what breaker, budget and turns for probes go by.

Kept as suspicions come and go, so that judging one of a thousand costs no look at the others. Who is judged never
counts among the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..api import QuarantineCondition, QuarantinePhase, Witness
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


_NOTHING = _Stand()


@dataclass
class Census:
    """Of all NodeQuarantines."""

    _stands: dict[str, _Stand] = field(default_factory=dict)
    _granted: set[str] = field(default_factory=set)
    _begins: list[float] = field(default_factory=list)
    _ends: list[float] = field(default_factory=list)
    _approved: int = 0
    _asked: int = 0
    _probing: int = 0

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
        """How many nodes are blamed at about the same time as this one, itself included."""
        at, own = quarantine.last_sign, self._stands.get(quarantine.name, _NOTHING)
        all_of_them = bisect_right(self._begins, at) - bisect_left(self._ends, at)
        return 1 + all_of_them - any(begin <= at <= end for begin, end in own.blamed)

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
        if stand.blamed != before.blamed:
            for begin, end in before.blamed:
                del self._begins[bisect_left(self._begins, begin)]
                del self._ends[bisect_left(self._ends, end)]
            for begin, end in stand.blamed:
                insort(self._begins, begin)
                insort(self._ends, end)


def worth_a_look(quarantine: Quarantine) -> bool:
    """The platform looks at a node for one strong sign, or for weak ones of two namespaces."""
    signs = quarantine.open_signs
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
    return _Stand(
        approved=quarantine.spec.approved,
        asked=not quarantine.spec.approved and quarantine.status.phase is QuarantinePhase.PENDING,
        probing=quarantine.suspicion and quarantine.probe_runs,
        blamed=_blamed(quarantine),
    )


def _blamed(quarantine: Quarantine) -> tuple[_Span, ...]:
    """One that a probe has cleared is blamed by words only, and so is one that none can look at."""
    if quarantine.over or quarantine.cleared_at is not None or not worth_a_look(quarantine) or unheard(quarantine):
        return ()
    spans: list[_Span] = []
    for at in sorted(sign.at for sign in quarantine.open_signs):
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
