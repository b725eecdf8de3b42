"""What decisions about a node see (its NodeQuarantine, the node, a probe's pod), and the steps that they choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pacekeeper_analysis.errors import InputError

from ..api import (
    FIELD_MANAGER_CONDITION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
    ConditionStatus,
    Inconclusive,
    ProbeFigures,
    ProbeResult,
    QuarantineCondition,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    Sign,
    Verdict,
    Witness,
    format_time,
)
from ..node_health import NodeHealth
from ..probe import DRIVER, GPUS, MEMORY, NETWORK
from .node_figures import read_check, read_figures

MAX_MESSAGE = 1000
NO_HEALTH = NodeHealth(cordons=False, taints=(), conditions=())
IMAGE_REASONS = frozenset(
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
"""Why a container waits through no fault of its node's."""
RUNS = "runs"
"""The check that a probe pod starts, and ends with words of its own."""
CHECKS = (RUNS, NETWORK, DRIVER, GPUS, MEMORY)
"""In the order in which a probe pod makes them."""


@dataclass(frozen=True)
class Quarantine:
    """A NodeQuarantine object."""

    name: str  # of the node, too
    uid: str
    spec: QuarantineSpec
    status: QuarantineStatus
    deleted: bool = False  # deletion was asked for
    guarded: bool = False  # it carries our finalizer: deletion waits until the node is released
    generation: int = 0

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
            generation=metadata.get("generation", 0),
        )

    @property
    def node_uid(self) -> str | None:
        """Of the node that is meant. Who makes a quarantine by hand means the node that was there when we saw it."""
        return self.spec.node_uid or self.status.node_uid

    @property
    def suspicion(self) -> bool:
        """Jobs blame the node, and it is not decided yet whether anything is done to it."""
        return bool(self.spec.signs) and not self.spec.approved

    @property
    def over(self) -> bool:
        """Nothing new is to be written into it."""
        return self.deleted or self.status.phase is QuarantinePhase.RELEASED

    @property
    def last_probe(self) -> ProbeResult | None:
        return self.status.probes[-1] if self.status.probes else None

    @property
    def probe_runs(self) -> bool:
        return self.last_probe is not None and self.last_probe.finished is None

    @property
    def probes_in_vain(self) -> tuple[ProbeResult, ...]:
        """The last ones in a row that have said nothing about the node."""
        found: list[ProbeResult] = []
        for probe in reversed(self.status.probes):
            if probe.finished is None or probe.passed is not None:
                break
            found.append(probe)
        return tuple(found)

    @property
    def last_word(self) -> ProbeResult | None:
        """The last probe that has said something about the node."""
        return next((probe for probe in reversed(self.status.probes) if probe.passed is not None), None)

    @property
    def cleared_at(self) -> float | None:
        """When a probe has cleared the node of all that was said before; None: none has."""
        word = self.last_word
        return word.finished if word is not None and word.passed else None

    @property
    def open_signs(self) -> tuple[Sign, ...]:
        """Those that no probe has refuted."""
        return tuple(sign for sign in self.spec.signs if sign.at > (self.cleared_at or 0.0))

    @property
    def last_sign(self) -> float:
        return max((sign.at for sign in self.spec.signs), default=0.0)

    @property
    def verdict(self) -> Verdict:
        """As it was written last; what another version of the operator has written in another word counts for none."""
        conditions = self.status.conditions
        word = next((c.reason for c in conditions if c.type == QuarantineCondition.QUARANTINED), None)
        return Verdict(word) if word in frozenset(Verdict) else Verdict.SUSPECTED


