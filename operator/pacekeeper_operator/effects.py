"""What a pass wants done in the world: values, which `services.errands` carries out, each by itself.

Every one of them may be repeated after a crash at any line, and follows from what is written in the job's bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .gangs import Gang
from .queues import Stage
from .state import Incident, WantedQuarantine, Worker


@dataclass(frozen=True)
class TryTemplate:
    """Ask the API server, by a dry run, whether it accepts the job's pods."""

    generation: int

    @property
    def key(self) -> str:
        return f"template {self.generation}"


@dataclass(frozen=True)
class CreatePod:
    """Of a worker whose name is reserved. `spare`: it is kept off the others' nodes; `avoid`: nodes under suspicion, or
    that are to be empty; `unreliable`: nodes that it is placed on only where there is no other as good."""

    worker: Worker
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
class AskForQuarantine:
    """Hand a node's case on to those who decide about nodes."""

    wanted: WantedQuarantine

    @property
    def key(self) -> str:
        return f"node {self.wanted.node} {self.wanted.incident}"


@dataclass(frozen=True)
class LookAtNodes:
    """Find out whether nodes (name, UID) can be used before ranks start there. `since`: when the last of the workers
    was made that they are for."""

    nodes: tuple[tuple[str, str], ...]
    since: float

    @property
    def key(self) -> str:
        return "look at nodes"


@dataclass(frozen=True)
class Localise:
    """Find out what a behaviour window's patterns say, in a thread of its own. `expected`: ranks of the job."""

    window: str
    expected: int

    @property
    def key(self) -> str:
        return f"localise {self.window}"


@dataclass(frozen=True)
class KeepBehaviour:
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
    before: Incident | None = None

    @property
    def key(self) -> str:
        return f"incident {self.incident.name}"


@dataclass(frozen=True)
class AttendQueue:
    """The job's Workload is as it shall be, and what its queue says of it is known."""

    stage: Stage

    @property
    def key(self) -> str:
        return "queue"


@dataclass(frozen=True)
class GuardNetwork:
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
    TryTemplate
    | CreatePod
    | DeletePod
    | AskForQuarantine
    | LookAtNodes
    | Localise
    | KeepBehaviour
    | WriteIncident
    | AttendQueue
    | GuardNetwork
    | DeleteJob
)
