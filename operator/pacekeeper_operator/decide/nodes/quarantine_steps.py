"""The inputs of decisions about a node (its NodeQuarantine, the node, a probe pod), and the steps that they choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pacekeeper_analysis.errors import InputError

from ...api.conditions import ConditionStatus, QuarantineCondition
from ...api.formats import format_time
from ...api.names import (
    FIELD_MANAGER_CONDITION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
)
from ...api.node_probe import InconclusiveReason, ProbeMetrics, ProbeResult
from ...api.node_quarantine import (
    NodeSuspicion,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    QuarantineVerdict,
    Witness,
)
from ...node_probe import DRIVER, GPUS, MEMORY, NETWORK
from ...pods.node_health import NodeHealthRules
from .probe_measurements import read_failed_check, read_measurements

MAX_NODE_MESSAGE_CHARACTERS = 1000
EMPTY_NODE_HEALTH = NodeHealthRules(cordons=False, taints=(), conditions=())
IMAGE_WAITING_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
    }
)
"""Waiting reasons of a container that are not its node's fault."""
PROBE_RUNS_CHECK = "runs"
"""The check that a probe pod starts, and ends with a message of its own."""
PROBE_CHECKS = (PROBE_RUNS_CHECK, NETWORK, DRIVER, GPUS, MEMORY)
"""The checks, in the order in which a probe pod runs them."""


