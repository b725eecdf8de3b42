"""A node's kubelet: it starts and ends the containers of the pods on its node, and reports their status.

It receives and reports with delays, and not at all while it is stopped or cannot reach the API server. Containers run
on without it. Its state of the pods is on the node's disk: it survives a restart and a reboot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pacekeeper_operator.api.names import LABEL_PROBE, LABEL_WORKER

from ..network import API_PLACE
from ..ports import KILLED_EXIT_CODE, Containers
from .api.changes import RESTORED, ObjectChange
from .api.objects import Object
from .cluster_world import ClusterWorld
from .containers import OtherContainers, ProbeContainers
from .machine import ImagePulls, Machine
from .placement import NodeOffer, PodNeeds, find_short_resource
from .pod_status import DEFAULT_POD_GRACE_SECONDS, ENDED_PHASES, LocalPod, PodStage, build_pod_status, has_run

POD_NOTICE_SECONDS = (0.02, 0.3)
CONTAINER_START_SECONDS = (0.2, 1.5)
STATUS_REPORT_SECONDS = (0.05, 0.6)
SIDECAR_END_SECONDS = (0.05, 1.0)
"""Seconds from the end of the trainer to that of the sidecar."""
API_RETRY_SECONDS = (0.5, 1.5)
"""Seconds between two attempts to reach the API server."""
IMAGE_PULL_RETRY_SECONDS = 10.0
"""Seconds until a failed image pull is retried."""
RUNTIME_RETRY_SECONDS = 5.0
"""Seconds until a hanging container runtime is called again."""
_SIDECAR_PROBE_SECONDS, _MAX_SIDECAR_PROBE_FAILURES = 10.0, 3  # the liveness probe of `manifests.build_worker_pod`
_LOST_CONTAINER_EXIT = (
    KILLED_EXIT_CODE,
    "ContainerStatusUnknown",
    "The container could not be located when the pod was terminated",
)


class Kubelet:
    """The kubelet of one node. It does not run before `start`."""

    def __init__(self, world: ClusterWorld, node: Machine) -> None:
        self.running = False
        self._world = world
        self._node = node
        self._random = world.create_random(f"kubelet of {node.name}")
        self._pods: dict[str, LocalPod] = {}  # by UID
        self._process_number = 0  # cancels calls that an earlier process has scheduled
        self._registered = False
        self._disconnected = False
        self._pending_syncs: dict[str, None] = {}  # UIDs of pods that will be synced soon
        self._addresses = 0

    # Its process.

    def start(self) -> None:
        """Start the process. It resumes from its state on disk."""
        if self.running or not self._node.powered:
            return
        self.running, self._registered, self._disconnected = True, False, False
        self._process_number += 1
        self._pending_syncs.clear()
        for pod in self._pods.values():
            pod.report_pending = False
            self._watch_deadline(pod)
            match pod.stage:
                case PodStage.CREATING | PodStage.PULLING | PodStage.PULL_FAILED:
                    self._call_later(self._random.uniform(*CONTAINER_START_SECONDS), self._start_pod, pod)
                case PodStage.RUNNING:
                    self._start_sidecar_probe(pod)
                case PodStage.EXITED:
                    self._call_later(self._random.uniform(*SIDECAR_END_SECONDS), self._finish_pod, pod)
        self._resync_all()

    def stop(self) -> None:
        """Stop the process. Containers run on."""
        self.running = False
        self._process_number += 1

    def lose_power(self) -> None:
        """End everything on the node. The API server is not informed."""
        self.stop()
        for pod in self._pods.values():
            if pod.containers is None or pod.is_over:
                continue
            pod.stage, pod.reported = PodStage.ENDED, False
            if pod.exit is None:
                pod.exit = _LOST_CONTAINER_EXIT
                pod.exited_at = self._world.now()
            self._release_address(pod)
            pod.containers.kill()

    def forget(self) -> None:
        """Drop the state: another machine with an empty disk."""
        self._pods.clear()

    @property
    def is_connected(self) -> bool:
        """Whether it can reach the API server now."""
        world, node = self._world, self._node
        return self.running and not world.api.faults.is_unavailable and world.network.can_reach(node.name, API_PLACE)

    # Events from the API server.

    def on_pod_change(self, change: ObjectChange) -> None:
        """Schedule a sync of a pod of this node that has changed."""
        body, previous = change.object, change.previous
        uid = body["metadata"]["uid"]
        restored = change.actor == RESTORED
        if restored and uid in self._pods:
            self._pods[uid].reported = False  # the API server has lost it
        if uid in self._pending_syncs or not self.running:
            return
        if not restored and change.type == "MODIFIED" and previous is not None and previous["spec"].get("nodeName"):
            old, new = previous["metadata"], body["metadata"]
            if all(old.get(key) == new.get(key) for key in ("deletionTimestamp", "deletionGracePeriodSeconds")):
                return  # usually its own write
        self._pending_syncs[uid] = None
        self._call_later(
            self._random.uniform(*POD_NOTICE_SECONDS),
            self._sync_pod,
            uid,
            body["metadata"]["namespace"],
            body["metadata"]["name"],
        )

    def _sync_pod(self, uid: str, namespace: str, name: str) -> None:
        self._pending_syncs.pop(uid, None)
        if not self.is_connected:
            self._wait_for_connection()
            return
        stored = self._world.api.get("pods", name, namespace)
        if stored is None or stored["metadata"]["uid"] != uid:
            self._sync_removed_pod(uid)
        else:
            self._sync_stored_pod(stored)

    def _sync_stored_pod(self, stored: Object) -> None:
        metadata, status = stored["metadata"], stored["status"]
        local_pod = self._pods.get(metadata["uid"])
        deleted = "deletionTimestamp" in metadata
        if local_pod is not None:
            if deleted:
                self._terminate_pod(
                    local_pod, float(metadata.get("deletionGracePeriodSeconds", DEFAULT_POD_GRACE_SECONDS))
                )
                if local_pod.is_over:
                    self._schedule_status(local_pod)
            elif not local_pod.reported:
                self._schedule_status(local_pod)
        elif deleted:  # it has never run here
            self._world.api.delete("pods", metadata["name"], metadata["namespace"], uid=metadata["uid"], grace=0)
        elif status.get("phase", "Pending") == "Pending" and not has_run(status):
            self._admit_pod(stored)
        elif status["phase"] not in ENDED_PHASES:  # it ran on a machine that no longer exists
            pod = LocalPod(stored, PodStage.ENDED, exit=_LOST_CONTAINER_EXIT)
            self._pods[pod.uid] = pod
            self._schedule_status(pod)

    def _sync_removed_pod(self, uid: str) -> None:
        """Handle a pod whose object was deleted: by force, or because the node seemed lost."""
        pod = self._pods.get(uid)
        if pod is None:
            return
        pod.deleted_by_force = True
        if pod.is_over:
            del self._pods[uid]
        else:
            self._terminate_pod(pod, self._random.choice((1.0, pod.spec_grace)))

    def _wait_for_connection(self) -> None:
        if not self._disconnected:
            self._disconnected = True
            self._call_later(self._random.uniform(*API_RETRY_SECONDS), self._retry_connection)

    def _retry_connection(self) -> None:
        self._disconnected = False
        self._resync_all()

    def _resync_all(self) -> None:
        """Sync all pods, and report all unreported statuses."""
        world, name = self._world, self._node.name
        if not self.is_connected:
            self._wait_for_connection()
            return
        if not self._registered:
            self._registered = True
            if world.api.get("nodes", name) is None:
                world.api.create("nodes", self._node.build_object(self._world.wall_time()), manager=f"kubelet {name}")
                world.log.record(name, "registers itself")
        stored = {
            body["metadata"]["uid"]: body for body in world.api.list_all("pods") if body["spec"].get("nodeName") == name
        }
        for uid in [uid for uid in self._pods if uid not in stored]:
            self._sync_removed_pod(uid)
        for body in stored.values():
            self._sync_stored_pod(body)
        for pod in self._pods.values():
            if not pod.reported:
                self._schedule_status(pod)

    # Containers.

    def _admit_pod(self, body: Object) -> None:
        pod = LocalPod(body, admitted_at=self._world.now())
        self._pods[pod.uid] = pod
        reason, message = self._find_refusal(body)
        if reason:
            pod.stage, pod.reason, pod.message = PodStage.ENDED, reason, message
            self._world.log.record(self._node.name, f"refuses pod {pod.name}: {reason}")
        else:
            self._watch_deadline(pod)
            self._call_later(self._random.uniform(*CONTAINER_START_SECONDS), self._start_pod, pod)
        self._schedule_status(pod)

    def _watch_deadline(self, pod: LocalPod) -> None:
        deadline = pod.body["spec"].get("activeDeadlineSeconds")
        if deadline is not None and not pod.is_over:
            message = "Pod was active on the node longer than the specified deadline"
            remaining = max(0.0, pod.admitted_at + float(deadline) - self._world.now())
            self._call_later(remaining, self.end_pod, pod.uid, "DeadlineExceeded", message)

    def _find_refusal(self, body: Object) -> tuple[str, str]:
        """Return (reason, message) of a rejection. The scheduler may have been wrong, or bypassed."""
        if self._node.refuses:
            return self._node.refuses, f"Pod was rejected: {self._node.refuses}"
        offer = NodeOffer(self._node.build_object(self._world.wall_time()))
        for pod in self._pods.values():
            if not pod.is_over and pod.uid != body["metadata"]["uid"]:
                offer.add(PodNeeds.parse(pod.body))
        resource = find_short_resource(PodNeeds.parse(body), offer)
        if not resource:
            return "", ""
        return f"OutOf{resource}", f"Pod was rejected: Node didn't have enough resource: {resource}"

    def _start_pod(self, pod: LocalPod) -> None:
        if pod.stage not in (PodStage.CREATING, PodStage.PULLING, PodStage.PULL_FAILED):
            return
        match self._node.images:
            case ImagePulls.FAIL:
                pod.stage = PodStage.PULL_FAILED
                self._call_later(IMAGE_PULL_RETRY_SECONDS, self._start_pod, pod)
            case ImagePulls.HANG:
                pod.stage = PodStage.PULLING
                self._call_later(IMAGE_PULL_RETRY_SECONDS, self._start_pod, pod)
            case ImagePulls.SUCCEED:
                self._run_pod(pod)
        self._schedule_status(pod)

    def _run_pod(self, pod: LocalPod) -> None:
        world, node = self._world, self._node
        if node.stuck_since is not None:
            self._call_later(RUNTIME_RETRY_SECONDS, self._start_pod, pod)
            return
        pod.stage, pod.started_at = PodStage.RUNNING, world.now()
        pod.address = node.address if pod.body["spec"].get("hostNetwork") else self._allocate_address()
        world.network.addresses[pod.address] = node.name
        pod.containers = self._create_containers(pod)
        world.log.record(node.name, f"runs pod {pod.name}")
        pod.containers.start()
        self._start_sidecar_probe(pod)

    def _create_containers(self, pod: LocalPod) -> Containers:
        labels = pod.body["metadata"].get("labels") or {}
        on_exit = partial(self._on_exit, pod)
        if LABEL_WORKER in labels:
            return self._world.create_worker(pod.body, self._node.name, pod.address, on_exit)
        if LABEL_PROBE in labels:
            return ProbeContainers(self._world, self._node, on_exit)
        return OtherContainers(self._world, on_exit)

    def _start_sidecar_probe(self, pod: LocalPod) -> None:
        if pod.containers is not None and pod.containers.sidecar is not None:
            self._call_later(_SIDECAR_PROBE_SECONDS, self._probe_sidecar, pod, 0)

    def _probe_sidecar(self, pod: LocalPod, failures: int) -> None:
        if pod.stage is not PodStage.RUNNING or pod.containers is None:
            return
        sidecar = pod.containers.sidecar
        failures = failures + 1 if sidecar is None or sidecar.dead or sidecar.paused else 0
        if failures >= _MAX_SIDECAR_PROBE_FAILURES:
            failures = 0
            pod.restarts += 1
            self._world.log.record(self._node.name, f"restarts the sidecar of {pod.name}, which does not answer")
            pod.containers.restart_sidecar()
            self._schedule_status(pod)
        self._call_later(_SIDECAR_PROBE_SECONDS, self._probe_sidecar, pod, failures)

    def end_pod(
        self, uid: str, reason: str, message: str, *, grace: float | None = None, disrupts: bool = False
    ) -> None:
        """End a pod on the kubelet's own decision: a deadline, a lack of memory or disk, a shutdown.

        The pod fails with `reason`. `disrupts`: its status shows that it is not to blame.
        """
        pod = self._pods.get(uid)
        if pod is None or pod.stage in (PodStage.EXITED, PodStage.ENDED) or not self.running:
            return
        pod.reason, pod.message, pod.disrupted = reason, message, disrupts
        self._world.log.record(self._node.name, f"ends pod {pod.name}: {reason}")
        self._terminate_pod(pod, pod.spec_grace if grace is None else grace)

    def list_running_pods(self) -> list[str]:
        """Return the UIDs of the running pods."""
        return [uid for uid, pod in self._pods.items() if pod.stage in (PodStage.RUNNING, PodStage.EXITED)]

    def is_listening(self, address: str) -> bool:
        """Return whether a sidecar with this address accepts connections. A paused one does."""
        containers = [pod.containers for pod in self._pods.values() if pod.address == address and not pod.is_over]
        return any(c is not None and c.sidecar is not None and not c.sidecar.dead for c in containers)

    def _terminate_pod(self, pod: LocalPod, grace: float) -> None:
        grace = max(1.0, grace)
        if grace >= pod.grace or pod.is_over:
            return
        if self._node.stuck_since is not None and pod.stage is PodStage.RUNNING:
            self._call_later(RUNTIME_RETRY_SECONDS, self._terminate_pod, pod, grace)
            return
        pod.grace = grace
        if pod.containers is not None:
            pod.containers.terminate(grace)
        else:
            self._finish_pod(pod)

    def _on_exit(self, pod: LocalPod, code: int, reason: str, message: str = "") -> None:
        """Handle the exit of the main container. The node may have no power, and the kubelet may be stopped."""
        if pod.stage is not PodStage.RUNNING:
            return
        pod.stage, pod.exit, pod.exited_at = PodStage.EXITED, (code, reason, message), self._world.now()
        if self.running:
            self._schedule_status(pod)
            self._call_later(self._random.uniform(*SIDECAR_END_SECONDS), self._finish_pod, pod)
        else:
            pod.reported = False

    def _finish_pod(self, pod: LocalPod) -> None:
        """Finish a pod: all of its containers have ended."""
        if pod.is_over:
            return
        pod.stage = PodStage.ENDED
        self._release_address(pod)
        if pod.containers is not None:
            pod.containers.kill()
        if pod.deleted_by_force:
            del self._pods[pod.uid]
        else:
            self._schedule_status(pod)

    def _allocate_address(self) -> str:
        self._addresses += 1
        return f"{self._node.pods_network}.{self._addresses // 250}.{self._addresses % 250 + 1}"

    def _release_address(self, pod: LocalPod) -> None:
        if pod.address and pod.address != self._node.address:
            self._world.network.addresses.pop(pod.address, None)

    # Reports.

    def _schedule_status(self, pod: LocalPod) -> None:
        """Report a pod's status soon. Changes until then are included."""
        pod.reported = False
        if not pod.report_pending and not pod.deleted_by_force:
            pod.report_pending = True
            self._call_later(self._random.uniform(*STATUS_REPORT_SECONDS), self._write_status, pod)

    def _write_status(self, pod: LocalPod) -> None:
        pod.report_pending = False
        if not self.is_connected:
            self._wait_for_connection()
            return
        api, name, namespace = self._world.api, pod.name, pod.namespace
        stored = api.get("pods", name, namespace)
        if stored is None or stored["metadata"]["uid"] != pod.uid:
            self._sync_removed_pod(pod.uid)
            return
        pod.reported = True
        conditions, wall = stored["status"].get("conditions", ()), self._world.wall_time(self._node.name)
        status = {"status": build_pod_status(pod, conditions, self._node.address, self._world.now(), wall)}
        api.patch("pods", name, namespace, status, subresource="status", manager=f"kubelet {self._node.name}")
        if pod.is_over and "deletionTimestamp" in stored["metadata"]:
            api.delete("pods", name, namespace, uid=pod.uid, grace=0)

    def _call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Schedule a call. It is canceled if the kubelet is stopped."""
        self._world.call_after(seconds, self._call_if_running, self._process_number, call, arguments)

    def _call_if_running(self, process_number: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if process_number == self._process_number:
            call(*arguments)
