"""The cluster around a job, as decisions see it: its workers, their pods and nodes, and the other jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState

from ..api.incident import IncidentCause
from .desired_state import WorkerRecord
from .network import NetworkState

RECENT_POLL_SECONDS = 5.0
"""Age up to which a worker's last poll counts as a report. A worker with an open long poll counts, too.

It must be shorter than any silence that counts as a failure. Otherwise the last report before the operator was cut off
would count as proof that the operator is connected.
"""
FRESH_WORKER_SECONDS = 10.0
"""Age of the last report from which a worker may be gone: it gets no ranks."""
LAUNCHER_UNRESPONSIVE_SECONDS = 8.0
"""Time without a sign of life to its sidecar after which a launcher counts as unresponsive. It gives two a second."""
STUCK_WAITING_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ImageInspectError",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
"""Waiting reasons of containers that will not start without a change."""


@dataclass(frozen=True)
class PodView:
    """The part of a worker's pod that decisions need."""

    name: str
    uid: str
    phase: str  # Pending, Running, Succeeded, Failed
    node: str = ""
    address: str = ""
    created_at: float = 0.0
    deleting: bool = False
    delete_by: float | None = None  # end of its grace period; None: not being deleted
    disruption_reason: str = ""  # reason of its DisruptionTarget condition: eviction, preemption, taint, …
    ended_by_itself: bool = False  # it had ended before it was deleted; known of watched pods only
    disrupted_at: float | None = None  # when that condition began, or its deletion was requested, in whole seconds
    unschedulable_message: str = ""  # the scheduler's message
    exit_code: int | None = None  # exit code of the trainer, or of `failed_init_container`; None: it has not ended
    failed_init_container: str = ""  # the init container that failed, so that the trainer never ran
    self_inflicted_reason: str = ""  # the kubelet's message, if it ended the pod for a cause in the pod itself
    exit_reason: str = ""  # OOMKilled, Error, …
    exit_message: str = ""
    finished: bool = False  # its launcher reported last that the ranks have finished
    waiting_reason: str = ""  # ErrImagePull, CreateContainerConfigError, … of any container
    waiting_message: str = ""
    waiting_container: str = ""  # the container with that reason
    job: str = ""  # from its label
    owner: str = ""  # UID of its job
    scheduling_gated: bool = False  # scheduling gates hold it, mostly those of a queue
    pod_set: str = ""  # of its job's Workload, from its label; "": none, or an older operator created it
    started: bool = False  # its trainer's container runs
    avoided_nodes: frozenset[str] = frozenset()  # nodes that its affinity has excluded since it was created
    gpus: int = 0  # of any vendor, that its containers ask for

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or self.phase in ("Succeeded", "Failed")

    @property
    def stuck(self) -> bool:
        """Whether a container cannot start as it is specified, or not on this node. The kubelet keeps trying."""
        return self.waiting_reason in STUCK_WAITING_REASONS


@dataclass(frozen=True)
class WorkerView:
    """A worker: its record, its pod in the API server, its last heartbeat, and the results of the operator's probes."""

    record: WorkerRecord
    pod: PodView | None = None  # None: there is no such pod
    heartbeat: Heartbeat | None = None
    silent_seconds: float = 0.0  # since its last report, or since the operator's own start if that is later
    state_seconds: float = math.inf  # since the first report of the state that it is in
    reachable: bool | None = None  # result of the operator's own probe; None: there was no reason to probe
    node_reachable: bool | None = None
    seconds_since_step: float | None = None  # since the first report of its last completed step; None: not known

    @property
    def node(self) -> str:
        """Name of its node, from the API server; "": it has none yet."""
        return self.pod.node if self.pod is not None else self.record.node

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def alive(self) -> bool:
        """Whether it has a pod that runs and is not being deleted."""
        return self.pod is not None and not self.pod.ended and not self.pod.deleting

    @property
    def usable(self) -> bool:
        """Whether it may hold ranks, now or when it is warm."""
        return self.alive and not self.record.leaving

    @property
    def can_checkpoint(self) -> bool:
        """Whether it can still take part in a checkpoint, even if it is to be replaced."""
        return self.pod is not None and not self.pod.ended and not self.record.dead

    @property
    def warm(self) -> bool:
        """Whether it can take ranks at once."""
        return self.responsive and self.heartbeat is not None and self.heartbeat.state is LauncherState.WARM

    @property
    def responsive(self) -> bool:
        """Whether it would follow a plan at once."""
        return (
            self.usable
            and self.pod is not None
            and bool(self.pod.address)
            and self.heartbeat is not None
            and self.silent_seconds <= FRESH_WORKER_SECONDS
            and not self.unresponsive
        )

    @property
    def unresponsive(self) -> bool:
        """Whether its sidecar reports, but its launcher has given no sign of life for too long."""
        return self.heartbeat is not None and self.heartbeat.launcher_silent_seconds >= LAUNCHER_UNRESPONSIVE_SECONDS


@dataclass(frozen=True)
class NodeView:
    name: str
    uid: str
    ready: bool = True
    leave_reason: str = ""  # why its platform drains it; "": it does not
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # those that may describe its location in the network
    boot_id: str = ""  # of its kernel: nodes that are containers of one machine share it; "": not reported


@dataclass(frozen=True)
class ClusterView:
    """The part of the cluster around a job that budgets need."""

    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    network: NetworkState | None = None  # None: this operator has not read it yet
    leaving_since: Mapping[str, float] = field(default_factory=dict)  # of nodes that are drained, by name
    levels: tuple[str, ...] = ()  # labels of nodes by which a Fabric locates them, from the leaf outward
    suspects: frozenset[str] = frozenset()  # nodes that this and other jobs consider lost or failing right now
    unreliable_nodes: tuple[str, ...] = ()  # nodes that had Incidents of any jobs on several days, the worst first
    older_waiting_job: str = ""  # an older job that is to be placed first
    folder_owner: str = ""  # another job that writes its checkpoints to this one's folder, and began before
    hung_nodes: Mapping[str, int] = field(default_factory=dict)  # node → recent hangs on it, of this namespace's jobs
    hung_elsewhere: frozenset[str] = frozenset()  # nodes on which jobs of other namespaces have hung recently
    # Durations of earlier incidents.
    past_durations: Mapping[IncidentCause, tuple[float, ...]] = field(default_factory=dict)
    reached_elsewhere: bool = False  # another job's worker, or another node, has just reached the operator