@dataclass(frozen=True)
class Node:
    """A node, as far as its quarantine is concerned."""

    uid: str
    tainted: bool = False  # by us
    cordoned: bool = False  # by us, perhaps among others
    cordoned_by_others: bool = False
    opted_out: bool = False
    ready: bool = True
    broken: str = ""  # by a condition that the platform vouches for: which one, in words
    broken_since: float = 0.0  # as that condition says; 0: it does not
    flagged: bool = False  # by us, with the condition for those who repair nodes

    @classmethod
    def parse(cls, body: Mapping[str, Any], health: NodeHealth = NO_HEALTH, condition: str = "") -> Self:
        """`body`: the whole object, with its managed fields. `health`: conditions that the platform vouches for.
        `condition`: type of the one that we set; "": none."""
        metadata, spec = body["metadata"], body.get("spec", {})
        owners = [
            (entry["manager"], entry["operation"])
            for entry in metadata.get("managedFields", ())
            if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
        ]
        cordoned = spec.get("unschedulable", False)
        ours = cordoned and (FIELD_MANAGER_CORDON, "Apply") in owners
        conditions = {c["type"]: c["status"] for c in body.get("status", {}).get("conditions", ())}
        broken = next(health.conditions_of(body), None)
        return cls(
            uid=metadata["uid"],
            tainted=any(taint["key"] == TAINT_QUARANTINE for taint in spec.get("taints", ())),
            cordoned=ours,
            cordoned_by_others=cordoned and (not ours or len(owners) > 1),
            opted_out=LABEL_NO_QUARANTINE in metadata.get("labels", {}),
            ready=conditions.get("Ready") == "True",
            broken=broken.words if broken else "",
            broken_since=broken.since if broken else 0.0,
            flagged=bool(condition) and conditions.get(condition) == "True" and _is_our_condition(metadata, condition),
        )

    @property
    def marked(self) -> bool:
        return self.tainted or self.cordoned or self.flagged

    @property
    def held(self) -> bool:
        return self.tainted and self.cordoned


def _is_our_condition(metadata: Mapping[str, Any], condition: str) -> bool:
    """Somebody else's condition of this type is not ours to take away."""
    return any(
        entry["manager"] == FIELD_MANAGER_CONDITION
        and f'k:{{"type":"{condition}"}}' in entry.get("fieldsV1", {}).get("f:status", {}).get("f:conditions", {})
        for entry in metadata.get("managedFields", ())
    )


@dataclass(frozen=True)
class ProbePod:
    """A pod that looks at a node."""

    phase: str  # Pending, Running, Succeeded, Failed; "": it is not there (yet), while others of its circle are
    message: str = ""  # why it failed, or what it waits for
    inconclusive: Inconclusive | None = None  # why it says nothing about the node, should it not succeed
    node: str = ""
    address: str = ""
    figures: ProbeFigures | None = None
    others: tuple[ProbePod, ...] = ()  # of its circle
    check: str = ""  # in which it found its node unfit; "": it does not say
    gpus: bool = False  # it had GPUs to look at
    failing_check: str = ""  # that nodes fail, too, which are not suspected; "": none

    @property
    def failed_check(self) -> str:
        """What its node fails, if it fails anything. A pod that does not end in words of its own has not run."""
        return self.check or RUNS

    @property
    def passed_checks(self) -> frozenset[str]:
        """What its node passes. The checks come one after the other."""
        made = [check for check in CHECKS if self.gpus or check not in (DRIVER, GPUS)]
        if self.phase == "Succeeded":
            return frozenset(made)
        stopped = self.phase == "Failed" and self.check in made
        return frozenset(made[: made.index(self.check)]) if stopped else frozenset()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        status, node = body.get("status", {}), body.get("spec", {}).get("nodeName", "")
        states = [state for c in status.get("containerStatuses", ()) for state in c.get("state", {}).values()]
        told = next((state.get("message", "") for state in states if "exitCode" in state), "")
        try:
            figures, unfit = read_figures(told)
            said = [unfit] if figures or unfit else [state.get("message") or state.get("reason") for state in states]
        except InputError as error:
            figures, said = None, [f"its words cannot be read: {error}"]
        words = [status.get("reason"), status.get("message"), *said]
        message = ": ".join(word.strip() for word in words if word)[-MAX_MESSAGE:]
        phase = status.get("phase", "Pending")
        check, gpus = read_check(told)
        address = status.get("podIP", "")
        return cls(phase, message, _inconclusive(status), node, address, figures, check=check, gpus=gpus)

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def _inconclusive(status: Mapping[str, Any]) -> Inconclusive | None:
    waiting = [c["state"]["waiting"] for c in status.get("containerStatuses", ()) if "waiting" in c.get("state", {})]
    if any(state.get("reason") in IMAGE_REASONS for state in waiting):
        return Inconclusive.IMAGE
    if status.get("phase") == "Failed":
        # The pod's own reason (OutOfcpu, Evicted, Shutdown …) means that somebody has refused or ended it.
        return Inconclusive.NOT_RUN if status.get("reason") else None
    # A sandbox with a network, and yet no container: nothing is left to be done but to pull the image.
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    pulling = any(state.get("reason") == "ContainerCreating" for state in waiting)
    return Inconclusive.IMAGE if pulling and conditions.get("PodReadyToStartContainers") == "True" else None


