"""A kubelet's state of a pod, and the status that follows from it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ..ports import Containers
from .api.objects import Object, format_timestamp
from .conditions import with_condition

ENDED_PHASES = ("Succeeded", "Failed")
"""Pod phases."""
DEFAULT_POD_GRACE_SECONDS = 30.0
"""Seconds."""
_SANDBOX_CONDITION = "PodReadyToStartContainers"


def build_pod_status(pod: LocalPod, conditions: Sequence[Object], node_address: str, now: float, wall: float) -> Object:
    """Build a pod's status. `conditions`: the present ones, of which others' stay. `wall`: the node's clock."""
    running, ended = pod.stage is PodStage.RUNNING, pod.stage is PodStage.ENDED
    flags = {
        _SANDBOX_CONDITION: pod.stage is not PodStage.CREATING and not ended,
        "Initialized": running or pod.stage is PodStage.EXITED,
        "Ready": running,
        "ContainersReady": running,
    }
    for type_, value in flags.items():
        conditions = with_condition(conditions, type_, str(value), wall)
    if pod.disrupted and ended:
        conditions = with_condition(conditions, "DisruptionTarget", "True", wall, "TerminationByKubelet", pod.message)
    status: Object = {"phase": _compute_phase(pod), "conditions": list(conditions)}
    if pod.reason and ended:
        status |= {"reason": pod.reason, "message": pod.message}
    if ended and pod.containers is None and pod.exit is None:
        return status  # rejected, or deleted before anything ran
    spec, epoch = pod.body["spec"], wall - now
    status |= {"hostIP": node_address, "startTime": format_timestamp(int(epoch + pod.admitted_at))}
    if pod.address:
        status |= {"podIP": pod.address, "podIPs": [{"ip": pod.address}]}
    init_containers = spec.get("initContainers") or ()
    if init_containers:
        status["initContainerStatuses"] = [
            _build_container_status(pod, item, epoch, sidecar=True) for item in init_containers
        ]
    status["containerStatuses"] = [
        _build_container_status(pod, item, epoch, after_init=bool(init_containers)) for item in spec["containers"]
    ]
    return status


def has_run(status: Object) -> bool:
    """Return whether a status shows that containers have been started."""
    return any("running" in container.get("state", {}) for container in status.get("containerStatuses", ()))


class PodStage(Enum):
    CREATING = auto()
    PULLING = auto()  # the sandbox exists, and the image pull hangs
    PULL_FAILED = auto()
    RUNNING = auto()
    EXITED = auto()  # the main container has exited; the sidecar still runs
    ENDED = auto()


@dataclass(eq=False)
class LocalPod:
    """A kubelet's state of a pod. Times are virtual seconds."""

    body: Object  # as it was received
    stage: PodStage = PodStage.CREATING
    admitted_at: float = 0.0
    containers: Containers | None = None
    address: str = ""
    started_at: float = 0.0
    restarts: int = 0  # of the sidecar
    exit: tuple[int, str, str] | None = None  # code, reason, message
    exited_at: float = 0.0
    grace: float = math.inf  # the shortest grace period so far, in seconds
    reason: str = ""  # why the kubelet has ended or rejected it
    message: str = ""
    disrupted: bool = False  # by the kubelet
    deleted_by_force: bool = False  # its object is deleted
    reported: bool = True  # the API server has the present state
    report_pending: bool = False  # a report is scheduled

    @property
    def is_over(self) -> bool:
        """Whether all of its containers have ended, permanently."""
        return self.stage is PodStage.ENDED

    @property
    def spec_grace(self) -> float:
        """The grace period in its spec, in seconds."""
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
    succeeded = pod.exit is not None and pod.exit[0] == 0 and not pod.reason
    return "Succeeded" if succeeded else "Failed"


def _build_container_status(
    pod: LocalPod, spec: Object, epoch: float, *, sidecar: bool = False, after_init: bool = False
) -> Object:
    """Build a container's status.

    `epoch`: wall clock at virtual second 0. `after_init`: other containers start first.
    """
    waiting: dict[str, str] = {"reason": "ContainerCreating"}
    if after_init:
        waiting = {"reason": "PodInitializing"}
    elif pod.stage is PodStage.PULL_FAILED:
        waiting = {"reason": "ErrImagePull", "message": f"failed to pull image {spec.get('image', '')!r}: not found"}
    started = format_timestamp(int(epoch + pod.started_at))
    state: Object = {"waiting": waiting}
    if pod.stage is PodStage.RUNNING or (sidecar and pod.stage is PodStage.EXITED):
        state = {"running": {"startedAt": started}}
    elif pod.exit is not None:
        code, reason, message = pod.exit if not sidecar else (0, "Completed", "")
        state = {"terminated": {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}}
        state["terminated"] |= {"startedAt": started, "finishedAt": format_timestamp(int(epoch + pod.exited_at))}
        if message:
            state["terminated"]["message"] = message
    is_up = "running" in state
    restarts = pod.restarts if sidecar else 0
    return {"name": spec["name"], "state": state, "ready": is_up, "started": is_up, "restartCount": restarts}
