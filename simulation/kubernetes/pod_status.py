"""A pod as its kubelet knows it, and the status that follows from that. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .conditions import with_condition
from .containers import Containers
from .objects import Object, format_timestamp

ENDED_PHASES = ("Succeeded", "Failed")
"""Phases."""
DEFAULT_POD_GRACE_SECONDS = 30.0
"""Seconds."""
_SANDBOX_CONDITION = "PodReadyToStartContainers"


def build_pod_status(pod: LocalPod, conditions: Sequence[Object], node_address: str, now: float, wall: float) -> Object:
    """`conditions`: those that stand in its status; others' stay. `now`: virtual seconds, `wall`: the node's clock."""
    running, ended = pod.stage is PodStage.RUNNING, pod.stage is PodStage.ENDED
    facts = {
        _SANDBOX_CONDITION: pod.stage is not PodStage.CREATING and not ended,
        "Initialized": running or pod.stage is PodStage.EXITED,
        "Ready": running,
        "ContainersReady": running,
    }
    for type_, holds in facts.items():
        conditions = with_condition(conditions, type_, str(holds), wall)
    if pod.disrupted and ended:
        conditions = with_condition(conditions, "DisruptionTarget", "True", wall, "TerminationByKubelet", pod.message)
    status: Object = {"phase": _compute_phase(pod), "conditions": list(conditions)}
    if pod.reason and ended:
        status |= {"reason": pod.reason, "message": pod.message}
    if ended and pod.containers is None and pod.exit is None:
        return status  # refused, or taken back before anything ran
    spec, since = pod.body["spec"], wall - now
    status |= {"hostIP": node_address, "startTime": format_timestamp(int(since + pod.admitted_at))}
    if pod.address:
        status |= {"podIP": pod.address, "podIPs": [{"ip": pod.address}]}
    first = spec.get("initContainers") or ()
    if first:
        status["initContainerStatuses"] = [_build_container_status(pod, item, since, sidecar=True) for item in first]
    status["containerStatuses"] = [_build_container_status(pod, item, since, behind=bool(first)) for item in spec["containers"]]
    return status


def has_run(status: Object) -> bool:
    """Whether a status says that containers have been started."""
    return any("running" in container.get("state", {}) for container in status.get("containerStatuses", ()))


class PodStage(Enum):
    CREATING = auto()
    PULLING = auto()  # there is a sandbox, and an image that does not come
    PULL_FAILED = auto()
    RUNNING = auto()
    EXITED = auto()  # the main container; the sidecar is still there
    ENDED = auto()


@dataclass(eq=False)
class LocalPod:
    """A pod as its kubelet knows it. Times are virtual seconds."""

    body: Object  # as it came
    stage: PodStage = PodStage.CREATING
    admitted_at: float = 0.0
    containers: Containers | None = None
    address: str = ""
    started_at: float = 0.0
    restarts: int = 0  # of the sidecar
    exit: tuple[int, str, str] | None = None  # code, reason, message
    exited_at: float = 0.0
    grace: float = math.inf  # seconds that it was given to end
    reason: str = ""  # why the kubelet itself has ended or refused it
    message: str = ""
    disrupted: bool = False  # by the kubelet
    deleted_by_force: bool = False  # its object is gone
    reported: bool = True  # the API server knows all this
    report_pending: bool = False  # it is about to be told

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more, or ever will."""
        return self.stage is PodStage.ENDED

    @property
    def spec_grace(self) -> float:
        """Seconds to end in, by its spec."""
        return float(self.body["spec"].get("terminationGracePeriodSeconds", DEFAULT_POD_GRACE_SECONDS))

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"]["namespace"])


def _compute_phase(pod: LocalPod) -> str:
    if pod.stage in (PodStage.RUNNING, PodStage.EXITED):
        return "Running"
    if pod.stage is not PodStage.ENDED:
        return "Pending"
    well = pod.exit is not None and pod.exit[0] == 0 and not pod.reason
    return "Succeeded" if well else "Failed"


def _build_container_status(pod: LocalPod, spec: Object, since: float, *, sidecar: bool = False, behind: bool = False) -> Object:
    """`since`: the wall clock of virtual second 0. `behind`: others have to start first."""
    waits: dict[str, str] = {"reason": "ContainerCreating"}
    if behind:
        waits = {"reason": "PodInitializing"}
    elif pod.stage is PodStage.PULL_FAILED:
        waits = {"reason": "ErrImagePull", "message": f"failed to pull image {spec.get('image', '')!r}: not found"}
    started = format_timestamp(int(since + pod.started_at))
    state: Object = {"waiting": waits}
    if pod.stage is PodStage.RUNNING or (sidecar and pod.stage is PodStage.EXITED):
        state = {"running": {"startedAt": started}}
    elif pod.exit is not None:
        code, reason, message = pod.exit if not sidecar else (0, "Completed", "")
        state = {"terminated": {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}}
        state["terminated"] |= {"startedAt": started, "finishedAt": format_timestamp(int(since + pod.exited_at))}
        if message:
            state["terminated"]["message"] = message
    up = "running" in state
    restarts = pod.restarts if sidecar else 0
    return {"name": spec["name"], "state": state, "ready": up, "started": up, "restartCount": restarts}