@dataclass(frozen=True)
class Rules:
    """The platform team's. Seconds."""

    acts: bool = True  # False: a person is asked before a node is touched
    max_nodes: int = 5
    max_share: float = 0.1
    breaker_nodes: int = 3
    probe_timeout: float = 60.0
    release_probes: int = 3  # that must pass in a row
    condition: str = ""  # type of the condition that a held node gets; "": none


@dataclass(frozen=True)
class Guard:
    """Add our finalizer."""


@dataclass(frozen=True)
class Approve:
    """A witness has spoken and nothing stands in the way: set spec.approved."""


@dataclass(frozen=True)
class Hold:
    """Taint and cordon the node. `again`: somebody has taken a mark away."""

    again: bool = False


@dataclass(frozen=True)
class Flag:
    """Set our condition on a node that is held, for whoever repairs nodes. `since`: when it was cordoned."""

    reason: str
    message: str
    since: float


@dataclass(frozen=True)
class Release:
    """Take our taint and our condition away, and give up our part of the cordon."""

    reason: str


@dataclass(frozen=True)
class Report:
    """Write the status, and tell people if there is an `event` (its reason)."""

    status: QuarantineStatus
    event: str = ""
    warning: bool = False


@dataclass(frozen=True)
class StartProbe:
    """`share`: other pods may hold GPUs of the node, so only those that are free are asked for."""

    pod: str
    share: bool = False


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


QuarantineStep = Guard | Approve | Hold | Flag | Release | Report | StartProbe | EndProbe | Delete | Unguard | Wait


def told(quarantine: Quarantine, phase: QuarantinePhase, verdict: Verdict, message: str, now: float) -> Report:
    """The status with its phase, and with the condition `Quarantined` that goes with it."""
    held = phase in (QuarantinePhase.ACTIVE, QuarantinePhase.PROBING)
    condition = (QuarantineCondition.QUARANTINED, "True" if held else "False", str(verdict), message)
    status = replace(quarantine.status, phase=phase, message=message)
    return Report(_with_condition(quarantine, status, condition, now))


def witnessed(quarantine: Quarantine, found: Report, witness: Witness | None, message: str, now: float) -> Report:
    """`found` with the condition `Witnessed`; without a witness it is False, or Unknown after a probe in vain."""
    if witness is not None:
        condition = (QuarantineCondition.WITNESSED, "True", str(witness), message)
    elif quarantine.probes_in_vain:
        condition = (QuarantineCondition.WITNESSED, "Unknown", "ProbeInconclusive", message)
    else:
        condition = (QuarantineCondition.WITNESSED, "False", "NoWitness", message)
    return replace(found, status=_with_condition(quarantine, found.status, condition, now))


def unless_known(quarantine: Quarantine, found: Report, seconds: float) -> Report | Wait:
    """`found`, or a pause of so long where it is written already."""
    return Wait(seconds) if found.status == quarantine.status else found


def clock(time: float) -> str:
    """To the second."""
    return format_time(time)[:19] + "Z"


def _with_condition(
    quarantine: Quarantine, status: QuarantineStatus, condition: tuple[str, str, str, str], now: float
) -> QuarantineStatus:
    """`condition`: type, status, reason, message. The time of its transition stays while its status does."""
    type_, value, reason, message = condition
    before = next((c for c in status.conditions if c.type == type_), None)
    since = before.last_transition_time if before is not None and before.status == value else now
    written = ConditionStatus(str(type_), value, reason, message, since, quarantine.generation)
    others = tuple(c for c in status.conditions if c.type != type_)
    return replace(status, conditions=tuple(sorted((*others, written), key=lambda c: c.type)))
