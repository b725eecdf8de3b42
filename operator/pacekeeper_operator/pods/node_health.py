"""Marks of nodes that others want to be empty: a cordon, and taints and conditions that the platform configures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pacekeeper_analysis.errors import InputError

from ..api.formats import parse_time
from ..api.names import TAINT_QUARANTINE

DEFAULT_LEAVE_TAINTS = ("ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted")
DEFAULT_LEAVE_CONDITIONS = ("KernelDeadlock", "ReadonlyFilesystem")
"""The permanent conditions of the node problem detector's own rules."""
CONDITION_TYPE_PATTERN = re.compile(r"[A-Za-z]([\w./-]{0,314}[A-Za-z0-9])?", re.ASCII)
KUBERNETES_CONDITIONS = frozenset({"Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"})
"""Conditions that the kubelet and the cloud's controllers set."""
_TAINT_PATTERN = re.compile(
    r"(?P<key>[A-Za-z0-9][\w./-]*)(=(?P<value>[\w.-]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_NODE_CONDITION_PATTERN = re.compile(r"(?P<type>[A-Za-z0-9][\w./-]*)(=(?P<status>True|False|Unknown))?")


@dataclass(frozen=True)
class NodeHealthRules:
    """The marks of nodes that have to be emptied.

    `taints` are key[=value][:effect], as kubectl writes them. `conditions` are type[=status]; the default status is
    True. Raises InputError for other forms.
    """

    cordons: bool = True
    taints: tuple[str, ...] = DEFAULT_LEAVE_TAINTS
    conditions: tuple[str, ...] = DEFAULT_LEAVE_CONDITIONS

    def __post_init__(self) -> None:
        for text in self.taints:
            if not _TAINT_PATTERN.fullmatch(text):
                raise InputError(f"taint {text!r}: write key, key=value or key=value:Effect, like gpu-fault:NoSchedule")
        for text in self.conditions:
            if not _NODE_CONDITION_PATTERN.fullmatch(text):
                raise InputError(f"condition {text!r}: write a type, or type=status, like GpuHealthy=False")
            if text.partition("=")[0] == "Ready":
                raise InputError("condition Ready: a node that is not ready counts as lost in any case; leave it out")

    def find_leave_reason(self, node: Mapping[str, Any]) -> str:
        """Return why others want this node empty; "": no mark is found.

        While our own quarantine is on the node, a cordon counts as ours: workers of jobs without a fault stay.
        """
        return next(self._iterate_marks(node), "")

    def _iterate_marks(self, node: Mapping[str, Any]) -> Iterator[str]:
        spec = node.get("spec", {})
        taints = [_Taint.from_object(taint) for taint in spec.get("taints") or ()]
        if self.cordons and spec.get("unschedulable") and all(taint.key != TAINT_QUARANTINE for taint in taints):
            yield "it is cordoned"
        for text in self.taints:
            match = _TAINT_PATTERN.fullmatch(text)
            assert match is not None
            yield from (f"taint {taint.description}" for taint in taints if taint.matches(**match.groupdict()))
        yield from (condition.description for condition in self.find_conditions(node))

    def find_conditions(self, node: Mapping[str, Any]) -> Iterator[MatchedNodeCondition]:
        """Yield the configured conditions that the node has now."""
        conditions = node.get("status", {}).get("conditions", ())
        for text in self.conditions:
            kind, _, status = text.partition("=")
            for condition in conditions:
                if condition["type"] == kind and condition["status"] == (status or "True"):
                    reason = f" ({condition['reason']})" if condition.get("reason") else ""
                    since = condition.get("lastTransitionTime")
                    yield MatchedNodeCondition(
                        f"condition {kind} is {condition['status']}{reason}", parse_time(since) if since else None
                    )


@dataclass(frozen=True)
class MatchedNodeCondition:
    """A condition of a node. `since` is in seconds since the epoch, as the condition has it; None: unknown."""

    description: str
    since: float | None


@dataclass(frozen=True)
class _Taint:
    key: str
    value: str
    effect: str

    @classmethod
    def from_object(cls, taint: Mapping[str, Any]) -> Self:
        return cls(taint["key"], taint.get("value") or "", taint["effect"])

    def matches(self, key: str, value: str | None, effect: str | None) -> bool:
        """Return whether the taint matches. None matches any value."""
        return self.key == key and value in (None, self.value) and effect in (None, self.effect)

    @property
    def description(self) -> str:
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"
