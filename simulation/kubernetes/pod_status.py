"""A pod as its kubelet knows it, and the status that follows from that. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .conditions import with_condition
from .containers import Containers
from .objects import Object, timestamp

ENDED = ("Succeeded", "Failed")
"""Phases."""
DEFAULT_GRACE = 30.0
"""Seconds."""
_SANDBOX = "PodReadyToStartContainers"


def pod_status(pod: LocalPod, conditions: Sequence[Object], node_address: str, now: float, wall: float) -> Object:
    """`conditions`: those that stand in its status; others' stay. `now`: virtual seconds, `wall`: the node's clock."""
    running, ended = pod.stage is Stage.RUNNING, pod.stage is Stage.ENDED
    facts = {
        _SANDBOX: pod.stage is not Stage.CREATING and not ended,
        "Initialized": running or pod.stage is Stage.EXITED,
        "Ready": running,
        "ContainersReady": running,
    }
    for type_, holds in facts.items():
        conditions = with_condition(conditions, type_, str(holds), wall)
    if pod.disrupted and ended:
        conditions = with_condition(conditions, "DisruptionTarget", "True", wall, "TerminationByKubelet", pod.message)
    status: Object = {"phase": _phase(pod), "conditions": list(conditions)}
    if pod.reason and ended:
        status |= {"reason": pod.reason, "message": pod.message}
    if ended and pod.containers is None and pod.exit is None:
        return status  # refused, or taken back before anything ran
    spec, since = pod.body["spec"], wall - now
    status |= {"hostIP": node_address, "startTime": timestamp(int(since + pod.began))}
    if pod.address:
        status |= {"podIP": pod.address, "podIPs": [{"ip": pod.address}]}
    first = spec.get("initContainers") or ()
    if first:
        status["initContainerStatuses"] = [_container(pod, item, since, sidecar=True) for item in first]
    status["containerStatuses"] = [_container(pod, item, since, behind=bool(first)) for item in spec["containers"]]
    return status


def has_run(status: Object) -> bool:
    """Whether a status says that containers have been started."""
    return any("running" in container.get("state", {}) for container in status.get("containerStatuses", ()))


class Stage(Enum):
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
    stage: Stage = Stage.CREATING
    began: float = 0.0
    containers: Containers | None = None
    address: str = ""
    started: float = 0.0
    restarts: int = 0  # of the sidecar
    exit: tuple[int, str, str] | None = None  # code, reason, message
    exited: float = 0.0
    grace: float = math.inf  # seconds that it was given to end
    reason: str = ""  # why the kubelet itself has ended or refused it
    message: str = ""
    disrupted: bool = False  # by the kubelet
    forgotten: bool = False  # its object is gone
    told: bool = True  # the API server knows all this
    tells: bool = False  # it is about to be told

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more, or ever will."""
        return self.stage is Stage.ENDED

    @property
    def wanted_grace(self) -> float:
        """Seconds to end in, by its spec."""
        return float(self.body["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE))

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"]["namespace"])


def _phase(pod: LocalPod) -> str:
    if pod.stage in (Stage.RUNNING, Stage.EXITED):
        return "Running"
    if pod.stage is not Stage.ENDED:
        return "Pending"
    well = pod.exit is not None and pod.exit[0] == 0 and not pod.reason
    return "Succeeded" if well else "Failed"


def _container(pod: LocalPod, spec: Object, since: float, *, sidecar: bool = False, behind: bool = False) -> Object:
    """`since`: the wall clock of virtual second 0. `behind`: others have to start first."""
    waits: dict[str, str] = {"reason": "ContainerCreating"}
    if behind:
        waits = {"reason": "PodInitializing"}
    elif pod.stage is Stage.PULL_FAILED:
        waits = {"reason": "ErrImagePull", "message": f"failed to pull image {spec.get('image', '')!r}: not found"}
    started = timestamp(int(since + pod.started))
    state: Object = {"waiting": waits}
    if pod.stage is Stage.RUNNING or (sidecar and pod.stage is Stage.EXITED):
        state = {"running": {"startedAt": started}}
    elif pod.exit is not None:
        code, reason, message = pod.exit if not sidecar else (0, "Completed", "")
        state = {"terminated": {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}}
        state["terminated"] |= {"startedAt": started, "finishedAt": timestamp(int(since + pod.exited))}
        if message:
            state["terminated"]["message"] = message
    up = "running" in state
    restarts = pod.restarts if sidecar else 0
    return {"name": spec["name"], "state": state, "ready": up, "started": up, "restartCount": restarts}
