"""TrainingJobs on the test cluster, as a user sees them by kubectl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from testcluster import faults
from tests.support.cluster import Cluster, wait_for

SMALL = ("--width", "32", "--layers", "1", "--context", "16", "--bytes", "20000", "--eval-every", "1000000")
"""A model that costs two cores next to nothing."""
START_SECONDS = 120.0


def manifest(name: str, *, command: list[str] | None = None, steps: int = 200, **spec: Any) -> dict[str, Any]:
    """A job of two small workers; `spec`: fields of its spec beside the template, `container`: of the trainer."""
    container = {
        "name": "trainer",
        "image": "pacekeeper.dev/trainer:dev",
        "imagePullPolicy": "Never",
        "command": command
        or ["python", "-m", "pacekeeper.cli", "run", "examples/gpt.py", "--steps", str(steps), *SMALL],
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        **spec.pop("container", {}),
    }
    pod = {"terminationGracePeriodSeconds": 10, "containers": [container], **spec.pop("pod", {})}
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"replicas": 2, "template": {"spec": pod}} | spec,
    }


def claim(name: str) -> dict[str, Any]:
    """A volume that all workers share."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "shared",
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


@dataclass(frozen=True)
class JobOnCluster:
    """One TrainingJob."""

    cluster: Cluster
    namespace: str
    name: str

    def body(self) -> dict[str, Any]:
        found: dict[str, Any] | None = self.cluster.get("trainingjob", self.name, self.namespace)
        assert found is not None, f"job {self.name} is gone"
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body().get("status", {})
        return found

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {"status": "Unknown"})

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.list("pod", self.namespace, f"pacekeeper.dev/job={self.name}")

    def incidents(self) -> list[dict[str, Any]]:
        found = self.cluster.list("incident", self.namespace)
        return [incident for incident in found if incident["spec"]["jobRef"]["name"] == self.name]

    def plan(self) -> dict[str, Any]:
        found = self.cluster.get("configmap", f"{self.name}-plan", self.namespace)
        plan: dict[str, Any] = json.loads(found["data"]["plan.json"])
        return plan

    def worker(self, rank: int) -> str:
        return next(str(member["worker"]) for member in self.plan()["members"] if rank in member["ranks"])

    def node(self, worker: str) -> str:
        return str(self.cluster.get("pod", worker, self.namespace)["spec"]["nodeName"])

    def rank_process(self, worker: str) -> int:
        """Process id, on the machine, of the rank on `worker`: the youngest of launcher, warm process and rank."""
        pids = faults.container_pids(self.namespace, worker, "trainer")
        assert len(pids) >= 3, f"{worker} runs no rank: {pids}"
        return pids[-1]

    def patch(self, spec: dict[str, Any]) -> None:
        body = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "trainingjob", self.name, "-n", self.namespace, "--type=merge", "-p", body)

    def wait_for_phase(self, phase: str, seconds: float = START_SECONDS) -> None:
        """Fails at once where the job fails instead."""

        def reached() -> bool:
            status = self.status()
            if status.get("phase") == "Failed" != phase:
                raise AssertionError(f"job {self.name} has failed: {status.get('message')}")
            return status.get("phase") == phase

        wait_for(reached, timeout=seconds, what=f"job {self.name} is {phase}; it is {self.status()}")

    def wait_until_calm(self, spares: int = 0, seconds: float = START_SECONDS) -> None:
        """It trains, no incident is open, and its spares are ready."""

        def calm() -> bool:
            status = self.status()
            assert status.get("phase") != "Failed", status
            closed = all(incident.get("status", {}).get("outcome") for incident in self.incidents())
            return status.get("phase") == "Running" and closed and status["workers"].get("spare", 0) >= spares

        wait_for(calm, timeout=seconds, what=f"job {self.name} trains undisturbed")

    def wait_for_incident(self, cause: str, known: list[dict[str, Any]], seconds: float = 60.0) -> dict[str, Any]:
        """The first incident of `cause` that is not among `known`, once it is over."""
        names = {incident["metadata"]["name"] for incident in known}

        def over() -> dict[str, Any] | None:
            fresh = [i for i in self.incidents() if i["metadata"]["name"] not in names and i["spec"]["cause"] == cause]
            return next((incident for incident in fresh if incident.get("status", {}).get("outcome")), None)

        return wait_for(over, timeout=seconds, what=f"an incident {cause} of {self.name} that is over")


def submit(cluster: Cluster, namespace: str, body: dict[str, Any]) -> JobOnCluster:
    cluster.apply(body, namespace)
    return JobOnCluster(cluster, namespace, body["metadata"]["name"])
