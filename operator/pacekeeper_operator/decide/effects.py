"""The effects that a pass requests: values that the effect runner (`runtime.effect_runner`) carries out one by one.

Each effect follows from the job's persisted state, and may be repeated after a crash at any line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..pods.gangs import Gang
from ..pods.queues import WorkloadProgress
from ..state.desired_state import Incident, QuarantineRequest, WorkerRecord


@dataclass(frozen=True)
class ValidateTemplate:
    """Check by a dry run whether the API server accepts the job's pods."""

    generation: int

    @property
    def key(self) -> str:
        return f"template {self.generation}"


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of a worker whose name is reserved.

    `spare`: the pod is kept off the nodes of the other workers. `avoid`: nodes under suspicion, or being drained.
    `unreliable`: nodes that the pod is placed on only if no other node is as good. `pod_set`: the pod's set in the
    job's Workload; "": the job is in no queue.
    """

    worker: WorkerRecord
    spare: bool = False
    avoid: tuple[str, ...] = ()
    unreliable: tuple[str, ...] = ()
    gang: Gang | None = None  # the gang to schedule the pod with; None: it is scheduled alone
    pod_set: str = ""

    PREFIX: ClassVar = "create "

    @property
    def key(self) -> str:
        return f"{self.PREFIX}{self.worker.name}"


@dataclass(frozen=True)
class CreateCheckpointServer:
    """Create the pod through which workers reach the claim."""

    name: str

    @property
    def key(self) -> str:
        return f"start checkpoint server {self.name}"


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod. `force`: do not wait for its kubelet, whose node is lost."""

    name: str
    uid: str
    force: bool = False

    @property
    def key(self) -> str:
        return f"delete {self.uid}{' by force' if self.force else ''}"


@dataclass(frozen=True)
class DeleteWatchedPod:
    """Delete a pod of a watched job, so that its controller restarts all ranks. It is checked again right before."""

    name: str
    uid: str
    incident: str

    @property
    def key(self) -> str:
        return f"delete watched {self.uid}"


@dataclass(frozen=True)
class RequestQuarantine:
    """Pass a suspicion on to the node quarantine controller (`services.quarantine`)."""

    request: QuarantineRequest

    @property
    def key(self) -> str:
        return f"node {self.request.node} {self.request.incident}"


@dataclass(frozen=True)
class CheckNodes:
    """Check nodes (name, UID) before ranks start on them.

    `since`: when the newest pod on these nodes was created, in seconds since the epoch.
    """

    nodes: tuple[tuple[str, str], ...]
    since: float

    @property
    def key(self) -> str:
        return "check nodes"


@dataclass(frozen=True)
class LocalizeProfile:
    """Localize the fault in a profile window's patterns, in a thread. `expected`: the number of the job's ranks."""

    window: str
    expected: int

    @property
    def key(self) -> str:
        return f"localize {self.window}"


@dataclass(frozen=True)
class SaveProfile:
    """Save a profile window for users, in addition to the incident that reports it."""

    window: str
    incident: str

    @property
    def key(self) -> str:
        return f"profile {self.incident}"


@dataclass(frozen=True)
class WriteIncident:
    """Write an incident to its object, with events at its beginning and end.

    `previous`: the incident as the object holds it; None: there is no object yet.
    """

    incident: Incident
    previous: Incident | None = None

    @property
    def key(self) -> str:
        return f"incident {self.incident.name}"


@dataclass(frozen=True)
class SyncWorkload:
    """Update the job's Workload, and read its queue's decision."""

    progress: WorkloadProgress

    @property
    def key(self) -> str:
        return "queue"


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """Create or update the job's NetworkPolicy."""

    generation: int

    @property
    def key(self) -> str:
        return f"network {self.generation}"


@dataclass(frozen=True)
class DeleteJob:
    """Delete a job whose `ttlSecondsAfterFinished` is over."""

    uid: str

    @property
    def key(self) -> str:
        return f"job {self.uid}"


Effect = (
    ValidateTemplate
    | CreatePod
    | CreateCheckpointServer
    | DeletePod
    | DeleteWatchedPod
    | RequestQuarantine
    | CheckNodes
    | LocalizeProfile
    | SaveProfile
    | WriteIncident
    | SyncWorkload
    | ApplyNetworkPolicy
    | DeleteJob
)
