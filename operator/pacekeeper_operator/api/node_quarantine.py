"""NodeQuarantine: a node that jobs blame, or that is kept from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from .codec import from_json, to_json, to_patch
from .conditions import CONDITION_TIMES, ConditionStatus
from .formats import format_duration, format_time, parse_duration, parse_time
from .incident import ObjectRef
from .node_probe import PROBE_METRIC_FORMATTERS, PROBE_TIMES, ProbeResult


class QuarantinePhase(StrEnum):
    SUSPECTED = "Suspected"  # a job blames the node; it stays untouched until a witness confirms
    BLOCKED = "Blocked"  # a witness has confirmed, but breaker, budget, or pause keep the node untouched
    CLEARED = "Cleared"  # a probe pod passed; the node is untouched, and not probed again for a while
    PENDING = "Pending"  # waits for approval
    ACTIVE = "Active"  # tainted and cordoned
    PROBING = "Probing"  # a probe pod decides whether the node is released
    RELEASED = "Released"


class Witness(StrEnum):
    """The evidence that a node is bad."""

    NONE = "None"  # only a job's own workers, which the platform does not trust
    NODE_CONDITION = "NodeCondition"  # the node is not Ready, or has a condition that the platform names
    GPU_SERIES = "GpuSeries"  # DCGM, from targets that the platform has vouched for
    PROBE = "Probe"  # a probe pod of the operator on the node
    PERSON = "Person"  # the person who created or approved the NodeQuarantine


class QuarantineVerdict(StrEnum):
    """The state of a node that a job blames. It is the reason of the condition `Quarantined`."""

    QUARANTINED = "Quarantined"
    AWAITS_APPROVAL = "AwaitsApproval"
    SUSPECTED = "Suspected"  # no witness has confirmed yet
    CLEARED = "Cleared"  # a probe pod passed, or no witness confirmed in time
    BREAKER = "Breaker"
    BUDGET_SPENT = "BudgetSpent"
    PAUSED = "Paused"
    OPTED_OUT = "OptedOut"
    UNKNOWN_NODE = "UnknownNode"
    RELEASING = "Releasing"  # an earlier quarantine of this node is ending

    @property
    def is_final(self) -> bool:
        """Return whether the decision about this suspicion will not change."""
        return self not in (
            QuarantineVerdict.SUSPECTED,
            QuarantineVerdict.AWAITS_APPROVAL,
            QuarantineVerdict.BREAKER,
            QuarantineVerdict.BUDGET_SPENT,
            QuarantineVerdict.PAUSED,
            QuarantineVerdict.RELEASING,
        )


@dataclass(frozen=True)
class NodeSuspicion:
    """The latest suspicion of a node by the jobs of one namespace, or by the platform (in the operator's namespace)."""

    namespace: str
    incident: str  # "": not from a job, but from the platform
    reason: str
    at: float
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to probe the node: a second namespace has to suspect it, too
    since: float | None = None  # when the namespace first reported it; None: at `at`

    @property
    def first_reported_at(self) -> float:
        """The time at which the namespace first reported it, in seconds since the epoch."""
        return self.at if self.since is None else self.since

    @property
    def is_from_platform(self) -> bool:
        return not self.incident


@dataclass(frozen=True)
class QuarantineSpec:
    """The spec of a NodeQuarantine, which is named after its node."""

    reason: str
    node_uid: str | None = None  # a node of the same name with another UID is another node
    incident_ref: ObjectRef | None = None
    expires_after: float = 3600.0  # seconds, from cordonedAt
    approved: bool = False
    suspicions: tuple[NodeSuspicion, ...] = ()  # (): created by hand, needs no witness

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        return from_json(cls, spec, "spec", {"expires_after": parse_duration, "at": parse_time, "since": parse_time})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"expires_after": format_duration, "at": format_time, "since": format_time})


_QUARANTINE_TIMES = ("cordoned_at", *CONDITION_TIMES, *PROBE_TIMES)


@dataclass(frozen=True)
class QuarantineStatus:
    phase: QuarantinePhase | None = None
    message: str | None = None
    conditions: tuple[ConditionStatus, ...] = ()
    node_uid: str | None = None  # UID of the node, if spec.nodeUID does not give it
    cordoned_at: float | None = None
    previously_cordoned: bool | None = None  # another owner's cordon was there before ours, and stays
    probes: tuple[ProbeResult, ...] = ()  # the last few

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", dict.fromkeys(_QUARANTINE_TIMES, parse_time))

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, {**dict.fromkeys(_QUARANTINE_TIMES, format_time), **PROBE_METRIC_FORMATTERS})
