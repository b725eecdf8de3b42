"""What a NodeQuarantine needs next, one step at a time, from the quarantine, its node and its probe pod as they are.

A quarantined node carries two marks: our taint, and a cordon of which our field manager is an owner. Every step leads
to a state from which the next one follows, so that an operator that dies between two steps, or in one, loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..api import (
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
    ProbeResult,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    format_time,
)

RESYNC_SECONDS = 60.0
PROBE_POLL_SECONDS = 1.0
FIRST_BACK_OFF = 60.0
LONGEST_BACK_OFF = 3600.0
MAX_PROBES = 10
MAX_MESSAGE = 1000


@dataclass(frozen=True)
class Quarantine:
    """A NodeQuarantine object."""

    name: str  # of the node, too
    uid: str
    spec: QuarantineSpec
    status: QuarantineStatus
    deleted: bool = False  # deletion was asked for
    guarded: bool = False  # it carries our finalizer: deletion waits until the node is released

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """`body`: the whole object. Raises InputError that names the field."""
        metadata = body["metadata"]
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            spec=QuarantineSpec.parse(body["spec"]),
            status=QuarantineStatus.parse(body.get("status", {})),
            deleted="deletionTimestamp" in metadata,
            guarded=FINALIZER_QUARANTINE in metadata.get("finalizers", ()),
        )

    @property
    def node_uid(self) -> str | None:
        """Of the node that is meant. Who makes a quarantine by hand means the node that was there when we saw it."""
        return self.spec.node_uid or self.status.node_uid

    @property
    def last_probe(self) -> ProbeResult | None:
        return self.status.probes[-1] if self.status.probes else None


@dataclass(frozen=True)
class Node:
    """A node, as far as its quarantine is concerned."""

    uid: str
    tainted: bool = False  # by us
    cordoned: bool = False  # by us, perhaps among others
    cordoned_by_others: bool = False
    opted_out: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """`body`: the whole object, with its managed fields."""
        metadata, spec = body["metadata"], body["spec"]
        owners = [
            (entry["manager"], entry["operation"])
            for entry in metadata.get("managedFields", ())
            if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
        ]
        cordoned = spec.get("unschedulable", False)
        ours = cordoned and (FIELD_MANAGER_CORDON, "Apply") in owners
        return cls(
            uid=metadata["uid"],
            tainted=any(taint["key"] == TAINT_QUARANTINE for taint in spec.get("taints", ())),
            cordoned=ours,
            cordoned_by_others=cordoned and (not ours or len(owners) > 1),
            opted_out=LABEL_NO_QUARANTINE in metadata.get("labels", {}),
        )

    @property
    def marked(self) -> bool:
        return self.tainted or self.cordoned

    @property
    def held(self) -> bool:
        return self.tainted and self.cordoned


@dataclass(frozen=True)
class ProbePod:
    """The pod of the last probe."""

    phase: str  # Pending, Running, Succeeded, Failed
    message: str = ""  # why it failed, or what it waits for

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        status = body.get("status", {})
        states = [state for c in status.get("containerStatuses", ()) for state in c.get("state", {}).values()]
        said = [state.get("message") or state.get("reason") for state in states]
        words = [status.get("reason"), status.get("message"), *said]
        return cls(status.get("phase", "Pending"), ": ".join(word.strip() for word in words if word)[-MAX_MESSAGE:])


@dataclass(frozen=True)
class Guard:
    """Add our finalizer."""


@dataclass(frozen=True)
class Hold:
    """Taint and cordon the node. `again`: somebody has taken a mark away."""

    again: bool = False


@dataclass(frozen=True)
class Release:
    """Take our taint away, and give up our part of the cordon."""

    reason: str


@dataclass(frozen=True)
class Report:
    """Write the status, and tell people if there is an `event` (its reason)."""

    status: QuarantineStatus
    event: str = ""
    warning: bool = False


@dataclass(frozen=True)
class StartProbe:
    pod: str


@dataclass(frozen=True)
class EndProbe:
    """It is not needed any more: delete the pod, without waiting for a kubelet that may be gone."""

    pod: str


@dataclass(frozen=True)
class Delete:
    """Delete the NodeQuarantine."""


@dataclass(frozen=True)
class Unguard:
    """Take our finalizer away: nothing of ours is left on the node."""


@dataclass(frozen=True)
class Wait:
    """There is nothing to do for so long."""

    seconds: float


Action = Guard | Hold | Release | Report | StartProbe | EndProbe | Delete | Unguard | Wait


def decide(quarantine: Quarantine, node: Node | None, pod: ProbePod | None, probe_timeout: float, now: float) -> Action:
    """The next step. `pod`: of the last probe, if it exists. `probe_timeout` in seconds, `now` since the epoch."""
    why = _why(quarantine, node)
    if quarantine.deleted or why:
        return _end(quarantine, node, pod, why or "its NodeQuarantine was deleted")
    assert node is not None  # _why has dealt with a node that is gone
    if not quarantine.guarded:
        return Guard()
    if quarantine.node_uid is None:
        return Report(replace(quarantine.status, phase=QuarantinePhase.PENDING, node_uid=node.uid, message="is new"))
    if not quarantine.spec.approved:
        return _await_approval(quarantine, node)
    if not node.held:
        return Hold(again=quarantine.status.cordoned_at is not None)
    probe = quarantine.last_probe
    if probe is not None and probe.finished is None:
        return _watch(quarantine, probe, pod, probe_timeout, now)
    if probe is not None and pod is not None:
        return EndProbe(probe.pod)
    return _keep(quarantine, node, now)


def allowed_nodes(nodes: int, max_nodes: int, max_share: float) -> int:
    """How many of `nodes` may be quarantined at once: by share, but one at least, and by count."""
    rounding = 1e-9  # 0.29 · 100 is 28.999…
    return min(max_nodes, max(1, math.floor(max_share * nodes + rounding)))


def _why(quarantine: Quarantine, node: Node | None) -> str:
    """Why the node is to be released; "": it is not."""
    if node is None:
        return "the node does not exist any more"
    if quarantine.node_uid not in (None, node.uid):
        return "the node was created anew: it is not the one that was meant"
    if node.opted_out:
        return f"the node's label {LABEL_NO_QUARANTINE} forbids quarantines"
    probe = quarantine.last_probe
    return "a probe pod on the node has passed" if probe is not None and probe.passed else ""


def _end(quarantine: Quarantine, node: Node | None, pod: ProbePod | None, why: str) -> Action:
    if node is not None and node.marked:
        return Release(why)
    if pod is not None and quarantine.last_probe is not None:
        return EndProbe(quarantine.last_probe.pod)
    if quarantine.deleted:
        return Unguard() if quarantine.guarded else Wait(RESYNC_SECONDS)
    if quarantine.status.phase is not QuarantinePhase.RELEASED:
        released = replace(quarantine.status, phase=QuarantinePhase.RELEASED, message=why)
        return Report(released, event="QuarantineEnded")
    return Delete()


def _await_approval(quarantine: Quarantine, node: Node) -> Action:
    if node.marked:
        return Release("its quarantine is not approved")
    status = replace(
        quarantine.status,
        phase=QuarantinePhase.PENDING,
        message="waits for spec.approved to be set to true by the platform team; the node is untouched",
    )
    return Wait(RESYNC_SECONDS) if status == quarantine.status else Report(status, event="ApprovalNeeded")


def _keep(quarantine: Quarantine, node: Node, now: float) -> Action:
    """The node is held, and no probe is under way."""
    status = quarantine.status
    since = now if status.cordoned_at is None else status.cordoned_at
    due = _next_probe(status, since + quarantine.spec.expires_after)
    if now >= due:
        probe = ProbeResult(pod=f"probe-{quarantine.uid[:8]}-{int(now)}", started=now)
        message = f"the pod {probe.pod} decides whether the node is released"
        probes = (*status.probes, probe)[-MAX_PROBES:]
        return Report(replace(status, phase=QuarantinePhase.PROBING, message=message, probes=probes))
    failed = status.probes[-1] if status.probes else None
    told = f"; the last one failed: {failed.message}" if failed is not None else ""
    active = replace(
        status,
        phase=QuarantinePhase.ACTIVE,
        cordoned_at=since,
        previously_cordoned=node.cordoned_by_others,
        message=f"is tainted and cordoned; a probe pod decides at {_clock(due)} whether it is released{told}",
    )
    if active == status:
        return Wait(min(RESYNC_SECONDS, due - now))
    return Report(active, event="" if status.cordoned_at is not None else "NodeQuarantined", warning=True)


def _next_probe(status: QuarantineStatus, expiry: float) -> float:
    """At expiry; after failed probes (one that passes ends it all) also a back-off that doubles with each of them."""
    if not status.probes:
        return expiry
    back_off: float = FIRST_BACK_OFF * 2 ** (len(status.probes) - 1)
    last = status.probes[-1]
    return max(expiry, (last.finished or last.started) + min(back_off, LONGEST_BACK_OFF))


def _watch(quarantine: Quarantine, probe: ProbeResult, pod: ProbePod | None, timeout: float, now: float) -> Action:
    """A probe is under way."""
    waiting = f": {pod.message}" if pod is not None and pod.message else ""
    if pod is not None and pod.phase == "Succeeded":
        ended = replace(probe, finished=now, passed=True, message="passed")
    elif pod is not None and pod.phase == "Failed":
        ended = replace(probe, finished=now, passed=False, message=pod.message or "failed without a word")
    elif now >= probe.started + timeout:
        ended = replace(probe, finished=now, passed=False, message=f"did not end within {timeout:.0f} s{waiting}")
    else:
        return StartProbe(probe.pod) if pod is None else Wait(PROBE_POLL_SECONDS)
    word = "passed" if ended.passed else f"failed: {ended.message}"
    status = replace(
        quarantine.status,
        phase=QuarantinePhase.PROBING if ended.passed else QuarantinePhase.ACTIVE,
        message=f"the probe pod {word}",
        probes=(*quarantine.status.probes[:-1], ended),
    )
    return Report(status, event="ProbePassed" if ended.passed else "ProbeFailed", warning=not ended.passed)


def _clock(time: float) -> str:
    """To the second."""
    return format_time(time)[:19] + "Z"
