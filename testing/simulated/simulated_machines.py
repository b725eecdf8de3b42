"""A made-up cluster's machines without an operator: a job's pods, and workers that only record what is done to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
from pacekeeper_operator.pods.manifests import (
    Installation,
    NodeProbeTask,
    ProbeImage,
    build_probe_pod,
    build_worker_pod,
)
from simulation.kubernetes.nodes import SimulatedNode
from simulation.loop import Process
from simulation.ports import KILLED_EXIT_CODE, ExitCallback
from simulation.world import World, WorldSettings

Object = dict[str, Any]
NAMESPACE = "team-a"
TRAINER = {"name": "trainer", "image": "train:1", "resources": {"requests": {"cpu": "1"}}}
INSTALLATION = Installation("https://10.96.0.50:8443", "PEM")


class PuppetContainers:
    """A worker that ends on request, after `takes` seconds, or by `exited`."""

    def __init__(self, world: World, pod: Object, node: str, address: str, exited: ExitCallback) -> None:
        self.name: str = pod["metadata"]["name"]
        self.node, self.address, self.exited = node, address, exited
        self.takes = 2.0
        self.alive = False
        self.sidecar = Process(world.loop, f"sidecar of {self.name}")
        self.notes: list[tuple[float, str]] = []  # when, what
        self._world = world

    def start(self) -> None:
        self.alive = True
        self._record("start")

    def terminate(self, grace: float) -> None:
        self._record(f"terminate {grace:g}")
        self._world.call_after(min(grace, self.takes), self._exit, 143 if self.takes <= grace else KILLED_EXIT_CODE)

    def _exit(self, code: int) -> None:
        if self.alive:
            self.end(code, "Error")

    def end(self, code: int, reason: str = "", message: str = "") -> None:
        """The trainer's, by itself."""
        self._record(f"exit {code}")
        self.alive = False
        self.exited(code, reason, message)

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "") -> None:
        self._record("kill")
        self.alive = False
        self.sidecar.kill()
        self.exited(code, reason)

    def restart_sidecar(self) -> None:
        self._record("restart sidecar")
        self.sidecar = Process(self._world.loop, self.sidecar.name)

    def _record(self, message: str) -> None:
        self.notes.append((self._world.now(), message))

    @property
    def messages(self) -> list[str]:
        return [message for _, message in self.notes]


class PuppetWorld(World):
    """With no operator in it, and puppets for workers."""

    def __init__(self, seed: int, settings: WorldSettings) -> None:
        super().__init__(seed, settings)
        self.puppets: dict[str, PuppetContainers] = {}  # by the pod's uid

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> PuppetContainers:  # type: ignore[override]
        puppet = self.puppets[pod["metadata"]["uid"]] = PuppetContainers(self, pod, node, address, exited)
        return puppet


class MachinesHarness:
    """`cpu`: cores of each node."""

    def __init__(self, seed: int = 1, nodes: int = 3, cpu: int = 4) -> None:
        self.world = PuppetWorld(seed, WorldSettings(nodes, cpu, operators=0))
        self.api, self.node_pool, self.workers = self.world.api, self.world.node_pool, self.world.puppets
        self.api.create("namespaces", {"metadata": {"name": NAMESPACE}})
        self.job = self._create_owner(
            "trainingjobs",
            {"name": "j", "namespace": NAMESPACE},
            {"replicas": 2, "template": {"spec": {"containers": [TRAINER]}}},
        )
        self.changes: list[Any] = []
        self.api.subscribe(self.changes.append)

    def _create_owner(self, plural: str, metadata: Object, spec: Object) -> Object:
        """What is to own pods; without owners they would be collected."""
        return self.api.create(plural, {"metadata": metadata, "spec": spec})

    def wait(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    def wait_until(self, condition: Callable[[], object], seconds: float = 60.0) -> float:
        """Seconds that it took; AssertionError after `seconds`."""
        start = self.world.now()
        while not condition():
            assert self.world.now() < start + seconds, f"not within {seconds} s: {self.world.log.lines[-10:]}"
            self.wait(0.05)
        return self.world.now() - start

    def get_node(self, number: int) -> SimulatedNode:
        return self.node_pool.nodes[f"node-{number}"]

    def get_node_object(self, number: int) -> Object:
        body: Object | None = self.api.get("nodes", f"node-{number}")
        assert body is not None
        return body

    def create_worker_pod(self, ordinal: int = 0, *, incarnation: int = 0, **options: Any) -> str:
        """The name of a new worker's pod. `options`: of `build_worker_pod`, and `spec`: of the pod's template."""
        spec = {"terminationGracePeriodSeconds": 10, **options.pop("spec", {})}
        template = {"spec": {"containers": [TRAINER], **spec}}
        job = TrainingJob(NAMESPACE, "j", self.job["metadata"]["uid"], 1, JobSpec(template))
        body = build_worker_pod(job, ordinal, incarnation, INSTALLATION, **options)
        self.api.create("pods", body)
        return str(body["metadata"]["name"])

    def create_probe_pod(self, number: int) -> str:
        quarantine = self._create_owner(
            "nodequarantines", {"name": f"node-{number}"}, {"nodeUID": "uid", "reason": "a test"}
        )
        name = f"probe-{number}"
        node = self.api.get("nodes", f"node-{number}") or {"metadata": {"name": f"node-{number}", "uid": "gone"}}
        image, task = ProbeImage("probe:1"), NodeProbeTask("circle")
        self.api.create("pods", build_probe_pod(name, NAMESPACE, node, quarantine, "NodeQuarantine", image, task))
        return name

    def find_pod(self, name: str) -> Object | None:
        pod: Object | None = self.api.get("pods", name, NAMESPACE)
        return pod

    def get_pod(self, name: str) -> Object:
        pod = self.find_pod(name)
        assert pod is not None, f"there is no pod {name}"
        return pod

    def get_phase(self, name: str) -> str:
        """ "": there is no such pod."""
        pod = self.find_pod(name)
        return "" if pod is None else str(pod["status"]["phase"])

    def get_node_name(self, name: str) -> str:
        return str(self.get_pod(name)["spec"].get("nodeName", ""))

    def is_running(self, name: str) -> PuppetContainers:
        """The worker of a pod, once it runs."""
        self.wait_until(lambda: self.get_phase(name) == "Running")
        return self.workers[self.get_pod(name)["metadata"]["uid"]]

    def get_condition(self, name: str, type_: str) -> Mapping[str, Any]:
        conditions = self.get_pod(name)["status"].get("conditions", ())
        return next((item for item in conditions if item["type"] == type_), {})

    def get_termination(self, name: str) -> Mapping[str, Any]:
        """How its main container has ended."""
        statuses = self.get_pod(name)["status"].get("containerStatuses", ())
        return next((item["state"].get("terminated", {}) for item in statuses), {})

    def list_taints(self, number: int) -> list[str]:
        taints = self.get_node_object(number)["spec"].get("taints", ())
        return [f"{taint['key'].rpartition('/')[2]}:{taint['effect']}" for taint in taints]