@dataclass(frozen=True)
class Quarantine:
    """A NodeQuarantine object."""

    name: str  # also the node's name
    uid: str
    spec: QuarantineSpec
    status: QuarantineStatus
    deleted: bool = False  # it has a deletion timestamp
    guarded: bool = False  # it carries our finalizer: deletion waits until the node is released
    generation: int = 0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a NodeQuarantine from `body`, the whole object. Raises InputError, which names the field."""
        metadata = body["metadata"]
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            spec=QuarantineSpec.parse(body["spec"]),
            status=QuarantineStatus.parse(body.get("status", {})),
            deleted="deletionTimestamp" in metadata,
            guarded=FINALIZER_QUARANTINE in metadata.get("finalizers", ()),
            generation=metadata.get("generation", 0),
        )

    @property
    def node_uid(self) -> str | None:
        """UID of the node. A quarantine that a person created is for the node that existed when the operator saw it."""
        return self.spec.node_uid or self.status.node_uid

    @property
    def is_suspicion(self) -> bool:
        """Whether jobs blame the node, and its quarantine is not approved (yet)."""
        return bool(self.spec.suspicions) and not self.spec.approved

    @property
    def is_over(self) -> bool:
        """Whether the object is released or being deleted, so that nothing new is written to it."""
        return self.deleted or self.status.phase is QuarantinePhase.RELEASED

    @property
    def last_probe(self) -> ProbeResult | None:
        return self.status.probes[-1] if self.status.probes else None

    @property
    def is_probing(self) -> bool:
        return self.last_probe is not None and self.last_probe.finished is None

    @property
    def inconclusive_probes(self) -> tuple[ProbeResult, ...]:
        """The last probes in a row that were inconclusive, newest first."""
        probes: list[ProbeResult] = []
        for probe in reversed(self.status.probes):
            if probe.finished is None or probe.passed is not None:
                break
            probes.append(probe)
        return tuple(probes)

    @property
    def last_conclusive_probe(self) -> ProbeResult | None:
        """The last probe that passed or failed."""
        return next((probe for probe in reversed(self.status.probes) if probe.passed is not None), None)

    @property
    def cleared_at(self) -> float | None:
        """When the last conclusive probe cleared the node of all earlier signs; None: it did not pass."""
        probe = self.last_conclusive_probe
        return probe.finished if probe is not None and probe.passed else None

    @property
    def open_signs(self) -> tuple[NodeSuspicion, ...]:
        """The signs that no probe has refuted."""
        return tuple(sign for sign in self.spec.suspicions if sign.at > (self.cleared_at or 0.0))

    @property
    def last_sign_at(self) -> float:
        return max((sign.at for sign in self.spec.suspicions), default=0.0)

    @property
    def verdict(self) -> QuarantineVerdict:
        """The verdict that was written last. A value that only another version of the operator knows counts as none."""
        conditions = self.status.conditions
        reason = next((c.reason for c in conditions if c.type == QuarantineCondition.QUARANTINED), None)
        return QuarantineVerdict(reason) if reason in frozenset(QuarantineVerdict) else QuarantineVerdict.SUSPECTED


@dataclass(frozen=True)
class TargetNode:
    """The properties of a node that matter for its quarantine."""

    uid: str
    tainted: bool = False  # by us
    cordoned: bool = False  # by us, perhaps among others
    cordoned_by_others: bool = False
    opted_out: bool = False
    ready: bool = True
    broken: str = ""  # description of a condition that the platform vouches for; "": none
    broken_since: float | None = None  # transition time of that condition; None: not given
    flagged: bool = False  # by us, with the condition for the tools that repair nodes

    @classmethod
    def parse(cls, body: Mapping[str, Any], health: NodeHealthRules = EMPTY_NODE_HEALTH, condition: str = "") -> Self:
        """Read a node from `body`, the whole object with its managed fields.

        `health`: conditions that the platform vouches for. `condition`: type of the one that we set; "": none.
        """
        metadata, spec = body["metadata"], body.get("spec", {})
        owners = [
            (entry["manager"], entry["operation"])
            for entry in metadata.get("managedFields", ())
            if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
        ]
        cordoned = spec.get("unschedulable", False)
        ours = cordoned and (FIELD_MANAGER_CORDON, "Apply") in owners
        conditions = {c["type"]: c["status"] for c in body.get("status", {}).get("conditions", ())}
        broken = next(health.find_conditions(body), None)
        return cls(
            uid=metadata["uid"],
            tainted=any(taint["key"] == TAINT_QUARANTINE for taint in spec.get("taints", ())),
            cordoned=ours,
            cordoned_by_others=cordoned and (not ours or len(owners) > 1),
            opted_out=LABEL_NO_QUARANTINE in metadata.get("labels", {}),
            ready=conditions.get("Ready") == "True",
            broken=broken.description if broken else "",
            broken_since=broken.since if broken else None,
            flagged=bool(condition) and conditions.get(condition) == "True" and _is_our_condition(metadata, condition),
        )

    @property
    def marked(self) -> bool:
        return self.tainted or self.cordoned or self.flagged

    @property
    def held(self) -> bool:
        return self.tainted and self.cordoned


def _is_our_condition(metadata: Mapping[str, Any], condition: str) -> bool:
    """Return whether we own the node's condition of this type. We do not remove another owner's."""
    return any(
        entry["manager"] == FIELD_MANAGER_CONDITION
        and f'k:{{"type":"{condition}"}}' in entry.get("fieldsV1", {}).get("f:status", {}).get("f:conditions", {})
        for entry in metadata.get("managedFields", ())
    )


@dataclass(frozen=True)
class ProbePod:
    """A pod that checks a node."""

    phase: str  # Pending, Running, Succeeded, Failed; "": it does not exist (yet), while others of its group do
    message: str = ""  # why it failed, or what it waits for
    inconclusive: InconclusiveReason | None = None  # why it is inconclusive, if it does not succeed
    node: str = ""
    address: str = ""
    measurements: ProbeMetrics | None = None
    group_peers: tuple[ProbePod, ...] = ()  # the other pods of its group
    reported_check: str = ""  # the check in which it found its node unfit; "": not reported
    has_gpus: bool = False  # it had GPUs to check
    failing_check: str = ""  # the check that nodes without a suspicion fail, too; "": none

    @property
    def failed_check(self) -> str:
        """The check that its node fails, if any. A pod that ends without a message of its own has not run."""
        return self.reported_check or PROBE_RUNS_CHECK

    @property
    def passed_checks(self) -> frozenset[str]:
        """The checks that its node passes. They run one after the other."""
        checks = [check for check in PROBE_CHECKS if self.has_gpus or check not in (DRIVER, GPUS)]
        if self.phase == "Succeeded":
            return frozenset(checks)
        stopped = self.phase == "Failed" and self.reported_check in checks
        return frozenset(checks[: checks.index(self.reported_check)]) if stopped else frozenset()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a probe pod from `body`, the whole object. An unreadable termination message becomes its `message`."""
        status, node = body.get("status", {}), body.get("spec", {}).get("nodeName", "")
        states = [state for c in status.get("containerStatuses", ()) for state in c.get("state", {}).values()]
        termination_message = next((state.get("message", "") for state in states if "exitCode" in state), "")
        try:
            measurements, unfit_reason = read_measurements(termination_message)
            reasons = (
                [unfit_reason]
                if measurements or unfit_reason
                else [state.get("message") or state.get("reason") for state in states]
            )
        except InputError as error:
            measurements, reasons = None, [f"its termination message is invalid: {error}"]
        parts = [status.get("reason"), status.get("message"), *reasons]
        message = ": ".join(part.strip() for part in parts if part)[-MAX_NODE_MESSAGE_CHARACTERS:]
        phase = status.get("phase", "Pending")
        check, gpus = read_failed_check(termination_message)
        address = status.get("podIP", "")
        return cls(
            phase,
            message,
            _classify_inconclusive(status),
            node,
            address,
            measurements,
            reported_check=check,
            has_gpus=gpus,
        )

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def _classify_inconclusive(status: Mapping[str, Any]) -> InconclusiveReason | None:
    waiting = [c["state"]["waiting"] for c in status.get("containerStatuses", ()) if "waiting" in c.get("state", {})]
    if any(state.get("reason") in IMAGE_WAITING_REASONS for state in waiting):
        return InconclusiveReason.IMAGE
    if status.get("phase") == "Failed":
        # A reason of the pod itself (OutOfcpu, Evicted, Shutdown …) means that it was refused or evicted.
        return InconclusiveReason.NOT_RUN if status.get("reason") else None
    # The sandbox has a network, but there is no container: only the image is missing.
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    pulling = any(state.get("reason") == "ContainerCreating" for state in waiting)
    return InconclusiveReason.IMAGE if pulling and conditions.get("PodReadyToStartContainers") == "True" else None


