"""A node's kubelet: starts and ends the containers of the pods on its node, and tells the API server how they are.

It hears late, tells late, and neither while it does not run or cannot reach the API server. What runs goes on without
it. What it knows of its pods lies on the node's disk: a restart, or a reboot, does not take it away.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from pacekeeper_operator.api import LABEL_PROBE, LABEL_WORKER

from ..network import API
from .containers import KILLED, Containers, Other, Probe
from .objects import Object
from .placement import Needs, Offer, refused_resource
from .pod_status import DEFAULT_GRACE, ENDED, LocalPod, Stage, has_run, pod_status

if TYPE_CHECKING:
    from .api_server import Change
    from .nodes import Node
    from .surroundings import Surroundings

HEARS = (0.02, 0.3)
STARTS = (0.2, 1.5)
TELLS = (0.05, 0.6)
ENDS_SIDECAR = (0.05, 1.0)
"""Seconds. From the end of the trainer to that of the sidecar."""
TRIES_AGAIN = (0.5, 1.5)
"""Seconds between two tries to reach the API server."""
PULLS_AGAIN = 10.0
"""Seconds until an image that could not be pulled is tried again."""
TRIES_RUNTIME_AGAIN = 5.0
"""Seconds until a container runtime that does nothing is asked again."""
_SIDECAR_PERIOD, _SIDECAR_FAILURES = 10.0, 3  # the liveness probe of `manifests.worker_pod`
_LOST = (KILLED, "ContainerStatusUnknown", "The container could not be located when the pod was terminated")


class Images(StrEnum):
    """How a node gets images."""

    COME = "come"
    FAIL = "fail"
    HANG = "hang"


class Kubelet:
    """Of one node. It does not run before `start`."""

    def __init__(self, world: Surroundings, node: Node) -> None:
        self.running = False
        self._world = world
        self._node = node
        self._random = world.random(f"kubelet of {node.name}")
        self._pods: dict[str, LocalPod] = {}  # by uid
        self._life = 0  # what an earlier life has planned does not come about
        self._registered = False
        self._out_of_touch = False
        self._hears: dict[str, None] = {}  # uids of pods that it is about to hear of
        self._addresses = 0

    # Its own life.

    def start(self) -> None:
        """The process: it finds what it has left."""
        if self.running or not self._node.powered:
            return
        self.running, self._registered, self._out_of_touch = True, False, False
        self._life += 1
        self._hears.clear()
        for pod in self._pods.values():
            pod.tells = False
            self._watch_deadline(pod)
            match pod.stage:
                case Stage.CREATING | Stage.PULLING | Stage.PULL_FAILED:
                    self._later(self._random.uniform(*STARTS), self._start, pod)
                case Stage.RUNNING:
                    self._watch_sidecar(pod)
                case Stage.EXITED:
                    self._later(self._random.uniform(*ENDS_SIDECAR), self._end, pod)
        self._catch_up()

    def stop(self) -> None:
        """The process; what it has started goes on."""
        self.running = False
        self._life += 1

    def lose_power(self) -> None:
        """Everything on the node ends, and nobody is told."""
        self.stop()
        for pod in self._pods.values():
            if pod.containers is None or pod.over:
                continue
            pod.stage, pod.told = Stage.ENDED, False
            if pod.exit is None:
                pod.exit = _LOST
                pod.exited = self._world.now()
            self._release(pod)
            pod.containers.kill()

    def forget(self) -> None:
        """Another machine, whose disk is empty."""
        self._pods.clear()

    @property
    def in_touch(self) -> bool:
        """Whether it could tell the API server something now."""
        world, node = self._world, self._node
        return self.running and not world.api.faults.away and world.network.reaches(node.name, API)

    # What it hears.

    def hear(self, change: Change) -> None:
        """A pod of this node has changed."""
        body, before = change.object, change.before
        uid = body["metadata"]["uid"]
        if uid in self._hears or not self.running:
            return
        if change.type == "MODIFIED" and before is not None and before["spec"].get("nodeName"):
            old, new = before["metadata"], body["metadata"]
            if all(old.get(key) == new.get(key) for key in ("deletionTimestamp", "deletionGracePeriodSeconds")):
                return  # mostly what it has written itself
        self._hears[uid] = None
        self._later(
            self._random.uniform(*HEARS), self._attend, uid, body["metadata"]["namespace"], body["metadata"]["name"]
        )

    def _attend(self, uid: str, namespace: str, name: str) -> None:
        self._hears.pop(uid, None)
        if not self.in_touch:
            self._wait_for_touch()
            return
        stored = self._world.api.get("pods", name, namespace)
        if stored is None or stored["metadata"]["uid"] != uid:
            self._attend_to_absence(uid)
        else:
            self._attend_to(stored)

    def _attend_to(self, stored: Object) -> None:
        metadata, status = stored["metadata"], stored["status"]
        known = self._pods.get(metadata["uid"])
        deleted = "deletionTimestamp" in metadata
        if known is not None:
            if deleted:
                self._terminate(known, float(metadata.get("deletionGracePeriodSeconds", DEFAULT_GRACE)))
                if known.over:
                    self._tell(known)
        elif deleted:  # nothing of it has ever run here
            self._world.api.delete("pods", metadata["name"], metadata["namespace"], uid=metadata["uid"], grace=0)
        elif status.get("phase", "Pending") == "Pending" and not has_run(status):
            self._admit(stored)
        elif status["phase"] not in ENDED:  # it ran on a machine that is no more
            pod = LocalPod(stored, Stage.ENDED, exit=_LOST)
            self._pods[pod.uid] = pod
            self._tell(pod)

    def _attend_to_absence(self, uid: str) -> None:
        """Its object is gone: removed by force, or by somebody who took the node for lost."""
        known = self._pods.get(uid)
        if known is None:
            return
        known.forgotten = True
        if known.over:
            del self._pods[uid]
        else:
            self._terminate(known, self._random.choice((1.0, known.wanted_grace)))

    def _wait_for_touch(self) -> None:
        if not self._out_of_touch:
            self._out_of_touch = True
            self._later(self._random.uniform(*TRIES_AGAIN), self._try_again)

    def _try_again(self) -> None:
        self._out_of_touch = False
        self._catch_up()

    def _catch_up(self) -> None:
        """All that it may have missed, and all that it has not told."""
        world, name = self._world, self._node.name
        if not self.in_touch:
            self._wait_for_touch()
            return
        if not self._registered:
            self._registered = True
            if world.api.get("nodes", name) is None:
                world.api.create("nodes", self._node.body(), manager=f"kubelet {name}")
                world.story.tell(name, "registers itself")
        stored = {
            body["metadata"]["uid"]: body for body in world.api.all("pods") if body["spec"].get("nodeName") == name
        }
        for uid in [uid for uid in self._pods if uid not in stored]:
            self._attend_to_absence(uid)
        for body in stored.values():
            self._attend_to(body)
        for pod in self._pods.values():
            if not pod.told:
                self._tell(pod)

    # What runs.

    def _admit(self, body: Object) -> None:
        pod = LocalPod(body, began=self._world.now())
        self._pods[pod.uid] = pod
        reason, message = self._refusal(body)
        if reason:
            pod.stage, pod.reason, pod.message = Stage.ENDED, reason, message
            self._world.story.tell(self._node.name, f"refuses pod {pod.name}: {reason}")
        else:
            self._watch_deadline(pod)
            self._later(self._random.uniform(*STARTS), self._start, pod)
        self._tell(pod)

    def _watch_deadline(self, pod: LocalPod) -> None:
        deadline = pod.body["spec"].get("activeDeadlineSeconds")
        if deadline is not None and not pod.over:
            message = "Pod was active on the node longer than the specified deadline"
            left = max(0.0, pod.began + float(deadline) - self._world.now())
            self._later(left, self.end, pod.uid, "DeadlineExceeded", message)

    def _refusal(self, body: Object) -> tuple[str, str]:
        """(reason, message); the scheduler may have been wrong, or passed by."""
        if self._node.refuses:
            return self._node.refuses, f"Pod was rejected: {self._node.refuses}"
        offer = Offer(self._node.body())
        for pod in self._pods.values():
            if not pod.over and pod.uid != body["metadata"]["uid"]:
                offer.add(Needs.parse(pod.body))
        lacking = refused_resource(Needs.parse(body), offer)
        if not lacking:
            return "", ""
        return f"OutOf{lacking}", f"Pod was rejected: Node didn't have enough resource: {lacking}"

    def _start(self, pod: LocalPod) -> None:
        if pod.stage not in (Stage.CREATING, Stage.PULLING, Stage.PULL_FAILED):
            return
        match self._node.images:
            case Images.FAIL:
                pod.stage = Stage.PULL_FAILED
                self._later(PULLS_AGAIN, self._start, pod)
            case Images.HANG:
                pod.stage = Stage.PULLING
                self._later(PULLS_AGAIN, self._start, pod)
            case Images.COME:
                self._run(pod)
        self._tell(pod)

    def _run(self, pod: LocalPod) -> None:
        world, node = self._world, self._node
        if node.stuck_since is not None:
            self._later(TRIES_RUNTIME_AGAIN, self._start, pod)
            return
        pod.stage, pod.started = Stage.RUNNING, world.now()
        pod.address = node.address if pod.body["spec"].get("hostNetwork") else self._next_address()
        world.network.addresses[pod.address] = node.name
        pod.containers = self._containers(pod)
        world.story.tell(node.name, f"runs pod {pod.name}")
        pod.containers.start()
        self._watch_sidecar(pod)

    def _containers(self, pod: LocalPod) -> Containers:
        labels = pod.body["metadata"].get("labels") or {}
        exited = partial(self._exited, pod)
        if LABEL_WORKER in labels:
            return self._world.launch(pod.body, self._node.name, pod.address, exited)
        if LABEL_PROBE in labels:
            return Probe(self._world, self._node, exited)
        return Other(self._world, exited)

    def _watch_sidecar(self, pod: LocalPod) -> None:
        if pod.containers is not None and pod.containers.sidecar is not None:
            self._later(_SIDECAR_PERIOD, self._look_at_sidecar, pod, 0)

    def _look_at_sidecar(self, pod: LocalPod, failures: int) -> None:
        if pod.stage is not Stage.RUNNING or pod.containers is None:
            return
        sidecar = pod.containers.sidecar
        failures = failures + 1 if sidecar is None or sidecar.dead or sidecar.paused else 0
        if failures >= _SIDECAR_FAILURES:
            failures = 0
            pod.restarts += 1
            self._world.story.tell(self._node.name, f"restarts the sidecar of {pod.name}, which does not answer")
            pod.containers.restart_sidecar()
            self._tell(pod)
        self._later(_SIDECAR_PERIOD, self._look_at_sidecar, pod, failures)

    def end(self, uid: str, reason: str, message: str, *, grace: float | None = None, disrupts: bool = False) -> None:
        """The kubelet's own will: a deadline, a lack of memory or disk, a shutdown. The pod will have failed of
        `reason`. `disrupts`: it is written that the pod is not to blame."""
        pod = self._pods.get(uid)
        if pod is None or pod.stage in (Stage.EXITED, Stage.ENDED) or not self.running:
            return
        pod.reason, pod.message, pod.disrupted = reason, message, disrupts
        self._world.story.tell(self._node.name, f"ends pod {pod.name}: {reason}")
        self._terminate(pod, pod.wanted_grace if grace is None else grace)

    def pods(self) -> list[str]:
        """uids of those that run."""
        return [uid for uid, pod in self._pods.items() if pod.stage in (Stage.RUNNING, Stage.EXITED)]

    def listens(self, address: str) -> bool:
        """Whether a sidecar with this address takes connections; one that is frozen does."""
        found = [pod.containers for pod in self._pods.values() if pod.address == address and not pod.over]
        return any(c is not None and c.sidecar is not None and not c.sidecar.dead for c in found)

    def _terminate(self, pod: LocalPod, grace: float) -> None:
        grace = max(1.0, grace)
        if grace >= pod.grace or pod.over:
            return
        if self._node.stuck_since is not None and pod.stage is Stage.RUNNING:
            self._later(TRIES_RUNTIME_AGAIN, self._terminate, pod, grace)
            return
        pod.grace = grace
        if pod.containers is not None:
            pod.containers.terminate(grace)
        else:
            self._end(pod)

    def _exited(self, pod: LocalPod, code: int, reason: str, message: str = "") -> None:
        """The main container has ended; the node may be without power, and its kubelet may be away."""
        if pod.stage is not Stage.RUNNING:
            return
        pod.stage, pod.exit, pod.exited = Stage.EXITED, (code, reason, message), self._world.now()
        if self.running:
            self._tell(pod)
            self._later(self._random.uniform(*ENDS_SIDECAR), self._end, pod)
        else:
            pod.told = False

    def _end(self, pod: LocalPod) -> None:
        """Nothing of it runs any more."""
        if pod.over:
            return
        pod.stage = Stage.ENDED
        self._release(pod)
        if pod.containers is not None:
            pod.containers.kill()
        if pod.forgotten:
            del self._pods[pod.uid]
        else:
            self._tell(pod)

    def _next_address(self) -> str:
        self._addresses += 1
        return f"{self._node.pods_network}.{self._addresses // 250}.{self._addresses % 250 + 1}"

    def _release(self, pod: LocalPod) -> None:
        if pod.address and pod.address != self._node.address:
            self._world.network.addresses.pop(pod.address, None)

    # What it tells.

    def _tell(self, pod: LocalPod) -> None:
        """In a moment; what happens until then is told with it."""
        pod.told = False
        if not pod.tells and not pod.forgotten:
            pod.tells = True
            self._later(self._random.uniform(*TELLS), self._write, pod)

    def _write(self, pod: LocalPod) -> None:
        pod.tells = False
        if not self.in_touch:
            self._wait_for_touch()
            return
        api, name, namespace = self._world.api, pod.name, pod.namespace
        stored = api.get("pods", name, namespace)
        if stored is None or stored["metadata"]["uid"] != pod.uid:
            self._attend_to_absence(pod.uid)
            return
        pod.told = True
        conditions, wall = stored["status"].get("conditions", ()), self._world.wall(self._node.name)
        status = {"status": pod_status(pod, conditions, self._node.address, self._world.now(), wall)}
        api.patch("pods", name, namespace, status, subresource="status", manager=f"kubelet {self._node.name}")
        if pod.over and "deletionTimestamp" in stored["metadata"]:
            api.delete("pods", name, namespace, uid=pod.uid, grace=0)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Unless the kubelet is stopped meanwhile."""
        self._world.after(seconds, self._still, self._life, call, arguments)

    def _still(self, life: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if life == self._life:
            call(*arguments)
