"""What a pass wants done in the world: values, which `services.errands` carries out, each by itself.

Every one of them may be repeated after a crash at any line, and follows from what is written in the job's bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .gangs import Gang
from .queues import WorkloadProgress
from .state import Incident, QuarantineRequest, WorkerRecord


@dataclass(frozen=True)
class ValidateTemplate:
    """Ask the API server, by a dry run, whether it accepts the job's pods."""

    generation: int

    @property
    def key(self) -> str:
        return f"template {self.generation}"


@dataclass(frozen=True)
class CreatePod:
    """Of a worker whose name is reserved. `spare`: it is kept off the others' nodes; `avoid`: nodes under suspicion, or
    that are to be empty; `unreliable`: nodes that it is placed on only where there is no other as good."""

    worker: WorkerRecord
    spare: bool = False
    avoid: tuple[str, ...] = ()
    unreliable: tuple[str, ...] = ()
    gang: Gang | None = None  # with which it is placed; None: alone

    PREFIX: ClassVar = "create "

    @property
    def key(self) -> str:
        return f"{self.PREFIX}{self.worker.name}"


@dataclass(frozen=True)
class DeletePod:
    """`force`: its node will not confirm it."""

    name: str
    uid: str
    force: bool = False

    @property
    def key(self) -> str:
        return f"delete {self.uid}{' by force' if self.force else ''}"


@dataclass(frozen=True)
class RequestQuarantine:
    """Hand a node's case on to those who decide about nodes."""

    request: QuarantineRequest

    @property
    def key(self) -> str:
        return f"node {self.request.node} {self.request.incident}"


@dataclass(frozen=True)
class CheckNodes:
    """Find out whether nodes (name, UID) can be used before ranks start there. `since`: when the last of the workers
    was made that they are for."""

    nodes: tuple[tuple[str, str], ...]
    since: float

    @property
    def key(self) -> str:
        return "look at nodes"


@dataclass(frozen=True)
class LocalizeProfile:
    """Find out what a behaviour window's patterns say, in a thread of its own. `expected`: ranks of the job."""

    window: str
    expected: int

    @property
    def key(self) -> str:
        return f"localise {self.window}"


@dataclass(frozen=True)
class SaveProfile:
    """What people may want to see of a window, beside the incident that tells of it."""

    window: str
    incident: str

    @property
    def key(self) -> str:
        return f"behaviour {self.incident}"


@dataclass(frozen=True)
class WriteIncident:
    """Into its own object, with events at its beginning and end. `before`: as it is written there; None: not at all."""

    incident: Incident
    previous: Incident | None = None

    @property
    def key(self) -> str:
        return f"incident {self.incident.name}"


@dataclass(frozen=True)
class SyncWorkload:
    """The job's Workload is as it shall be, and what its queue says of it is known."""

    progress: WorkloadProgress

    @property
    def key(self) -> str:
        return "queue"


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """The job's NetworkPolicy is as it shall be."""

    generation: int

    @property
    def key(self) -> str:
        return f"network {self.generation}"


@dataclass(frozen=True)
class DeleteJob:
    """Its time after its end is over."""

    uid: str

    @property
    def key(self) -> str:
        return f"job {self.uid}"


Effect = (
    ValidateTemplate
    | CreatePod
    | DeletePod
    | RequestQuarantine
    | CheckNodes
    | LocalizeProfile
    | SaveProfile
    | WriteIncident
    | SyncWorkload
    | ApplyNetworkPolicy
    | DeleteJob
)