@dataclass(frozen=True)
class QuarantineRules:
    """The platform team's rules for quarantines. Times are seconds."""

    acts: bool = True  # False: a person must approve before a node is touched
    max_nodes: int = 5
    max_share: float = 0.1
    breaker_nodes: int = 3
    probe_timeout: float = 60.0
    release_probes: int = 3  # probes that must pass in a row before a node is released
    condition: str = ""  # type of the condition that a held node gets; "": none


@dataclass(frozen=True)
class AddFinalizer:
    """Add our finalizer."""


@dataclass(frozen=True)
class ApproveQuarantine:
    """Set spec.approved: a witness has confirmed the suspicion, and the rules allow the quarantine."""


@dataclass(frozen=True)
class HoldNode:
    """Taint and cordon the node. `repeated`: one of its marks was removed."""

    repeated: bool = False


@dataclass(frozen=True)
class FlagNode:
    """Set our condition on a quarantined node, for the tools that repair nodes. `since`: when it was cordoned."""

    reason: str
    message: str
    since: float


@dataclass(frozen=True)
class ReleaseNode:
    """Remove our taint and our condition, and give up our ownership of the cordon."""

    reason: str


@dataclass(frozen=True)
class WriteQuarantineStatus:
    """Write the status, and emit an event if there is an `event` (its reason)."""

    status: QuarantineStatus
    event: str = ""
    warning: bool = False


@dataclass(frozen=True)
class StartProbe:
    """Create a probe pod. `share_gpus`: other pods may hold GPUs of the node, so it requests only free GPUs."""

    pod: str
    share_gpus: bool = False


@dataclass(frozen=True)
class EndProbe:
    """Delete a probe pod that is not needed any more, without waiting for a kubelet that may be gone."""

    pod: str


@dataclass(frozen=True)
class DeleteQuarantine:
    """Delete the NodeQuarantine."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Remove our finalizer: none of our marks is left on the node."""


@dataclass(frozen=True)
class RequeueAfter:
    """Do nothing for some seconds."""

    seconds: float


QuarantineStep = (
    AddFinalizer
    | ApproveQuarantine
    | HoldNode
    | FlagNode
    | ReleaseNode
    | WriteQuarantineStatus
    | StartProbe
    | EndProbe
    | DeleteQuarantine
    | RemoveFinalizer
    | RequeueAfter
)


def build_status_write(
    quarantine: Quarantine, phase: QuarantinePhase, verdict: QuarantineVerdict, message: str, now: float
) -> WriteQuarantineStatus:
    """Return a write of the status with this phase, and with the matching condition `Quarantined`."""
    held = phase in (QuarantinePhase.ACTIVE, QuarantinePhase.PROBING)
    condition = (QuarantineCondition.QUARANTINED, "True" if held else "False", str(verdict), message)
    status = replace(quarantine.status, phase=phase, message=message)
    return WriteQuarantineStatus(_with_condition(quarantine, status, condition, now))


def add_witness_condition(
    quarantine: Quarantine, write: WriteQuarantineStatus, witness: Witness | None, message: str, now: float
) -> WriteQuarantineStatus:
    """Return `write` with the condition `Witnessed`: False without a witness, Unknown after an inconclusive probe."""
    if witness is not None:
        condition = (QuarantineCondition.WITNESSED, "True", str(witness), message)
    elif quarantine.inconclusive_probes:
        condition = (QuarantineCondition.WITNESSED, "Unknown", "ProbeInconclusive", message)
    else:
        condition = (QuarantineCondition.WITNESSED, "False", "NoWitness", message)
    return replace(write, status=_with_condition(quarantine, write.status, condition, now))


def skip_if_written(
    quarantine: Quarantine, write: WriteQuarantineStatus, seconds: float
) -> WriteQuarantineStatus | RequeueAfter:
    """Return `write`, or a requeue after `seconds` if that status is already written."""
    return RequeueAfter(seconds) if write.status == quarantine.status else write


def format_clock_time(time: float) -> str:
    """Return the time, to the second, in RFC 3339 format."""
    return format_time(time)[:19] + "Z"


def _with_condition(
    quarantine: Quarantine, status: QuarantineStatus, condition: tuple[str, str, str, str], now: float
) -> QuarantineStatus:
    """Return the status with `condition`: type, status, reason, message.

    The time of its last transition stays while its status does not change.
    """
    type_, value, reason, message = condition
    previous = next((c for c in status.conditions if c.type == type_), None)
    since = previous.last_transition_time if previous is not None and previous.status == value else now
    updated = ConditionStatus(str(type_), value, reason, message, since, quarantine.generation)
    others = tuple(c for c in status.conditions if c.type != type_)
    return replace(status, conditions=tuple(sorted((*others, updated), key=lambda c: c.type)))
