"""A made-up cluster's machines without an operator: a job's pods, and workers that only tell what is done to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from pacekeeper_operator.api import Job, JobSpec
from pacekeeper_operator.manifests import Installation, ProbeImage, ProbeTask, probe_pod, worker_pod
from simulation.kubernetes.containers import KILLED, Exited
from simulation.kubernetes.nodes import Node
from simulation.loop import Process
from simulation.world import World, WorldSettings

Object = dict[str, Any]
NAMESPACE = "team-a"
TRAINER = {"name": "trainer", "image": "train:1", "resources": {"requests": {"cpu": "1"}}}
INSTALLATION = Installation("https://10.96.0.50:8443", "PEM")


class Puppet:
    """A worker that ends when it is told to, after `takes` seconds, or by `exited`."""

    def __init__(self, world: World, pod: Object, node: str, address: str, exited: Exited) -> None:
        self.name: str = pod["metadata"]["name"]
        self.node, self.address, self.exited = node, address, exited
        self.takes = 2.0
        self.alive = False
        self.sidecar = Process(world.loop, f"sidecar of {self.name}")
        self.told: list[tuple[float, str]] = []  # when, what
        self._world = world

    def start(self) -> None:
        self.alive = True
        self._note("start")

    def terminate(self, grace: float) -> None:
        self._note(f"terminate {grace:g}")
        self._world.after(min(grace, self.takes), self._leave, 143 if self.takes <= grace else KILLED)

    def _leave(self, code: int) -> None:
        if self.alive:
            self.end(code, "Error")

    def end(self, code: int, reason: str = "", message: str = "") -> None:
        """The trainer's, by itself."""
        self._note(f"exit {code}")
        self.alive = False
        self.exited(code, reason, message)

    def kill(self, code: int = KILLED, reason: str = "") -> None:
        self._note("kill")
        self.alive = False
        self.sidecar.kill()
        self.exited(code, reason)

    def restart_sidecar(self) -> None:
        self._note("restart sidecar")
        self.sidecar = Process(self._world.loop, self.sidecar.name)

    def _note(self, words: str) -> None:
        self.told.append((self._world.now(), words))

    @property
    def words(self) -> list[str]:
        return [words for _, words in self.told]


class Place(World):
    """With no operator in it, and puppets for workers."""

    def __init__(self, seed: int, settings: WorldSettings) -> None:
        super().__init__(seed, settings)
        self.puppets: dict[str, Puppet] = {}  # by the pod's uid

    def launch(self, pod: Object, node: str, address: str, exited: Exited) -> Puppet:  # type: ignore[override]
        puppet = self.puppets[pod["metadata"]["uid"]] = Puppet(self, pod, node, address, exited)
        return puppet


class Machines:
    """`cpu`: cores of each node."""

    def __init__(self, seed: int = 1, nodes: int = 3, cpu: int = 4) -> None:
        self.world = Place(seed, WorldSettings(nodes, cpu, operators=0))
        self.api, self.fleet, self.workers = self.world.api, self.world.fleet, self.world.puppets
        self.api.create("namespaces", {"metadata": {"name": NAMESPACE}})
        self.job = self._own(
            "trainingjobs",
            {"name": "j", "namespace": NAMESPACE},
            {"replicas": 2, "template": {"spec": {"containers": [TRAINER]}}},
        )
        self.changes: list[Any] = []
        self.api.subscribe(self.changes.append)

    def _own(self, plural: str, metadata: Object, spec: Object) -> Object:
        """What is to own pods; without owners they would be collected."""
        return self.api.create(plural, {"metadata": metadata, "spec": spec})

    def wait(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    def until(self, holds: Callable[[], object], seconds: float = 60.0) -> float:
        """Seconds that it took; AssertionError after so many."""
        began = self.world.now()
        while not holds():
            assert self.world.now() < began + seconds, f"not within {seconds} s: {self.world.story.lines[-10:]}"
            self.wait(0.05)
        return self.world.now() - began

    def node(self, number: int) -> Node:
        return self.fleet.nodes[f"node-{number}"]

    def stored(self, number: int) -> Object:
        body: Object | None = self.api.get("nodes", f"node-{number}")
        assert body is not None
        return body

    def worker(self, ordinal: int = 0, *, incarnation: int = 0, **options: Any) -> str:
        """The name of a new worker's pod. `options`: of `worker_pod`, and `spec`: of the pod's template."""
        spec = {"terminationGracePeriodSeconds": 10, **options.pop("spec", {})}
        template = {"spec": {"containers": [TRAINER], **spec}}
        job = Job(NAMESPACE, "j", self.job["metadata"]["uid"], 1, JobSpec(template))
        body = worker_pod(job, ordinal, incarnation, INSTALLATION, **options)
        self.api.create("pods", body)
        return str(body["metadata"]["name"])

    def probe(self, number: int) -> str:
        quarantine = self._own("nodequarantines", {"name": f"node-{number}"}, {"nodeUID": "uid", "reason": "a test"})
        name = f"probe-{number}"
        node = self.api.get("nodes", f"node-{number}") or {"metadata": {"name": f"node-{number}", "uid": "gone"}}
        image, task = ProbeImage("probe:1"), ProbeTask("circle")
        self.api.create("pods", probe_pod(name, NAMESPACE, node, quarantine, "NodeQuarantine", image, task))
        return name

    def pod(self, name: str) -> Object | None:
        found: Object | None = self.api.get("pods", name, NAMESPACE)
        return found

    def there(self, name: str) -> Object:
        found = self.pod(name)
        assert found is not None, f"there is no pod {name}"
        return found

    def phase(self, name: str) -> str:
        """ "": there is no such pod."""
        found = self.pod(name)
        return "" if found is None else str(found["status"]["phase"])

    def place(self, name: str) -> str:
        return str(self.there(name)["spec"].get("nodeName", ""))

    def runs(self, name: str) -> Puppet:
        """The worker of a pod, once it runs."""
        self.until(lambda: self.phase(name) == "Running")
        return self.workers[self.there(name)["metadata"]["uid"]]

    def condition(self, name: str, type_: str) -> Mapping[str, Any]:
        conditions = self.there(name)["status"].get("conditions", ())
        return next((item for item in conditions if item["type"] == type_), {})

    def terminated(self, name: str) -> Mapping[str, Any]:
        """How its main container has ended."""
        statuses = self.there(name)["status"].get("containerStatuses", ())
        return next((item["state"].get("terminated", {}) for item in statuses), {})

    def taints(self, number: int) -> list[str]:
        taints = self.stored(number)["spec"].get("taints", ())
        return [f"{taint['key'].rpartition('/')[2]}:{taint['effect']}" for taint in taints]
