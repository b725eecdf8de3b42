"""A stand-in for Kueue, which cannot be had here: its resource definitions in brief, and its part of the protocol with
a job's controller, as its documentation has it. The test decides what is admitted, and when."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacekeeper_operator.api.formats import format_time
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob

DEFINITIONS = Path(__file__).parents[2] / "tests/data/kueue/definitions.yaml"
GROUP = "kueue.x-k8s.io"


@dataclass(frozen=True)
class QueueStandIn:
    cluster: KubectlCluster

    def create_flavor(self, name: str, labels: Mapping[str, str]) -> None:
        body = {"apiVersion": f"{GROUP}/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": name}}
        self.cluster.apply({**body, "spec": {"nodeLabels": dict(labels)}})

    def create_priority_class(self, name: str, value: int) -> None:
        body = {"apiVersion": f"{GROUP}/v1beta1", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
        self.cluster.apply({**body, "value": value})

    def get_workload(self, job: ClusterJob) -> dict[str, Any] | None:
        """The job's own; None: there is none (yet)."""
        output = self.cluster.kubectl("get", "workloads", "-n", job.namespace, "-o", "json")
        items: list[dict[str, Any]] = json.loads(output)["items"]
        owners = {body["metadata"]["name"]: body["metadata"].get("ownerReferences", [{}]) for body in items}
        owned = [body for body in items if owners[body["metadata"]["name"]][0].get("name") == job.name]
        assert len(owned) < 2, "one job, one Workload"
        return owned[0] if owned else None

    def get_condition(self, job: ClusterJob, kind: str) -> dict[str, str]:
        """{}: no report yet."""
        conditions = (self.get_workload(job) or {}).get("status", {}).get("conditions", ())
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def get_condition_status(self, job: ClusterJob, kind: str) -> str:
        """The condition's status."""
        return self.get_condition(job, kind).get("status", "")

    def keep_pending(self, job: ClusterJob, message: str) -> None:
        self._set_conditions(job, {"QuotaReserved": ("False", "Pending", message)})

    def admit(self, job: ClusterJob, flavor: str, **counts: int) -> None:
        """`counts`: pods, by set."""
        assignments = [{"name": name, "count": count, "flavors": {"cpu": flavor}} for name, count in counts.items()]
        conditions = {
            "QuotaReserved": ("True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            "Admitted": ("True", "Admitted", "The workload is admitted"),
            "Evicted": ("False", "QuotaReserved", "Previously: evicted"),
        }
        self._set_conditions(job, conditions, {"clusterQueue": "all", "podSetAssignments": assignments})

    def evict(self, job: ClusterJob, reason: str, message: str) -> None:
        """From now on the job has to leave; its quota is its own until it reports that it has left."""
        self._set_conditions(job, {"Evicted": ("True", reason, message)})

    def send_to_worker_cluster(self, job: ClusterJob, namespace: str) -> ClusterJob:
        """As MultiKueue's adapter for jobs of any kind does, once the job is admitted: copies its Workload, which is
        admitted there, and the job itself. `namespace`: stands in for another cluster's."""
        workload, body = self.get_workload(job), job.read()
        assert workload is not None
        name = workload["metadata"]["name"]
        metadata = {"name": name, "namespace": namespace, "annotations": workload["metadata"]["annotations"]}
        self.cluster.apply({**workload, "metadata": metadata, "status": {}}, namespace)
        labels = {**body["metadata"]["labels"], f"{GROUP}/prebuilt-workload-name": name}
        spec = {field: value for field, value in body["spec"].items() if field != "managedBy"}
        copy = {**body, "metadata": {"name": job.name, "labels": labels}, "spec": spec}
        worker_job = ClusterJob.apply(
            self.cluster, namespace, {field: copy[field] for field in copy if field != "status"}
        )
        worker_job.wait_until(lambda: self.get_workload(worker_job), 30, "the copy has taken the Workload for its own")
        assignments = workload["status"]["admission"]["podSetAssignments"]
        self.admit(
            worker_job,
            assignments[0]["flavors"]["cpu"],
            **{assignment["name"]: assignment["count"] for assignment in assignments},
        )
        return worker_job

    def copy_status_back(self, copy: ClusterJob, job: ClusterJob) -> None:
        """The copy's status is the job's."""
        self.cluster.kubectl(
            "patch", "tj", job.name, "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": copy.status}),
        )  # fmt: skip

    def _set_conditions(
        self, job: ClusterJob, updates: Mapping[str, tuple[str, str, str]], admission: Mapping[str, Any] | None = None
    ) -> None:
        body = self.get_workload(job)
        assert body is not None
        conditions = {condition["type"]: condition for condition in body.get("status", {}).get("conditions", ())}
        for kind, (value, reason, message) in updates.items():
            transition = {"lastTransitionTime": format_time(int(time.time()))}
            conditions[kind] = {"type": kind, "status": value, "reason": reason, "message": message, **transition}
        status: dict[str, Any] = {"conditions": list(conditions.values())}
        if admission is not None:
            status["admission"] = admission
        patch = {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}, "status": status}
        self.cluster.kubectl(
            "patch", "workload", body["metadata"]["name"], "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps(patch),
        )  # fmt: skip


@contextmanager
def install_queue_stand_in(cluster: KubectlCluster) -> Iterator[QueueStandIn]:
    cluster.kubectl("apply", "-f", str(DEFINITIONS))
    try:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=20s", "-f", str(DEFINITIONS))
        yield QueueStandIn(cluster)
    finally:
        cluster.kubectl("delete", "-f", str(DEFINITIONS), "--timeout=50s", timeout=60)
